"""Where a run logs: metrics.csv, TensorBoard's HPARAMS tab, wandb, mlflow, and Lightning's own logging."""

import dataclasses
import re
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lightning import Callback
from lightning.pytorch.callbacks import LearningRateMonitor
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from gpt.training.metrics.loggers import UserCurves, open_loggers
from gpt.training.run.run import Run
from harness import (
    StopAt,
    begin_run,
    differences,
    fit,
    needs,
    read_curves,
    read_events,
    read_table,
    refusal,
    resume_run,
    tiny_config,
)


class Logging(Callback):
    """Logs in all the ways of Lightning: at each step, at some, after validations, at the end, and past the module."""

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx: int) -> None:
        module.log("mine/step", float(trainer.global_step))
        if trainer.global_step == 4:
            module.log("mine/once", 4.0)
        if trainer.global_step % 5 == 0:
            trainer.logger.log_metrics({"mine/direct": trainer.global_step / 2}, step=trainer.global_step)

    def on_validation_end(self, trainer, module) -> None:
        module.log("mine/double", 2 * trainer.callback_metrics["val/loss"])

    def on_train_epoch_end(self, trainer, module) -> None:
        module.log("mine/end", 7.0)


def users() -> list[Callback]:
    return [Logging(), LearningRateMonitor()]


@pytest.fixture(scope="module")
def whole(corpus_folder) -> Run:
    """A run of 13 steps of two micro-batches, with callbacks that log."""
    run_dir = f"run_dir={corpus_folder / 'run'}"
    session = begin_run(tiny_config(corpus_folder, "horizon=13steps", "data.prompts=[]", run_dir))
    fit(session, users())
    return session


def again(session: Run, folder: Path, **changes) -> Run:
    """Begin the same run in another folder, with changes to its configuration."""
    return begin_run(dataclasses.replace(session.config, run_dir=str(folder / "run"), **changes))


# --- metrics.csv and TensorBoard ---


def test_what_callbacks_log(whole):
    """`module.log` counts steps as our curves do: of each tag the latest value up to a log point or a validation, at
    the step where it was logged. What goes past the module is taken as it is.

    It is all in TensorBoard, too.
    """
    table = read_table(whole.directory)
    assert table["mine/step"] == [(step, float(step)) for step in (3, 6, 9, 12, 13)]
    assert table["mine/once"] == [(4, 4.0)]
    assert table["mine/direct"] == [(5, 2.5), (10, 5.0)]
    assert table["mine/end"] == [(13, 7.0)]
    losses = dict(table["val/loss"])  # at 3, 6, 9, 12 and 13
    assert table["mine/double"] == [(step, pytest.approx(2 * losses[step])) for step in (3, 6, 9, 12, 13)]
    rates = {tag: points for tag, points in table.items() if tag.startswith("lr-")}
    assert [[step for step, _ in points] for points in rates.values()] == [[0, 2, 5, 8, 11]] * len(rates)
    assert len(rates) == 3
    logged = {tag: points for tag, points in table.items() if tag.startswith(("mine/", "lr-"))}
    shown = {tag: points for tag, points in read_curves(whole.directory).items() if tag.startswith(("mine/", "lr-"))}
    assert shown == {tag: [(step, pytest.approx(value)) for step, value in points] for tag, points in logged.items()}


def test_resumed_run_has_the_same_table(whole, tmp_path, capfd):
    """Interrupted between two log points and killed later, a run ends with the files of an uninterrupted one."""
    session = again(whole, tmp_path)
    fit(session, [*users(), StopAt(5)])
    assert "mine/once" not in read_table(session.directory)  # logged at step 4, to be written at 6
    with (session.directory / "metrics.csv").open("a") as table:
        table.write("6,train/loss,7.0\n")  # as if killed later
    fit(resume_run(str(session.directory)), users())
    assert differences(session.directory, whole.directory) == []


def test_hparams_tab(whole):
    """TensorBoard's HPARAMS tab gets every setting, beside the curves that it compares by, without a run of its own.

    It shows the first five, in the order of test_train.py::test_tensorboard_serves_the_run: sizes and rates.
    """
    events = read_events(whole.directory)
    start, experiment = (
        HParamsPluginData.FromString(events.SummaryMetadata(f"_hparams_/{name}").plugin_data.content)
        for name in ("session_start_info", "experiment")
    )
    hparams = start.session_start_info.hparams
    assert hparams["optim.lr"].number_value == whole.config.optim.lr
    assert hparams["optim.betas"].string_value == str(whole.config.optim.betas)
    assert hparams["horizon"].string_value == "13steps"
    infos = sorted(experiment.experiment.hparam_infos, key=lambda info: (not info.differs, info.name))
    shown = ["model.d_model", "model.num_layers", "optim.lr", "optim.matrix_lr", "seed"]
    assert [info.name for info in infos[:5]] == shown
    assert [info.name.tag for info in experiment.experiment.metric_infos][:2] == ["val/loss", "val/bits_per_byte"]
    assert len(list(whole.directory.glob("events.*"))) == 1


