"""Files that are on disk whole or not at all, and locks that end with their process."""

import contextlib
import errno
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

# How systems refuse to open or to sync a folder: Windows, then file systems of virtual machines and networks.
_NOT_FOR_FOLDERS = {errno.EACCES, errno.EPERM, errno.EBADF, errno.EINVAL, errno.ENOTSUP}
PATIENCE = 2.0  # seconds: virus scanners and indexers on Windows look into every new file


def sync(path: Path) -> None:
    """Wait until a file, or a folder's list of files, is safe on disk; folders only where the system can sync them."""
    is_folder = path.is_dir()
    try:
        descriptor = os.open(path, os.O_RDONLY if is_folder else os.O_RDWR)  # Windows syncs only what may be written
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if not is_folder or error.errno not in _NOT_FOR_FOLDERS:
            raise


def publish(finished: Path, path: Path) -> None:
    """Give a finished file or folder its final name in one step, and wait until both are safe on disk.

    A file replaces an older one. Windows refuses while another program has one of them open, so this tries for a while.
    """
    sync(finished)
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            os.replace(finished, path)
            break
        except PermissionError as error:
            if not hasattr(error, "winerror") or time.monotonic() > deadline:
                raise
            time.sleep(0.05)
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
        temporary.write_text(text, encoding="utf-8", newline="\n")  # the same bytes on every system


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
