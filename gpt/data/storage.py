"""A directory of few and large files, on this machine or behind a URL. Files enter it whole or not at all."""

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gpt.console import print_line
from gpt.data.data_config import is_url
from gpt.data.dataset_cache import dump_checked_json, make_cache, parse_checked_json
from gpt.data.download import open_filesystem, retry, store_errors
from gpt.errors import ExternalError
from gpt.files import atomic_write, expand_path, sync_parents, user_errors

Directory = Path | str  # a string is a URL


def as_directory(path: str | Path) -> Directory:
    """Return an absolute path, or a URL without its last slash."""
    if not is_url(str(path)):
        return expand_path(path).absolute()
    return Path(str(path)[7:]) if str(path).startswith("file://") else str(path).rstrip("/")


def read_bytes(directory: Directory, name: str) -> bytes | None:
    """Return the content of a small file, or None if it does not exist."""

    def read() -> bytes:
        if isinstance(directory, Path):
            return (directory / name).read_bytes()
        fs, path = open_filesystem(directory)
        fs.invalidate_cache()  # an earlier listing may lack the file
        return fs.cat_file(f"{path}/{name}")

    return _access(directory, name, lambda: _none_if_missing(read))


def file_size(directory: Directory, name: str) -> int | None:
    """Return the size of a file, or None if it does not exist."""

    def size() -> int:
        if isinstance(directory, Path):
            return (directory / name).stat().st_size
        fs, path = open_filesystem(directory)
        fs.invalidate_cache()
        return fs.info(f"{path}/{name}")["size"]

    return _access(directory, name, lambda: _none_if_missing(size))


def _none_if_missing(request: Callable[[], Any]) -> Any:
    try:
        return request()
    except FileNotFoundError:
        return None


def fetch_checked_json(directory: Directory, name: str, hint: str) -> dict | None:
    """Return what `store_checked_json` wrote, or None if nothing is there.

    Raises:
        ExternalError: It is damaged. The error ends with the hint.
    """
    content = read_bytes(directory, name)
    try:
        return None if content is None else parse_checked_json(content.decode("utf-8"), name)
    except ValueError as error:
        raise ExternalError(f"{directory}: is damaged ({error}); {hint}") from None


def write_bytes(directory: Directory, name: str, content: bytes) -> None:
    """Write a small file, in place of an older one."""
    if isinstance(directory, Path):
        with new_file(directory, name, directory) as file:
            file.write_bytes(content)
        return
    fs, path = open_filesystem(directory)
    _access(directory, name, lambda: fs.pipe_file(f"{path}/{name}", content))


def store_checked_json(directory: Directory, name: str, content: dict) -> None:
    """Write JSON with a hash of its content, so that `fetch_checked_json` detects damage."""
    write_bytes(directory, name, dump_checked_json(content).encode())


@contextlib.contextmanager
def new_file(directory: Directory, name: str, scratch: Path) -> Iterator[Path]:
    """Yield a path to write to. The file enters the directory, whole, when the block succeeds.

    For a directory behind a URL the path is in the folder `scratch`.
    """
    if isinstance(directory, Path):
        if not directory.is_dir():
            directory.mkdir(parents=True, exist_ok=True)
            sync_parents(directory)
        with atomic_write(directory / name) as file:
            yield file
        return
    make_cache(scratch)
    fs, path = open_filesystem(directory)
    with tempfile.TemporaryDirectory(dir=scratch, prefix=".upload-") as folder:
        file = Path(folder) / name
        yield file
        _access(directory, name, lambda: fs.put_file(str(file), f"{path}/{name}"))


def _access(directory: Directory, name: str, request: Callable[[], Any]) -> Any:
    """Return the answer to a request. Wait for a store that does not answer."""
    if isinstance(directory, Path):
        with user_errors(directory / name):
            return request()
    url = f"{directory}/{name}"
    with store_errors(url):
        return retry(lambda _: request(), url, print_line)
