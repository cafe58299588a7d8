"""What follows a step, part by part: clock, curves, journal, validation, samples, saving, progress, signals."""

import dataclasses
import json
import math
import os
import re
import signal
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lightning import Callback

from gpt.errors import NonFiniteError
from gpt.exchange import checkpoint
from gpt.sampling.scoring import Score
from gpt.training import runs
from gpt.training.curves import Curves
from gpt.training.journal import Journal
from gpt.training.record import git_commit, versions
from gpt.training.saving import CheckpointFiles
from gpt.training.session import Session
from gpt.training.signals import StopSignals
from gpt.training.steps import Clock, StepCallback
from harness import read_curves, tiny_config, write_corpus


class Recorder(StepCallback):
    """Notes what it hears, and what the trainer says at that moment."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.validations: list[tuple[int, Score]] = []
        self.metrics: list[float] = []
        self.clock_ran: list[bool] = []

    def on_step_end(self, trainer, module, step: int) -> None:
        self.steps.append(step)

    def on_validated(self, trainer, module, step: int, score: Score) -> None:
        self.validations.append((step, score))
        self.metrics.append(float(trainer.callback_metrics["val/loss"]))
        clock = next(callback for callback in trainer.callbacks if isinstance(callback, Clock))
        before = clock.seconds
        time.sleep(0.001)
        self.clock_ran.append(clock.seconds != before)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Session, Recorder]:
    """A run of 12 steps, with dropout and two micro-batches a step, and what a callback heard of it."""
    folder = tmp_path_factory.mktemp("trained")
    write_corpus(folder)
    session = Session.begin(tiny_config(folder, "horizon=12steps", f"run_dir={folder / 'run'}"))
    recorder = Recorder()
    session.fit([recorder])
    return session, recorder


def test_steps_are_counted_once(trained):
    """However many micro-batches a step takes, callbacks hear of it once."""
    assert trained[0].plan.accumulation == 2
    assert trained[1].steps == list(range(1, 13))


def test_callbacks_hear_of_validations(trained):
    """Four times in 12 steps, with the score, which `trainer.callback_metrics` has as well; the clock stands still."""
    session, recorder = trained
    assert [step for step, _ in recorder.validations] == [3, 6, 9, 12]
    assert recorder.metrics == pytest.approx([score.nats_per_token for _, score in recorder.validations])
    assert recorder.clock_ran == [False] * 4
    assert session.metrics["val_loss"] == recorder.validations[-1][1].nats_per_token


def test_metrics_and_curves_agree(trained):
    """metrics.json, the session and the last points of the curves say the same."""
    session, _ = trained
    assert json.loads((session.run_dir / "metrics.json").read_text()) == session.metrics
    curves = read_curves(session.run_dir)
    assert curves["val/loss"][-1] == (12, pytest.approx(session.metrics["val_loss"]))
    assert curves["val/bits_per_byte"][-1] == (12, pytest.approx(session.metrics["val_bits_per_byte"]))


def test_both_rates_have_a_curve(trained):
    """`train/matrix_lr` is the rate of Muon, which trains the blocks; `train/lr` is AdamW's."""
    curves, optim = read_curves(trained[0].run_dir), trained[0].config.optim
    assert [step for step, _ in curves["train/matrix_lr"]] == [3, 6, 9, 12]
    for (_, rate), (_, matrix_rate) in zip(curves["train/lr"], curves["train/matrix_lr"], strict=True):
        assert matrix_rate / rate == pytest.approx(optim.matrix_lr / optim.lr)


def test_best_and_last_checkpoints(trained):
    """best.ckpt is of the best step; last.ckpt of the last, the same file where these are one."""
    folder, metrics = trained[0].run_dir / "checkpoints", trained[0].metrics
    assert checkpoint.load(folder / "best.ckpt")["step"] == metrics["best_step"]
    assert checkpoint.load(folder / "last.ckpt")["step"] == 12
    assert checkpoint.load(folder / "previous.ckpt")["step"] == 11
    assert (folder / "best.ckpt").samefile(folder / "last.ckpt") == (metrics["best_step"] == 12)


def test_samples_follow_the_prompts(trained):
    """samples.md has the continuations by step."""
    text = (trained[0].run_dir / "samples.md").read_text(encoding="utf-8")
    assert re.findall(r"^## Step (\d+)$", text, re.M) == ["3", "6", "9", "12"]


# --- clock ---


def test_clock_leaves_pauses_out():
    """It counts between the start and the end, without pauses, on top of what a checkpoint brought."""
    clock = Clock()
    clock.load_state_dict({"seconds": 100.0})
    assert clock.seconds == 100.0
    clock.on_train_start(None, None)
    time.sleep(0.02)
    with clock.paused():
        at_pause = clock.seconds
        time.sleep(0.05)
        assert clock.seconds == at_pause
    clock.on_train_end(None, None)
    assert 100.02 <= clock.seconds < 100.05 + (at_pause - 100.02)
    assert clock.state_dict() == {"seconds": clock.seconds}


# --- curves ---


