"""Downloads (s3://, gs://, hf://, https://): resumed, checked, retried, one at a time, within a bounded space."""

import contextlib
import functools
import gzip
import hashlib
import itertools
import logging
import math
import os
import re
import shutil
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from io import BufferedRandom
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote

import fsspec

from gpt.console import print_line, progress_bar
from gpt.data.dataset_cache import CACHE_WRITE_HINT, exclusive_lock, make_cache
from gpt.errors import ExternalError, UserError, is_disk_full, summarize_error
from gpt.files import atomic_rename, user_errors

DOWNLOAD_BLOCK_BYTES = 1 << 23  # bytes of a request; after each failed attempt a quarter of that
ABANDONED_SECONDS = 3600  # an unfinished file that did not change for longer is no longer being fetched
WEB_SCHEMES = ("http://", "https://")
MAX_ATTEMPTS = 14  # of a request; the pause after each doubles up to 15 seconds, so they take two minutes in all
MAX_WAIT_SECONDS = 120  # no attempt begins later, even if each one takes long
QUIET_SECONDS = 3  # before a line reports that a store does not answer
STALL_SECONDS = 30  # without a byte, before a request fails
DRIVERS = {"s3": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "hf": "huggingface_hub"}  # scheme -> package
OFFLINE_HINT = "without a network, use data=python_docs, data=python_stdlib or data.path=FILE"
_TRANSIENT_STATUS = (408, 425, 429)  # a server refuses a request for now: too slow, too early, too many
_LOGIN_HINT = "log in with the store's own tool, such as aws, gcloud or hf"
_PROGRAM_ERRORS = (AssertionError, AttributeError, NameError, TypeError)  # bugs, not mistakes of the user


@dataclass(frozen=True)
class RemoteFile:
    """A file behind a URL as its store lists it, and where its local copy is kept.

    `tag` identifies a version of the file, for example the ETag. If the `sha256` is given, it is checked instead, and
    a copy is used without a request to the store.
    """

    url: str
    size: int | None
    tag: str
    cache: Path
    cache_bytes: int  # the space for all copies together
    sha256: str = ""
    print_line: Callable[[str], None] = print_line

    def __str__(self) -> str:
        return self.url

    @property
    def name(self) -> str:
        if not self.url.startswith("http"):
            return self.url.rsplit("/", 1)[-1]
        return unquote(re.split("[?#]", self.url)[0].rsplit("/", 1)[-1])

    @property
    def suffixes(self) -> list[str]:
        return PurePosixPath(self.name).suffixes

    @property
    def target(self) -> Path:
        """The path of the local copy."""
        key = self.sha256.lower() or hashlib.sha256(f"{self.url}\n{self.size}\n{self.tag}".encode()).hexdigest()
        return self.cache / f"downloads/{key[:16]}-{re.sub('[^A-Za-z0-9._-]+', '_', self.name)[-100:]}"

    def fetch(self) -> Path:
        """Return the path of the local copy. Fetch and check it first if it does not exist.

        An interrupted download resumes. Raises `UserError` naming the URL or the folder, the reason and the remedy.
        """
        target = self.target
        with user_errors(target.parent, *CACHE_WRITE_HINT):
            make_cache(self.cache)
            with exclusive_lock(target.with_name(f".{target.name}.lock"), f"downloading {self.url}", self.print_line):
                if not target.is_file():
                    part = target.with_name(f"{target.name}.part")
                    self._download(part)
                    atomic_rename(self._unpack(part) if self._is_packed(part) else part, target)
                    part.unlink(missing_ok=True)
                # `_make_room` needs the time of use. The time of the content stays, since it reveals a change.
                os.utime(target, ns=(time.time_ns(), target.stat().st_mtime_ns))
        return target

    def _download(self, part: Path) -> None:
        """Append the rest of the file to the result of an earlier attempt, and check all of it."""
        request = functools.partial(retry, url=self.url, print_line=self.print_line)
        fs, path = open_filesystem(self.url)
        size, tag = self.size, self.tag
        content = b""
        with store_errors(self.url):
            if size is None:
                size, tag = request(lambda _: size_and_tag(fs, path))
            if size is None:  # the server does not tell the size
                content = request(lambda _: fs.cat_file(path))
        self._make_room(part, len(content) if size is None else size)
        with part.open("a+b") as stream, store_errors(self.url):
            if size is None:
                stream.truncate(0)
                stream.write(content)
            else:
                _receive(fs, path, stream, size, request)
            stream.seek(0)
            if self.sha256:
                digest = hashlib.file_digest(stream, "sha256").hexdigest()
                is_intact = digest == self.sha256.lower()
                problem = f"the SHA-256 is {digest[:16]}..., not {self.sha256.lower()[:16]}..."
            else:
                listing = request(lambda _: size_and_tag(fs, path))
                is_intact = listing == (size, tag)
                problem = f"size and tag are {listing!r}, and were {(size, tag)!r}"
            if not is_intact:
                stream.truncate(0)
                keys = "the URL and data.sha256=" if self.sha256 else "the URL"
                problem += ": the file has changed, or another server answered"
                raise UserError(f"{self.url}: {problem}; check {keys}, and run the command again")

    def _is_packed(self, part: Path) -> bool:
        """Return True if a server packed the file (Content-Encoding: gzip), though unpacked content was requested."""
        with part.open("rb") as stream:
            return stream.read(3) == b"\x1f\x8b\x08" and not self.name.lower().endswith(".gz")

    def _unpack(self, part: Path) -> Path:
        """Return the path of the unpacked content. The packed file stays, because an interrupted download resumes."""
        unpacked = part.with_suffix(".unpacked.part")
        try:
            with gzip.open(part) as packed, unpacked.open("wb") as stream:
                shutil.copyfileobj(packed, stream)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            part.unlink()
            raise ExternalError(f"{self.url}: packed with gzip, and damaged ({error}); run the command again") from None
        self._make_room(unpacked, unpacked.stat().st_size)
        return unpacked

    def _make_room(self, part: Path, size: int) -> None:
        """Delete the copies that were used longest ago, until `size` bytes fit beside the others."""
        if size > self.cache_bytes:
            raise UserError(
                f"data.cache_bytes={self.cache_bytes} does not hold {self.url}, of {size:,} bytes: raise it"
            )
        copies = []
        for file in part.parent.iterdir():
            with contextlib.suppress(OSError):  # another process has deleted it
                status = file.stat()
                if file != part and not file.name.startswith("."):  # locks and listings are hidden
                    size += status.st_size
                    if file.suffix != ".part" or status.st_mtime < time.time() - ABANDONED_SECONDS:
                        copies.append((max(status.st_atime_ns, status.st_mtime_ns), status.st_size, file))
        for _, length, file in sorted(copies):
            if size > self.cache_bytes:
                with contextlib.suppress(OSError):  # in use, on Windows
                    file.unlink()
                    size -= length


