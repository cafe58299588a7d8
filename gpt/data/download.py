"""Downloads (s3://, gs://, hf://, https://): resumed, checked, retried, and kept in bounded disk, one at a time."""

import contextlib
import functools
import hashlib
import itertools
import logging
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from io import BufferedRandom
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote

import fsspec

from gpt.console import progress_bar, say
from gpt.data.dataset_cache import CACHE_WRITE_HINT, exclusive_lock, make_cache
from gpt.errors import OutsideError, UserError, is_disk_full, reason
from gpt.files import explain, publish

DOWNLOAD_BLOCK_BYTES = 1 << 23  # bytes to request for at once; after each attempt that failed, a quarter of that
ABANDONED_SECONDS = 3600  # seconds after which nobody fetches an unfinished file any more
WEB_SCHEMES = ("http://", "https://")
MAX_ATTEMPTS = 14  # at a request, with a pause after each that doubles up to 15 seconds: two minutes in all
MAX_WAIT_SECONDS = 120  # seconds after which no attempt begins, where each of them takes long
QUIET_SECONDS = 3  # seconds before a line says that a store does not answer
STALL_SECONDS = 30  # seconds without a byte
DRIVERS = {"s3": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "hf": "huggingface_hub"}  # scheme -> package
OFFLINE_HINT = "without a network, use data=python_docs, data=python_stdlib or data.path=FILE"
_TRANSIENT_STATUS = (408, 425, 429)  # requests that a server refuses for now: too slow, too early, too many
_LOGIN_HINT = "give the credentials as to the store's own tools, such as aws, gcloud and hf"
_PROGRAM_ERRORS = (AssertionError, AttributeError, NameError, TypeError)  # of a program, which are no user's business


@dataclass(frozen=True)
class RemoteFile:
    """A file behind a URL as its store lists it, and where its local copy is kept.

    `tag` is what the store says to tell versions apart, such as the ETag. If the `sha256` is known, that is checked
    instead, and the store is asked for nothing once there is a copy.
    """

    url: str
    size: int | None
    tag: str
    cache: Path
    cache_bytes: int  # bytes that all copies together may take
    sha256: str = ""
    say: Callable[[str], None] = say

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
        """Where the local copy is, or will be."""
        key = self.sha256.lower() or hashlib.sha256(f"{self.url}\n{self.size}\n{self.tag}".encode()).hexdigest()
        return self.cache / f"downloads/{key[:16]}-{re.sub('[^A-Za-z0-9._-]+', '_', self.name)[-100:]}"

    def fetch(self) -> Path:
        """Return the local copy, whole and checked, after fetching it if need be. An interrupted download resumes.

        Raises `UserError` naming the URL or the folder, the reason and the remedy.
        """
        target = self.target
        with explain(target.parent, *CACHE_WRITE_HINT):
            make_cache(self.cache)
            with exclusive_lock(target.with_name(f".{target.name}.lock"), f"downloading {self.url}", self.say):
                if not target.is_file():
                    part = target.with_name(f"{target.name}.part")
                    self._download(part)
                    publish(part, target)
                # `_make_room` knows by it what is in use; the time of the content stays, by which a change is noticed.
                os.utime(target, ns=(time.time_ns(), target.stat().st_mtime_ns))
        return target

    def _download(self, part: Path) -> None:
        """Append the rest of the file to what an earlier attempt left, and check the whole."""
        request = functools.partial(retry, url=self.url, say=self.say)
        fs, path = open_filesystem(self.url)
        with store_errors(self.url):
            size, tag = (self.size, self.tag) if self.size is not None else request(lambda _: size_and_tag(fs, path))
            whole = b"" if size is not None else request(lambda _: fs.cat_file(path))  # of a length that nobody tells
        self._make_room(part, len(whole) if size is None else size)
        with part.open("a+b") as stream, store_errors(self.url):
            if size is None:
                stream.truncate(0)
                stream.write(whole)
            else:
                _receive(fs, path, stream, size, request)
            stream.seek(0)
            if self.sha256:
                found, wanted = (hashlib.file_digest(stream, "sha256").hexdigest(), self.sha256.lower())
                what, remedy = (f"the SHA-256 is {found[:16]}..., not {wanted[:16]}...", " and data.sha256=")
            else:
                found, wanted = (repr(request(lambda _: size_and_tag(fs, path))), repr((size, tag)))
                what, remedy = f"size and tag are {found}, and were {wanted}", ""
            if found != wanted:
                stream.truncate(0)
                raise UserError(
                    f"{self.url}: {what}: the file has changed, or another server answered; check the URL{remedy}, and "
                    "run the command again"
                )

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
                if file != part and not file.name.startswith("."):  # which locks and listings do
                    size += status.st_size
                    if file.suffix != ".part" or status.st_mtime < time.time() - ABANDONED_SECONDS:
                        copies.append((max(status.st_atime_ns, status.st_mtime_ns), status.st_size, file))
        for _, length, file in sorted(copies):
            if size > self.cache_bytes:
                with contextlib.suppress(OSError):  # in use, on Windows
                    file.unlink()
                    size -= length


