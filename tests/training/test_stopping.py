"""How runs end: when their time is over, by patience, or by a signal. Diverging runs print a warning."""

import json
import os
import re
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpt.api import read_curves
from gpt.checkpoint import load_checkpoint
from gpt.training import loop
from gpt.training.config import load_config
from gpt.training.report import print_report
from gpt.training.schedule import Schedule
from gpt.training.stop_signals import REPEATED_SIGNAL_SECONDS, StopSignals
from harness import (
    StopAt,
    Training,
    begin_run,
    differences,
    fit,
    refusal,
    resume_run,
    tiny_config,
)


def begin(folder: Path, tmp_path: Path, *changes: str) -> Training:
    """Begin a run of 23 steps of two micro-batches, with a validation every three steps."""
    run = ["horizon=23steps", "trainer.validate_every=3", "data.prompts=[]", f"run_dir={tmp_path / 'run'}", *changes]
    return begin_run(tiny_config(folder, *run))


# --- a time ---


class Machine:
    """A machine with a simulated clock. Each of `paces` is a start in seconds and the seconds of a step."""

    def __init__(self, monkeypatch, *paces: tuple[float, float]):
        self.paces, self.now = paces, 0.0
        fake_time = SimpleNamespace(perf_counter=lambda: self.now, process_time=lambda: self.now)
        monkeypatch.setattr("gpt.training.training_clock.time", fake_time)
        train_step = loop.train_step

        def timed_step(*arguments):
            self.now += next(pace for begin, pace in reversed(self.paces) if self.now >= begin)
            return train_step(*arguments)

        monkeypatch.setattr(loop, "train_step", timed_step)


@pytest.mark.parametrize(
    ("seconds", "paces", "steps"),
    [
        (10.0, [(0.0, 0.25), (5.0, 1.0)], 25),  # the machine becomes four times slower
        (10.0, [(0.0, 1.0), (5.0, 0.25)], 25),
        (10.0, [(0.0, 11.0)], 1),  # the time is shorter than a step
    ],
)
def test_a_time_is_met(corpus_folder, tmp_path, monkeypatch, seconds, paces, steps):
    """A run ends within a step of its time at any speed. Its learning rate follows the clock.

    It validates and saves at each quarter.
    """
    quiet = [f"horizon={seconds}s", "trainer.validate_every=100000", "trainer.checkpoint_every=100000"]
    training = begin(corpus_folder, tmp_path, *quiet)
    machine = Machine(monkeypatch, *paces)
    fit(training)
    assert seconds <= machine.now < seconds + paces[-1][1] + 1e-9
    assert training.metrics["steps"] == training.schedule.total_steps == steps
    lr = dict(read_curves(training.path)["train/lr"])[steps]
    optim = training.config.optim
    progress = (machine.now - paces[-1][1]) / seconds  # before the last step
    assert lr == pytest.approx(optim.lr * Schedule(seconds=seconds).lr_multiplier(steps - 1, progress, optim))
    points = [step for step, _ in read_curves(training.path)["val/loss"]]
    assert len(points) == min(4, steps)
    assert points[-1] == steps
    last = load_checkpoint(training.path / "checkpoints/last.ckpt")
    assert last["step"] == last["state"]["total_steps"] == steps
    assert load_config(training.path / "config.yaml").horizon == last["config"]["horizon"] == f"{seconds}s"
    assert resume_run(training.path) is None


@pytest.mark.promise("runs.md#the horizon is a time")
@pytest.mark.slow
def test_stopped_and_resumed_it_ends_in_time(corpus_folder, tmp_path, monkeypatch):
    """A run is resumed on a machine of half the speed, and extended after its end."""
    training = begin(corpus_folder, tmp_path, "horizon=10s")
    machine = Machine(monkeypatch, (0.0, 0.125))
    fit(training, [StopAt(17)])
    machine.paces = ((0.0, 0.25),)
    resumed = resume_run(tmp_path / "run")
    fit(resumed)
    assert (machine.now, resumed.schedule.total_steps) == (10.125, 17 + 32)
    longer = resume_run(tmp_path / "run", "14s")
    fit(longer)
    assert (machine.now, longer.config.horizon) == (14.125, "14s")
    assert "is behind this run, which has trained 65 steps in 14s" in refusal(resume_run, tmp_path / "run", "9s")


# --- patience ---


@pytest.mark.parametrize(
    ("patience", "step", "best_step", "restart_step", "expected"),
    [
        (0, 1000, 3, 0, False),
        (2, 8, 3, 0, False),
        (2, 9, 3, 0, True),
        (3, 9, -1, 0, True),
        (2, 15, 3, 11, True),
    ],
)
def test_patience_counts_validations(patience, step, best_step, restart_step, expected):
    """It depends on step numbers only. Extending a run restarts the count."""
    schedule = Schedule(validate_every=3, restart_step=restart_step)
    assert schedule.is_out_of_patience(patience, step, best_step) is expected


