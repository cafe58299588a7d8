"""The disk fails or is full, or memory is short. One line has the reason, and earlier checkpoints are intact."""

import contextlib
import errno
import os
import re
import resource
import shutil
import sys
import time
from pathlib import Path

import pytest

from gpt.checkpoint import load_checkpoint
from gpt.errors import UserError
from harness import (
    TINY_RUN,
    CallAt,
    Process,
    begin_run,
    differences,
    fit,
    fork_server,
    tiny_config,
    train,
    train_refusal,
)

RUN = ["horizon=23steps"]


def test_run_directory_that_was_deleted_is_not_made_again(corpus_folder, tmp_path):
    """It would have no configuration and no lock. The run ends with one line."""
    run_dir = tmp_path / "run"
    training = begin_run(tiny_config(corpus_folder, *RUN, f"run_dir={run_dir}"))
    with pytest.raises(UserError, match="was deleted or replaced while its run was training, so nothing can be saved"):
        fit(training, [CallAt(12, lambda: shutil.rmtree(run_dir))])
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
        fit(training, [CallAt(12, lambda: monkeypatch.setattr(os, call, failing))])
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
        ("horizon=99999999999999Msteps", "steps are out of range: they must be at most 1,000,000,000,000"),
    ],
)
def test_absurd_argument_is_refused(corpus_folder, tmp_path, monkeypatch, argument, words):
    """One line, code 2, and nothing is made."""
    monkeypatch.chdir(tmp_path)
    paths = [f"data.path={corpus_folder}/corpus.txt", f"data.cache={corpus_folder}/cache"]
    shape = ("model.", "tokenizer") if "init_from" in argument else ("nothing",)
    tiny = [] if "resume" in argument else [word for word in [*TINY_RUN, *paths] if not word.startswith(shape)]
    assert words in train_refusal(*tiny, argument)
    assert list(tmp_path.iterdir()) == []


def limited(resource_name: str, size: int) -> list[str]:
    """Return what stands before train.py in a command, so that the system limits a resource of the process."""
    code = f"import resource; resource.setrlimit(resource.{resource_name}, ({size},) * 2)\n"
    return ["-c", f"{code}import sys, runpy; sys.argv = sys.argv[1:]; runpy.run_path('train.py', run_name='__main__')"]


@pytest.mark.promise("runs.md#second process in the same directory")
@pytest.mark.slow
@pytest.mark.parametrize("kibibytes", [10, 100])
def test_full_disk_is_one_line(settings, reference, tmp_path, kibibytes):
    """A limit of the size of files imitates it. Without that limit, the run continues bit for bit."""
    run_dir = tmp_path / "run"
    process = Process([*settings, f"run_dir={run_dir}"], launcher=limited("RLIMIT_FSIZE", 1024 * kibibytes))
    assert process.end() == 2
    assert "the disk is full" in process.output.strip().splitlines()[-1]
    assert "Traceback" not in process.output
    train(f"resume={run_dir}")
    assert differences(run_dir, reference) == []


LARGE = ["model.d_model=384", "model.num_layers=4", "model.context_length=512", "model.dropout=0.0"]
LARGE += ["trainer.tokens_per_step=4096", "trainer.precision=fp32", "horizon=1steps", "logger=[]"]


def train_large(settings, micro_batch, run_dir, launcher=()) -> Process:
    """Start to train on `micro_batch` sequences at once, in a process whose memory is the same every time.

    With more than one arena, glibc reserves 64 MB for each thread that happens to allocate while another one does.
    """
    arguments = [*settings, *LARGE, f"trainer.micro_batch_size={micro_batch}", f"run_dir={run_dir}"]
    return Process(arguments, launcher=launcher, server=fork_server(MALLOC_ARENA_MAX="1"))


def measure_peak_memory(process: Process) -> int:
    """Wait for the end of a process, and return its largest address space in bytes."""
    peak = 0
    while process.poll() is None:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it may end before this line
            if match := re.search(r"VmPeak:\s+(\d+) kB", Path(f"/proc/{process.pid}/status").read_text()):
                peak = 1024 * int(match[1])
        time.sleep(0.01)
    assert process.end() == 0, process.output
    return peak


@pytest.mark.promise("runs.md#micro_batch_size=auto")
@pytest.mark.slow
@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="SKIPPED LOUDLY: memory can be limited on Linux only")
def test_lack_of_memory_shrinks_an_automatic_micro_batch(settings, tmp_path):
    """Here the address space suffices for four sequences at once, and not for eight. A step keeps its tokens."""
    one, eight = (measure_peak_memory(train_large(settings, size, tmp_path / str(size))) for size in (1, 8))
    assert eight - one > 200_000_000
    process = train_large(settings, "auto", tmp_path / "run", limited("RLIMIT_AS", (one + 2 * eight) // 3))
    assert process.end() == 0, process.output
    assert "out of memory at trainer.micro_batch_size=8: continuing with 4 and as" in process.output
    assert load_checkpoint(tmp_path / "run/checkpoints/last.ckpt")["step"] == 1