@pytest.mark.parametrize(
    ("stored", "world_size", "rank", "expected"),
    [(6.0, 1, 0, 6.0), ([2.0, 4.0], 2, 0, 2.0), ([2.0, 4.0], 2, 1, 4.0), ([2.0, 4.0], 1, 0, 3.0), (6.0, 2, 1, 6.0)],
)
def test_each_rank_gets_its_own_sum_back(tmp_path, stored, world_size, rank, expected):
    """The partial sum of train/loss is restored by rank; where their number has changed, the mean is."""
    curves = Curves(tmp_path, Clock(), None)
    curves.load_state_dict({"losses": stored, "num_losses": 2})
    trainer = SimpleNamespace(world_size=world_size, global_rank=rank, global_step=5, is_global_zero=False)
    curves.on_train_start(trainer, None)  # type: ignore[arg-type]
    assert float(curves._losses) == expected
    assert curves._num_losses == 2


# --- journal ---


def events_file(folder: Path, seconds: int, content: bytes = b"0123456789") -> Path:
    file = folder / f"events.out.tfevents.{seconds:010d}.host.1.0"
    file.write_bytes(content)
    return file


def journal(folder: Path) -> Journal:
    return Journal(folder, Curves(folder, Clock(), None))


RANK_0 = SimpleNamespace(is_global_zero=True)


def test_journal_cuts_back(tmp_path):
    """Samples and known event files get their lengths of the checkpoint back; later files go."""
    (tmp_path / "samples.md").write_bytes(b"0123456789")
    first, later = events_file(tmp_path, 1000), events_file(tmp_path, 2000)
    kept = journal(tmp_path)
    kept.load_state_dict({"samples": 4, "events": [7]})
    kept.on_fit_start(RANK_0, None)  # type: ignore[arg-type]
    assert (tmp_path / "samples.md").read_bytes() == b"0123"
    assert first.read_bytes() == b"0123456"
    assert not later.exists()


def test_journal_never_lengthens(tmp_path):
    """A file that is shorter than the checkpoint says is left as it is, not filled with zeros."""
    (tmp_path / "samples.md").write_bytes(b"01")
    kept = journal(tmp_path)
    kept.load_state_dict({"samples": 4, "events": []})
    kept.on_fit_start(RANK_0, None)  # type: ignore[arg-type]
    assert (tmp_path / "samples.md").read_bytes() == b"01"


def test_journal_renames_files_from_the_future(tmp_path):
    """Event files keep their order and come before whatever is written now."""
    now = int(time.time())
    for i, seconds in enumerate((1000, now + 500, now + 900)):
        events_file(tmp_path, seconds, bytes([i]))
    kept = journal(tmp_path)
    kept.load_state_dict({"samples": 0, "events": [1, 1, 1]})
    kept.on_fit_start(RANK_0, None)  # type: ignore[arg-type]
    files = sorted(tmp_path.glob("events.*"))
    assert [file.read_bytes() for file in files] == [b"\0", b"\1", b"\2"]
    assert all(int(file.name.split(".")[3]) <= now for file in files)


# --- signals ---


def test_first_signal_asks_and_second_ends(capfd):
    """The first is remembered and answered on stderr; the second ends the process with 128 + signal."""
    signals, before = StopSignals(), signal.getsignal(signal.SIGTERM)
    signals.install()
    signals.install()  # as after Lightning's own
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.received == signal.SIGTERM
        assert "stopping after this step" in capfd.readouterr().err
        with pytest.raises(SystemExit) as end:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
        assert end.value.code == 130
    finally:
        signals.restore()
    assert signal.getsignal(signal.SIGTERM) is before


class StopAt(Callback):
    """Sends this process a signal, once, after some step."""

    def __init__(self, step: int):
        self.step, self.sent = step, False

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx: int) -> None:
        if trainer.global_step == self.step and not self.sent:
            self.sent = True
            os.kill(os.getpid(), signal.SIGTERM)


def test_stop_and_resume(trained, tmp_path, capfd):
    """A signal saves after the step and ends with 143; the rest of the run has the bits of an uninterrupted one."""
    folder, run_dir = trained[0].run_dir.parent, tmp_path / "run"
    config = dataclasses.replace(trained[0].config, run_dir=str(run_dir))
    with pytest.raises(SystemExit) as end:
        Session.begin(config).fit([StopAt(5)])
    assert end.value.code == 143
    assert f"continue with: python train.py resume={run_dir}" in capfd.readouterr().out
    step = checkpoint.load(run_dir / "checkpoints/last.ckpt")["step"]
    assert 5 <= step <= 6
    resumed = Session.resume(str(run_dir))
    assert resumed is not None
    resumed.fit()
    whole, parts = (checkpoint.load(run / "checkpoints/last.ckpt")["state_dict"] for run in (folder / "run", run_dir))
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    assert read_curves(run_dir) == read_curves(folder / "run")
    assert Session.resume(str(run_dir)) is None
    assert "is complete" in capfd.readouterr().out


# --- saving ---


