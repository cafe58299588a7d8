"""The loggers of a run: metrics.csv, TensorBoard's HPARAMS tab, wandb and mlflow."""

import time

import pytest
import torch
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from gpt.training.config import Config
from gpt.training.metric_logger import MetricLogger
from gpt.training.run_directory import RunDirectory
from gpt.training.schedule import Schedule
from gpt.training.state import RunSpec, TrainState
from harness import (
    StopAt,
    begin_again,
    fit,
    import_or_skip,
    read_events,
    refusal,
    resume_run,
)


class Logging:
    """Logs each step."""

    def on_train_step_end(self, step: int, log) -> None:
        log("mine/step", step)


# --- curves ---


@pytest.mark.parametrize(
    ("stored", "world_size", "rank", "expected"),
    [([6.0], 1, 0, 6.0), ([2.0, 4.0], 2, 1, 4.0), ([2.0, 4.0], 1, 0, 3.0), ([6.0], 2, 1, 6.0)],
)
def test_each_rank_restores_its_own_sum(tmp_path, monkeypatch, stored, world_size, rank, expected):
    """Each rank restores its sum of losses since the last point. If the number of ranks changed, it is the mean."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    for name, number in zip(names, (rank, world_size, rank, world_size), strict=True):
        monkeypatch.setenv(name, str(number))
    monkeypatch.setattr(torch.distributed, "all_gather_object", lambda sums, own: sums.__setitem__(rank, own))
    state = TrainState(loss_sums=stored, num_loss_steps=2)
    spec = RunSpec(Config(logger=[]), Schedule(), dataset=None)  # type: ignore[arg-type]
    logger = MetricLogger(spec, RunDirectory(tmp_path), state)
    logger.open(0)
    logger.update_state()
    assert len(state.loss_sums) == world_size
    assert (state.loss_sums[rank], state.num_loss_steps) == (expected, 2)


# --- metrics.csv and TensorBoard ---


def test_hparams_tab(trained):
    """TensorBoard's HPARAMS tab has the settings, and no second run for them."""
    metadata = read_events(trained.path).SummaryMetadata("_hparams_/session_start_info")
    hparams = HParamsPluginData.FromString(metadata.plugin_data.content).session_start_info.hparams
    assert hparams["optim.lr"].number_value == trained.config.optim.lr
    assert hparams["optim.betas"].string_value == str(trained.config.optim.betas)
    assert hparams["horizon"].string_value == "13steps"
    assert hparams["model.d_model"].string_value == "24"
    assert len(list(trained.path.glob("events.*"))) == 1
    assert not [path for path in trained.path.iterdir() if path.is_dir() and path.name != "checkpoints"]


def test_no_loggers(trained, tmp_path):
    """With `logger=[]` a run has no curves, and the `log` of callbacks does nothing."""
    training = begin_again(trained, tmp_path, logger=[], horizon="1steps")
    fit(training, [Logging()])
    names = {file.name for file in training.path.iterdir()}
    assert names == {".lock", "command.txt", "config.yaml", "checkpoints", "metrics.json", "samples.md"}


# --- wandb and mlflow ---


@pytest.mark.parametrize("name", ["WandbLogger", "MLFlowLogger"])
def test_loggers_that_cannot_be_started(trained, tmp_path, name, monkeypatch):
    """A missing package or login is reported in one line, before a step is trained."""
    monkeypatch.setattr(f"gpt.training.loggers.{name}", lambda *arguments, **options: {}["wandb"])
    key = name.removesuffix("Logger").lower()
    training = begin_again(trained, tmp_path, logger=["csv", key])
    line = refusal(fit, training)
    assert line == f"logger={key}: cannot be started (it has no 'wandb'): check its login and address"
    assert not list(training.path.glob("checkpoints/*"))


@pytest.mark.promise("security.md#wandb or mlflow")
@pytest.mark.slow
def test_wandb(trained, tmp_path, monkeypatch, capfd):
    """wandb records the run offline. The resumed run continues the same record."""
    wandb = import_or_skip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    training = begin_again(trained, tmp_path, logger=["wandb"])
    fit(training, [StopAt(5)])
    assert wandb.run is None
    name = (training.path / "wandb_run.txt").read_text().strip()
    fit(resume_run(training.path), [Logging()])
    assert (training.path / "wandb_run.txt").read_text().strip() == name
    records = list(training.path.glob(f"wandb/offline-run-*-{name}*/run-{name}.wandb"))  # numbered within a second
    assert len(records) == 2
    tags = (b"val/loss", b"train/loss", b"mine/step", b"trainer/global_step", b"matrix_lr")
    deadline = time.monotonic() + 30  # wandb's own process may write on for a moment
    while missing := [tag for tag in tags if not any(tag in file.read_bytes() for file in records)]:
        assert time.monotonic() < deadline, missing
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # mlflow's own
def test_mlflow(trained, tmp_path, monkeypatch, capfd):
    """mlflow records the run. The resumed run continues the same record."""
    import_or_skip("mlflow")
    from mlflow.tracking import MlflowClient

    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    training = begin_again(trained, tmp_path, logger=["mlflow"])
    fit(training, [StopAt(5)])
    resumed = resume_run(training.path)
    fit(resumed, [Logging()])
    name = (training.path / "mlflow_run.txt").read_text().strip()
    client = MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    run = client.get_run(name)
    assert run.info.run_name == training.path.name
    assert run.info.status == "FINISHED"
    assert float(run.data.params["optim/lr"]) == training.config.optim.lr
    assert run.data.metrics["val/loss"] == pytest.approx(resumed.metrics["val_loss"])
    assert sorted({point.step for point in client.get_metric_history(name, "val/loss")}) == [3, 6, 9, 12, 13]
    assert [point.step for point in client.get_metric_history(name, "mine/step")] == list(range(6, 14))
