"""A catalogue of faults: what is done to a run, what train.py prints, its exit code, and what is lost (nothing).

Each row hurts a copy of a run that was stopped half-way. Where the fault can be undone, or does not matter, the run is
then resumed to its end, which must be equal, bit for bit, to that of a run that nothing happened to.
"""

import contextlib
import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from lightning import Callback

from gpt.errors import OutsideError, UserError
from gpt.exchange import checkpoint
from harness import (
    ROOT,
    TINY,
    At,
    Process,
    StopAt,
    begin_run,
    command,
    differences,
    fit,
    refused,
    tiny_config,
    train,
    train_apart,
    wait_for_file,
)

RUN, STOP = ["horizon=41steps"], 31


def contents(run: Path) -> dict[str, bytes]:
    """Every file of a run."""
    return {str(file.relative_to(run)): file.read_bytes() for file in run.rglob("*") if file.is_file()}


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
def test_files_of_a_run(hurt, reference, name):
    """The run ends with the weights of the reference, and nothing of the user's is touched."""
    damage, complete = FILES[name]
    damage(hurt)
    assert train(f"resume={hurt}").stderr == ""
    found = differences(hurt, reference)
    assert [line for line in found if complete or not line.startswith(("curve", "samples"))] == []
    for file in ("events.out.tfevents.backup", "notes.txt"):
        assert not (hurt / file).exists() or (hurt / file).read_text() == "mine"


def test_going_back_is_refused(hurt):
    """An older checkpoint of a run is not continued, since that would undo what came after it."""
    newest = checkpoint.load(hurt / "checkpoints/last.ckpt")["step"]
    before = contents(hurt)
    line = refused(f"resume={hurt}/checkpoints/previous.ckpt")
    assert f"and the run has gone on to step {newest}: continue it with resume={hurt}" in line
    assert f"init_from={hurt}/checkpoints/previous.ckpt" in line
    assert contents(hurt) == before


def test_killed_between_the_best_and_the_last(reference, tmp_path):
    """Where the last step was also the best, a kill before last.ckpt follows best.ckpt leaves a complete run."""
    run = Path(shutil.copytree(reference, tmp_path / "run"))
    best, last, previous = (run / f"checkpoints/{name}.ckpt" for name in ("best", "last", "previous"))
    assert checkpoint.load(best)["step"] == 41
    last.unlink()
    previous.rename(last)
    os.utime(last, ns=(0, best.stat().st_mtime_ns - 10**9))
    done = train(f"resume={run}")
    assert done.stderr == ""
    assert "is complete" in done.stdout
    assert differences(run, reference) == []


@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU]
)
def test_signals(corpus_folder, reference, tmp_path, capfd, number):
    """Each saves after the step and ends with 128 + its number: also those that a lost connection and queues send."""
    run_dir = tmp_path / "run"
    session = begin_run(tiny_config(corpus_folder, *RUN, f"run_dir={run_dir}"))
    fit(session, [StopAt(STOP, number)])
    assert session.stopped_by == number
    assert f"continue with: python train.py resume={run_dir}" in capfd.readouterr().out
    train(f"resume={run_dir}")
    assert differences(run_dir, reference) == []


@pytest.mark.parametrize(("number", "stopped_by"), [(signal.SIGHUP, 0), (signal.SIGINT, signal.SIGINT)])
def test_ignored_signals_stay_so(corpus_folder, reference, tmp_path, number, stopped_by):
    """`nohup` has a run ignore SIGHUP: it goes on. A script's `&` has it ignore SIGINT, which stops it all the same."""
    before = signal.signal(number, signal.SIG_IGN)
    try:
        session = begin_run(tiny_config(corpus_folder, *RUN, f"run_dir={tmp_path / 'run'}"))
        fit(session, [StopAt(STOP, number)])
        assert session.stopped_by == stopped_by and signal.getsignal(number) == signal.SIG_IGN
    finally:
        signal.signal(number, before)
    if stopped_by:
        train(f"resume={tmp_path / 'run'}")
    assert differences(tmp_path / "run", reference) == []


def test_in_a_thread(corpus_folder, reference, tmp_path):
    """Where there are no signals to take, as in a web application, a run trains all the same."""
    session = begin_run(tiny_config(corpus_folder, *RUN, f"run_dir={tmp_path / 'run'}"))
    with ThreadPoolExecutor(1) as pool:
        pool.submit(fit, session).result()
    assert differences(tmp_path / "run", reference) == []


@pytest.mark.parametrize("error", [OutsideError("the store does not answer"), UserError("a name"), ValueError("a bug")])
def test_what_fails_beside_a_step_loses_none(corpus_folder, reference, tmp_path, error):
    """A store that is gone when the next text is read, or a callback that fails there: the steps so far are saved."""

    class Fails(Callback):
        def on_train_batch_start(self, trainer, *given) -> None:
            if trainer.global_step == STOP:
                raise error

    run_dir = tmp_path / "run"
    with pytest.raises(type(error), match=str(error)):
        fit(begin_run(tiny_config(corpus_folder, *RUN, f"run_dir={run_dir}")), [Fails()])
    assert checkpoint.load(run_dir / "checkpoints/last.ckpt")["step"] == STOP
    train(f"resume={run_dir}")
    assert differences(run_dir, reference) == []


