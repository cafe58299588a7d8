"""A run that is given a longer horizon: where its rates go, and that nothing of it is lost."""

import dataclasses
import json
import os
import shutil
import signal
from pathlib import Path

import pytest

from gpt.errors import UserError
from gpt.exchange import checkpoint
from gpt.training.config import read
from gpt.training.optim import OptimConfig, lr_factor
from gpt.training.resuming import extended, read_plan
from gpt.training.session import Session
from harness import StopAt, differences, tiny_config, train, write_corpus

STEADY = "optim.warmup_steps=5"  # with optim.decay_from=0.3, the rates of 61 steps fall from step 19 on


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with a corpus, and a run of 61 steps (`short`)."""
    folder = tmp_path_factory.mktemp("extending")
    write_corpus(folder)
    Session.begin(tiny_config(folder, STEADY, "horizon=61steps", f"run_dir={folder / 'short'}")).fit()
    return folder


@pytest.fixture
def short(folder, tmp_path) -> Path:
    return Path(shutil.copytree(folder / "short", tmp_path / "run"))


def test_rates_by_hand():
    """From a tenth of the peak at step 20 they rise by a quarter a step, and meet the schedule of 40 steps."""
    config = OptimConfig(warmup_steps=4, schedule="linear", decay_from=0.5, final_lr=0.0)
    factors = [lr_factor(step, 40, config, 20, 0.1) for step in (20, 21, 22, 23, 24, 30, 39, 40)]
    assert factors == pytest.approx([0.35, 0.6, 0.85, 17 / 20, 16 / 20, 0.5, 0.05, 0.0], abs=1e-12)


def test_before_the_rates_fall(folder, tmp_path):
    """A run that is extended before its rates fall is, bit for bit, the run of that horizon from the start."""
    run_dir, whole = tmp_path / "run", tmp_path / "whole"
    with pytest.raises(SystemExit):
        config = tiny_config(folder, STEADY, "horizon=61steps", f"run_dir={run_dir}")
        Session.begin(config).fit([StopAt(13)])
    Session.begin(tiny_config(folder, STEADY, "horizon=83steps", f"run_dir={whole}")).fit()
    assert train(f"resume={run_dir}", "horizon=83steps").returncode == 0
    assert [d for d in differences(run_dir, whole) if "earlier_horizons" not in d and "extended_at" not in d] == []


def test_after_the_end(short):
    """The rates rise again, more is learnt, and configuration and checkpoint name both horizons."""
    before = json.loads((short / "metrics.json").read_text())
    done = train(f"resume={short}", "horizon=97steps")
    assert done.returncode == 0
    assert "extending the run from 61 steps to 97" in done.stdout
    after = json.loads((short / "metrics.json").read_text())
    assert (after["steps"], before["steps"]) == (97, 61)
    assert after["val_loss"] < before["val_loss"]
    config = read(short / "config.yaml")
    assert (config.horizon, config.earlier_horizons) == ("97steps", ["61steps until step 61"])
    done = train(f"resume={short}", "horizon=97steps")
    assert (done.returncode, "is complete: it has trained all of its 97 steps" in done.stdout) == (0, True)


@pytest.mark.parametrize(
    "change", [lambda c: c.pop("Clock"), lambda c: c.update(Clock=[]), lambda c: c.update(Clock={})]
)
def test_unknown_speed(short, change):
    """A time cannot be turned into steps without the time so far; nothing is changed."""
    payload = checkpoint.load(short / "checkpoints/last.ckpt")
    change(payload["callbacks"])
    with pytest.raises(UserError, match="does not say how fast it was: give the horizon in steps"):
        extended(*read_plan(short, payload), payload, "2h", 1000)


def test_damaged_state_is_found_before_anything_changes(short):
    """A checkpoint whose optimizer is damaged stays as it is, and so does config.yaml."""
    payload = checkpoint.load(short / "checkpoints/last.ckpt")
    payload["optimizer_states"][0]["state"][0]["exp_avg"].fill_(float("nan"))
    for name in ("best", "previous"):
        (short / f"checkpoints/{name}.ckpt").unlink()
    checkpoint.save(payload, short / "checkpoints/last.ckpt")
    before = {name: (short / name).read_bytes() for name in ("checkpoints/last.ckpt", "config.yaml")}
    done = train(f"resume={short}", "horizon=97steps")
    assert (done.returncode, "exp_avg is not finite" in done.stderr) == (2, True)
    assert {name: (short / name).read_bytes() for name in before} == before


def test_patience_begins_anew(folder, tmp_path):
    """A run that ran out of patience while its rates were at their peak trains to the new horizon's validations."""
    run_dir = tmp_path / "run"
    config = tiny_config(
        folder, STEADY, "horizon=61steps", f"run_dir={run_dir}", "optim.decay_from=1.0", "optim.lr=5.0"
    )
    Session.begin(dataclasses.replace(config, patience=1)).fit()
    stopped = json.loads((run_dir / "metrics.json").read_text())["steps"]
    assert stopped < 61
    session = Session.resume(str(run_dir), "83steps")
    assert session is not None
    assert session.plan.extended_at == stopped
    session.fit()
    assert json.loads((run_dir / "metrics.json").read_text())["steps"] > stopped + 1
    assert Session.resume(str(run_dir)) is None


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_interrupted_extension(short, tmp_path, number):
    """A run that is stopped or killed while it is extended ends with the same bits, and needs no second horizon."""
    whole = Path(shutil.copytree(short, tmp_path / "whole"))
    assert train(f"resume={whole}", "horizon=97steps").returncode == 0
    child = os.fork()
    if child == 0:
        session = Session.resume(str(short), "97steps")
        assert session is not None
        try:
            session.fit([StopAt(79, number)])
        finally:
            os._exit(143)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == (143 if number == signal.SIGTERM else -9)
    assert train(f"resume={short}").returncode == 0
    assert differences(short, whole) == []


