"""Files behind URLs, each pinned by its SHA-256: fetched once, through whatever the network does, and kept."""

import fcntl
import hashlib
import http.client
import os
import re
import sys
import time
from collections.abc import Callable
from io import BufferedRandom
from pathlib import Path
from urllib.parse import unquote

from tqdm import tqdm

from gpt.errors import UserError
from gpt.files import explain_cache, sync

BLOCK = 1 << 14  # bytes to receive at once: the most that is lost with a connection
TIMEOUT = 30  # seconds without a byte
WAITS = (1, 2, 4, 8, 16)  # seconds before further tries, anew whenever bytes have come
FIRST_WAITS = (1, 2)  # until then: most often there is no network at all
OFFLINE = "without a network there are data=python_docs, data=python_stdlib and data=text data.path=FILE"


def fetch(url: str, sha256: str, folder: Path, say: Callable[[str], None] = print) -> Path:
    """The local copy of the file behind an http(s) URL: where it is in `folder` already, no network is touched.

    It bears its name only after its hash was found to be `sha256` (64 hex digits). What is left of a download that was
    cut or killed is gone on from. Raises `UserError` naming the URL or the folder, the reason and the remedy; a full
    disk is an `OSError`.
    """
    if not re.fullmatch("[0-9a-fA-F]{64}", sha256):
        raise UserError(f"data.sha256={sha256!r} is not 64 hex digits: give what sha256sum FILE prints for {url}")
    name = re.sub("[^A-Za-z0-9._-]+", "_", unquote(re.split("[?#]", url)[0].rsplit("/", 1)[-1]))[-100:]
    target = folder / f"{sha256[:16].lower()}-{name}"
    while not target.is_file():
        with explain_cache(folder):
            folder.mkdir(parents=True, exist_ok=True)
            _try_to_complete(target, url, sha256.lower(), say)
    return target


def _try_to_complete(target: Path, url: str, sha256: str, say: Callable[[str], None]) -> None:
    """Make the file, or wait until another process has made it or given up."""
    part = target.with_name(f"{target.name}.part")
    with part.open("a+b") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another process that downloads {url}")
            fcntl.flock(stream, fcntl.LOCK_EX)
        if os.fstat(stream.fileno()).st_nlink == 0:  # it gave up, and removed what we have opened
            return
        try:
            if not target.is_file():
                _download(url, sha256, stream, say)
                stream.flush()
                os.fsync(stream.fileno())
                os.replace(part, target)
                sync(target.parent)
        finally:
            if os.fstat(stream.fileno()).st_size == 0:
                part.unlink(missing_ok=True)


def _download(url: str, sha256: str, stream: BufferedRandom, say: Callable[[str], None]) -> None:
    """Complete a file; where its beginning is of an earlier try and the hash is wrong, make it once more from none."""
    for last in (False, True):
        joined = _receive(url, stream, say)
        stream.seek(0)
        found = hashlib.file_digest(stream, "sha256").hexdigest()
        if found == sha256:
            return
        stream.truncate(0)
        if last or not joined:
            break
    raise UserError(
        f"{url}: its SHA-256 is {found[:16]}... and not {sha256[:16]}...: it has changed, or something else has "
        "answered in its place; check the URL, and data.sha256="
    )


def _receive(url: str, stream: BufferedRandom, say: Callable[[str], None]) -> bool:
    """Append what is missing of a file, in as many tries as it takes; whether the last one went on from another."""
    import requests  # here, for it takes a while
    import urllib3

    broken = urllib3.exceptions.HTTPError  # what reading an answer raises
    waits = iter(FIRST_WAITS)
    most = stream.seek(0, os.SEEK_END)
    while True:
        try:
            return _receive_once(url, stream, say)
        except (requests.RequestException, broken) as error:
            here = stream.seek(0, os.SEEK_END)
            if here > most:  # a server that starts over and gets no further is not tried forever
                most, waits, say = here, iter(WAITS), lambda line: None  # it has been said
            wait = next(waits, None)
            if wait is None or not isinstance(error, (requests.ConnectionError, requests.Timeout, broken)):
                kept = f"{here:,} bytes of it are kept for the next try; " if here else ""
                raise UserError(f"{url}: cannot be downloaded ({_reason(error)}); {kept}{OFFLINE}") from None
        time.sleep(wait)


def _receive_once(url: str, stream: BufferedRandom, say: Callable[[str], None]) -> bool:
    """Append what one answer has of the rest of a file, or write it anew; whether it went on from what was there."""
    import requests

    here = stream.seek(0, os.SEEK_END)
    headers = {"Accept-Encoding": "identity"}  # the file's own bytes
    if here:
        headers["Range"] = f"bytes={here}-"
    with requests.get(url, headers=headers, stream=True, timeout=TIMEOUT) as answer:
        status = answer.status_code
        if here and status == 416:
            return True  # there is no more: the hash tells whether it is complete
        if status not in (200, 206):
            passing = status == 429 or status >= 500
            reason = f"HTTP {status} {http.client.responses.get(status, '')}".rstrip()
            raise (requests.ConnectionError if passing else requests.HTTPError)(reason)
        goes_on = status == 206 and answer.headers.get("Content-Range", "").startswith(f"bytes {here}-")
        if here and not goes_on:
            stream.truncate(0)
            here = stream.seek(0)
        if status == 206 and not goes_on:
            raise requests.ConnectionError("the server sent another part of it")
        answer.raw.enforce_content_length = True  # a body that ends early is an error, also with urllib3 1
        length = answer.raw.length_remaining
        total = None if length is None else here + length
        say(f"downloading {url}" + (f" ({total / 1e6:,.1f} MB)" if total is not None else ""))
        with tqdm(
            total=total, initial=here, unit="B", unit_scale=True, leave=False, disable=not sys.stderr.isatty()
        ) as bar:
            for block in answer.raw.stream(BLOCK, decode_content=False):
                stream.write(block)
                bar.update(len(block))
    return goes_on


def _reason(error: BaseException) -> str:
    """What is at the bottom of an error of the network, without the layers around it."""
    while not getattr(error, "strerror", None) and (inner := error.__cause__ or error.__context__):
        error = inner
    if isinstance(error, http.client.IncompleteRead):
        return "the connection was cut"
    return getattr(error, "strerror", None) or str(error)
