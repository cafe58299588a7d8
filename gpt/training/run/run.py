"""A run: a directory that one process holds, its configuration, its checkpoints, and the files that grow beside them.

with Run.create("runs/mine", "book-mini", config) as run:  # or Run.open("runs/mine")
    run.save(write, step=20)
"""

import contextlib
import json
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from filelock import BaseFileLock

from gpt.console import warn
from gpt.errors import UserError, is_out_of_memory, reason
from gpt.exchange.checkpoint import DamagedError, UnreadableError, load, step_of
from gpt.exchange.loading import BEST, LAST, PREVIOUS, SAVED, find_run
from gpt.files import HeldError, flatten, hold, link, replacing, sync, sync_parents, write_text
from gpt.text.corpus.config import DataConfig
from gpt.text.prepared import Corpora
from gpt.training.config.loading import read, to_yaml
from gpt.training.config.schedule import Schedule
from gpt.training.config.schema import Config
from gpt.training.run.code import code
from gpt.training.run.state import TrainState

TABLE, SAMPLES, KEPT = "metrics.csv", "samples.md", "checkpoints/step-*.ckpt"
REFERENCES = "9999-references"  # their lines for TensorBoard, which so sorts them behind runs named by a date
SUFFIX = ".run"  # of the names of our event files, by which they are told from those of other programs
EVENTS = f"events.out.tfevents.*{SUFFIX}"
# What may differ between config.yaml and the newest checkpoint, where a kill came between the two files.
MAY_LAG = {"horizon", *(f"trainer.{name}" for name in ("devices", "num_nodes", "strategy", "micro_batch_size"))}