def test_seconds_count_from_the_start(short, monkeypatch):
    """A horizon in seconds becomes steps at the run's own speed."""
    seconds = json.loads((short / "metrics.json").read_text())["train_seconds"]
    session = Session.resume(str(short), f"{2 * seconds}s")
    assert session is not None
    assert session.plan.total_steps == pytest.approx(122, abs=9)  # the clock went on while the last figures were saved
    assert session.config.horizon == f"{2 * seconds}s"


def test_too_short(short):
    """A horizon that has been reached changes nothing."""
    files = {file: file.read_bytes() for file in short.rglob("*") if file.is_file()}
    with pytest.raises(UserError, match=r"^horizon=1epochs is \d+ steps, and the run has trained 61: give a longer"):
        Session.resume(str(short), "1epochs")
    assert {file: file.read_bytes() for file in short.rglob("*") if file.is_file()} == files


def test_without_a_checkpoint(folder, tmp_path):
    """A run that never saved begins with the new horizon, and its config.yaml says so."""
    run_dir = tmp_path / "run"
    session = Session.begin(tiny_config(folder, STEADY, "horizon=61steps", f"run_dir={run_dir}"))
    assert session.plan.total_steps == 61
    session = Session.resume(str(run_dir), "7steps")
    assert session is not None
    assert (session.plan.total_steps, read(run_dir / "config.yaml").horizon) == (7, "7steps")


def test_older_checkpoints_know_no_extension(short):
    """The plan of a checkpoint that was saved before runs could be extended is read as one that was not."""
    payload = checkpoint.load(short / "checkpoints/last.ckpt")
    del payload["plan"]["extended_at"], payload["plan"]["factor_then"], payload["config"]["earlier_horizons"]
    _, plan = read_plan(short, payload)
    assert (plan.extended_at, plan.factor_then) == (0, 1.0)
    payload["plan"] = dataclasses.asdict(plan) | {"extended_at": 62}
    with pytest.raises(UserError, match="its plan is damaged"):
        read_plan(short, payload)
