"""A catalogue of faults: what is done to a run, what train.py prints, its exit code, and what is lost (nothing).

Each row hurts a copy of a run that was stopped half-way. Where the fault can be undone, or does not matter, the run is
then resumed to its end, which must be equal, bit for bit, to that of a run that nothing happened to.
"""

import dataclasses
import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import Callback

from gpt.errors import UserError
from gpt.exchange import checkpoint
from gpt.training import runs
from gpt.training.session import Session
from harness import (
    ROOT,
    TINY,
    Process,
    StopAt,
    command,
    differences,
    tiny_config,
    train,
    train_apart,
    wait_for_file,
    write_corpus,
)

STOP = 31


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with a corpus, a whole run of it (`reference`), and one that was stopped half-way (`stopped`)."""
    folder = tmp_path_factory.mktemp("catalogue")
    write_corpus(folder)
    settings = tiny_config(folder, "horizon=41steps")
    Session.begin(dataclasses.replace(settings, run_dir=str(folder / "reference"))).fit()
    with pytest.raises(SystemExit):
        Session.begin(dataclasses.replace(settings, run_dir=str(folder / "stopped"))).fit([StopAt(STOP)])
    return folder


@pytest.fixture
def run(folder, tmp_path) -> Path:
    """A copy of the stopped run, to hurt."""
    return Path(shutil.copytree(folder / "stopped", tmp_path / "run"))


def edit(run: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change what a run's newest checkpoint holds, and leave it no other."""
    payload = checkpoint.load(run / "checkpoints/last.ckpt")
    change(payload)
    for name in ("best", "previous", "last"):
        (run / f"checkpoints/{name}.ckpt").unlink(missing_ok=True)
    checkpoint.save(payload, run / "checkpoints/last.ckpt")


def contents(run: Path) -> dict[str, bytes]:
    """Every file of a run."""
    return {str(file.relative_to(run)): file.read_bytes() for file in run.rglob("*") if file.is_file()}


# What is changed in a checkpoint that is to be continued -> a part of the line that refuses it.
MANGLED: dict[str, tuple[Callable[[dict], object], str]] = {
    "no plan": (lambda p: p.pop("plan"), "it has no 'plan'"),
    "plan is a list": (lambda p: p.update(plan=[1, 2]), "its 'plan' is of type list, not dict"),
    "plan with text": (lambda p: p["plan"].update(total_steps="41"), "its plan is damaged"),
    "plan with true": (lambda p: p["plan"].update(total_steps=True), "its plan is damaged"),
    "plan with another key": (lambda p: p["plan"].update(more=1), "its plan is damaged"),
    "plan without a key": (lambda p: p["plan"].pop("accumulation"), "its plan is damaged"),
    "plan of zero windows": (lambda p: p["plan"].update(micro_batch_size=0), "its plan does not fit its configuration"),
    "plan of other windows": (lambda p: p["plan"].update(windows_per_step=7), "its plan does not fit"),
    "negative step": (lambda p: p.update(step=-1), "its step is -1 of 41"),
    "step beyond the end": (lambda p: p.update(step=42), "its step is 42 of 41"),
    "step as text": (lambda p: p.update(step="37"), "its 'step' is of type str, not int"),
    "step as a truth value": (lambda p: p.update(step=True), "its 'step' is of type bool, not int"),
    "no threads": (lambda p: p.update(threads=0), "its number of threads is 0"),
    "a million threads": (lambda p: p.update(threads=10**6), "its number of threads is 1000000"),
    "versions as numbers": (lambda p: p["versions"].update(torch=2), "its versions are not text"),
    "corpus without its tokenizer": (lambda p: p["corpus"].pop("tokenizer"), "which text and which tokens"),
    "corpus of another text": (lambda p: p["corpus"].update(corpus="0" * 64), "the corpus was 0000"),
    "configuration as a list": (lambda p: p.update(config=[]), "its 'config' is of type list"),
    "configuration with an unknown key": (lambda p: p["config"].update(foo=1), "there is no key 'foo'"),
    "no optimizer": (lambda p: p.update(optimizer_states=[]), "its optimizer_states is not a list of 1"),
    "optimizer without states": (
        lambda p: p["optimizer_states"][0].update(state={}),
        "optimizer_states[0].state has no",
    ),
    "optimizer state of another shape": (
        lambda p: p["optimizer_states"][0]["state"][0].update(exp_avg=torch.zeros(3)),
        "exp_avg is not a tensor of torch.float32",
    ),
    "optimizer state that is nan": (
        lambda p: p["optimizer_states"][0]["state"][0]["exp_avg"].fill_(float("nan")),
        "exp_avg is not finite",
    ),
    "optimizer with other rates": (
        lambda p: p["optimizer_states"][0]["param_groups"][0].update(peak_lr=9.0),
        "peak_lr is 9.0 and not 0.006",
    ),
    "older Muon": (
        lambda p: [state.pop("squares", None) for state in p["optimizer_states"][0]["state"].values()],
        "an older version with a different Muon optimizer saved it",
    ),
    "weights that are missing": (
        lambda p: p["state_dict"].pop("final_norm.bias"),
        "state_dict has no 'final_norm.bias'",
    ),
    "weights that are nan": (lambda p: p["state_dict"]["final_norm.bias"].fill_(float("nan")), "final_norm.bias"),
    "no callbacks": (lambda p: p.update(callbacks={}), "its callbacks has no 'Clock'"),
    "clock as text": (lambda p: p["callbacks"]["Clock"].update(seconds="1"), "its callbacks.Clock.seconds is '1'"),
    "clock that is nan": (
        lambda p: p["callbacks"]["Clock"].update(seconds=float("nan")),
        "callbacks.Clock.seconds is nan",
    ),
    "best step as text": (lambda p: p["callbacks"]["Validation"].update(best_step="x"), "best_step is 'x'"),
    "journal without its sizes": (
        lambda p: p["callbacks"]["Journal"].pop("samples"),
        "callbacks.Journal has no 'samples'",
    ),
    "journal of other files": (
        lambda p: p["callbacks"]["Journal"].update(events=[["../x", 1]]),
        "callbacks.Journal.events",
    ),
    "journal with negative sizes": (
        lambda p: p["callbacks"]["Journal"].update(events=[-5]),
        "callbacks.Journal.events",
    ),
}


