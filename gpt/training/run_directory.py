"""A run directory: lock, configuration, commands, checkpoints, and logs that only grow.

with RunDirectory.create("runs/mine", "book-mini", config, command) as run:  # or RunDirectory.open("runs/mine")
    run.save_last(write, step=20)
"""

import contextlib
import json
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from filelock import BaseFileLock

from gpt.checkpoint import DamagedError, UnreadableError, load_checkpoint, read_checkpoint_step
from gpt.console import print_warning
from gpt.data.data_config import DataConfig
from gpt.errors import UserError, is_out_of_memory, summarize_error
from gpt.files import LockedError, acquire_lock, atomic_write, hard_link, read_text, sync, sync_parents, write_text
from gpt.loading import BEST_CHECKPOINT, LAST_CHECKPOINT, PREVIOUS_CHECKPOINT, SAVE_TIME_FILE, find_run
from gpt.training.config import Config, config_to_yaml, load_config

METRICS_FILE, SAMPLES_FILE, KEPT = "metrics.csv", "samples.md", "checkpoints/step-*.ckpt"
COMMANDS_FILE = "command.txt"
EVENTS_SUFFIX = ".run"  # ends the names of our event files, and tells them from those of other programs
EVENTS_PATTERN = f"events.out.tfevents.*{EVENTS_SUFFIX}"


