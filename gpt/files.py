"""Files that are on disk whole or not at all, small files read with one-line errors, and locks."""

import contextlib
import errno
import hashlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml
from filelock import BaseFileLock, FileLock, SoftFileLock, Timeout

from gpt.errors import ExternalError, UserError, is_disk_full, summarize_error

PACKAGE = Path(__file__).resolve().parent
IS_INSTALLED = (PACKAGE / "configs").is_dir()  # by pip, as opposed to a checkout, where configs/ lies beside gpt/
CONFIGS = PACKAGE / "configs" if IS_INSTALLED else PACKAGE.parent / "configs"
ASSETS = PACKAGE / "assets"
TRAIN_COMMAND = "gpt.train()" if IS_INSTALLED else "python train.py"  # what messages tell the user to run

# How systems refuse to open or to sync a folder: Windows, then file systems of virtual machines and networks.
_NOT_FOR_FOLDERS = {errno.EACCES, errno.EPERM, errno.EBADF, errno.EINVAL, errno.ENOTSUP}
CACHE_TAG, CACHE_SIGNATURE = "CACHEDIR.TAG", "Signature: 8a477f597d28d172789f06886806bc55"
PATIENCE = 2.0  # seconds: virus scanners and indexers on Windows look into every new file


@contextlib.contextmanager
def user_errors(path: Path, what: str = "read", hint: str = "fix that, or move the file away") -> Iterator[None]:
    """Turn an error of the system, which keeps a file from being read or a folder from being written, into one line.

    It is an `ExternalError`, unless the file is not there, which may not be the same again later.
    """
    try:
        yield
    except OSError as error:
        why = "the disk is full" if is_disk_full(error) else f"cannot be {what}"
        kind = UserError if isinstance(error, FileNotFoundError) else ExternalError
        raise kind(f"{path}: {why} ({error.strerror or error}); {hint}") from None


def expand_path(path: str | Path) -> Path:
    """Return a path in which `~` is the home directory, also where no shell has seen it, as in --to=~/model."""
    return Path(os.path.expanduser(path))


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


def sync_parents(path: Path) -> None:
    """Wait until the name of a new folder, and those of the folders above it that are new with it, are safe on disk."""
    for folder in (path, *path.absolute().parents[:2]):
        sync(folder)


def atomic_rename(finished: Path, path: Path) -> None:
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
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary name beside `path` to write to; the file takes the place of `path` when the block succeeds.

    After an error nothing is left of it, and `path` is what it was. A device or a pipe is never replaced: its own name
    is yielded, to be written to as a stream.
    """
    if path.exists() and not path.is_file():
        yield path
        return
    path = Path(os.path.realpath(path)) if path.is_symlink() else path
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_native_id()}")
    temporary.unlink(missing_ok=True)
    try:
        yield temporary
        atomic_rename(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Replace a small file as a whole."""
    with atomic_write(path) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="\n")  # the same bytes on every system


def read_text(path: Path) -> str:
    """Read a UTF-8 file; `UserError` if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({summarize_error(error)})") from None


class _NoAliases(yaml.SafeLoader):
    """YAML without aliases, which could expand to any size."""

    def compose_node(self, parent, index):
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("it has aliases (*name), which no run writes")
        return super().compose_node(parent, index)


def read_yaml(path: Path) -> Any:
    """Read a YAML file of plain values; `UserError` if it cannot be read or has aliases."""
    text = read_text(path)
    try:
        return yaml.load(text, _NoAliases)  # a safe loader
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read ({summarize_error(error)})") from None


def code_hash() -> str:
    """Return twelve digits that tell this code from any other: the hash of all Python files of gpt/."""
    code = hashlib.sha256()
    for file in sorted(PACKAGE.rglob("*.py")):
        code.update(file.read_bytes())
    return code.hexdigest()[:12]


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested dictionaries to one with dotted keys: {"optim": {"lr": 1}} becomes {"optim.lr": 1}."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat


def mark_as_cache(folder: Path) -> None:
    """Put a CACHEDIR.TAG into a folder that can be made again, so that it is not read as text, and backups skip it."""
    if not (tag := folder / CACHE_TAG).exists():
        write_text(tag, f"{CACHE_SIGNATURE}\n# Written by mini-gpt: see https://bford.info/cachedir/\n")


def is_program_output(folder: Path) -> bool:
    """Tell whether a folder holds what programs have made: a run, or anything with a CACHEDIR.TAG."""
    if (folder / "config.yaml").exists() and any((folder / name).exists() for name in (".lock", "checkpoints")):
        return True  # a run, which has no such tag, because backups should keep its models
    with contextlib.suppress(OSError):
        return (folder / CACHE_TAG).read_bytes().startswith(CACHE_SIGNATURE.encode())
    return False


def hard_link(source: Path, target: Path) -> None:
    """Make `target` another name of the file `source`, in one step, replacing it if it exists."""
    with atomic_write(target) as temporary:
        try:
            os.link(source, temporary)
        except OSError:  # a file system without hard links
            shutil.copyfile(source, temporary)


class LockedError(Exception):
    """Another process holds the lock; as a string, its process id where it is known."""


def acquire_lock(file: Path, tell: Callable[[str], None] | None = None) -> BaseFileLock:
    """Take a lock until what is returned is released or the process ends, however it ends.

    Where another process has it, this calls `tell` with its process id and waits, or without `tell` raises
    `LockedError`. `OSError` where the file cannot be made. The file itself stays.
    On a file system without locks, the lock is another file, which names its owner. If that process has died on this
    machine, its file does not count.
    """
    lock: BaseFileLock = FileLock(file, thread_local=False, fallback_to_soft=False)
    names = file
    try:
        try:
            lock.acquire(blocking=False)
        except OSError as error:
            if error.errno != errno.ENOSYS:
                raise
            names = file.with_name(f"{file.name}.owner")
            lock = SoftFileLock(names, thread_local=False)
            lock.acquire(timeout=1.0)  # in which it looks whether the owner is alive
    except Timeout:
        owner = ""
        with contextlib.suppress(OSError):  # Windows does not let anybody read a locked file
            owner = " on ".join(names.read_text(encoding="utf-8", errors="replace").split()[:2])
        if tell is None:
            raise LockedError(owner or "(unknown)") from None
        tell(owner or "(unknown)")
        lock.acquire()
    if names == file:
        with contextlib.suppress(OSError):
            file.write_text(f"{os.getpid()}\n", encoding="utf-8")
    return lock