def test_no_loggers(whole, tmp_path):
    """With `logger=[]` there are no curves, and a callback that needs a logger says so in one line."""
    session = again(whole, tmp_path, logger=[], horizon="1steps")
    fit(session)
    names = {file.name for file in session.directory.iterdir()}
    assert names == {".lock", "config.yaml", "checkpoints", "metrics.json", "samples.md"}
    (tmp_path / "other").mkdir()
    line = refusal(fit, again(whole, tmp_path / "other", logger=[], horizon="1steps"), [LearningRateMonitor()])
    assert "Cannot use `LearningRateMonitor` callback with `Trainer` that has no logger" in line


def test_values_that_are_no_numbers():
    """A NaN that a callback logs stays out of checkpoints, which would be refused with it."""
    values = UserCurves(None, waiting := {"of an earlier version": 1.0})  # type: ignore[arg-type]
    trainer = SimpleNamespace(logged_metrics={"a": torch.tensor(float("nan")), "b_step": torch.tensor(2.0)})
    values.note(trainer, SimpleNamespace(logged={"a": None, "b": None}), 3)  # type: ignore[arg-type]
    values.settle()
    assert waiting == {"b_step": [3, 2.0]}


class InOrder(Callback):
    """Logs under many names."""

    names = tuple(f"mine/{letter}" for letter in "zebrafox")

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx: int) -> None:
        for name in self.names:
            module.log(name, 1.0)


def test_rows_stand_in_the_order_of_the_calls(whole, tmp_path):
    """In every process: a set of names has another order in each, which would make another metrics.csv."""
    session = again(whole, tmp_path, horizon="1steps")
    fit(session, [InOrder()])
    rows = (session.directory / "metrics.csv").read_text().splitlines()
    assert [tag for row in rows if (tag := row.split(",")[1]).startswith("mine/")] == list(InOrder.names)


# --- which loggers ---


@pytest.mark.parametrize("name", ["WandbLogger", "MLFlowLogger"])
def test_loggers_that_cannot_be_started(whole, tmp_path, name, monkeypatch):
    """Whatever is missing, a package or a login, is said in one line, before a step is trained."""
    monkeypatch.setattr(f"gpt.training.metrics.loggers.{name}", lambda *given, **options: {}["wandb"])
    key = name.removesuffix("Logger").lower()
    line = refusal(fit, again(whole, tmp_path, logger=["csv", key]))
    assert line == f"logger={key}: cannot be started (it has no 'wandb'): check its login and address"


@pytest.mark.slow
def test_wandb(whole, tmp_path, monkeypatch, capfd):
    """wandb gets the run, offline, and after an interruption the same run."""
    wandb = needs("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    session = again(whole, tmp_path, logger=["wandb"])
    fit(session, [StopAt(5)])
    assert wandb.run is None
    name = (session.directory / "wandb_run.txt").read_text().strip()
    fit(resume_run(str(session.directory)), users())
    assert (session.directory / "wandb_run.txt").read_text().strip() == name
    records = list(session.directory.glob(f"wandb/offline-run-*-{name}*/run-{name}.wandb"))  # numbered within a second
    assert len(records) == 2
    tags = (b"val/loss", b"train/loss", b"mine/step", b"trainer/global_step", b"matrix_lr")
    deadline = time.monotonic() + 30  # wandb's own process may write on for a moment
    while missing := [tag for tag in tags if not any(tag in file.read_bytes() for file in records)]:
        assert time.monotonic() < deadline, missing
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # mlflow's own
def test_mlflow(whole, tmp_path, monkeypatch, capfd):
    """mlflow gets the run, and after an interruption the same run; one that its store does not know is named."""
    needs("mlflow")
    from mlflow.tracking import MlflowClient

    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    session = again(whole, tmp_path, logger=["mlflow"])
    fit(session, [StopAt(5)])
    resumed = resume_run(str(session.directory))
    fit(resumed, users())
    name = (session.directory / "mlflow_run.txt").read_text().strip()
    client = MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    run = client.get_run(name)
    assert run.info.run_name == session.directory.name
    assert run.info.status == "FINISHED"
    assert float(run.data.params["optim/lr"]) == session.config.optim.lr
    assert run.data.metrics["val/loss"] == pytest.approx(resumed.metrics["val_loss"])
    assert sorted({point.step for point in client.get_metric_history(name, "val/loss")}) == [3, 6, 9, 12, 13]
    assert "mine/step" in run.data.metrics
    (session.directory / "mlflow_run.txt").write_text("0" * 32)
    line = refusal(open_loggers, session.config, session.directory)
    assert re.search(r"logger=mlflow: cannot be started \(.*not found.*\): check its login", line)
