"""A catalogue of faults: what happens to a run, what train.py prints, its exit code, and that nothing is lost.

Most tests hurt a copy of a run that was stopped half-way, and then resume it. It must end like the reference, bit for
bit.
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

from gpt.checkpoint import load_checkpoint
from gpt.errors import ExternalError, UserError
from gpt.training import batch_loader, loop
from gpt.training.module import GPTModule
from harness import (
    ROOT,
    TINY_RUN,
    CallAt,
    Process,
    StopAt,
    begin_run,
    command,
    differences,
    fit,
    tiny_config,
    train,
    train_in_subprocess,
    train_refusal,
    wait_for_file,
)

RUN, STOP = ["horizon=41steps"], 31


def contents(run: Path) -> dict[str, bytes]:
    """Return every file of a run."""
    return {str(file.relative_to(run)): file.read_bytes() for file in run.rglob("*") if file.is_file()}


# What happens to the files of a run, and whether its curves can still be complete.
FILES: dict[str, tuple[Callable[[Path], object], bool]] = {
    "nothing": (lambda run: None, True),
    "samples.md deleted": (lambda run: (run / "samples.md").unlink(), False),
    "samples.md emptied": (lambda run: (run / "samples.md").write_text(""), False),
    "event file deleted": (lambda run: [file.unlink() for file in run.glob("events.*")], False),
    "the user's own event file": (lambda run: (run / "events.out.tfevents.backup").write_text("mine"), True),
    "the user's own notes": (lambda run: (run / "notes.txt").write_text("mine"), True),
    "metrics.json deleted": (lambda run: (run / "metrics.json").unlink(), True),
    "lock file deleted": (lambda run: (run / ".lock").unlink(), True),
    "half a checkpoint of a kill": (lambda run: (run / "checkpoints/.last.ckpt.77").write_bytes(b"PK"), True),
    "a folder among the checkpoints": (lambda run: (run / "checkpoints/mine").mkdir(), True),
}


@pytest.mark.parametrize("name", FILES)
def test_files_that_were_changed_do_not_matter(hurt, reference, name):
    """The run ends with the weights of the reference, and files of the user stay as they are."""
    damage, complete = FILES[name]
    damage(hurt)
    assert train(f"resume={hurt}").stderr == ""
    lines = differences(hurt, reference)
    assert [line for line in lines if complete or not line.startswith(("curve", "samples"))] == []
    for file in ("events.out.tfevents.backup", "notes.txt"):
        assert not (hurt / file).exists() or (hurt / file).read_text() == "mine"


def test_going_back_is_refused(hurt):
    """Resuming an older checkpoint of a run would undo the steps after it."""
    newest = load_checkpoint(hurt / "checkpoints/last.ckpt")["step"]
    before = contents(hurt)
    line = train_refusal(f"resume={hurt}/checkpoints/previous.ckpt")
    assert f"and the run has trained until step {newest}: continue it with resume={hurt}" in line
    assert f"init_from={hurt}/checkpoints/previous.ckpt" in line
    assert contents(hurt) == before


def test_kill_between_best_and_last_checkpoint_leaves_a_complete_run(reference, tmp_path):
    """The last step was also the best, and the kill came before last.ckpt was written."""
    run = Path(shutil.copytree(reference, tmp_path / "run"))
    best, last, previous = (run / f"checkpoints/{name}.ckpt" for name in ("best", "last", "previous"))
    assert load_checkpoint(best)["step"] == 41
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
def test_signal_stops_after_the_step(corpus_folder, reference, tmp_path, capfd, number):
    """The signals are those of a user, of a lost connection and of queues. The run saves before it ends."""
    run_dir = tmp_path / "run"
    training = begin_run(tiny_config(corpus_folder, *RUN, f"run_dir={run_dir}"))
    fit(training, [StopAt(STOP, number)])
    assert training.result.stop_signal == number
    assert load_checkpoint(run_dir / "checkpoints/last.ckpt")["step"] == STOP
    assert f"continue with: python train.py resume={run_dir}" in capfd.readouterr().out
    train(f"resume={run_dir}")
    assert differences(run_dir, reference) == []


@pytest.mark.parametrize(("number", "stop_signal"), [(signal.SIGHUP, 0), (signal.SIGINT, signal.SIGINT)])
def test_ignored_signal_stays_ignored(corpus_folder, reference, tmp_path, number, stop_signal):
    """After `nohup`, SIGHUP does not stop a run. SIGINT does, even if a script's `&` made the process ignore it."""
    before = signal.signal(number, signal.SIG_IGN)
    try:
        training = begin_run(tiny_config(corpus_folder, *RUN, f"run_dir={tmp_path / 'run'}"))
        fit(training, [StopAt(STOP, number)])
        assert training.result.stop_signal == stop_signal and signal.getsignal(number) == signal.SIG_IGN
    finally:
        signal.signal(number, before)
    if stop_signal:
        train(f"resume={tmp_path / 'run'}")
    assert differences(tmp_path / "run", reference) == []


def test_run_trains_in_a_thread(corpus_folder, reference, tmp_path):
    """A thread, as of a web application, cannot receive signals."""
    training = begin_run(tiny_config(corpus_folder, *RUN, f"run_dir={tmp_path / 'run'}"))
    with ThreadPoolExecutor(1) as pool:
        pool.submit(fit, training).result()
    assert differences(tmp_path / "run", reference) == []


