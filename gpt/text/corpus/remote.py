"""Files behind URLs (s3://, gs://, hf://, https://): listed, fetched one at a time, checked, kept in bounded disk."""

import contextlib
import functools
import hashlib
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from io import BufferedRandom
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote

import fsspec

from gpt.console import progress_bar, say
from gpt.errors import UserError
from gpt.files import explain, publish
from gpt.text.cache import UNWRITABLE, make_cache, one_at_a_time
from gpt.text.store import explain_store, open_store, retried

BLOCK = 1 << 23  # bytes to ask for at once; after each attempt that failed, a quarter of that
ABANDONED = 3600  # seconds after which nobody fetches an unfinished file any more
WEB = ("http://", "https://")


@dataclass(frozen=True)
class Remote:
    """A file behind a URL as its store lists it, and where its local copy is kept.

    `tag` is what the store says to tell versions apart, such as the ETag. If the `sha256` is known, that is checked
    instead, and the store is asked for nothing once there is a copy.
    """

    url: str
    size: int | None
    tag: str
    cache: Path
    room: int  # bytes that all copies together may take
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

    def local(self) -> Path:
        """Return the local copy, whole and checked, after fetching it if need be. An interrupted download resumes.

        Raises `UserError` naming the URL or the folder, the reason and the remedy.
        """
        target = self.target
        with explain(target.parent, *UNWRITABLE):
            make_cache(self.cache)
            with one_at_a_time(target.with_name(f".{target.name}.lock"), f"downloading {self.url}", self.say):
                if not target.is_file():
                    part = target.with_name(f"{target.name}.part")
                    self._download(part)
                    publish(part, target)
                # `_make_room` knows by it what is in use; the time of the content stays, by which a change is noticed.
                os.utime(target, ns=(time.time_ns(), target.stat().st_mtime_ns))
        return target

    def _download(self, part: Path) -> None:
        """Append the rest of the file to what an earlier attempt left, and check the whole."""
        ask = functools.partial(retried, url=self.url, say=self.say)
        fs, path = open_store(self.url)
        with explain_store(self.url):
            size, tag = (self.size, self.tag) if self.size is not None else ask(lambda _: described(fs, path))
            whole = b"" if size is not None else ask(lambda _: fs.cat_file(path))  # of a length that nobody tells
        self._make_room(part, len(whole) if size is None else size)
        with part.open("a+b") as stream, explain_store(self.url):
            if size is None:
                stream.truncate(0)
                stream.write(whole)
            else:
                _receive(fs, path, stream, size, ask)
            stream.seek(0)
            if self.sha256:
                found, wanted = hashlib.file_digest(stream, "sha256").hexdigest(), self.sha256.lower()
                what, remedy = f"the SHA-256 is {found[:16]}..., not {wanted[:16]}...", " and data.sha256="
            else:
                found, wanted = repr(ask(lambda _: described(fs, path))), repr((size, tag))
                what, remedy = f"size and tag are {found}, and were {wanted}", ""
            if found != wanted:
                stream.truncate(0)
                raise UserError(
                    f"{self.url}: {what}: the file has changed, or another server answered; check the URL{remedy}, and "
                    "run the command again"
                )

    def _make_room(self, part: Path, size: int) -> None:
        """Delete the copies that were used longest ago, until `size` bytes fit beside the others."""
        if size > self.room:
            raise UserError(f"data.cache_bytes={self.room} does not hold {self.url}, of {size:,} bytes: raise it")
        copies = []
        for file in part.parent.iterdir():
            with contextlib.suppress(OSError):  # another process has deleted it
                status = file.stat()
                if file != part and not file.name.startswith("."):  # which locks and listings do
                    size += status.st_size
                    if file.suffix != ".part" or status.st_mtime < time.time() - ABANDONED:
                        copies.append((max(status.st_atime_ns, status.st_mtime_ns), status.st_size, file))
        for _, length, file in sorted(copies):
            if size > self.room:
                with contextlib.suppress(OSError):  # in use, on Windows
                    file.unlink()
                    size -= length


def local(file: Path | Remote) -> Path:
    """Return a file that can be read here: the copy of a remote one."""
    return file.local() if isinstance(file, Remote) else file


def described(fs: fsspec.AbstractFileSystem, path: str) -> tuple[int | None, str]:
    """Return the size and the tag that a file has now."""
    info = info_of(fs, path)
    return info["size"], tag_of(info)


def info_of(fs: fsspec.AbstractFileSystem, path: str) -> dict[str, Any]:
    """Return what a store says of a file now."""
    fs.invalidate_cache()
    try:
        return fs.info(path)
    except FileNotFoundError as error:  # whatever the reason is, if the store is a web server
        raise (path.startswith(WEB) and error.__cause__) or error from None


def tag_of(info: dict[str, Any]) -> str:
    """Return what tells the versions of a file apart, by the first of the names that stores have for it."""
    names = ("ETag", "etag", "blob_id", "md5Hash", "Last-Modified", "LastModified", "mtime")
    return next((str(info[name]) for name in names if info.get(name)), "")


def _receive(fs: fsspec.AbstractFileSystem, path: str, stream: BufferedRandom, size: int, ask: Callable) -> None:
    """Append the rest of a file, but for the last block of an earlier attempt, which a power cut may have spoilt."""
    here = max(0, stream.seek(0, os.SEEK_END) - BLOCK)
    if here < stream.tell():
        stream.truncate(here)
    with progress_bar(f"downloading {path.rpartition('/')[2]}", size, here, delay=1) as bar:
        while here < size:
            block = ask(functools.partial(_block, fs, path, here, size))
            here += stream.write(block)
            stream.flush()
            os.fsync(stream.fileno())
            bar.update(len(block))


def _block(fs: fsspec.AbstractFileSystem, path: str, here: int, size: int, attempt: int) -> bytes:
    """Return bytes of a file from `here` on, after each attempt that failed fewer of them."""
    block = fs.cat_file(path, start=here, end=min(size, here + (BLOCK >> 2 * min(attempt, 4))))
    if len(block) == size:  # some servers always send all
        block = block[here:]
    if not 0 < len(block) <= size - here:
        raise ConnectionError(f"{len(block):,} bytes came where {size - here:,} are missing")
    return block