class RunDirectory:
    """The directory of a run. The process that created or opened it holds its lock until `close`.

    On ranks above 0 it has no lock, and none of the methods that write does anything there.

    Args:
        path: The directory, which exists.
        lock: Held by this process; None on ranks above 0.
    """

    def __init__(self, path: Path, lock: BaseFileLock | None = None):
        self.path = path
        self._lock = lock
        self._inode = _inode(path)

    @classmethod
    def create(cls, run_dir: str | None, name: str, config: Config, command: str) -> "RunDirectory":
        """Make a directory for a new run: `run_dir`, or one below runs/ with `name` in it.

        It holds `command`, which starts the run, in command.txt, and then `config` in config.yaml.

        Raises:
            UserError: `run_dir` cannot be made, or holds anything already.
        """
        first_choice = Path(run_dir) if run_dir else Path("runs") / f"{datetime.now():%Y-%m-%d_%H-%M-%S}_{_safe(name)}"
        path, number = first_choice, 2
        while True:
            try:
                path.mkdir(parents=True, exist_ok=run_dir is not None)
                break
            except OSError as error:
                if run_dir is not None or not os.path.exists(path):
                    cause = f"{error.filename}: {error.strerror}"
                    raise UserError(f"run_dir={path}: cannot be made ({cause}); a link may lead nowhere") from None
                path, number = first_choice.with_name(f"{first_choice.name}-{number}"), number + 1
        sync_parents(path)
        lock = _acquire_lock(path)
        require_empty(path)  # again, now that nobody else can fill it
        write_text(path / COMMANDS_FILE, f"{command}\n")
        write_text(path / "config.yaml", config_to_yaml(config))
        return cls(path, lock)

    @classmethod
    def open(cls, path: str | Path) -> "RunDirectory":
        """Hold the run that a path or a name stands for.

        Raises:
            UserError: Another process holds it, or one of its files leads elsewhere.
        """
        directory = find_run(path)
        _require_own_files(directory)
        return cls(directory, _acquire_lock(directory))

    def close(self) -> None:
        """Release the lock."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def __enter__(self) -> "RunDirectory":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def check_directory(self) -> None:
        """Raise `UserError` if the directory that this process holds was deleted or replaced by another."""
        if self._lock is not None and _inode(self.path) != self._inode:
            problem = "was deleted or replaced while its run was training, so nothing can be saved; start a new run"
            raise UserError(f"{self.path}: {problem}")

    # --- checkpoints ---

    def load_newest(self) -> tuple[Path, dict[str, Any]] | None:
        """Return the intact checkpoint of the greatest step, its file and its content; None if there is none.

        A damaged one is reported and renamed to *.damaged, so that it never replaces a good one. One that the disk
        cannot read is renamed to *.unreadable. Files that a kill left half written are removed.

        Raises:
            UserError: There are checkpoints, and none can be read.
        """
        for unfinished in self.path.glob("checkpoints/.*.ckpt.*"):
            unfinished.unlink()
        last = self.path / LAST_CHECKPOINT
        steps = {
            file: read_checkpoint_step(file)
            for name in (LAST_CHECKPOINT, PREVIOUS_CHECKPOINT, BEST_CHECKPOINT)
            if (file := self.path / name).exists()
        }
        steps |= {file: int(file.stem[5:]) for file in self.path.glob(KEPT) if file.stem[5:].isdecimal()}
        problem = "" if last in steps else f"{last} is missing"
        # Of two with the same step, last.ckpt: it may have been saved again, with another horizon.
        for file in sorted(steps, key=lambda file: -steps[file]):
            try:
                checkpoint = load_checkpoint(file, mmap=True)
            except (DamagedError, UnreadableError) as error:
                problem = problem or str(error)
                suffix = "damaged" if isinstance(error, DamagedError) else "unreadable"
                file.replace(file.with_name(f"{file.name}.{suffix}"))
                continue
            if problem:
                print_warning(f"{problem}; resuming from {file.name} of step {checkpoint.get('step')}")
            return file, checkpoint
        if steps:
            raise UserError(f"{problem}; and no other checkpoint of the run can be read")
        return None

    def save_last(self, write: Callable[[Path], None], step: int, is_best: bool = False) -> None:
        """Write last.ckpt with `write`, on every rank; the one before it becomes previous.ckpt.

        If `is_best`, `save_best` wrote the same a moment ago, and last.ckpt becomes a link to it.
        """
        self.check_directory()
        last = self.path / LAST_CHECKPOINT
        if self._lock is not None and last.exists():
            hard_link(last, self.path / PREVIOUS_CHECKPOINT)
        if not is_best:
            write(last)
        elif self._lock is not None:
            hard_link(self.path / BEST_CHECKPOINT, last)
        self._record_time(step)

    def save_best(self, write: Callable[[Path], None], step: int) -> None:
        """Write best.ckpt with `write`, on every rank."""
        self.check_directory()
        write(self.path / BEST_CHECKPOINT)
        self._record_time(step)

    def _record_time(self, step: int) -> None:
        """Record when the newest checkpoint was saved: the time of a file changes when it is copied."""
        if self._lock is not None:
            write_text(self.path / SAVE_TIME_FILE, json.dumps({"step": step, "saved": time.time()}) + "\n")

    def keep_checkpoint(self, step: int) -> None:
        """Keep last.ckpt, which is of this step, under a name of its own."""
        kept = self.path / KEPT.replace("*", f"{step:08d}")
        if self._lock is not None and not kept.exists():
            hard_link(self.path / LAST_CHECKPOINT, kept)

    def restore_last(self, newest: Path) -> None:
        """Make last.ckpt the newest checkpoint: a kill may have come between writing best.ckpt and last.ckpt."""
        last = self.path / LAST_CHECKPOINT
        if self._lock is not None and newest != last:
            if last.exists():
                hard_link(last, self.path / PREVIOUS_CHECKPOINT)
            hard_link(newest, last)

    # --- the other files ---

    def write_config(self, config: Config, step: int, command: str = "") -> None:
        """Write config.yaml if it has changed, and before it what command.txt is to hold.

        Args:
            config: The configuration of the next steps.
            step: The steps so far.
            command: The command that resumes the run; empty if it is in command.txt already.
        """
        if self._lock is None:
            return
        file = self.path / "config.yaml"
        old, new = load_config(file).settings(), config.settings()
        changed = [key for key in new if new[key] != old[key]]
        lines = [f"# after step {step}: {key}={new[key]}, was {old[key]}" for key in changed]
        if command or lines:
            commands = read_text(self.path / COMMANDS_FILE) if (self.path / COMMANDS_FILE).exists() else ""
            write_text(
                self.path / COMMANDS_FILE, "\n".join([*commands.splitlines(), *filter(None, [command]), *lines, ""])
            )
        if file.read_bytes() != config_to_yaml(config).encode():
            write_text(file, config_to_yaml(config))

    def sync_logs(self) -> dict[str, int]:
        """Sync samples.md, metrics.csv and our event files with their folder, and return their sizes in bytes."""
        for file in self._logs():
            sync(file)
        sync(self.path)
        return {file.name: file.stat().st_size for file in self._logs()}

    def truncate_logs(self, sizes: dict[str, int]) -> None:
        """Truncate the logs to the sizes of a checkpoint: the steps after it are trained again."""
        for file in self._logs() if self._lock is not None else ():
            size = sizes.get(file.name)
            if size is None:
                file.unlink()
                continue
            if file.is_file() and file.stat().st_nlink > 1:  # as in a copy by cp -l, which must stay as it is
                with atomic_write(file) as own_copy:
                    shutil.copyfile(file, own_copy)
            os.truncate(file, min(size, file.stat().st_size))

    def _logs(self) -> list[Path]:
        events = sorted(self.path.glob(EVENTS_PATTERN))
        return [file for name in (SAMPLES_FILE, METRICS_FILE) if (file := self.path / name).exists()] + events


@contextlib.contextmanager
def checkpoint_errors(file: Path) -> Iterator[None]:
    """Turn any error in the contents of a checkpoint into one line."""
    try:
        yield
    except (KeyError, TypeError, AttributeError, IndexError, ValueError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise
        hint = f"start a new run from its weights with init_from={file}"
        raise UserError(f"{file}: cannot be resumed: {summarize_error(error)}; {hint}") from None


def require_empty(run_dir: Path) -> None:
    """Raise `UserError` if a directory holds a run, or anything else that a run could harm.

    A kill at the start of a run may have left its lock, beside it its command, and a file that was half written.
    """
    names = [file.name for file in run_dir.iterdir()] if run_dir.is_dir() else []
    remains = (".lock", f".{COMMANDS_FILE}.", ".config.yaml.", *([COMMANDS_FILE] if ".lock" in names else []))
    if any(not name.startswith(remains) for name in names):
        raise UserError(f"run_dir={run_dir} is not empty: choose another, or continue the run in it with resume=")


def repeat_command(run_dir: Path, *changes: str) -> str:
    """Return the command that starts a run again, in a new directory, with changes appended."""
    file = run_dir / COMMANDS_FILE
    command = read_text(file).split("\n")[0] if file.exists() else "python train.py"
    elsewhere = [f"{key}=null" for key in ("run_dir", "resume") if re.search(rf"\s'?{key}=", command)]
    return " ".join([command, *elsewhere, *changes])


def text_name(data: DataConfig) -> str:
    """The text's part of a run's name: `book` for book.txt, `book+2` with two other files, else the data's own name."""
    if not data.paths:
        return data.name
    for part in reversed(re.split(r"[/\\]", data.paths[0].partition("?")[0])):
        part = re.sub(r"\.[A-Za-z]\w{0,7}(\.(gz|bz2|xz|zst))?$", "", part)
        if name := _safe(part)[:40].strip("_.-+"):
            return name + (f"+{len(data.paths) - 1}" if len(data.paths) > 1 else "")
    return data.name