@pytest.mark.parametrize(
    ("place", "error"),
    [
        ("reading", ExternalError("the store does not answer")),
        ("forward", ValueError("a bug")),
        ("update", UserError("a mistake")),
        ("hook", UserError("a mistake")),
    ],
)
def test_exception_saves_the_last_whole_step(corpus_folder, reference, tmp_path, monkeypatch, place, error):
    """On one device, an exception while text is read or before an update loses no step.

    Within an update, and before all that follows it is done, the step is not whole, and earlier checkpoints stay.
    """

    def fail(*arguments, **options):
        raise error

    class Fails:
        def on_train_step_end(self, step) -> None:
            if step == STOP:
                if place == "hook":
                    raise error
                name = {"forward": "training_step", "update": "clip_gradients_to"}.get(place)
                if name:
                    monkeypatch.setattr(GPTModule, name, fail)

    def read_micro_batches(config, dataset, step, *arguments, **options):
        if place == "reading" and step == STOP:
            raise error
        return batch_loader.read_micro_batches(config, dataset, step, *arguments, **options)

    run_dir = tmp_path / "run"
    monkeypatch.setattr(loop, "read_micro_batches", read_micro_batches)
    with pytest.raises(type(error), match=str(error)):
        fit(begin_run(tiny_config(corpus_folder, *RUN, f"run_dir={run_dir}")), [Fails()])
    monkeypatch.undo()
    newest = load_checkpoint(run_dir / "checkpoints/last.ckpt")["step"]
    assert newest == STOP if place in ("reading", "forward") else 0 < newest < STOP
    train(f"resume={run_dir}")
    assert differences(run_dir, reference) == []


def test_run_directory_that_was_deleted_is_not_made_again(corpus_folder, tmp_path):
    """It would have no configuration and no lock. The run ends with one line."""
    run_dir = tmp_path / "run"
    training = begin_run(tiny_config(corpus_folder, *RUN, f"run_dir={run_dir}"))
    with pytest.raises(UserError, match="was deleted or replaced while its run was training, so nothing can be saved"):
        fit(training, [CallAt(20, lambda: shutil.rmtree(run_dir))])
    assert not (run_dir / "checkpoints").exists()


@pytest.mark.parametrize(
    ("call", "number"),
    [
        ("fsync", errno.EIO),
        pytest.param("replace", errno.EROFS, marks=pytest.mark.slow),
        pytest.param("link", errno.EPERM, marks=pytest.mark.slow),
    ],
)
def test_failing_disk_leaves_earlier_checkpoints_intact(corpus_folder, reference, tmp_path, monkeypatch, number, call):
    """Whichever call fails in a save, the error is not a bug, and the run continues from the last checkpoint."""
    run_dir, before = tmp_path / "run", getattr(os, call)

    def failing(*arguments, **options):
        raise OSError(number, os.strerror(number), str(arguments[0]))

    training = begin_run(tiny_config(corpus_folder, *RUN, f"run_dir={run_dir}"))
    expected = () if call == "link" else (OSError, UserError)  # without hard links, checkpoints are copied
    with pytest.raises(expected) if expected else contextlib.nullcontext():
        fit(training, [CallAt(20, lambda: monkeypatch.setattr(os, call, failing))])
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
def test_absurd_argument_is_refused(corpus_folder, tmp_path, monkeypatch, argument, words):
    """One line, code 2, and nothing is made."""
    monkeypatch.chdir(tmp_path)
    paths = [f"data.path={corpus_folder}/corpus.txt"]
    paths += [f"data.cache={corpus_folder}/cache"] * ("cache" not in argument)
    shape = ("model.", "tokenizer") if "init_from" in argument else ("nothing",)
    tiny = [] if "resume" in argument else [word for word in [*TINY_RUN, *paths] if not word.startswith(shape)]
    assert words in train_refusal(*tiny, argument)
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
def test_environment_makes_no_difference(hurt, reference, environment):
    """A run continues with its own number of threads, whatever the language, the terminal and the home folder."""
    train_in_subprocess(f"resume={hurt}", env=os.environ | environment)
    assert differences(hurt, reference) == []


@pytest.mark.slow
def test_suspending_changes_only_the_time(settings, reference, tmp_path):
    """The signals are those of Ctrl-Z and fg."""
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
def test_run_survives_closed_streams(settings, reference, tmp_path, streams):
    """Its terminal is gone. A mistake still ends with code 2."""
    run_dir = tmp_path / "run"
    words = " ".join(f"'{word}'" for word in command(*settings, f"run_dir={run_dir}"))
    assert subprocess.run(f"{words} {streams}", shell=True, cwd=ROOT).returncode == 0
    assert differences(run_dir, reference) == []
    assert subprocess.run(f"{words} {streams}", shell=True, cwd=ROOT).returncode == 2


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [10, 100])
def test_full_disk_is_one_line(settings, reference, tmp_path, blocks):
    """`ulimit -f` imitates it. Without that limit, the run continues bit for bit."""
    run_dir = tmp_path / "run"
    words = " ".join(f"'{word}'" for word in command(*settings, f"run_dir={run_dir}"))
    shell = f"ulimit -f {blocks}; exec {words}"
    done = subprocess.run(["bash", "-c", shell], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert "the disk is full" in done.stderr.strip().splitlines()[-1]
    assert "Traceback" not in done.stderr
    train(f"resume={run_dir}")
    assert differences(run_dir, reference) == []