@dataclass
class Run:
    """A run directory. The process that has created or opened it holds it until `close`; other ranks only know of it.

    `begin` and `resume` make one, with `config`, `schedule` and `text` as they are to be trained; `fit` trains it,
    which sets `state`, `metrics`, `samples` and `stopped_by`. `file` and `payload` are its newest checkpoint, if it has
    one; `payload` and `weights` are given away when training begins.
    """

    directory: Path
    config: Config  # as config.yaml has it
    schedule: Schedule = field(default_factory=Schedule)
    text: Corpora = None  # type: ignore[assignment]  # once it is prepared
    weights: dict[str, Any] | None = None  # to start from, until training begins
    state: TrainState = field(default_factory=TrainState)
    metrics: dict[str, Any] = field(default_factory=dict)  # of the last validation: see docs/runs.md for each key
    samples: list[str] = field(default_factory=list)  # of the last validation
    longest_copy: int = 0  # characters of the longest passage in them that stands in the training text
    file: Path | None = None
    payload: dict[str, Any] | None = None
    commits: dict[str, str] = field(default_factory=dict)  # the code that made its steps, from each of these on
    stopped_by: int = 0  # the signal that ended the training early
    complete: bool = False  # whether it was found to have nothing left to train
    in_python: bool = False  # whether to suggest calls, as to who has called `gpt.train`, and not commands
    _lock: BaseFileLock | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self._held = _identity(self.directory)

    @classmethod
    def create(cls, run_dir: str | None, name: str, config: Config) -> "Run":
        """Make a directory for a new run, with its config.yaml: `run_dir`, or one below runs/ with `name` in it.

        Raises `UserError` if `run_dir` cannot be made or holds anything already.
        """
        wanted = Path(run_dir) if run_dir else Path("runs") / f"{datetime.now():%Y-%m-%d_%H-%M-%S}_{_safe(name)}"
        made, number = wanted, 2
        while True:
            try:
                made.mkdir(parents=True, exist_ok=run_dir is not None)
                break
            except OSError as error:
                if run_dir is not None or not os.path.exists(made):
                    why = f"{error.filename}: {error.strerror}"
                    raise UserError(f"run_dir={made}: cannot be made ({why}); a link may lead nowhere") from None
                made, number = wanted.with_name(f"{wanted.name}-{number}"), number + 1
        sync_parents(made)
        lock = _locked(made)
        require_empty(made)  # again, now that nobody else can fill it
        write_text(made / "config.yaml", to_yaml(config))
        return cls(made, config, _lock=lock)

    @classmethod
    def open(cls, path: str | Path) -> "Run":
        """Hold the run that a path or a name stands for, and read its configuration and its newest checkpoint.

        Raises `UserError` if another process holds it, if a file of it leads elsewhere, or if nothing can be read.
        """
        directory = find_run(path)
        _require_own_files(directory)
        run = cls(directory, read(directory / "config.yaml"), _lock=_locked(directory))
        try:
            run.read_newest()
        except BaseException:
            run.close()
            raise
        return run

    def close(self) -> None:
        """Give the directory back, for others to train in."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def for_others(self) -> "Run":
        """The run as the other ranks know it, who do not hold it and read the checkpoint themselves."""
        file = self.file and self.file.absolute()
        known = Run(self.directory.absolute(), self.config, self.schedule, file=file, commits=self.commits)
        known.complete = self.complete
        return known

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # --- checkpoints ---

    def read_newest(self) -> None:
        """Read the intact checkpoint of the greatest step into `file` and `payload`, which are None if there is none.

        A damaged one is reported and renamed to *.damaged, so that it never replaces a good one, and one that the disk
        cannot read to *.unreadable. Files that a kill left half written are removed.
        """
        self.file = self.payload = None
        for unfinished in self.directory.glob("checkpoints/.*.ckpt.*"):
            unfinished.unlink()
        last = self.directory / LAST
        steps = {file: step_of(file) for name in (LAST, PREVIOUS, BEST) if (file := self.directory / name).exists()}
        steps |= {file: int(file.stem[5:]) for file in self.directory.glob(KEPT) if file.stem[5:].isdecimal()}
        problem = "" if last in steps else f"{last} is missing"
        # Of two of one step, last.ckpt: it may have been saved again, with another horizon.
        for file in sorted(steps, key=lambda file: -steps[file]):
            try:
                self.payload, self.file = load(file, mmap=True), file
            except (DamagedError, UnreadableError) as error:
                problem = problem or str(error)
                kind = "damaged" if isinstance(error, DamagedError) else "unreadable"
                file.replace(file.with_name(f"{file.name}.{kind}"))
                continue
            if problem:
                warn(f"{problem}; going on from {file.name} of step {self.payload.get('step')}")
            self._require_same_config()
            self.commits = self.payload.get("commits") or {"0": str(self.payload.get("git_commit"))}
            return
        if steps:
            raise UserError(f"{problem}; and no other checkpoint of the run can be read")

    @contextlib.contextmanager
    def restoring(self) -> Iterator[None]:
        """Turn any error in the contents of the checkpoint into one line."""
        try:
            yield
        except (KeyError, TypeError, AttributeError, IndexError, ValueError, RuntimeError) as error:
            if is_out_of_memory(error):
                raise
            remedy = f"start anew with init_from={self.file}"
            raise UserError(f"{self.file}: cannot be continued: {reason(error)}; {remedy}") from None

    def _require_same_config(self) -> None:
        """Raise `UserError` if the checkpoint and config.yaml disagree about what the run does."""
        assert self.payload is not None
        stored = flatten(self.payload["config"])
        for key, value in self.config.settings().items():
            kept = stored.get(key, value)
            if kept != value and key not in MAY_LAG:
                raise UserError(
                    f"{self.directory / 'config.yaml'} has {key}={value!r}, and {self.file} {kept!r}: a run goes on as "
                    "it was configured; make the first say the same, if you trust the second"
                )

    def save(self, write: Callable[[Path], None], step: int, like_best: bool = False) -> None:
        """Write last.ckpt with `write`, on every rank; the one before it becomes previous.ckpt.

        With `like_best` it is what `save_best` has written a moment ago.
        """
        self.require_here()
        last = self.directory / LAST
        if self._lock is not None and last.exists():
            link(last, self.directory / PREVIOUS)
        if not like_best:
            write(last)
        elif self._lock is not None:
            link(self.directory / BEST, last)
        self._note(step)

    def save_best(self, write: Callable[[Path], None], step: int) -> None:
        """Write best.ckpt with `write`, on every rank."""
        self.require_here()
        write(self.directory / BEST)
        self._note(step)

    def _note(self, step: int) -> None:
        """Record when the newest checkpoint was saved: the time of a file changes when it is copied."""
        if self._lock is not None:
            write_text(self.directory / SAVED, json.dumps({"step": step, "saved": time.time()}) + "\n")

    def keep(self, step: int) -> None:
        """Keep last.ckpt, which is of this step, under a name of its own."""
        kept = self.directory / KEPT.replace("*", f"{step:08d}")
        if not kept.exists():
            link(self.directory / LAST, kept)

    def make_last(self) -> None:
        """Make last.ckpt the newest checkpoint, as after a kill between the best of a run and its last."""
        last = self.directory / LAST
        if self.file is not None and self.file != last:
            if last.exists():
                link(last, self.directory / PREVIOUS)
            link(self.file, last)

    def note_code(self, step: int) -> None:
        """Record which code makes the steps after this one."""
        if self.commit != (now := code()):
            self.commits[str(step)] = now

    @property
    def commit(self) -> str:
        """The code that makes the steps, once `note_code` has been called."""
        return list(self.commits.values())[-1] if self.commits else ""

    def require_here(self) -> None:
        """Raise `UserError` if another directory stands where the one was that this process holds, or none."""
        if self._lock is not None and _identity(self.directory) != self._held:
            why = "was deleted or replaced while its run was training, so nothing can be saved; start a new run"
            raise UserError(f"{self.directory}: {why}")

    # --- the other files ---

    def write_config(self) -> None:
        """Write the configuration to config.yaml, if it has changed."""
        file, text = self.directory / "config.yaml", to_yaml(self.config)
        if file.read_bytes() != text.encode():
            write_text(file, text)

    def sizes(self) -> dict[str, int]:
        """Sync samples.md, metrics.csv and our event files, and return their sizes."""
        for file in self._growing():
            sync(file)
        return {file.name: file.stat().st_size for file in self._growing()}

    def cut_back(self, sizes: dict[str, int]) -> None:
        """Truncate the growing files to these sizes: the steps that follow are trained again."""
        for file in self._growing():
            if (size := sizes.get(file.name)) is None:
                file.unlink()
                continue
            if file.is_file() and file.stat().st_nlink > 1:  # as in a copy by cp -l, which must stay as it is
                with replacing(file) as own:
                    shutil.copyfile(file, own)
            os.truncate(file, min(size, file.stat().st_size))

    def _growing(self) -> list[Path]:
        events = sorted(self.directory.glob(EVENTS))
        return [file for name in (SAMPLES, TABLE) if (file := self.directory / name).exists()] + events


def require_empty(run_dir: Path) -> None:
    """Raise `UserError` if a directory holds a run, or anything else that a run could harm."""
    if run_dir.is_dir() and any(not file.name.startswith((".lock", ".config.yaml.")) for file in run_dir.iterdir()):
        raise UserError(f"run_dir={run_dir} is not empty: choose another, or continue the run in it with resume=")


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


def _identity(directory: Path) -> tuple[int, int] | None:
    """The identity of a directory, which another of the same name would not have; None if there is none."""
    with contextlib.suppress(OSError):
        status = directory.stat()
        return status.st_dev, status.st_ino
    return None


def _locked(directory: Path) -> BaseFileLock:
    """Hold a run directory; `UserError` if another process holds it, or it cannot be written."""
    try:
        return hold(directory / ".lock")
    except HeldError as owner:
        raise UserError(f"{directory}: process {owner} is training in it: wait, or stop that one") from None
    except OSError as error:
        raise UserError(f"{directory}: cannot be written ({error.strerror})") from None


def _require_own_files(directory: Path) -> None:
    """Raise `UserError` if what a run would write to leads out of its directory, or is no file."""
    for folder in (directory, directory / "checkpoints", directory / "embeddings"):
        for entry in folder.iterdir() if folder.is_dir() else ():
            mode = entry.lstat().st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                what = f"a link to {os.readlink(entry)}" if stat.S_ISLNK(mode) else "not a regular file"
                raise UserError(
                    f"{entry}: {what}, and a run writes to nothing outside of its directory: remove it, or put in its "
                    "place what it leads to"
                )
