"""Files that are on disk whole or not at all, whatever happens to the process or the machine meanwhile."""

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from gpt.errors import UserError


def sync(path: Path) -> None:
    """Wait until a file, or a folder's list of files, is safe on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Replace a small file as a whole."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        sync(temporary)
        temporary.replace(path)
        sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def link(source: Path, target: Path) -> None:
    """Let `target` name the same file as `source`, replacing what it named before, in one step."""
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    try:
        os.link(source, temporary)
    except OSError:  # a file system without hard links
        shutil.copyfile(source, temporary)
        sync(temporary)
    os.replace(temporary, target)
    temporary.unlink(missing_ok=True)  # where both were one file already, renaming has done nothing
    sync(target.parent)


def try_lock(file: Path) -> TextIO | str:
    """Hold a lock until what is returned is closed or the process ends; or return the number of the one that has it."""
    stream = file.open("a+")
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        with stream:
            stream.seek(0)
            return stream.read().strip()
    stream.truncate(0)
    stream.write(f"{os.getpid()}\n")
    stream.flush()
    return stream


@contextlib.contextmanager
def explain_cache(folder: Path) -> Iterator[None]:
    """Turn a folder of the cache that cannot be written into one line, unless it is for want of space."""
    try:
        yield
    except OSError as error:
        if error.errno in (None, errno.ENOSPC, errno.EDQUOT):
            raise
        raise UserError(
            f"{folder}: cannot be written ({error.strerror}); name another folder with data.cache="
        ) from None
