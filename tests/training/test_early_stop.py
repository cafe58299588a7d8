"""Runs that end before their horizon: by patience, or because a user's callback asks for it."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
import torch
from lightning import Callback
from lightning.pytorch.callbacks import EarlyStopping

from gpt.errors import UserError
from gpt.exchange import checkpoint
from gpt.training.early_stop import out_of_patience
from gpt.training.plan import Plan
from gpt.training.session import Session
from harness import TINY, StopAt, differences, read_curves, tiny_config, train, write_corpus


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("early")
    write_corpus(folder)
    return folder


def begin(folder: Path, tmp_path: Path, *changes: str) -> Session:
    """A run of 23 steps of two micro-batches, which validates after every third."""
    run = ["horizon=23steps", "trainer.validate_every=3", "data.prompts=[]", f"run_dir={tmp_path / 'run'}", *changes]
    return Session.begin(tiny_config(folder, *run))


# --- patience ---


@pytest.mark.parametrize(
    ("patience", "step", "best_step", "extended_at", "expected"),
    [
        (0, 1000, 3, 0, False),
        (2, 8, 3, 0, False),
        (2, 9, 3, 0, True),
        (2, 10, 3, 0, True),  # a checkpoint after the stop, had there been one
        (1, 6, 3, 0, True),
        (3, 9, -1, 0, True),
        (2, 13, 3, 11, False),
        (2, 14, 3, 11, False),
        (2, 15, 3, 11, True),
    ],
)
def test_patience_counts_validations(patience, step, best_step, extended_at, expected):
    """It follows from the steps alone; extending a run starts the count again."""
    plan = Plan(100, 6, 3, 2, validate_every=3, extended_at=extended_at)
    assert out_of_patience(patience, plan, step, best_step) is expected


def test_patience_ends_a_run(folder, tmp_path, worse, capfd):
    """It ends two validations after the best, says why, keeps the best checkpoint, and is complete."""
    session = begin(folder, tmp_path, "patience=2")
    session.fit()
    session.report()
    said = capfd.readouterr().out
    assert (
        "stopped early at step 12 of 23: no improvement in the last 2 validations (best at step 6). The learning rates "
        "were still falling: a shorter run, such as horizon=6steps, will probably do better\n" in said
    )
    assert re.search(r"^trained +12  steps: 1,152 tokens, ", said, re.M)
    assert re.search(r"^best validation +\d\.\d{4}  nats per token, at step 6, which best.ckpt keeps$", said, re.M)
    assert f"\nrun shorter:  python train.py rerun={session.run_dir} horizon=6steps\n" in said
    stored = json.loads((session.run_dir / "metrics.json").read_text())
    assert (stored["steps"], stored["best_step"]) == (12, 6)
    files = {name: checkpoint.load(session.run_dir / f"checkpoints/{name}.ckpt")["step"] for name in ("best", "last")}
    assert files == {"best": 6, "last": 12}
    assert Session.resume(str(session.run_dir)) is None
    assert "is complete: it stopped early at step 12, by patience=2; to train" in capfd.readouterr().out
    longer = Session.resume(str(session.run_dir), "31steps")
    assert longer is not None
    assert longer.plan.total_steps == 31


def test_patience_after_an_interruption(folder, tmp_path, worse, capfd):
    """A resumed run stops where an uninterrupted one does, with the same files."""
    (tmp_path / "other").mkdir()
    whole, parts = begin(folder, tmp_path, "patience=2"), begin(folder, tmp_path / "other", "patience=2")
    whole.fit()
    with pytest.raises(SystemExit):
        parts.fit([StopAt(10)])
    resumed = Session.resume(str(parts.run_dir))
    assert resumed is not None
    resumed.fit()
    assert resumed.metrics["steps"] == 12
    assert differences(parts.run_dir, whole.run_dir) == []


@pytest.mark.parametrize("change", ["patience=-1", "trainer.keep_every=-1"])
def test_out_of_range(folder, change):
    """Neither is negative."""
    with pytest.raises(UserError, match=f"{change} is out of range: it must be at least 0"):
        tiny_config(folder, change)


# --- callbacks that ask ---


def test_early_stopping(folder, tmp_path, worse, capfd):
    """Lightning's own sees each validation; the run ends cleanly, says how to go on, and goes on."""
    session = begin(folder, tmp_path)
    session.fit([EarlyStopping(monitor="val/loss", patience=1)])
    assert "stopped early at step 9 of 23, as a callback asked; to go on regardless: python train.py resume=" in (
        capfd.readouterr().out
    )
    assert session.metrics["steps"] == 9
    last = checkpoint.load(session.run_dir / "checkpoints/last.ckpt")
    assert last["step"] == 9
    state = last["callbacks"]["EarlyStopping{'monitor': 'val/loss', 'mode': 'min'}"]
    assert (state["wait_count"], float(state["best_score"])) == (1, pytest.approx(1.0))
    resumed, stopper = Session.resume(str(session.run_dir)), EarlyStopping(monitor="val/loss", patience=3)
    assert resumed is not None
    stopper.patience = 3
    resumed.fit([stopper])
    assert resumed.metrics["steps"] == 12  # it remembers that its patience was 1


