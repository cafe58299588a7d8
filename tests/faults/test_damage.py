"""Files of a stopped run are changed, damaged or missing. The run continues bit for bit, or one line has the reason."""

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from gpt.checkpoint import load_checkpoint
from gpt.training.run_directory import RunDirectory
from harness import (
    differences,
    train,
    train_refusal,
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
def test_files_that_were_changed_do_not_matter(run_copy, reference, name):
    """The run ends with the weights of the reference, and files of the user stay as they are."""
    damage, complete = FILES[name]
    damage(run_copy)
    assert train(f"resume={run_copy}").stderr == ""
    lines = differences(run_copy, reference)
    assert [line for line in lines if complete or not line.startswith(("curve", "samples"))] == []
    for file in ("events.out.tfevents.backup", "notes.txt"):
        assert not (run_copy / file).exists() or (run_copy / file).read_text() == "mine"


@pytest.mark.promise("runs.md#the intact checkpoint with the greatest step")
def test_going_back_is_refused(run_copy):
    """Resuming an older checkpoint of a run would undo the steps after it."""
    newest = load_checkpoint(run_copy / "checkpoints/last.ckpt")["step"]
    before = contents(run_copy)
    line = train_refusal(f"resume={run_copy}/checkpoints/previous.ckpt")
    assert f"and the run has trained until step {newest}: continue it with resume={run_copy}" in line
    assert f"init_from={run_copy}/checkpoints/previous.ckpt" in line
    assert contents(run_copy) == before


def test_resuming_with_other_settings_is_refused(stopped_run):
    """They are for a new run, and the line has the command for it."""
    line = train_refusal(f"resume={stopped_run}", "optim.lr=0.1")
    assert "optim.lr=0.1 would change it" in line
    assert f"init_from={stopped_run}" in line


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


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.unlink()  # best.ckpt may be the same file by another name
    file.write_bytes(content)


def empty(file: Path) -> None:
    file.unlink()
    file.touch()


@pytest.mark.promise("runs.md#verified by its checksum", "runs.md#the intact checkpoint with the greatest step")
@pytest.mark.promise("runs.md#*.damaged", "security.md#CRC-32")
@pytest.mark.parametrize(
    ("damage", "words"),
    [(truncate, "cut short"), (flip_a_bit, "damaged"), (empty, "cut short"), (Path.unlink, "is missing")],
)
def test_damaged_checkpoint_is_replaced_by_the_one_before(run_copy, damage, words, capsys):
    """A warning has the file and the reason."""
    last = run_copy / "checkpoints/last.ckpt"
    if last.samefile(run_copy / "checkpoints/best.ckpt"):
        (run_copy / "checkpoints/best.ckpt").unlink()
    damage(last)
    with RunDirectory.open(run_copy) as run:
        file, _ = run.load_newest()
    assert file.name == "previous.ckpt"
    (warning,) = capsys.readouterr().err.splitlines()
    assert str(last) in warning
    assert words in warning
    assert "resuming from previous.ckpt of step" in warning
    assert last.with_suffix(".ckpt.damaged").exists() == (words != "is missing")


def test_run_without_an_intact_checkpoint_is_refused(run_copy):
    """The line has the first of the damaged ones."""
    for file in run_copy.glob("checkpoints/*.ckpt"):
        empty(file)
    line = train_refusal(f"resume={run_copy}")
    assert re.search(r"last\.ckpt: .*; and no other checkpoint of the run can be read$", line)


def test_corrupt_tokens_are_refused(settings, tmp_path):
    """The line has the file with the flipped bit, and the remedy."""
    cache = tmp_path / "cache"
    arguments = [a for a in settings if not a.startswith(("data.cache", "horizon"))] + [f"data.cache={cache}"]
    arguments += ["horizon=1steps", f"run_dir={tmp_path / 'run'}"]
    train(*arguments)
    shutil.rmtree(tmp_path / "run")
    file = next(cache.glob("*/train-*.bin"))
    flip_a_bit(file)
    line = train_refusal(*arguments)
    assert line.startswith(f"train.py: {file}: cannot be read (its SHA-256")
    assert f"delete {file.parent}" in line
    assert not (tmp_path / "run").exists()
