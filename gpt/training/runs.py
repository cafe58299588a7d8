"""Create, lock and find run directories, and load their newest checkpoint."""

import json
import re
import subprocess
from dataclasses import dataclass
from datetime import datetime
from importlib.metadata import distribution, version
from pathlib import Path
from typing import Any

from filelock import FileLock

from gpt.console import warn
from gpt.errors import UserError
from gpt.exchange.checkpoint import DamagedError, load
from gpt.exchange.loading import find_path
from gpt.files import INSTALLED, PACKAGE, HeldError, code_hash, hold, link, write_text
from gpt.text.corpus.config import DataConfig
from gpt.text.tokenizer import Tokenizer

_LOCKS: dict[Path, FileLock] = {}  # held as long as the process lives


@dataclass
class Start:
    """Where the weights come from: a checkpoint file, with what was read of it, or weights alone, or neither."""

    file: Path | None = None
    payload: dict[str, Any] | None = None
    weights: dict[str, Any] | None = None
    tokenizer: Tokenizer | None = None  # of the model whose weights these are
    threads: int | None = None  # with which the run began
    amended: bool = False  # whether the run goes on with another configuration than that of `file`


def make(run_dir: str | None, name: str, config_text: str) -> Path:
    """Make and lock a directory for a new run, with its config.yaml: `run_dir`, or one below runs/ with `name` in it.

    Raises `UserError` if `run_dir` cannot be made or holds anything already.
    """
    wanted = Path(run_dir) if run_dir else Path("runs") / f"{datetime.now():%Y-%m-%d_%H-%M-%S}_{_safe(name)}"
    made, number = wanted, 2
    while True:
        try:
            made.mkdir(parents=True, exist_ok=run_dir is not None)
            break
        except OSError as error:
            if run_dir is not None or not isinstance(error, FileExistsError):
                raise UserError(f"run_dir={made}: cannot be made ({error.strerror})") from None
            made, number = wanted.with_name(f"{wanted.name}-{number}"), number + 1
    lock(made)
    require_empty(made)  # again, now that nobody else can fill it
    write_text(made / "config.yaml", config_text)
    return made


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
    return re.sub(r"[^\w.+-]+", "_", name, flags=re.ASCII)


def git_commit(folder: Path = PACKAGE) -> str | None:
    """The commit of the checkout that holds `folder`, with `-dirty` if its files have changed since; None outside one.

    Files that git does not know make no difference. Of an installed package it is the commit that pip installed, if it
    did so from a repository.
    """
    if INSTALLED and folder == PACKAGE:
        source = json.loads(distribution("mini-gpt").read_text("direct_url.json") or "{}")
        return source.get("vcs_info", {}).get("commit_id")
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        answer = subprocess.run(command, cwd=folder, capture_output=True, encoding="utf-8", timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()


def installed_version() -> str:
    """The version of an installed package and the hash of its code; empty in a checkout, whose commit tells more."""
    return f"{version('mini-gpt')}+{code_hash()}" if INSTALLED else ""


def require_empty(run_dir: Path) -> None:
    """Raise `UserError` if a directory holds a run, or anything else that a run could harm."""
    if run_dir.is_dir() and any(not file.name.startswith((".lock", ".config.yaml.")) for file in run_dir.iterdir()):
        raise UserError(f"run_dir={run_dir} is not empty: choose another, or continue the run in it with resume=")


def directory(path: str | Path) -> Path:
    """The run directory that a path or a run's name stands for, or its checkpoints, or a file in them; `UserError`."""
    path = find_path(path)
    if path.is_file():
        path = path.resolve().parent
    if path.name == "checkpoints":
        path = path.resolve().parent
    if not (path / "config.yaml").is_file():
        why = "it has no config.yaml" if path.exists() else "it does not exist"
        raise UserError(f"{path}: not a run directory ({why}); give one of those below runs/")
    return path


def lock(run_dir: Path) -> None:
    """Hold a run directory until this process ends; `UserError` if another process holds it."""
    place = run_dir.resolve()
    if place in _LOCKS:
        return
    try:
        _LOCKS[place] = hold(run_dir / ".lock")
    except HeldError as owner:
        raise UserError(f"{run_dir}: process {owner} is training in it: wait, or stop that one") from None
    except OSError as error:
        raise UserError(f"{run_dir}: cannot be written ({error.strerror})") from None


def make_last(run_dir: Path, newest: Path) -> None:
    """Make last.ckpt the newest checkpoint, as after a kill between the best of a run and its last."""
    last = run_dir / "checkpoints/last.ckpt"
    if newest != last:
        if last.exists():
            link(last, run_dir / "checkpoints/previous.ckpt")
        link(newest, last)


def load_newest(run_dir: Path) -> tuple[Path, dict[str, Any]] | None:
    """Load the newest intact checkpoint of a run; None if it has none at all.

    A damaged one is reported and renamed to *.damaged, so that it never replaces a good one, and files
    that a kill left half written are removed. The caller holds the run directory.
    """
    for unfinished in run_dir.glob("checkpoints/.*.ckpt.*"):
        unfinished.unlink()
    files = [run_dir / f"checkpoints/{name}.ckpt" for name in ("last", "previous", "best")]
    present = [file for file in files if file.exists()]
    problem = "" if files[0].exists() else f"{files[0]} is missing"
    # The newest first, and of equally new ones last.ckpt.
    for file in sorted(present, key=lambda file: -file.stat().st_mtime_ns):
        try:
            payload = load(file)
        except DamagedError as error:
            problem = problem or str(error)
            file.replace(file.with_suffix(".ckpt.damaged"))
            continue
        if problem:
            warn(f"{problem}; going on from {file.name} of step {payload.get('step')}")
        return file, payload
    if present:
        raise UserError(f"{problem}; and no other checkpoint of the run can be read")
    return None