def _safe(name: str) -> str:
    return re.sub(r"[^\w.+=-]+", "_", name, flags=re.ASCII)


def _inode(directory: Path) -> tuple[int, int] | None:
    """The identity of a directory, which another of the same name would not have; None if there is none."""
    with contextlib.suppress(OSError):
        status = directory.stat()
        return status.st_dev, status.st_ino
    return None


def _acquire_lock(directory: Path) -> BaseFileLock:
    """Hold a run directory; `UserError` if another process holds it, or it cannot be written."""
    try:
        return acquire_lock(directory / ".lock")
    except LockedError as owner:
        raise UserError(f"{directory}: process {owner} is training in it: wait, or stop that one") from None
    except OSError as error:
        raise UserError(f"{directory}: cannot be written ({error.strerror})") from None


def _require_own_files(directory: Path) -> None:
    """Raise `UserError` if what a run would write to leads out of its directory, or is no file."""
    for folder in (directory, directory / "checkpoints"):
        for entry in folder.iterdir() if folder.is_dir() else ():
            mode = entry.lstat().st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                what = f"a link to {os.readlink(entry)}" if stat.S_ISLNK(mode) else "not a regular file"
                raise UserError(
                    f"{entry}: {what}, and a run writes to nothing outside of its directory: remove it, or put in its "
                    "place what it leads to"
                )
