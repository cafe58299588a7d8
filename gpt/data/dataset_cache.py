"""The cache folder: locks, unfinished work, JSON files that detect damage, and one-line errors."""

import contextlib
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from gpt.errors import ExternalError, UserError, summarize_error
from gpt.files import IS_INSTALLED, PACKAGE, acquire_lock, mark_as_cache, sync_parents, user_errors, write_text

if IS_INSTALLED:  # an installed package uses the user's cache folder, a checkout a folder beside the code
    from platformdirs import user_cache_path

    DEFAULT_CACHE = user_cache_path("mini-gpt", appauthor=False)
else:
    DEFAULT_CACHE = PACKAGE.parent / "data" / "cache"
CACHE_WRITE_HINT = ("written", "fix that or name another folder with data.cache=, and run the command again")
PLAN_FILE = "plan.json"  # without it, nothing in a working folder counts


def make_cache(cache: Path) -> None:
    """Make the cache folder. Mark it as a cache unless it holds other files already, which may be the user's."""
    cache.mkdir(parents=True, exist_ok=True)
    sync_parents(cache)
    if all(entry.name.startswith(".") for entry in cache.iterdir()):
        mark_as_cache(cache)


def write_checked_json(file: Path, content: dict) -> None:
    """Replace a JSON file as a whole. It contains a hash, so `read_checked_json` detects damage."""
    write_text(file, dump_checked_json(content))


def read_checked_json(file: Path) -> dict:
    """Return what `write_checked_json` wrote; raise `ValueError` if it is damaged."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(content, dict) and content.pop("seal", None) == _hash_json(content):
            return content
    except RecursionError as error:
        raise ValueError(summarize_error(error)) from None
    raise ValueError(f"the content of {file.name} does not match its seal")


def load_checked_json(file: Path, hint: str) -> dict | None:
    """Return what `write_checked_json` wrote, or None without such a file; `ExternalError` with the hint if damaged."""
    with user_errors(file):
        try:
            return read_checked_json(file)
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise ExternalError(f"{file.parent}: is damaged ({error}); {hint}") from None


def dump_checked_json(content: dict) -> str:
    """Return JSON that includes a hash of its content."""
    return json.dumps({**content, "seal": _hash_json(content)}, indent=2)


def _hash_json(content: dict) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


@contextlib.contextmanager
def exclusive_lock(lock_file: Path, task: str, print_line: Callable[[str], None]) -> Iterator[None]:
    """Hold a lock. If another process holds it, print that once and wait. The lock file stays.

    Args:
        lock_file: The file.
        task: The work under the lock, for the printed line, such as "preparing this text".
        print_line: Prints a line.
    """
    lock_file.parent.mkdir(parents=True, exist_ok=True)
    lock = acquire_lock(lock_file, lambda holder: print_line(f"process {holder} is {task}: waiting for it"))
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def working_folder(folder: Path, print_line: Callable[[str], None]) -> Iterator[Path]:
    """Yield a hidden path beside `folder`, where this process alone may make it. The caller renames the result.

    After an interruption the content stays, and the next process resumes. After a user's mistake it is deleted.
    """
    make_cache(folder.parent)
    with exclusive_lock(folder.parent / f".{folder.name}.lock", "preparing this text", print_line):
        working = folder.with_name(f".preparing-{folder.name}")
        try:
            yield working
        except UserError as error:
            if not isinstance(error, ExternalError):
                delete_working_folder(working)
            raise


def delete_working_folder(working: Path) -> None:
    """Delete a working folder, its plan first. So a kill at any moment leaves nothing that looks usable."""
    with contextlib.suppress(OSError):
        (working / PLAN_FILE).unlink(missing_ok=True)
        shutil.rmtree(working)