def fetch_if_remote(file: Path | RemoteFile) -> Path:
    """Return the path of a local file, or of the copy of a remote file."""
    return file.fetch() if isinstance(file, RemoteFile) else file


def size_and_tag(fs: fsspec.AbstractFileSystem, path: str) -> tuple[int | None, str]:
    """Return the size and the version tag that a remote file has now."""
    info = file_info(fs, path)
    return info["size"], version_tag(info)


def file_info(fs: fsspec.AbstractFileSystem, path: str) -> dict[str, Any]:
    """Return a store's present information on a file."""
    fs.invalidate_cache()
    try:
        return fs.info(path)
    except FileNotFoundError as error:  # for a web server fsspec raises this for any reason
        raise (path.startswith(WEB_SCHEMES) and error.__cause__) or error from None


def version_tag(info: dict[str, Any]) -> str:
    """Return the value that identifies a file's version. Stores give it different names."""
    names = ("ETag", "etag", "blob_id", "md5Hash", "Last-Modified", "LastModified", "mtime")
    return next((str(info[name]) for name in names if info.get(name)), "")


def _receive(fs: fsspec.AbstractFileSystem, path: str, stream: BufferedRandom, size: int, request: Callable) -> None:
    """Append the rest of a file. Fetch the last block of an earlier attempt again: a power cut may have spoilt it."""
    offset = max(0, stream.seek(0, os.SEEK_END) - DOWNLOAD_BLOCK_BYTES)
    if offset < stream.tell():
        stream.truncate(offset)
    with progress_bar(f"downloading {path.rpartition('/')[2]}", size, offset, delay=1) as bar:
        while offset < size:
            block = request(functools.partial(_fetch_block, fs, path, offset, size))
            offset += stream.write(block)
            stream.flush()
            os.fsync(stream.fileno())
            bar.update(len(block))


def _fetch_block(fs: fsspec.AbstractFileSystem, path: str, offset: int, size: int, attempt: int) -> bytes:
    """Return bytes of a file from `offset` on, fewer of them after each failed attempt."""
    length = DOWNLOAD_BLOCK_BYTES >> 2 * min(attempt, 4)
    block = fs.cat_file(path, start=offset, end=min(size, offset + length))
    if len(block) == size:  # some servers always send the whole file
        block = block[offset:]
    if not 0 < len(block) <= size - offset:
        raise ConnectionError(f"received {len(block):,} bytes of {size - offset:,} that are missing")
    return block


