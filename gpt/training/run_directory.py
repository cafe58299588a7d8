"""A run directory: lock, configuration, commands, checkpoints, and logs that only grow.

with RunDirectory.create("runs/mine", "book-mini", config, command) as run:  # or RunDirectory.open("runs/mine")
    run.save_last(write, step=20)
"""

import contextlib
import json
import os
import re
import shlex
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

METRICS_FILE, SAMPLES_FILE, COMMANDS_FILE = "metrics.csv", "samples.md", "command.txt"
KEPT_CHECKPOINTS = "checkpoints/step-*.ckpt"
EVENTS_SUFFIX = ".run"  # marks our event files: other programs may write some into the same directory
EVENTS_PATTERN = f"events.out.tfevents.*{EVENTS_SUFFIX}"


class RunDirectory:
    """The directory of a run. The process that created or opened it holds its lock until `close`.

    On ranks above 0 it has no lock, and the methods that write do nothing.

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
        """Create the directory of a new run.

        Args:
            run_dir: Its path; if None, it is made below runs/.
            name: A part of its name below runs/.
            config: Written to config.yaml.
            command: The command that starts the run, written to command.txt before that.

        Raises:
            UserError: `run_dir` cannot be made, or is not empty.
        """
        path = _make_folder(run_dir, name)
        sync_parents(path)
        lock = _acquire_lock(path)
        require_empty(path)  # again, now that no other process can fill it
        write_text(path / COMMANDS_FILE, f"{command}\n")
        write_text(path / "config.yaml", config_to_yaml(config))
        return cls(path, lock)

    @classmethod
    def open(cls, path: str | Path) -> "RunDirectory":
        """Lock the run that a path or a name stands for.

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
        """Return the file and the content of the intact checkpoint with the greatest step; None if there is none.

        Print a warning about a damaged checkpoint, and rename it to *.damaged, so that it never replaces a good one.
        Rename one that the disk cannot read to *.unreadable. Remove files that a kill left half written.

        Raises:
            UserError: There are checkpoints, and none can be read.
        """
        for unfinished in self.path.glob("checkpoints/.*.ckpt.*"):
            unfinished.unlink()
        last = self.path / LAST_CHECKPOINT
        files = [
            file
            for name in (LAST_CHECKPOINT, PREVIOUS_CHECKPOINT, BEST_CHECKPOINT)
            if (file := self.path / name).exists()
        ]
        steps = {file: read_checkpoint_step(file) for file in files}
        steps |= {file: int(file.stem[5:]) for file in self.path.glob(KEPT_CHECKPOINTS) if file.stem[5:].isdecimal()}
        problem = "" if last in steps else f"{last} is missing"
        # Of two checkpoints with the same step, take last.ckpt: it may have been saved again, with another horizon.
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
        """Write last.ckpt, on every rank. The checkpoint before it becomes previous.ckpt.

        Args:
            write: Writes the checkpoint to a path.
            step: Its step.
            is_best: `save_best` has just written the same checkpoint, and last.ckpt becomes a link to it.
        """
        self.check_directory()
        if is_best:
            self.restore_last(self.path / BEST_CHECKPOINT)
        else:
            self._keep_previous()
            write(self.path / LAST_CHECKPOINT)
        self._record_time(step)

    def save_best(self, write: Callable[[Path], None], step: int) -> None:
        """Write best.ckpt, on every rank, with the arguments of `save_last`."""
        self.check_directory()
        write(self.path / BEST_CHECKPOINT)
        self._record_time(step)

    def keep_checkpoint(self, step: int) -> None:
        """Keep last.ckpt, which is of this step, under a name of its own."""
        kept = self.path / KEPT_CHECKPOINTS.replace("*", f"{step:08d}")
        if self._lock is not None and not kept.exists():
            hard_link(self.path / LAST_CHECKPOINT, kept)

    def restore_last(self, newest: Path) -> None:
        """Make last.ckpt the newest checkpoint: a kill may have come between writing best.ckpt and last.ckpt."""
        if self._lock is not None and newest != self.path / LAST_CHECKPOINT:
            self._keep_previous()
            hard_link(newest, self.path / LAST_CHECKPOINT)

    def _keep_previous(self) -> None:
        """Give last.ckpt a second name, previous.ckpt, before it is replaced."""
        if self._lock is not None and (self.path / LAST_CHECKPOINT).exists():
            hard_link(self.path / LAST_CHECKPOINT, self.path / PREVIOUS_CHECKPOINT)

    def _record_time(self, step: int) -> None:
        """Write down when the newest checkpoint was saved: copying a file changes its time."""
        if self._lock is not None:
            write_text(self.path / SAVE_TIME_FILE, json.dumps({"step": step, "saved": time.time()}) + "\n")

    # --- the other files ---

    def write_config(self, config: Config, step: int, command: str = "") -> None:
        """Write config.yaml if it has changed. Before that, append the command and the changes to command.txt.

        Args:
            config: The configuration of the next steps.
            step: The steps so far.
            command: The command that resumes the run; empty if command.txt has it already.
        """
        if self._lock is None:
            return
        file = self.path / "config.yaml"
        old, new = load_config(file).settings(), config.settings()
        lines = [command] if command else []
        lines += [f"# after step {step}: {key}={new[key]}, was {old[key]}" for key in new if new[key] != old[key]]
        if lines:
            commands = self.path / COMMANDS_FILE
            lines = (read_text(commands).splitlines() if commands.exists() else []) + lines
            write_text(commands, "".join(f"{line}\n" for line in lines))
        if file.read_bytes() != config_to_yaml(config).encode():
            write_text(file, config_to_yaml(config))

    def sync_logs(self) -> dict[str, int]:
        """Sync samples.md, metrics.csv and our event files with their folder, and return their sizes in bytes."""
        for file in self._logs():
            sync(file)
        sync(self.path)
        return {file.name: file.stat().st_size for file in self._logs()}

    def truncate_logs(self, sizes: dict[str, int]) -> None:
        """Truncate the logs to the sizes of a checkpoint: the steps after it are trained again.

        If a log is shorter, print a warning, and drop a half written line at its end.
        """
        incomplete = []
        for file in self._logs() if self._lock is not None else ():
            size = sizes.get(file.name)
            if size is None:
                file.unlink()
                continue
            if file.is_file() and file.stat().st_nlink > 1:  # `cp -l` made a copy, which must not change
                with atomic_write(file) as unlinked:
                    shutil.copyfile(file, unlinked)
            if file.stat().st_size >= size:
                os.truncate(file, size)
                continue
            incomplete.append(file.name)
            if file.name == METRICS_FILE:
                os.truncate(file, file.read_bytes().rfind(b"\n") + 1)
        incomplete += [name for name in sizes if self._lock is not None and not (self.path / name).exists()]
        if incomplete:
            print_warning(
                f"{self.path}: the checkpoint is newer than {', '.join(incomplete)}, as in a copy that was made during "
                "training: the curves will lack steps; to have them, copy these files again before you resume"
            )

    def _logs(self) -> list[Path]:
        files = [self.path / SAMPLES_FILE, self.path / METRICS_FILE]
        return [file for file in files if file.exists()] + sorted(self.path.glob(EVENTS_PATTERN))


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

    A run that was killed at its start may have left its lock, its command, and a file that was half written.
    """
    names = [file.name for file in run_dir.iterdir()] if run_dir.is_dir() else []
    remains: tuple[str, ...] = (".lock", f".{COMMANDS_FILE}.", ".config.yaml.")
    if ".lock" in names:
        remains += (COMMANDS_FILE,)
    if any(not name.startswith(remains) for name in names):
        raise UserError(f"run_dir={run_dir} is not empty: choose another, or continue the run in it with resume=")


def repeat_command(run_dir: Path, *changes: str) -> str:
    """Return the command that starts a run again, in a new directory, with changes appended."""
    file = run_dir / COMMANDS_FILE
    command = read_text(file).split("\n")[0] if file.exists() else "python train.py"
    keys = {word.partition("=")[0] for word in shlex.split(command)}
    resets = [f"{key}=null" for key in ("run_dir", "resume") if key in keys]
    return " ".join([command, *resets, *changes])


def text_name(data: DataConfig) -> str:
    """Return the text's part of a run's name: `book` for book.txt, `book+2` with two more files, or the data's name."""
    if not data.paths:
        return data.name
    for part in reversed(re.split(r"[/\\]", data.paths[0].partition("?")[0])):
        part = re.sub(r"\.[A-Za-z]\w{0,7}(\.(gz|bz2|xz|zst))?$", "", part)
        if name := _safe_name(part)[:40].strip("_.-+"):
            return name + (f"+{len(data.paths) - 1}" if len(data.paths) > 1 else "")
    return data.name


