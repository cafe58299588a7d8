"""What follows a step, part by part: clock, curves, journal, validation, samples, saving, progress, signals."""

import dataclasses
import math
import os
import shutil
import signal
import subprocess
import time

import pytest
import torch
from lightning import Callback

from gpt.errors import NonFiniteError
from gpt.exchange import checkpoint
from gpt.sampling.scoring import Score
from gpt.training.config.schema import Config
from gpt.training.distributed.launch import TORCHRUN
from gpt.training.metrics.curves import Curves
from gpt.training.run.clock import Clock
from gpt.training.run.code import git_commit, versions
from gpt.training.run.run import Run
from gpt.training.run.signals import REPEATED, StopSignals
from gpt.training.run.state import TrainState
from harness import StopAt, begin_run, fit, read_curves, resume_run, tiny_config


class Recorder(Callback):
    """Notes what it hears, and what the trainer says at that moment."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.losses: list[float] = []
        self.validations: list[int] = []
        self.metrics: list[float] = []
        self.begun: list[int] = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx: int) -> None:
        self.steps.append(trainer.global_step)
        self.losses.append(float(outputs["loss"]))

    def on_validation_start(self, trainer, module) -> None:
        self.begun.append(trainer.global_step)

    def on_validation_end(self, trainer, module) -> None:
        self.validations.append(trainer.global_step)
        self.metrics.append(float(trainer.callback_metrics["val/loss"]))
        time.sleep(0.2)

    def on_train_start(self, trainer, module) -> None:
        self.began = time.perf_counter()

    def on_train_end(self, trainer, module) -> None:
        self.seconds = time.perf_counter() - self.began


@pytest.fixture(scope="module")
def trained(corpus_folder) -> tuple[Run, Recorder]:
    """A run of 12 steps, with dropout and two micro-batches a step, and what a callback heard of it."""
    session = begin_run(tiny_config(corpus_folder, "horizon=12steps", f"run_dir={corpus_folder / 'run'}"))
    recorder = Recorder()
    fit(session, [recorder])
    return session, recorder


def test_a_batch_is_a_step(trained):
    """However many micro-batches a step takes, callbacks hear of it once, with the loss of all."""
    session, recorder = trained
    assert session.config.accumulation == 2
    assert recorder.steps == list(range(1, 13))
    points = read_curves(session.directory)["train/loss"]
    assert [loss for _, loss in points] == pytest.approx([sum(recorder.losses[i : i + 3]) / 3 for i in (0, 3, 6, 9)])


def test_validations_are_heard(trained):
    """Callbacks hear of each after its step, with the loss in `trainer.callback_metrics`; the clock stands still."""
    session, recorder = trained
    assert recorder.begun == recorder.validations == [3, 6, 9, 12]
    assert recorder.metrics == pytest.approx([loss for _, loss in read_curves(session.directory)["val/loss"]])
    assert session.metrics["val_loss"] == pytest.approx(recorder.metrics[-1])
    assert session.state.seconds < recorder.seconds - 4 * 0.2


def test_both_rates_have_a_curve(trained):
    """`train/matrix_lr` is the rate of Muon, which trains the blocks; `train/lr` is AdamW's."""
    curves, optim = read_curves(trained[0].directory), trained[0].config.optim
    assert [step for step, _ in curves["train/matrix_lr"]] == [3, 6, 9, 12]
    for (_, rate), (_, matrix_rate) in zip(curves["train/lr"], curves["train/matrix_lr"], strict=True):
        assert matrix_rate / rate == pytest.approx(optim.matrix_lr / optim.lr)


def test_best_and_last_checkpoints(trained):
    """best.ckpt is of the best step; last.ckpt of the last, the same file where these are one."""
    folder, metrics = trained[0].directory / "checkpoints", trained[0].metrics
    assert checkpoint.load(folder / "best.ckpt")["step"] == metrics["best_step"]
    assert checkpoint.load(folder / "last.ckpt")["step"] == 12
    assert checkpoint.load(folder / "previous.ckpt")["step"] == 11
    assert (folder / "best.ckpt").samefile(folder / "last.ckpt") == (metrics["best_step"] == 12)


# --- clock ---


def test_clock_leaves_pauses_out():
    """It counts between the start and the end, without pauses, on top of what a checkpoint brought."""
    clock = Clock(TrainState(seconds=100.0), 0.0)
    clock.start()
    time.sleep(0.02)
    with clock.paused():
        at_pause = clock.state.seconds
        time.sleep(0.05)
        assert clock.state.seconds == at_pause
    clock.end_step(1)
    assert 100.02 <= at_pause <= clock.state.seconds < 100.05 + (at_pause - 100.02)


