"""How runs end: when their time is up, by patience, or because a user's callback asks for it."""

import json
import re
import signal
import time
from pathlib import Path

import pytest
import torch
from lightning import Callback
from lightning.pytorch.callbacks import EarlyStopping

from gpt.exchange import checkpoint
from gpt.training.config.loading import read
from gpt.training.config.schedule import Schedule
from gpt.training.metrics.report import report
from gpt.training.optim import OptimConfig, lr_factor
from gpt.training.run.clock import Clock
from gpt.training.run.run import Run
from gpt.training.run.state import TrainState
from harness import (
    ROOT,
    StopAt,
    begin_run,
    differences,
    fit,
    read_curves,
    read_table,
    refusal,
    resume_run,
    tiny_arguments,
    tiny_config,
    train_apart,
)


def begin(folder: Path, tmp_path: Path, *changes: str) -> Run:
    """A run of 23 steps of two micro-batches, which validates after every third."""
    run = ["horizon=23steps", "trainer.validate_every=3", "data.prompts=[]", f"run_dir={tmp_path / 'run'}", *changes]
    return begin_run(tiny_config(folder, *run))


# --- a time ---


class Machine(Callback):
    """A machine whose steps take `paces`: (seconds of training time from which on, seconds a step)."""

    def __init__(self, monkeypatch, *paces: tuple[float, float]):
        self.paces, self.now = paces, 0.0
        monkeypatch.setattr(Clock, "_lap", lambda clock: setattr(clock.state, "seconds", self.now))

    def on_train_batch_start(self, trainer, module, batch, batch_idx: int) -> None:
        self.now += next(pace for begin, pace in reversed(self.paces) if self.now >= begin)

    def __call__(self, session: Run) -> Run:
        fit(session, [self])
        return session


@pytest.mark.parametrize(
    ("seconds", "paces", "steps"),
    [
        (10.0, [(0.0, 0.125)], 80),
        (10.0, [(0.0, 0.125), (5.0, 0.5)], 50),  # it becomes four times as slow
        (10.0, [(0.0, 0.5), (5.0, 0.125)], 50),
        (10.0, [(0.0, 11.0)], 1),  # the time is shorter than a step
        (3.0, [(0.0, 1.0)], 3),
    ],
)
def test_a_time_is_met(corpus_folder, tmp_path, monkeypatch, seconds, paces, steps):
    """To within a step, whatever the machine does; it validates at each quarter, and saves what it knows."""
    machine = Machine(monkeypatch, *paces)
    quiet = [f"horizon={seconds}s", "trainer.validate_every=100000", "trainer.checkpoint_every=100000"]
    session = machine(begin(corpus_folder, tmp_path, *quiet))
    assert seconds <= machine.now < seconds + paces[-1][1] + 1e-9
    assert session.metrics["steps"] == session.schedule.total_steps == steps
    points = [step for step, _ in read_curves(session.directory)["val/loss"]]
    assert len(points) == min(4, steps)
    assert points[-1] == steps
    payload = checkpoint.load(session.directory / "checkpoints/last.ckpt")
    assert payload["step"] == payload["schedule"]["total_steps"] == steps
    assert read(session.directory / "config.yaml").horizon == payload["config"]["horizon"] == f"{seconds}s"
    assert resume_run(str(session.directory)).complete


def test_rates_follow_the_clock(corpus_folder, tmp_path, monkeypatch):
    """At each share of the time they are what a run of steps has at that share of its steps; they end at nothing."""
    machine = Machine(monkeypatch, (0.0, 0.0625), (5.0, 0.25))
    changes = ["horizon=10s", "optim=adamw", "optim.lr=0.01", "optim.warmup_steps=5", "trainer.log_every=1"]
    session = machine(begin(corpus_folder, tmp_path, *changes))
    rates = dict(read_table(session.directory)["train/lr"])
    config = OptimConfig(lr=0.01, warmup_steps=5)
    for step, share in ((41, 0.25), (81, 0.5), (91, 0.75), (100, 0.975)):
        assert rates[step] / 0.01 == pytest.approx(lr_factor(round(1e6 * share), 10**6, config), abs=0.01)
    assert rates[100] < 0.05 * 0.01


@pytest.mark.slow
def test_stopped_and_resumed_it_ends_in_time(corpus_folder, tmp_path, monkeypatch):
    """Resumed on a machine of half the speed, and with a longer time after its end."""
    machine = Machine(monkeypatch, (0.0, 0.125))
    fit(begin(corpus_folder, tmp_path, "horizon=10s"), [machine, StopAt(17)])
    machine.paces = ((0.0, 0.25),)
    session = resume_run(str(tmp_path / "run"))
    machine(session)
    assert (machine.now, session.schedule.total_steps) == (10.125, 17 + 32)
    longer = resume_run(str(tmp_path / "run"), "14s")
    machine(longer)
    assert (machine.now, longer.config.horizon) == (14.125, "14s")
    assert "is behind this run, which has trained 65 steps in 14s" in refusal(resume_run, str(tmp_path / "run"), "9s")