def _safe_name(name: str) -> str:
    return re.sub(r"[^\w.+=-]+", "_", name, flags=re.ASCII)


def _make_folder(run_dir: str | None, name: str) -> Path:
    """Make the folder `run_dir`, or one below runs/ named after the time and `name`, with a number if that exists."""
    first_choice = Path(run_dir or f"runs/{datetime.now():%Y-%m-%d_%H-%M-%S}_{_safe_name(name)}")
    path, number = first_choice, 2
    while True:
        try:
            path.mkdir(parents=True, exist_ok=run_dir is not None)
            return path
        except OSError as error:
            if run_dir is not None or not path.exists():
                cause = f"{error.filename}: {error.strerror}"
                raise UserError(f"run_dir={path}: cannot be made ({cause}); a link may lead nowhere") from None
        path = first_choice.with_name(f"{first_choice.name}-{number}")
        number += 1


def _inode(directory: Path) -> tuple[int, int] | None:
    """Return what distinguishes a directory from any other of the same name; None if it does not exist."""
    with contextlib.suppress(OSError):
        status = directory.stat()
        return status.st_dev, status.st_ino
    return None


def _acquire_lock(directory: Path) -> BaseFileLock:
    """Lock a run directory; raise `UserError` if another process holds it, or it cannot be written."""
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
                problem = f"a link to {os.readlink(entry)}" if stat.S_ISLNK(mode) else "not a regular file"
                raise UserError(
                    f"{entry}: {problem}, and a run writes only inside its directory: remove it, or replace it by the "
                    "file that it leads to"
                )