class Asks(Callback):
    """Asks for the end after the first micro-batch of a step."""

    def __init__(self, micro_step: int):
        self.micro_step = micro_step

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx: int) -> None:
        if batch_idx + 1 == self.micro_step:
            trainer.should_stop = True


def test_stop_within_a_step(folder, tmp_path):
    """The step is finished and validated, so that the report is true of the model that is saved."""
    session = begin(folder, tmp_path)
    session.fit([Asks(9)])
    assert session.metrics["steps"] == 5
    assert [step for step, _ in read_curves(session.run_dir)["val/loss"]] == [3, 5]
    whole = begin(folder, tmp_path / "whole", "trainer.checkpoint_every=5", "trainer.keep_every=5")
    whole.fit()
    a, b = session.run_dir / "checkpoints/last.ckpt", whole.run_dir / "checkpoints/step-00000005.ckpt"
    weights, expected = checkpoint.load(a)["state_dict"], checkpoint.load(b)["state_dict"]
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_callbacks_in_one_of_several_processes(folder, tmp_path):
    """Callbacks that exist in one process only are refused for several, which would wait for each other."""
    session = begin(folder, tmp_path)
    session.config = dataclasses.replace(session.config, trainer=dataclasses.replace(session.config.trainer, devices=2))
    with pytest.raises(UserError, match=r"trainer\.devices=2: callbacks must exist in every process"):
        session.fit([Callback()])


def test_a_curve_that_nobody_writes(folder, tmp_path):
    """Lightning's complaint about a curve to watch is one line that names those there are."""
    session = begin(folder, tmp_path)
    with pytest.raises(UserError, match=r"metric `typo` which is not available.*: `val/loss`$") as caught:
        session.fit([EarlyStopping(monitor="typo")])
    assert "\n" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["both", "one"])
def test_two_processes_stop_together(folder, tmp_path, monkeypatch, name):
    """Callbacks are made in each process; if one asks to stop, in whichever, all stop after the same step."""
    (tmp_path / "stoppers.py").write_text(
        "import os\n"
        "from lightning import Callback\n"
        "from lightning.pytorch.callbacks import EarlyStopping\n"
        "both = lambda: EarlyStopping('val/loss', patience=1, min_delta=100.0)\n"
        "class one(Callback):\n"
        "    def on_train_batch_end(self, trainer, module, *rest):\n"
        "        if trainer.global_rank == 1 and trainer.global_step == 7:\n"
        "            trainer.should_stop = True\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]))
    text = [f"data.path={folder / 'corpus.txt'}", f"data.cache={folder / 'cache'}", f"run_dir={tmp_path / 'run'}"]
    two = ["trainer.device=cpu", "trainer.devices=2", "horizon=40steps", "trainer.validate_every=5"]
    done = train(*TINY, *text, *two, f"callbacks=stoppers:{name}")
    assert (done.returncode, done.stderr) == (0, "")
    step = {"both": 10, "one": 9}[name]  # ranks agree every three steps
    assert f"stopped early at step {step} of 40, as a callback asked" in done.stdout
    assert json.loads((tmp_path / "run/metrics.json").read_text())["steps"] == step
