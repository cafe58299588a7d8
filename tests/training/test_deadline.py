"""A horizon in seconds: the run ends when it was asked to, although the machine changes its speed."""

import json
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning import Callback

from gpt.exchange import checkpoint
from gpt.training.config import Config, read
from gpt.training.deadline import Deadline
from gpt.training.optim import OptimConfig
from gpt.training.plan import Plan
from gpt.training.session import Session
from gpt.training.steps import Clock
from harness import TINY, StopAt, differences, tiny_config, train, write_corpus


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("deadline")
    write_corpus(folder)
    return folder


class Machine(Callback):
    """A machine whose steps take `paces`: (seconds of training time from which on, seconds a step).

    A `real` one sleeps for what is left of a step, or for less after a step that took too long. Otherwise the clock of
    the training is this machine's, so that nothing depends on the machine below.
    """

    def __init__(self, *paces: tuple[float, float], real: bool = False):
        self.paces, self.real, self.now, self.late = paces, real, 0.0, 0.0

    def pass_a_step(self) -> None:
        self.now += next(pace for begin, pace in reversed(self.paces) if self.now >= begin)

    def on_train_batch_start(self, trainer, module, batch, batch_idx: int) -> None:
        if batch_idx % module.plan.accumulation == 0:
            self.pass_a_step()
            if self.real:
                clock = next(callback for callback in trainer.callbacks if isinstance(callback, Clock))
                self.late = max(self.late, clock.seconds - self.now)
                time.sleep(max(0.0, self.now - clock.seconds))

    def take_over(self, monkeypatch) -> "Machine":
        monkeypatch.setattr(Clock, "seconds", property(lambda clock: self.now))
        return self


def begin(folder: Path, run_dir: Path, monkeypatch, horizon: str, measured: float, *changes: str) -> Session:
    """A run on a machine that is said to take `measured` seconds a step."""
    monkeypatch.setattr("gpt.training.probe.seconds_per_step", lambda *_, **__: measured)
    few = [f"horizon={horizon}", f"run_dir={run_dir}", "data.prompts=[]", "logger=[csv]", "optim.warmup_steps=5"]
    return Session.begin(tiny_config(folder, *few, *changes))


def simulate(machine: Machine, seconds: float, measured: float, optim: OptimConfig, run_dir: Path) -> Plan:
    """The plan that a run of many steps ends with, without a model: only the deadline and the machine are real."""
    (run_dir / "config.yaml").touch()
    plan = Plan(1, 6, 3, 2).for_steps(max(1, round(seconds / measured)), 500)
    config = Config(horizon=f"{seconds}s", optim=optim)
    module = SimpleNamespace(plan=plan, config=config)
    epoch = SimpleNamespace(max_steps=plan.total_steps, batch_progress=SimpleNamespace(is_last_batch=False))
    loop = SimpleNamespace(epoch_loop=epoch, _data_fetcher=SimpleNamespace(), max_batches=0)
    trainer = SimpleNamespace(fit_loop=loop, world_size=1, is_global_zero=False)
    deadline = Deadline(run_dir, SimpleNamespace())  # type: ignore[arg-type]
    deadline.on_train_start(trainer, module)  # type: ignore[arg-type]
    step, validations = 0, 0
    while step < epoch.max_steps:
        machine.pass_a_step()
        step += 1
        deadline._clock = SimpleNamespace(seconds=machine.now)  # type: ignore[assignment]
        deadline.on_step_end(trainer, module, step)  # type: ignore[arg-type]
        validations += module.plan.due(step, module.plan.validate_every)
    assert module.plan.total_steps == step == epoch.max_steps
    assert module.config.horizon == f"{step}steps"
    assert validations >= min(3, step)  # four, unless the machine becomes several times as slow after the first third
    return module.plan


