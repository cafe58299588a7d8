"""Run directories: made for one run, held by one process, and found again."""

from datetime import datetime
from pathlib import Path
from typing import TextIO

from gpt.errors import UserError
from gpt.files import try_lock, write_text

_LOCKS: list[TextIO] = []  # open as long as the process lives


def make(run_dir: str | None, name: str, config_text: str) -> Path:
    """A directory of a new run's own, locked, with its config.yaml: `run_dir`, or one below runs/ with `name` in it.

    Raises `UserError` where `run_dir` cannot be made or holds anything already.
    """
    wanted = Path(run_dir) if run_dir else Path("runs") / f"{datetime.now():%Y-%m-%d_%H-%M-%S}_{name}"
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
    require_empty(made)  # once more: now nobody else can fill it
    write_text(made / "config.yaml", config_text)
    return made


def require_empty(run_dir: Path) -> None:
    """Raise `UserError` where a directory holds a run, or anything else that a run could harm."""
    if (run_dir / "config.yaml").exists() or any(run_dir.glob("checkpoints/*.ckpt")):
        raise UserError(f"run_dir={run_dir} already holds a run: choose another, or continue it with resume=")
    if run_dir.is_dir() and any(file.name != ".lock" for file in run_dir.iterdir()):
        raise UserError(f"run_dir={run_dir} is not empty: choose another, for a run has its directory to itself")


def directory(path: str | Path) -> Path:
    """The run directory that a path names: itself, its checkpoints folder, or a file in that; else `UserError`."""
    path = Path(path)
    if path.is_file():
        path = path.resolve().parent
    if path.name == "checkpoints":
        path = path.resolve().parent
    if not (path / "config.yaml").is_file():
        raise UserError(f"{path}: not a run directory (it has no config.yaml); give one of those below runs/")
    return path


def lock(run_dir: Path) -> None:
    """Hold a run directory until this process ends, however it does; `UserError` where another process holds it."""
    try:
        held = try_lock(run_dir / ".lock")
    except OSError as error:
        raise UserError(f"{run_dir}: cannot be written ({error.strerror})") from None
    if isinstance(held, str):
        raise UserError(f"{run_dir}: process {held} is training in it: wait, or stop that one")
    _LOCKS.append(held)