@pytest.mark.parametrize("name", MANGLED)
def test_mangled_checkpoint(run, name):
    """Code 2 and one line, before a single file is changed."""
    change, words = MANGLED[name]
    edit(run, change)
    before = contents(run)
    done = train(f"resume={run}")
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert words in line
    assert contents(run) == before


# What is changed in a checkpoint without any consequence.
HARMLESS: dict[str, Callable[[dict], object]] = {
    "Lightning's loops emptied": lambda p: p.update(loops={}),
    "Lightning's counters changed": lambda p: p["loops"]["fit_loop"].update(epoch_progress=None),
    "Lightning's own step changed": lambda p: p.update(global_step=3, epoch=9),
    "another commit": lambda p: p.update(git_commit="?"),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_what_does_not_matter(run, folder, name):
    """The run ends as the reference did."""
    edit(run, HARMLESS[name])
    done = train(f"resume={run}")
    assert (done.returncode, done.stderr) == (0, "")
    assert [line for line in differences(run, folder / "reference") if not line.startswith("best")] == []


# What is done to the files of a run -> whether its curves can still be complete.
FILES: dict[str, tuple[Callable[[Path], object], bool]] = {
    "nothing": (lambda run: None, True),
    "samples.md deleted": (lambda run: (run / "samples.md").unlink(), False),
    "samples.md emptied": (lambda run: (run / "samples.md").write_text(""), False),
    "event file deleted": (lambda run: [file.unlink() for file in run.glob("events.*")], False),
    "the user's own event file": (lambda run: (run / "events.out.tfevents.backup").write_text("mine"), True),
    "the user's own notes": (lambda run: (run / "notes.txt").write_text("mine"), True),
    "metrics.json and embeddings deleted": (
        lambda run: ((run / "metrics.json").unlink(), shutil.rmtree(run / "embeddings")),
        True,
    ),
    "lock file deleted": (lambda run: (run / ".lock").unlink(), True),
    "half a checkpoint of a kill": (lambda run: (run / "checkpoints/.last.ckpt.77").write_bytes(b"PK"), True),
    "a folder among the checkpoints": (lambda run: (run / "checkpoints/mine").mkdir(), True),
}


@pytest.mark.parametrize("name", FILES)
def test_files_of_a_run(run, folder, name):
    """The run ends with the weights of the reference, and nothing of the user's is touched."""
    hurt, complete = FILES[name]
    hurt(run)
    done = train(f"resume={run}")
    assert (done.returncode, done.stderr) == (0, "")
    found = differences(run, folder / "reference")
    assert [line for line in found if complete or not line.startswith(("curve", "samples"))] == []
    for file in ("events.out.tfevents.backup", "notes.txt"):
        assert not (run / file).exists() or (run / file).read_text() == "mine"


def test_event_files_are_known_by_name(folder, tmp_path, run):
    """With one of several event files gone, the others keep the sizes that they had."""
    with pytest.raises(SystemExit):
        session = Session.resume(str(run))
        assert session is not None
        session.fit([StopAt(36)])
    first, second = sorted(run.glob("events.out.tfevents.*"))
    size = second.stat().st_size
    first.unlink()
    second.write_bytes(second.read_bytes() + b"what a kill has left")
    session = Session.resume(str(run))
    assert session is not None
    session.fit()
    (kept,) = run.glob(f"events.out.tfevents.*.{second.name.split('.', 4)[4]}")  # it may have been renamed
    assert kept.stat().st_size == size


def test_going_back_is_refused(run):
    """An older checkpoint of a run is not continued, since that would undo what came after it."""
    newest = checkpoint.load(run / "checkpoints/last.ckpt")["step"]
    before = contents(run)
    done = train(f"resume={run}/checkpoints/previous.ckpt")
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert f"and the run has gone on to step {newest}: continue it with resume={run}" in line
    assert f"init_from={run}/checkpoints/previous.ckpt" in line
    assert contents(run) == before


def test_killed_between_the_best_and_the_last(folder, tmp_path):
    """Where the last step was also the best, a kill before last.ckpt follows best.ckpt leaves a complete run."""
    run = Path(shutil.copytree(folder / "reference", tmp_path / "run"))
    best, last, previous = (run / f"checkpoints/{name}.ckpt" for name in ("best", "last", "previous"))
    assert checkpoint.load(best)["step"] == 41
    last.unlink()
    previous.rename(last)
    os.utime(last, ns=(0, best.stat().st_mtime_ns - 10**9))
    done = train(f"resume={run}")
    assert (done.returncode, done.stderr) == (0, "")
    assert "is complete" in done.stdout
    assert differences(run, folder / "reference") == []


def test_variables_do_not_make_a_helper(run, monkeypatch):
    """`LOCAL_RANK` and a run directory in the environment do not let a process write into somebody's run."""
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("GPT_RUN_DIR", str(run))
    before = contents(run)
    done = train(*TINY, f"data.path={run}/missing.txt", f"run_dir={run}")
    assert done.returncode == 2
    assert "already holds a run" in done.stderr
    assert contents(run) == before


def test_helper_without_rank_0(tmp_path):
    """A helper process that is started by hand finds no job and writes nothing."""
    done = subprocess.run(
        [sys.executable, "-m", "gpt.training.following"],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stderr == "gpt.training.following: not a command: use python train.py\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals(folder, tmp_path, number):
    """Each saves after the step and ends with 128 + its number: also SIGHUP, which a lost connection sends."""
    run_dir = tmp_path / "run"
    with pytest.raises(SystemExit) as end:
        Session.begin(tiny_config(folder, "horizon=41steps", f"run_dir={run_dir}")).fit([StopAt(STOP, number)])
    assert end.value.code == 128 + number
    assert train(f"resume={run_dir}").returncode == 0
    assert differences(run_dir, folder / "reference") == []


class Sabotage(Callback):
    """Does something to the run, once, after some step."""

    def __init__(self, step: int, act: Callable[[], object]):
        self.step, self.act = step, act

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx: int) -> None:
        if trainer.global_step == self.step and self.act is not None:
            act, self.act = self.act, None  # type: ignore[assignment]
            act()


def test_run_directory_deleted_while_training(folder, tmp_path):
    """It is not made again without its configuration and lock: one line says that nothing can be saved."""
    run_dir = tmp_path / "run"
    session = Session.begin(tiny_config(folder, "horizon=41steps", f"run_dir={run_dir}"))
    with pytest.raises(UserError, match="was deleted while its run was training, so nothing can be saved"):
        session.fit([Sabotage(20, lambda: shutil.rmtree(run_dir))])
    assert not (run_dir / "checkpoints").exists()


@pytest.mark.slow
def test_samples_file_becomes_a_folder(folder, tmp_path):
    """The line names it; what was saved before is intact, and the run goes on once it is gone."""
    run_dir = tmp_path / "run"

    def act() -> None:
        (run_dir / "samples.md").unlink()
        (run_dir / "samples.md").mkdir()

    with pytest.raises(IsADirectoryError) as error:
        Session.begin(tiny_config(folder, "horizon=41steps", f"run_dir={run_dir}")).fit([Sabotage(20, act)])
    assert str(error.value.filename).endswith("samples.md")
    (run_dir / "samples.md").rmdir()
    assert train(f"resume={run_dir}").returncode == 0
    assert [d for d in differences(run_dir, folder / "reference") if "samples" not in d and "curve" not in d] == []


@pytest.mark.parametrize(
    ("call", "number"),
    [
        ("fsync", errno.EIO),
        pytest.param("fsync", errno.ESTALE, marks=pytest.mark.slow),
        pytest.param("replace", errno.ENOSPC, marks=pytest.mark.slow),
        pytest.param("replace", errno.EROFS, marks=pytest.mark.slow),
        pytest.param("link", errno.EPERM, marks=pytest.mark.slow),
    ],
)
def test_failing_disk(folder, tmp_path, monkeypatch, number, call):
    """Whichever call fails in a save, the error is one of the surroundings, and the run goes on from what is intact."""
    run_dir, original, fails = tmp_path / "run", getattr(os, call), [False]

    def failing(*arguments, **options):
        if fails[0]:
            raise OSError(number, os.strerror(number), str(arguments[0]))
        return original(*arguments, **options)

    monkeypatch.setattr(os, call, failing)

    def act() -> None:
        fails[0] = True

    if call == "link":  # a file system without hard links: checkpoints are copied, and nothing is wrong
        Session.begin(tiny_config(folder, "horizon=41steps", f"run_dir={run_dir}")).fit([Sabotage(20, act)])
    else:
        with pytest.raises((OSError, UserError)):
            Session.begin(tiny_config(folder, "horizon=41steps", f"run_dir={run_dir}")).fit([Sabotage(20, act)])
        fails[0] = False
        assert train(f"resume={run_dir}").returncode == 0
    assert differences(run_dir, folder / "reference") == []


@pytest.mark.slow
def test_clock_that_jumps(folder, tmp_path, monkeypatch):
    """The clock of the day may jump by years while training: curves and bits stay the same."""
    run_dir, real, chance = tmp_path / "run", time.time, random.Random(3)
    monkeypatch.setattr(time, "time", lambda: real() + chance.choice([-1e8, 0.0, 1e8]))
    Session.begin(tiny_config(folder, "horizon=41steps", f"run_dir={run_dir}")).fit()
    monkeypatch.undo()
    assert differences(run_dir, folder / "reference") == []


LONG = "x" * 300


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        (f"run_dir={LONG}", "File name too long"),
        (f"resume={LONG}", "File name too long"),
        (f"init_from={LONG}", "there is no such checkpoint or run directory"),
        (f"data.cache={LONG}", "File name too long"),
        ("horizon=99999999999999Msteps", "steps are out of range: they must be at most 1,000,000,000,000"),
        ("horizon=999999999999999epochs", "steps are out of range"),
    ],
)
def test_absurd_arguments(folder, tmp_path, monkeypatch, argument, words):
    """One line, code 2, and nothing is made."""
    monkeypatch.chdir(tmp_path)
    places = [f"data.path={folder}/corpus.txt"] + [f"data.cache={folder}/cache"] * ("cache" not in argument)
    shape = ("model.", "tokenizer") if "init_from" in argument else ("nothing",)
    tiny = [] if "resume" in argument else [word for word in [*TINY, *places] if not word.startswith(shape)]
    done = train(*tiny, argument)
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert words in line
    assert list(tmp_path.iterdir()) == []