@settings(deadline=None, max_examples=60)
@given(
    measured=st.floats(0.02, 0.5),
    paces=st.lists(st.floats(0.02, 0.5), min_size=1, max_size=4),
    decay_from=st.sampled_from([0.0, 0.3, 1.0]),
)
def test_any_drift_before_the_end(measured, paces, decay_from, tmp_path_factory):
    """Whatever the machine did in the first 85 of 100 seconds, and whatever was measured: at most 3% off."""
    run_dir = tmp_path_factory.getbasetemp()
    machine = Machine(*[(85.0 * i / len(paces), pace) for i, pace in enumerate(paces)])
    simulate(machine, 100.0, measured, OptimConfig(decay_from=decay_from), run_dir)
    assert machine.now == pytest.approx(100.0, rel=0.03)


@pytest.mark.parametrize(
    ("seconds", "measured", "pace", "steps"),
    [
        (10.0, 1.0, 5.0, 2),  # the time is over before the first correction
        (10.0, 1.0, 11.0, 1),
        (1.0, 5.0, 5.0, 1),  # the time is shorter than a step
        (10.0, 9.0, 1.0, 10),  # the one step that was planned was far too few
        (7.0, 1.0, 1.0, 7),
        (3.0, 1.0, 1.0, 3),
    ],
)
def test_few_steps(seconds, measured, pace, steps, tmp_path):
    """Runs of hardly any steps end as near to the time as whole steps allow."""
    machine = Machine((0.0, pace))
    assert simulate(machine, seconds, measured, OptimConfig(), tmp_path).total_steps == steps


def test_warm_up_longer_than_the_run(tmp_path):
    machine = Machine((0.0, 1.0), (9.0, 2.0))
    plan = simulate(machine, 40.0, 0.5, OptimConfig(warmup_steps=500), tmp_path)
    assert machine.now == pytest.approx(40.0, abs=1.0)
    assert 0.0 < plan.factor_then <= 1.0


def test_corrections_are_told_and_stored(folder, tmp_path, monkeypatch, capsys):
    """Each is one line; configuration and checkpoint name the time, the first steps and the new ones."""
    machine = Machine((0.0, 0.125), (1.5, 0.25)).take_over(monkeypatch)
    session = begin(folder, tmp_path / "run", monkeypatch, "16s", 0.125, "trainer.validate_every=100")
    assert (session.plan.total_steps, read(tmp_path / "run/config.yaml").horizon) == (128, "16s")
    session.fit([machine])
    said = capsys.readouterr().out
    assert "horizon=16s: 70 steps instead of 128, at 250.0 ms each so far\n" in said
    assert said.count("horizon=16s: ") == 2  # as measured, and one of two corrections, as the other confirmed it
    assert machine.now == pytest.approx(16.0, abs=1e-9)
    payload = checkpoint.load(tmp_path / "run/checkpoints/last.ckpt")
    assert payload["step"] == payload["plan"]["total_steps"] == session.plan.total_steps == 70
    for config in (read(tmp_path / "run/config.yaml"), session.config):
        assert config.horizon == "70steps"
        assert config.earlier_horizons == ["16s (128 steps) until step 26", "16s (70 steps) until step 68"]
    assert payload["config"]["horizon"] == "70steps"


@pytest.mark.slow
def test_killed_right_after_a_correction(folder, tmp_path, monkeypatch):
    """Every correction is saved at once. After the last, a killed run ends like one that was left alone, to the bit."""
    machine = Machine((0.0, 0.125), (1.5, 0.25)).take_over(monkeypatch)
    whole, run_dir, first = tmp_path / "whole", tmp_path / "run", tmp_path / "first"
    begin(folder, whole, monkeypatch, "16s", 0.125).fit([machine])
    for place, step in ((first, 27), (run_dir, 69)):
        machine.now = 0.0
        child = os.fork()
        if child == 0:
            try:
                begin(folder, place, monkeypatch, "16s", 0.125).fit([machine, StopAt(step, signal.SIGKILL)])
            finally:
                os._exit(1)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
        payload = checkpoint.load(place / "checkpoints/last.ckpt")
        assert (payload["step"], payload["plan"]["total_steps"]) == (step - 1, 70)
    machine.now = 1e6  # which no longer matters
    session = Session.resume(str(run_dir))
    assert session is not None
    session.fit([machine])
    assert differences(run_dir, whole) == []