def fetch_if_remote(file: Path | RemoteFile) -> Path:
    """Return a file that can be read here: the copy of a remote one."""
    return file.fetch() if isinstance(file, RemoteFile) else file


def size_and_tag(fs: fsspec.AbstractFileSystem, path: str) -> tuple[int | None, str]:
    """Return the size and the tag that a file has now."""
    info = file_info(fs, path)
    return info["size"], version_tag(info)


def file_info(fs: fsspec.AbstractFileSystem, path: str) -> dict[str, Any]:
    """Return what a store says of a file now."""
    fs.invalidate_cache()
    try:
        return fs.info(path)
    except FileNotFoundError as error:  # whatever the reason is, if the store is a web server
        raise (path.startswith(WEB_SCHEMES) and error.__cause__) or error from None


def version_tag(info: dict[str, Any]) -> str:
    """Return what tells the versions of a file apart, by the first of the names that stores have for it."""
    names = ("ETag", "etag", "blob_id", "md5Hash", "Last-Modified", "LastModified", "mtime")
    return next((str(info[name]) for name in names if info.get(name)), "")


def _receive(fs: fsspec.AbstractFileSystem, path: str, stream: BufferedRandom, size: int, request: Callable) -> None:
    """Append the rest of a file, but for the last block of an earlier attempt, which a power cut may have spoilt."""
    here = max(0, stream.seek(0, os.SEEK_END) - DOWNLOAD_BLOCK_BYTES)
    if here < stream.tell():
        stream.truncate(here)
    with progress_bar(f"downloading {path.rpartition('/')[2]}", size, here, delay=1) as bar:
        while here < size:
            block = request(functools.partial(_block, fs, path, here, size))
            here += stream.write(block)
            stream.flush()
            os.fsync(stream.fileno())
            bar.update(len(block))


def _block(fs: fsspec.AbstractFileSystem, path: str, here: int, size: int, attempt: int) -> bytes:
    """Return bytes of a file from `here` on, after each attempt that failed fewer of them."""
    block = fs.cat_file(path, start=here, end=min(size, here + (DOWNLOAD_BLOCK_BYTES >> 2 * min(attempt, 4))))
    if len(block) == size:  # some servers always send all
        block = block[here:]
    if not 0 < len(block) <= size - here:
        raise ConnectionError(f"{len(block):,} bytes came where {size - here:,} are missing")
    return block