def require_disk_space(files: Sequence[Path | RemoteFile], cache: Path, cache_bytes: int) -> None:
    """Raise `UserError` unless all these files fit into `cache_bytes` and onto the disk."""
    remote = [file for file in files if isinstance(file, RemoteFile)]
    size = sum(file.size or 0 for file in remote)
    if size > cache_bytes:
        need = f"the {len(remote):,} files of this dataset, {size:,} bytes"
        raise UserError(f"data.cache_bytes={cache_bytes:,} does not hold {need}: raise it, or name fewer files")
    missing = sum(file.size or 0 for file in remote if not file.target.is_file())
    if missing:
        with user_errors(cache, *CACHE_WRITE_HINT):
            make_cache(cache)
            free = shutil.disk_usage(cache).free
        if missing > free:
            problem = f"the disk has {free:,} bytes free, and {missing:,} are to be fetched"
            raise ExternalError(f"{cache}: {problem}: make room, or name another folder with data.cache=")


# --- stores: their file systems, their errors, and how long to wait for them ---


def open_filesystem(url: str) -> tuple[fsspec.AbstractFileSystem, str]:
    """Return the file system behind a URL, and the path there. Credentials come from the store's own tools."""
    for driver in ("gcsfs", "s3fs"):
        logging.getLogger(driver).setLevel(logging.CRITICAL)  # it logs errors that it also raises
    options: dict[str, Any] = {}
    with store_errors(url):
        if url.startswith("http"):
            from aiohttp import ClientTimeout

            timeout = ClientTimeout(sock_connect=STALL_SECONDS, sock_read=STALL_SECONDS)
            raw = {"auto_decompress": False, "headers": {"Accept-Encoding": "identity"}}
            options = {"client_kwargs": {"trust_env": True, "timeout": timeout, **raw}, "encoded": True}
        elif url.startswith("hf:"):
            options = {"block_size": 1}  # the bytes that it reads beyond each requested block
        return fsspec.core.url_to_fs(url, **options)


def retry(request: Callable[[int], Any], url: str, print_line: Callable[[str], None], wait: float = math.inf) -> Any:
    """Return the answer to `request(attempt)`. After a temporary error request again, with ever longer pauses.

    Args:
        request: Takes the number of the attempt, from 0.
        url: The URL, for a line that reports the wait.
        print_line: Prints a line.
        wait: The number of seconds after which to give up, at most `MAX_WAIT_SECONDS`.
    """
    begin = time.monotonic()
    is_reported = False
    for attempt in itertools.count():
        try:
            return request(attempt)
        except (ImportError, MemoryError, *_PROGRAM_ERRORS):
            raise
        except Exception as error:
            waited = time.monotonic() - begin
            if attempt + 1 >= MAX_ATTEMPTS or waited >= min(wait, MAX_WAIT_SECONDS) or _store_hint(error):
                raise
            if not is_reported and waited >= QUIET_SECONDS:
                print_line(
                    f"{url}: does not answer ({summarize_error(error)}): waiting for it, for about two minutes at most"
                )
                is_reported = True
        time.sleep(min(15, 2**attempt / 5))


@contextlib.contextmanager
def store_errors(url: str) -> Iterator[None]:
    """Turn any exception of a store's library into one line, unless the disk is full."""
    try:
        yield
    except (UserError, MemoryError, *_PROGRAM_ERRORS):
        raise
    except ImportError as error:
        driver = DRIVERS.get(url.partition("://")[0])
        install = f": pip install {driver}" if driver else ""
        raise UserError(f"{url}: needs a driver that is not installed{install} ({summarize_error(error)})") from None
    except Exception as error:  # each store has a library of its own
        if is_disk_full(error):
            raise
        hint = _store_hint(error)
        exception_type = UserError if hint else ExternalError
        problem = f"{type(error).__name__}: {summarize_error(error)}"
        raise exception_type(f"{url}: cannot be used ({problem}); {hint or OFFLINE_HINT}") from None


def _store_hint(error: Exception) -> str:
    """Return the remedy for an error, or "" if the error may be temporary."""
    status = getattr(error, "status", None) or getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, FileNotFoundError) or status in (404, 410):
        return "there is no such file: check the spelling"
    if isinstance(error, PermissionError) or status in (401, 403) or "Credentials" in type(error).__name__:
        return f"{_LOGIN_HINT}, or check the spelling"
    if re.search("range.* not satisfiable", str(error), re.IGNORECASE):
        return "the file has become shorter: run the command again"
    is_permanent = isinstance(error, ValueError | IsADirectoryError) or 400 <= (status or 0) < 500
    return "check the spelling" if is_permanent and status not in _TRANSIENT_STATUS else ""