def test_run_directory_deleted_while_training(corpus_folder, tmp_path):
    """It is not made again without its configuration and lock: one line says that nothing can be saved."""
    run_dir = tmp_path / "run"
    session = begin_run(tiny_config(corpus_folder, *RUN, f"run_dir={run_dir}"))
    with pytest.raises(UserError, match="was deleted or replaced while its run was training, so nothing can be saved"):
        fit(session, [At(20, lambda: shutil.rmtree(run_dir))])
    assert not (run_dir / "checkpoints").exists()


@pytest.mark.parametrize(
    ("call", "number"),
    [
        ("fsync", errno.EIO),
        pytest.param("replace", errno.EROFS, marks=pytest.mark.slow),
        pytest.param("link", errno.EPERM, marks=pytest.mark.slow),
    ],
)
def test_failing_disk(corpus_folder, reference, tmp_path, monkeypatch, number, call):
    """Whichever call fails in a save, the error is one of the surroundings, and the run goes on from what is intact."""
    run_dir, before = tmp_path / "run", getattr(os, call)

    def failing(*arguments, **options):
        raise OSError(number, os.strerror(number), str(arguments[0]))

    session = begin_run(tiny_config(corpus_folder, *RUN, f"run_dir={run_dir}"))
    expected = () if call == "link" else (OSError, UserError)  # without hard links, checkpoints are copied
    with pytest.raises(expected) if expected else contextlib.nullcontext():
        fit(session, [At(20, lambda: monkeypatch.setattr(os, call, failing))])
    monkeypatch.setattr(os, call, before)
    if expected:
        train(f"resume={run_dir}")
    assert differences(run_dir, reference) == []


LONG = "x" * 300


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        (f"run_dir={LONG}", "File name too long"),
        (f"resume={LONG}", "File name too long" if sys.version_info < (3, 14) else "it does not exist"),
        (f"init_from={LONG}", "there is no such checkpoint or run directory"),
        (f"data.cache={LONG}", "File name too long"),
        ("horizon=99999999999999Msteps", "steps are out of range: they must be at most 1,000,000,000,000"),
        ("horizon=999999999999999epochs", "steps are out of range"),
    ],
)
def test_absurd_arguments(corpus_folder, tmp_path, monkeypatch, argument, words):
    """One line, code 2, and nothing is made."""
    monkeypatch.chdir(tmp_path)
    places = [f"data.path={corpus_folder}/corpus.txt"]
    places += [f"data.cache={corpus_folder}/cache"] * ("cache" not in argument)
    shape = ("model.", "tokenizer") if "init_from" in argument else ("nothing",)
    tiny = [] if "resume" in argument else [word for word in [*TINY, *places] if not word.startswith(shape)]
    assert words in refused(*tiny, argument)
    assert list(tmp_path.iterdir()) == []


# --- in processes of their own ---


@pytest.mark.slow
@pytest.mark.parametrize(
    "environment",
    [
        {"LANG": "C", "LC_ALL": "C", "PYTHONIOENCODING": "ascii", "TERM": "dumb"},
        {"HOME": "/dev/null/home", "TMPDIR": "/dev/null/home"},
        {"OMP_NUM_THREADS": "2"},
    ],
    ids=["plain terminal", "no home", "other threads"],
)
def test_other_environments(hurt, reference, environment):
    """A run goes on with its own number of threads, whatever language, terminal, home and threads it finds."""
    train_apart(f"resume={hurt}", env=os.environ | environment)
    assert differences(hurt, reference) == []


@pytest.mark.slow
def test_suspended_and_continued(settings, reference, tmp_path):
    """Ctrl-Z and fg change nothing but the time."""
    run_dir = tmp_path / "run"
    process = Process([*settings, f"run_dir={run_dir}"])
    wait_for_file(run_dir / "checkpoints/last.ckpt")
    process.send(signal.SIGTSTP)
    time.sleep(0.5)
    process.send(signal.SIGCONT)
    assert process.end() == 0, process.output
    assert differences(run_dir, reference) == []


@pytest.mark.slow
@pytest.mark.parametrize("streams", ["2>&-", ">&-", "<&- >&- 2>&-"])
def test_closed_streams(settings, reference, tmp_path, streams):
    """A training whose terminal has gone trains on, and a mistake still ends with code 2."""
    run_dir = tmp_path / "run"
    words = " ".join(f"'{word}'" for word in command(*settings, f"run_dir={run_dir}"))
    assert subprocess.run(f"{words} {streams}", shell=True, cwd=ROOT).returncode == 0
    assert differences(run_dir, reference) == []
    assert subprocess.run(f"{words} {streams}", shell=True, cwd=ROOT).returncode == 2


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [10, 100])
def test_limited_file_size(settings, reference, tmp_path, blocks):
    """`ulimit -f` is a full disk: one line, and the run goes on without it."""
    run_dir = tmp_path / "run"
    words = " ".join(f"'{word}'" for word in command(*settings, f"run_dir={run_dir}"))
    shell = f"ulimit -f {blocks}; exec {words}"
    done = subprocess.run(["bash", "-c", shell], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert "the disk is full" in done.stderr.strip().splitlines()[-1]
    assert "Traceback" not in done.stderr
    train(f"resume={run_dir}")
    assert differences(run_dir, reference) == []