def require_disk_space(files: Sequence[Path | RemoteFile], cache: Path, cache_bytes: int) -> None:
    """Raise `UserError` unless all these files can be in the cache together, in `cache_bytes` bytes and on the disk."""
    remote = [file for file in files if isinstance(file, RemoteFile)]
    size = sum(file.size or 0 for file in remote)
    if size > cache_bytes:
        what = (
            f"data.cache_bytes={cache_bytes:,} does not hold the {len(remote):,} files of this dataset, {size:,} bytes"
        )
        raise UserError(f"{what}: raise it, or name fewer files")
    missing = sum(file.size or 0 for file in remote if not file.target.is_file())
    if missing:
        with explain(cache, *CACHE_WRITE_HINT):
            make_cache(cache)
            free = shutil.disk_usage(cache).free
        if missing > free:
            what = f"{cache}: the disk has {free:,} bytes free, and {missing:,} are to be fetched"
            raise OutsideError(f"{what}: make room, or name another folder with data.cache=")


# --- stores: what their libraries raise, and how long to wait for them ---


def open_filesystem(url: str) -> tuple[fsspec.AbstractFileSystem, str]:
    """Return the file system behind a URL, and the path there. Credentials are those of the store's own tools."""
    for driver in ("gcsfs", "s3fs"):
        logging.getLogger(driver).setLevel(logging.CRITICAL)  # whatever is an error is raised as well
    options: dict[str, Any] = {}
    with store_errors(url):
        if url.startswith("http"):
            from aiohttp import ClientTimeout

            timeout = ClientTimeout(sock_connect=STALL_SECONDS, sock_read=STALL_SECONDS)
            raw = {"auto_decompress": False, "headers": {"Accept-Encoding": "identity"}}
            options = {"client_kwargs": {"trust_env": True, "timeout": timeout, **raw}, "encoded": True}
        elif url.startswith("hf:"):
            options = {"block_size": 1}  # what it reads beyond each block that we request for
        return fsspec.core.url_to_fs(url, **options)


def retry(request: Callable[[int], Any], url: str, say: Callable[[str], None], wait: float = math.inf) -> Any:
    """Return the answer to `request(attempt)`; after an error that may pass, request again, with ever longer pauses.

    `wait` is the number of seconds after which to give up, if that is less than `MAX_WAIT_SECONDS`.
    """
    begin, silent = time.monotonic(), True
    for attempt in itertools.count():
        try:
            return request(attempt)
        except (ImportError, MemoryError, *_PROGRAM_ERRORS):
            raise
        except Exception as error:
            waited = time.monotonic() - begin
            if attempt + 1 >= MAX_ATTEMPTS or waited >= min(wait, MAX_WAIT_SECONDS) or _store_hint(error):
                raise
            if silent and waited >= QUIET_SECONDS:
                say(f"{url}: does not answer ({reason(error)}): waiting for it, for about two minutes at most")
                silent = False
        time.sleep(min(15, 2**attempt / 5))


@contextlib.contextmanager
def store_errors(url: str) -> Iterator[None]:
    """Turn what the library of a store raises into one line, unless the disk is full."""
    try:
        yield
    except (UserError, MemoryError, *_PROGRAM_ERRORS):
        raise
    except ImportError as error:
        driver = DRIVERS.get(url.partition("://")[0])
        install = f": pip install {driver}" if driver else ""
        raise UserError(f"{url}: needs a driver that is not installed{install} ({reason(error)})") from None
    except Exception as error:  # each store has a library of its own
        if is_disk_full(error):
            raise
        hint = _store_hint(error)
        kind = UserError if hint else OutsideError
        what = f"{type(error).__name__}: {reason(error)}"
        raise kind(f"{url}: cannot be used ({what}); {hint or OFFLINE_HINT}") from None


def _store_hint(error: Exception) -> str:
    """Return what to do about an error; nothing if it may pass by itself."""
    status = getattr(error, "status", None) or getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, FileNotFoundError) or status in (404, 410):
        return "there is no such file: check the spelling"
    if isinstance(error, PermissionError) or status in (401, 403) or "Credentials" in type(error).__name__:
        return f"{_LOGIN_HINT}, or check the spelling"
    if re.search("range.* not satisfiable", str(error), re.IGNORECASE):
        return "the file has become shorter: run the command again"
    never = isinstance(error, ValueError | IsADirectoryError) or 400 <= (status or 0) < 500
    return "check the spelling" if never and status not in _TRANSIENT_STATUS else ""
