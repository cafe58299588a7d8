"""Files that are on disk whole or not at all, whatever happens to the process or the machine meanwhile."""

import os
import shutil
from pathlib import Path


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