# --- curves ---


@pytest.mark.parametrize(
    ("stored", "world_size", "rank", "expected"),
    [([6.0], 1, 0, 6.0), ([2.0, 4.0], 2, 1, 4.0), ([2.0, 4.0], 1, 0, 3.0), ([6.0], 2, 1, 6.0)],
)
def test_each_rank_gets_its_own_sum_back(tmp_path, monkeypatch, stored, world_size, rank, expected):
    """The partial sum of train/loss is restored by rank; where their number has changed, the mean is."""
    for name, number in zip(TORCHRUN, (rank, world_size, rank, world_size), strict=True):
        monkeypatch.setenv(name, str(number))
    monkeypatch.setattr(torch.distributed, "all_gather_object", lambda sums, mine: sums.__setitem__(rank, mine))
    run = Run(tmp_path, Config(logger=[]), state=TrainState(losses=stored, num_losses=2))
    curves = Curves(run)
    curves.open(0)
    curves.note()
    assert (run.state.losses[rank], run.state.num_losses) == (expected, 2)


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
        os.kill(os.getpid(), signal.SIGTERM)  # as from `timeout`, which sends it to its child and then to its group
        time.sleep(REPEATED)
        with pytest.raises(SystemExit) as end:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
        assert end.value.code == 130
    finally:
        signals.restore()
    assert signal.getsignal(signal.SIGTERM) is before


# --- saving ---


@pytest.mark.parametrize(
    ("files", "warnings"),
    [
        ({"previous": 5, "best": 9}, ["last.ckpt is missing; going on from best.ckpt of step 9"]),
        ({"previous": 5, "last": 7, "best": 9}, []),
    ],
)
def test_newest_checkpoint(trained, tmp_path, files, warnings, capsys):
    """A run goes on from the newest of its checkpoints, which may be best.ckpt, and says if last.ckpt is missing."""
    shutil.copy(trained[0].directory / "config.yaml", tmp_path)
    payload = checkpoint.load(trained[0].directory / "checkpoints/last.ckpt")
    for name, step in files.items():
        checkpoint.save(payload | {"step": step}, tmp_path / f"checkpoints/{name}.ckpt")
    with Run.open(tmp_path) as run:
        assert (run.file.name, run.payload["step"]) == ("best.ckpt", 9)
    said = capsys.readouterr().err.splitlines()
    assert said == [f"train.py: {tmp_path}/checkpoints/{line}" for line in warnings]


class Counter(Callback):
    """A user's callback with a state of its own, which changes its type."""

    def __init__(self) -> None:
        self.steps: int | None = None

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx: int) -> None:
        self.steps = (self.steps or 0) + 1

    def state_dict(self) -> dict:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict) -> None:
        self.steps = state["steps"]


@pytest.mark.parametrize("from_the_beginning", [True, False])
def test_callbacks_with_a_state(trained, tmp_path, from_the_beginning):
    """A user's callback continues with its state of the checkpoint, and may be new to a run."""
    config = dataclasses.replace(trained[0].config, run_dir=str(tmp_path / "run"))
    fit(begin_run(config), [StopAt(5), *([Counter()] if from_the_beginning else [])])
    resumed, counter = resume_run(str(tmp_path / "run")), Counter()
    done = checkpoint.load(tmp_path / "run/checkpoints/last.ckpt")["step"]
    fit(resumed, [counter])
    assert counter.steps == (12 if from_the_beginning else 12 - done)


def test_validation_that_is_not_finite(trained, tmp_path, monkeypatch):
    """A validation loss of nan ends the run, rather than counting as none."""
    monkeypatch.setattr("gpt.training.metrics.validation.score", lambda *_: Score(math.nan, 10, 20))
    config = dataclasses.replace(trained[0].config, run_dir=str(tmp_path / "run"))
    with pytest.raises(NonFiniteError, match="step 3: the validation loss is nan"):
        fit(begin_run(config))
    assert not (tmp_path / "run/metrics.json").exists()


# --- record ---


def test_checkpoints_record_their_origin(trained):
    """Versions, commit, threads, schedule and configuration are in every checkpoint as plain types."""
    payload = checkpoint.load(trained[0].directory / "checkpoints/best.ckpt")
    assert payload["versions"] == versions()
    assert payload["threads"] == torch.get_num_threads()
    assert payload["schedule"] == dataclasses.asdict(trained[0].schedule)
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
    (inside / "code.py").touch()
    assert git_commit(inside) == head
    subprocess.run(["git", "-C", inside, "add", "code.py"], check=True)
    assert git_commit(inside) == f"{head}-dirty"