def test_patience_ends_a_run(corpus_folder, tmp_path, overfitting, capfd):
    """The run ends two validations after the best step, prints why, keeps the best checkpoint, and is complete."""
    training = begin(corpus_folder, tmp_path, "patience=2")
    fit(training)
    assert training.result.stop_reason == "patience"
    print_report(training.spec, training.path, training.result)
    printed = capfd.readouterr().out
    assert "stopped early at step 12: no improvement in the last 2 validations (best at step 6)" in printed
    assert "a shorter run, such as horizon=6steps, will probably do better\n" in printed
    assert re.search(r"^trained +12  steps: 1,152 tokens, ", printed, re.M)
    assert re.search(r"^best validation +\d\.\d{4}  nats per token, at step 6, in best.ckpt$", printed, re.M)
    assert "\nrun shorter:  python train.py horizon=6steps\n" in printed
    stored = json.loads((training.path / "metrics.json").read_text())
    assert (stored["steps"], stored["best_step"]) == (12, 6)
    steps = {name: load_checkpoint(training.path / f"checkpoints/{name}.ckpt")["step"] for name in ("best", "last")}
    assert steps == {"best": 6, "last": 12}
    assert resume_run(training.path) is None
    assert "is complete: it stopped early at step 12, by patience=2; to train" in capfd.readouterr().out
    assert resume_run(training.path, "31steps").schedule.total_steps == 31


def test_a_constant_learning_rate_was_not_still_falling(corpus_folder, tmp_path, overfitting, capfd):
    """A shorter run would reach the same best weights, so none is suggested when patience ends the run."""
    fit(begin(corpus_folder, tmp_path, "patience=2", "optim.schedule=constant"))
    assert "no improvement in the last 2 validations (best at step 6)\n" in capfd.readouterr().out


def test_patience_after_an_interruption(corpus_folder, tmp_path, overfitting):
    """A resumed run stops where an uninterrupted one does, with the same files."""
    (tmp_path / "other").mkdir()
    uninterrupted = begin(corpus_folder, tmp_path, "patience=2")
    fit(uninterrupted)
    interrupted = begin(corpus_folder, tmp_path / "other", "patience=2")
    fit(interrupted, [StopAt(10)])
    resumed = resume_run(interrupted.path)
    fit(resumed)
    assert resumed.metrics["steps"] == 12
    assert differences(interrupted.path, uninterrupted.path) == []


# --- signals ---


@pytest.mark.promise("runs.md#second signal")
def test_first_signal_stops_after_the_step_and_second_at_once(capfd):
    """The first is recorded, with a line on stderr. The second ends the process with code 128 + signal."""
    signals, handler = StopSignals(), signal.getsignal(signal.SIGTERM)
    signals.install()
    signals.install()  # as when memory runs out and the run is retried
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.received_signal == signal.SIGTERM
        assert "stopping after this step" in capfd.readouterr().err
        os.kill(os.getpid(), signal.SIGTERM)  # as from `timeout`, which sends it to its child and then to its group
        time.sleep(REPEATED_SIGNAL_SECONDS)
        with pytest.raises(SystemExit) as end:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
        assert end.value.code == 130
    finally:
        signals.restore()
    assert signal.getsignal(signal.SIGTERM) is handler


def test_signal_in_the_last_step(corpus_folder, tmp_path, monkeypatch):
    """A signal in the last step changes nothing: the run is complete."""
    training = begin(corpus_folder, tmp_path, "horizon=3s")
    Machine(monkeypatch, (0.0, 1.0))
    fit(training, [StopAt(3)])
    assert (training.metrics["steps"], training.result.stop_reason, training.result.stop_signal) == (3, "horizon", 0)
    assert resume_run(training.path) is None


# --- divergence ---


@pytest.mark.slow
def test_diverging_run_is_warned_of_once(tmp_path, corpus_folder, capsys):
    """The warning names learning rates to try. It comes once, although the run is stopped before and after it."""
    lrs = ["optim.lr=2", "optim.matrix_lr=2", "optim.warmup_steps=100", "trainer.log_every=2"]
    run = ["horizon=120steps", "trainer.validate_every=20", "data.prompts=[]", f"run_dir={tmp_path / 'run'}"]
    fit(begin_run(tiny_config(corpus_folder, *run, *lrs)), [StopAt(58)])
    fit(resume_run(tmp_path / "run"), [StopAt(80)])
    fit(resume_run(tmp_path / "run"))
    lines = [line for line in capsys.readouterr().err.splitlines() if "above its average" in line]
    losses = dict(read_curves(tmp_path / "run")["train/loss"])
    warning = re.fullmatch(
        r"train.py: training loss has been far above its average since step (\d+) \((.*), and (.*) before\): "
        r"best.ckpt of step 20 is from before; .* with python train.py optim.lr=1 "
        r"optim.matrix_lr=1",
        *lines,
    )
    assert warning
    healthy, high, lowest = int(warning[1]), float(warning[2]), float(warning[3])
    assert high == pytest.approx(losses[healthy + 10], abs=0.01)
    assert all(losses[healthy + 2 * i] > 1.2 * lowest + 0.3 for i in range(1, 6))
    assert losses[healthy] <= 1.2 * lowest + 0.31