def test_a_loaded_checkpoint_is_given_away_once(tmp_path):
    """What was read already is not read again, and not kept."""
    payload = {"format": 1, "state_dict": {}, "config": {}, "tokenizer": {}}
    checkpoint.save(payload | {"step": 7}, tmp_path / "a.ckpt")
    files = CheckpointFiles(payload)
    assert files.load_checkpoint(tmp_path / "a.ckpt") is payload
    assert files.loaded is None
    assert files.load_checkpoint(tmp_path / "a.ckpt")["step"] == 7
    files.remove_checkpoint(tmp_path / "a.ckpt")
    files.remove_checkpoint(tmp_path / "a.ckpt")
    assert os.listdir(tmp_path) == []


def test_newest_checkpoint_by_step(trained, tmp_path):
    """Where last.ckpt is missing, the one with the most steps of the others is taken, and a line says so."""
    payload = checkpoint.load(trained[0].run_dir / "checkpoints/last.ckpt")
    for name, step in (("previous", 5), ("best", 9)):
        checkpoint.save(payload | {"step": step}, tmp_path / f"checkpoints/{name}.ckpt")
    warnings: list[str] = []
    found = runs.load_newest(tmp_path, warnings.append)
    assert found is not None
    assert (found[0].name, found[1]["step"]) == ("best.ckpt", 9)
    assert warnings == [f"{tmp_path}/checkpoints/last.ckpt is missing; going on from best.ckpt of step 9"]


def test_best_checkpoint_may_be_the_newest(trained, tmp_path):
    """A best.ckpt that was saved after last.ckpt is continued from: the steps between them are not lost."""
    payload = checkpoint.load(trained[0].run_dir / "checkpoints/last.ckpt")
    for name, step in (("previous", 5), ("last", 7), ("best", 9)):
        checkpoint.save(payload | {"step": step}, tmp_path / f"checkpoints/{name}.ckpt")
    found = runs.load_newest(tmp_path, pytest.fail)
    assert found is not None
    assert (found[0].name, found[1]["step"]) == ("best.ckpt", 9)


class Counter(Callback):
    """A user's callback with a state of its own, which changes its type."""

    def __init__(self) -> None:
        self.steps: int | None = None

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx: int) -> None:
        if (batch_idx + 1) % module.plan.accumulation == 0:
            self.steps = (self.steps or 0) + 1

    def state_dict(self) -> dict:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict) -> None:
        self.steps = state["steps"]


@pytest.mark.parametrize("from_the_beginning", [True, False])
def test_callbacks_with_a_state(trained, tmp_path, from_the_beginning):
    """A user's callback continues with its state of the checkpoint, and may be new to a run."""
    config = dataclasses.replace(trained[0].config, run_dir=str(tmp_path / "run"))
    with pytest.raises(SystemExit):
        Session.begin(config).fit([StopAt(5), *([Counter()] if from_the_beginning else [])])
    resumed, counter = Session.resume(str(tmp_path / "run")), Counter()
    assert resumed is not None
    done = checkpoint.load(tmp_path / "run/checkpoints/last.ckpt")["step"]
    resumed.fit([counter])
    assert counter.steps == (12 if from_the_beginning else 12 - done)


def test_validation_that_is_not_finite(trained, tmp_path, monkeypatch):
    """A validation loss of nan ends the run, rather than counting as none."""
    monkeypatch.setattr("gpt.training.validation.score", lambda *_: Score(math.nan, 10, 20))
    config = dataclasses.replace(trained[0].config, run_dir=str(tmp_path / "run"))
    with pytest.raises(NonFiniteError, match="step 3: the validation loss is nan"):
        Session.begin(config).fit()
    assert not (tmp_path / "run/metrics.json").exists()


def test_event_files_of_other_programs(tmp_path):
    """An event file that another program has written into the run's directory is neither cut nor deleted."""
    theirs = events_file(tmp_path, 3000)
    ours = events_file(tmp_path, 1000).rename(tmp_path / "events.out.tfevents.0000001000.host.1.0.run")
    kept = journal(tmp_path)
    kept.load_state_dict({"samples": 0, "events": [[ours.name, 4]]})
    kept.on_fit_start(RANK_0, None)  # type: ignore[arg-type]
    assert theirs.read_bytes() == b"0123456789"
    assert ours.read_bytes() == b"0123"


# --- record ---


def test_checkpoints_record_their_origin(trained):
    """Versions, commit, threads, plan and configuration are in every checkpoint as plain types."""
    payload = checkpoint.load(trained[0].run_dir / "checkpoints/best.ckpt")
    assert payload["versions"] == versions()
    assert payload["threads"] == torch.get_num_threads()
    assert payload["plan"] == dataclasses.asdict(trained[0].plan)
    assert payload["config"] == dataclasses.asdict(trained[0].config)


def test_git_commit(tmp_path):
    """The commit of a checkout; None outside one."""
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    outside.mkdir()
    assert git_commit(outside) is None
    assert git_commit(tmp_path / "nowhere") is None
    identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", "init", "-q", inside], check=True)
    subprocess.run(["git", *identity, "-C", inside, "commit", "-q", "--allow-empty", "-m", "a"], check=True)
    head = (inside / ".git" / (inside / ".git/HEAD").read_text().split()[1]).read_text().strip()
    assert git_commit(inside) == head
