"""Write files atomically, read small files with one-line errors, and take locks."""

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
IS_INSTALLED = (PACKAGE / "configs").is_dir()  # by pip; in a checkout, configs/ lies beside gpt/
CONFIGS = PACKAGE / "configs" if IS_INSTALLED else PACKAGE.parent / "configs"
ASSETS = PACKAGE / "assets"
TRAIN_COMMAND = "gpt.train()" if IS_INSTALLED else "python train.py"  # for messages

# The errors of systems that cannot sync a folder: Windows, then file systems of virtual machines and networks.
_FOLDER_SYNC_ERRORS = {errno.EACCES, errno.EPERM, errno.EBADF, errno.EINVAL, errno.ENOTSUP}
CACHE_TAG = "CACHEDIR.TAG"
CACHE_SIGNATURE = "Signature: 8a477f597d28d172789f06886806bc55"
RENAME_RETRY_SECONDS = 2.0  # virus scanners and indexers on Windows open every new file for a moment


@contextlib.contextmanager
def user_errors(path: Path, action: str = "read", hint: str = "fix that, or move the file away") -> Iterator[None]:
    """Turn a system error of the block into a `UserError`. It is an `ExternalError` unless a file is missing.

    Args:
        path: The file or folder that the message names.
        action: The participle of what failed, "read" or "written".
        hint: Ends the message.
    """
    try:
        yield
    except OSError as error:
        problem = "the disk is full" if is_disk_full(error) else f"cannot be {action}"
        error_type = UserError if isinstance(error, FileNotFoundError) else ExternalError
        raise error_type(f"{path}: {problem} ({error.strerror or error}); {hint}") from None


def expand_path(path: str | Path) -> Path:
    """Expand `~` to the home directory. A shell does not do so in --to=~/model."""
    return Path(os.path.expanduser(path))


def sync(path: Path) -> None:
    """Wait until a file, or a folder's list of files, is safe on disk. Some systems cannot sync folders."""
    is_folder = path.is_dir()
    try:
        descriptor = os.open(path, os.O_RDONLY if is_folder else os.O_RDWR)  # Windows syncs only writable files
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if not is_folder or error.errno not in _FOLDER_SYNC_ERRORS:
            raise


def sync_parents(path: Path) -> None:
    """Wait until the name of a new folder, and of up to two new parents, is safe on disk."""
    for folder in (path, *path.absolute().parents[:2]):
        sync(folder)


def atomic_rename(finished: Path, path: Path) -> None:
    """Give a finished file or folder its final name in one step, and wait until both are safe on disk.

    A file replaces an older one. Windows refuses while another program has either file open, so this retries.
    """
    sync(finished)
    deadline = time.monotonic() + RENAME_RETRY_SECONDS
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
    """Yield a temporary name beside `path` to write to. If the block succeeds, that file replaces `path`.

    After an error the temporary file is deleted, and `path` is unchanged. A device or a pipe is never replaced: its own
    name is yielded, to be written as a stream.
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
    """A safe loader that refuses aliases, since they could expand to any size."""

    def compose_node(self, parent, index):
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("it has aliases (*name), which no run writes")
        return super().compose_node(parent, index)


def read_yaml(path: Path) -> Any:
    """Read a YAML file of plain values; `UserError` if it cannot be read or has aliases."""
    text = read_text(path)
    try:
        return yaml.load(text, _NoAliases)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read ({summarize_error(error)})") from None


def code_hash() -> str:
    """Return twelve digits of a hash of all Python files of gpt/."""
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
    """Put a CACHEDIR.TAG into a folder that can be recreated. It is then not read as text, and backups skip it."""
    tag = folder / CACHE_TAG
    if not tag.exists():
        write_text(tag, f"{CACHE_SIGNATURE}\n# Written by mini-gpt: see https://bford.info/cachedir/\n")


def is_program_output(folder: Path) -> bool:
    """Return True if programs wrote the folder: it is a run, or has a CACHEDIR.TAG."""
    if (folder / "config.yaml").exists() and any((folder / name).exists() for name in (".lock", "checkpoints")):
        return True  # a run has no such tag, because backups should keep its models
    with contextlib.suppress(OSError):
        return (folder / CACHE_TAG).read_bytes().startswith(CACHE_SIGNATURE.encode())
    return False


def hard_link(source: Path, target: Path) -> None:
    """Make `target` another name of the file `source`, in one step. It replaces an older target."""
    with atomic_write(target) as temporary:
        try:
            os.link(source, temporary)
        except OSError:  # a file system without hard links
            shutil.copyfile(source, temporary)


class LockedError(Exception):
    """Another process holds the lock. The message is its process id, if known."""


def acquire_lock(file: Path, on_wait: Callable[[str], None] | None = None) -> BaseFileLock:
    """Take a lock. It ends when it is released, or with the process, even if that is killed.

    If another process holds the lock, call `on_wait` with its process id, and wait. Without `on_wait`, raise
    `LockedError`. `OSError` if the file cannot be created. The file itself stays. On a file system without locks, the
    lock is a second file with the owner's process id. It is void if that process of this machine has ended.
    """
    lock: BaseFileLock = FileLock(file, thread_local=False, fallback_to_soft=False)
    owner_file = file
    try:
        try:
            lock.acquire(blocking=False)
        except OSError as error:
            if error.errno != errno.ENOSYS:
                raise
            owner_file = file.with_name(f"{file.name}.owner")
            lock = SoftFileLock(owner_file, thread_local=False)
            lock.acquire(timeout=1.0)  # meanwhile it checks whether the owner is alive
    except Timeout:
        owner = ""
        with contextlib.suppress(OSError):  # nobody can read a locked file on Windows
            owner = " on ".join(owner_file.read_text(encoding="utf-8", errors="replace").split()[:2])
        if on_wait is None:
            raise LockedError(owner or "(unknown)") from None
        on_wait(owner or "(unknown)")
        lock.acquire()
    if owner_file == file:
        with contextlib.suppress(OSError):
            file.write_text(f"{os.getpid()}\n", encoding="utf-8")
    return lock