@pytest.mark.slow
def test_met_for_real(corpus_folder, tmp_path):
    """Four real seconds; a process that is suspended for ten on the way trains for four all the same."""

    class Suspended(Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx: int) -> None:
            if batch_idx == 100:
                time.sleep(10)

    session = begin(corpus_folder, tmp_path, "horizon=4s", "trainer.validate_every=100000")
    start = time.perf_counter()
    fit(session, [Suspended()])
    assert time.perf_counter() - start > 13
    assert session.metrics["train_seconds"] == pytest.approx(4.0, rel=0.05)
    assert session.metrics["steps"] > 60


# --- patience ---


@pytest.mark.parametrize(
    ("patience", "step", "best_step", "extended_at", "expected"),
    [
        (0, 1000, 3, 0, False),
        (2, 8, 3, 0, False),
        (2, 9, 3, 0, True),
        (2, 10, 3, 0, True),  # a checkpoint after the stop, had there been one
        (3, 9, -1, 0, True),
        (2, 14, 3, 11, False),
        (2, 15, 3, 11, True),
    ],
)
def test_patience_counts_validations(patience, step, best_step, extended_at, expected):
    """It follows from the steps alone; extending a run starts the count again."""
    schedule = Schedule(validate_every=3, extended_at=extended_at)
    assert schedule.out_of_patience(patience, step, best_step) is expected


def test_patience_ends_a_run(corpus_folder, tmp_path, worse, capfd):
    """It ends two validations after the best, says why, keeps the best checkpoint, and is complete."""
    session = begin(corpus_folder, tmp_path, "patience=2")
    fit(session)
    report(session)
    said = capfd.readouterr().out
    assert (
        "stopped early at step 12: no improvement in the last 2 validations (best at step 6). The learning rates were "
        "still falling: a shorter run, such as horizon=6steps, will probably do better\n" in said
    )
    assert re.search(r"^trained +12  steps: 1,152 tokens, ", said, re.M)
    assert re.search(r"^best validation +\d\.\d{4}  nats per token, at step 6, which best.ckpt keeps$", said, re.M)
    assert f"\nrun shorter:  python train.py rerun={session.directory} horizon=6steps\n" in said
    stored = json.loads((session.directory / "metrics.json").read_text())
    assert (stored["steps"], stored["best_step"]) == (12, 6)
    files = {name: checkpoint.load(session.directory / f"checkpoints/{name}.ckpt")["step"] for name in ("best", "last")}
    assert files == {"best": 6, "last": 12}
    assert resume_run(str(session.directory)).complete
    assert "is complete: it stopped early at step 12, by patience=2; to train" in capfd.readouterr().out
    longer = resume_run(str(session.directory), "31steps")
    assert longer.schedule.total_steps == 31


def test_patience_after_an_interruption(corpus_folder, tmp_path, worse):
    """A resumed run stops where an uninterrupted one does, with the same files."""
    (tmp_path / "other").mkdir()
    whole, parts = begin(corpus_folder, tmp_path, "patience=2"), begin(corpus_folder, tmp_path / "other", "patience=2")
    fit(whole)
    fit(parts, [StopAt(10)])
    resumed = resume_run(str(parts.directory))
    fit(resumed)
    assert resumed.metrics["steps"] == 12
    assert differences(parts.directory, whole.directory) == []


# --- callbacks that ask ---


def test_early_stopping(corpus_folder, tmp_path, worse, capfd):
    """Lightning's own sees each validation; the run ends cleanly, says how to go on, and goes on."""
    session = begin(corpus_folder, tmp_path)
    fit(session, [EarlyStopping(monitor="val/loss", patience=1)])
    said = capfd.readouterr().out
    assert "stopped early at step 9, as a callback asked; to go on regardless: python train.py resume=" in said
    assert session.metrics["steps"] == 9
    last = checkpoint.load(session.directory / "checkpoints/last.ckpt")
    state = last["callbacks"]["EarlyStopping{'monitor': 'val/loss', 'mode': 'min'}"]
    assert (last["step"], state["wait_count"], float(state["best_score"])) == (9, 1, pytest.approx(1.0))
    resumed, stopper = resume_run(str(session.directory)), EarlyStopping(monitor="val/loss", patience=3)
    fit(resumed, [stopper])
    assert resumed.metrics["steps"] == 12  # it remembers that its patience was 1