def test_alias_bomb_in_a_config_dir(tmp_path):
    """Hydra would expand it to billions of values: it is refused at once."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment/bomb.yaml").write_text("\n".join(["# @package _global_", *lines]))
    for option in (["--config-dir", str(tmp_path)], [f"--config-dir={tmp_path}"]):
        done = train(*option, "experiment=bomb")
        assert done.returncode == 2
        assert "bomb.yaml: has more than 100,000 values once its aliases are expanded" in done.stderr


# --- in processes of their own ---


@pytest.fixture
def settings(folder) -> list[str]:
    return [*TINY, f"data.path={folder / 'corpus.txt'}", f"data.cache={folder / 'cache'}", "horizon=41steps"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "environment",
    [
        {"LANG": "C", "LC_ALL": "C", "PYTHONIOENCODING": "ascii", "TERM": "dumb"},
        {"HOME": "/nonexistent", "TMPDIR": "/nonexistent"},
        {"OMP_NUM_THREADS": "2"},
    ],
    ids=["plain terminal", "no home", "other threads"],
)
def test_other_environments(settings, folder, run, environment):
    """A run goes on with its own number of threads, whatever language, terminal, home and threads it finds."""
    done = train_apart(f"resume={run}", env=os.environ | environment)
    assert done.returncode == 0, done.stderr
    assert differences(run, folder / "reference") == []


@pytest.mark.slow
def test_suspended_and_continued(settings, folder, tmp_path):
    """Ctrl-Z and fg change nothing but the time."""
    run_dir = tmp_path / "run"
    process = Process([*settings, f"run_dir={run_dir}"])
    wait_for_file(run_dir / "checkpoints/last.ckpt")
    process.send(signal.SIGTSTP)
    time.sleep(0.5)
    process.send(signal.SIGCONT)
    assert process.end() == 0, process.output
    assert differences(run_dir, folder / "reference") == []


@pytest.mark.slow
@pytest.mark.parametrize("streams", ["2>&-", ">&-", "<&- >&- 2>&-"])
def test_closed_streams(settings, folder, tmp_path, streams):
    """A training whose terminal has gone trains on, and a mistake still ends with code 2."""
    run_dir = tmp_path / "run"
    words = " ".join(f"'{word}'" for word in command(*settings, f"run_dir={run_dir}"))
    assert subprocess.run(f"{words} {streams}", shell=True, cwd=ROOT).returncode == 0
    assert differences(run_dir, folder / "reference") == []
    assert subprocess.run(f"{words} {streams}", shell=True, cwd=ROOT).returncode == 2


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [10, 100])
def test_limited_file_size(settings, folder, tmp_path, blocks):
    """`ulimit -f` is a full disk: one line, and the run goes on without it."""
    run_dir = tmp_path / "run"
    words = " ".join(f"'{word}'" for word in command(*settings, f"run_dir={run_dir}"))
    shell = f"ulimit -f {blocks}; exec {words}"
    done = subprocess.run(["bash", "-c", shell], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert "the disk is full" in done.stderr.strip().splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert train(f"resume={run_dir}").returncode == 0
    assert differences(run_dir, folder / "reference") == []


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="SKIPPED LOUDLY: only root can mount a disk that is then read-only")
def test_read_only_run(folder, tmp_path, run):
    """A run on a disk that has become read-only: one line, and it goes on when it can be written again."""
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", disk], check=True)
    try:
        moved = Path(shutil.copytree(run, disk / "run"))
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        done = train_apart(f"resume={moved}")
        assert done.returncode == 2
        assert len(done.stderr.strip().splitlines()) == 1, done.stderr
        assert "Read-only file system" in done.stderr
        subprocess.run(["mount", "-o", "remount,rw", disk], check=True)
        assert train(f"resume={moved}").returncode == 0
        assert differences(moved, folder / "reference") == []
    finally:
        for held in list(runs._LOCKS):
            runs.release(held)
        subprocess.run(["umount", "-l", disk], check=True)