@pytest.mark.slow
def test_a_run_that_was_stopped_corrects_by_its_own_clock(folder, tmp_path, monkeypatch):
    """Stopped before the first correction and resumed on a machine of half the speed, it still ends in time."""
    machine = Machine((0.0, 0.1)).take_over(monkeypatch)
    with pytest.raises(SystemExit):
        begin(folder, tmp_path / "run", monkeypatch, "10s", 0.1).fit([machine, StopAt(17)])
    machine.paces = ((0.0, 0.2),)
    session = Session.resume(str(tmp_path / "run"))
    assert session is not None
    assert (session.plan.total_steps, session.config.horizon) == (100, "10s")
    session.fit([machine])
    assert machine.now == pytest.approx(10.0, abs=0.2)
    assert Session.resume(str(tmp_path / "run")) is None


@pytest.mark.slow
def test_extending_by_a_time_is_corrected(folder, tmp_path, monkeypatch):
    """`resume=RUN horizon=10s` on a machine that has slowed down meets the ten seconds since the run began."""
    machine = Machine((0.0, 0.1)).take_over(monkeypatch)
    begin(folder, tmp_path / "run", monkeypatch, "31steps", 0.1).fit([machine])
    machine.paces = ((0.0, 0.2),)
    session = Session.resume(str(tmp_path / "run"), "10s")
    assert session is not None
    assert session.plan.total_steps == 100
    session.fit([machine])
    assert machine.now == pytest.approx(10.0, abs=0.2)
    assert read(tmp_path / "run/config.yaml").horizon == f"{session.plan.total_steps}steps"


def test_a_new_time_before_the_first_checkpoint(folder, tmp_path, monkeypatch):
    """config.yaml says the new time until it is corrected, and then the steps."""
    machine = Machine((0.0, 0.25)).take_over(monkeypatch)
    begin(folder, tmp_path / "run", monkeypatch, "10s", 0.25)
    session = Session.resume(str(tmp_path / "run"), "5s")
    assert session is not None
    assert (session.plan.total_steps, read(tmp_path / "run/config.yaml").horizon) == (20, "5s")
    session.fit([machine])
    assert read(tmp_path / "run/config.yaml").horizon == "20steps"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "paces"),
    [
        ("slower", [(0.0, 0.05), (1.0, 0.15)]),
        ("faster", [(0.0, 0.15), (1.0, 0.05)]),
        ("slower after the first correction", [(0.0, 0.05), (3.0, 0.15)]),
        ("five times as fast as measured", [(0.0, 0.03)]),
    ],
)
def test_met_for_real(folder, tmp_path, monkeypatch, name, paces):
    """Eight seconds are met to 3% by a machine that changes its speed; the steps sleep for real."""
    run_dir = tmp_path / "run"
    session = begin(folder, run_dir, monkeypatch, "8s", 0.15 if "five" in name else 0.1)
    machine = Machine(*paces, real=True)
    session.fit([machine])
    met = json.loads((run_dir / "metrics.json").read_text())["train_seconds"]
    print(f"{name}: asked 8 s, met {met:.2f} s in {session.plan.total_steps} steps")
    if met != pytest.approx(8.0, rel=0.03) and machine.late > 0.1:
        pytest.skip(
            f"this machine is too busy: its own steps came up to {machine.late:.1f} s later than those asked of it"
        )
    assert met == pytest.approx(8.0, rel=0.03)


@pytest.mark.slow
def test_several_ranks_decide_alike(folder, tmp_path):
    """Two processes end after the same step, which rank 0 has decided."""
    places = [f"data.path={folder / 'corpus.txt'}", f"data.cache={folder / 'cache'}", f"run_dir={tmp_path / 'run'}"]
    two = ["trainer.device=cpu", "trainer.devices=2", "horizon=2s", "data.prompts=[]", "logger=[]"]
    done = train(*TINY, *places, *two)
    assert done.returncode == 0, done.stderr
    assert "steps instead of" in done.stdout
    payload = checkpoint.load(tmp_path / "run/checkpoints/last.ckpt")
    assert payload["config"]["horizon"] == f"{payload['step']}steps"