class Asks(Callback):
    """Asks for the end after some step."""

    def __init__(self, step: int):
        self.step = step

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx: int) -> None:
        if batch_idx + 1 == self.step:
            trainer.should_stop = True


def test_a_callback_stops(corpus_folder, tmp_path):
    """The step is validated, so that the report is true of the model that is saved."""
    session = begin(corpus_folder, tmp_path)
    fit(session, [Asks(5)])
    assert session.metrics["steps"] == 5
    assert [step for step, _ in read_curves(session.directory)["val/loss"]] == [3, 5]
    whole = begin(corpus_folder, tmp_path / "whole", "trainer.checkpoint_every=5", "trainer.keep_every=5")
    fit(whole)
    a, b = session.directory / "checkpoints/last.ckpt", whole.directory / "checkpoints/step-00000005.ckpt"
    weights, expected = checkpoint.load(a)["state_dict"], checkpoint.load(b)["state_dict"]
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_a_curve_that_nobody_writes(corpus_folder, tmp_path):
    """Lightning's complaint about a curve to watch is one line that names those there are."""
    session = begin(corpus_folder, tmp_path)
    assert re.search(
        r"metric `typo` which is not available.*: `val/loss`$", refusal(fit, session, [EarlyStopping(monitor="typo")])
    )


@pytest.mark.slow
@pytest.mark.parametrize(("name", "step"), [("both", 10), ("one", 9)])  # ranks agree every three steps
def test_two_processes_stop_together(corpus_folder, tmp_path, name, step):
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
    two = ["trainer.device=cpu", "trainer.devices=2", "horizon=40steps", "trainer.validate_every=5"]
    run = tiny_arguments(corpus_folder, *two, f"run_dir={tmp_path / 'run'}", f"callbacks=stoppers:{name}")
    done = train_apart(*run, env={"PYTHONPATH": f"{ROOT}:{tmp_path}"})
    assert done.stderr == ""
    assert f"stopped early at step {step}, as a callback asked" in done.stdout
    assert json.loads((tmp_path / "run/metrics.json").read_text())["steps"] == step


def test_a_stop_signal_while_the_time_is_up(corpus_folder, tmp_path, monkeypatch):
    """A signal in the last step changes nothing: the run is complete."""
    machine = Machine(monkeypatch, (0.0, 1.0))
    session = begin(corpus_folder, tmp_path, "horizon=3s")
    fit(session, [machine, StopAt(3, signal.SIGTERM)])
    assert session.metrics["steps"] == 3


# --- an explosion ---


@pytest.mark.parametrize("stop", [0, 58, 80])
def test_explosion(tmp_path, corpus_folder, capsys, stop):
    """Rates that are too high are told once, with the rates to try, whether or not the run is stopped meanwhile."""
    rates = ["optim.lr=2", "optim.matrix_lr=2", "optim.warmup_steps=100", "trainer.log_every=2"]
    run = ["horizon=120steps", "trainer.validate_every=20", "data.prompts=[]", f"run_dir={tmp_path / 'run'}"]
    fit(begin_run(tiny_config(corpus_folder, *run, *rates)), [StopAt(stop)] if stop else [])
    if stop:
        fit(resume_run(str(tmp_path / "run")))
    lines = [line for line in capsys.readouterr().err.splitlines() if "above its course" in line]
    losses = dict(read_table(tmp_path / "run")["train/loss"])
    told = re.fullmatch(
        r"train.py: training loss has been far above its course since step (\d+) \((.*), and (.*) before\): best.ckpt "
        rf"of step 20 is from before; try lower rates with rerun={tmp_path}/run optim.lr=1 optim.matrix_lr=1",
        *lines,
    )
    assert told
    good, high, lowest = int(told[1]), float(told[2]), float(told[3])
    assert high == pytest.approx(losses[good + 10], abs=0.01)
    assert all(losses[good + 2 * i] > 1.2 * lowest + 0.3 for i in range(1, 6)) and losses[good] <= 1.2 * lowest + 0.31


@pytest.mark.parametrize(("lap", "worked", "counted"), [(10.0, 0.3, 0.3), (3.0, 2.8, 3.0), (10.0, 9.0, 10.0)])
def test_asleep_in_the_first_step(monkeypatch, lap, worked, counted):
    """Before a usual step is known, time in which the processor did nothing is no training; compiling is."""
    clock, now = Clock(TrainState(), 0.0), {"perf_counter": 100.0, "process_time": 5.0}
    for name in now:
        monkeypatch.setattr(f"gpt.training.run.clock.time.{name}", lambda name=name: now[name])
    with clock.paused():
        pass
    before = clock.state.seconds
    now["perf_counter"] += lap
    now["process_time"] += worked
    with clock.paused():
        pass
    assert clock.state.seconds - before == pytest.approx(counted)
