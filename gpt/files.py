"""Files that are on disk whole or not at all, and locks that end with their process."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout


def sync(path: Path) -> None:
    """Wait until a file, or a folder's list of files, is safe on disk."""
    if path.is_dir() and os.name == "nt":
        return  # Windows cannot open a folder, and needs no such call
    descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def publish(finished: Path, path: Path) -> None:
    """Give a finished file its final name in one step, and wait until both are safe on disk."""
    sync(finished)
    os.replace(finished, path)
    sync(path.parent)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary name beside `path` to write to; the file takes the place of `path` when the block succeeds.

    After an error nothing is left of it, and `path` is what it was.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    try:
        yield temporary
        publish(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Replace a small file as a whole."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def link(source: Path, target: Path) -> None:
    """Make `target` another name of the file `source`, in one step, replacing it if it exists."""
    with replacing(target) as temporary:
        try:
            os.link(source, temporary)
        except OSError:  # a file system without hard links
            shutil.copyfile(source, temporary)


class HeldError(Exception):
    """Another process holds the lock; as a string, its process id where it is known."""


def hold(file: Path) -> FileLock:
    """Take a lock until what is returned is released or the process ends, however it ends.

    Raises `HeldError` where another process has it, and `OSError` where the file cannot be made. The file itself stays.
    """
    lock = FileLock(file, thread_local=False)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        owner = ""
        with contextlib.suppress(OSError):  # Windows does not let anybody read a locked file
            owner = file.read_text(encoding="utf-8", errors="replace").strip()
        raise HeldError(owner or "(unknown)") from None
    with contextlib.suppress(OSError):
        file.write_text(f"{os.getpid()}\n", encoding="utf-8")
    return lock
