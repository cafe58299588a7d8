"""Files behind URLs, pinned by SHA-256: downloaded once, resumed after interruptions, and cached."""

import hashlib
import http.client
import os
import re
import time
from collections.abc import Callable
from io import BufferedRandom
from pathlib import Path
from urllib.parse import unquote

from gpt.errors import UserError
from gpt.files import publish
from gpt.text.cache import explain_unwritable, one_at_a_time
from gpt.text.progress_bar import progress_bar

BLOCK = 1 << 14  # bytes to receive at once: the most that a broken connection loses
TIMEOUT = 30  # seconds without a byte
WAITS = (1, 2, 4, 8, 16)  # seconds before each retry; starts over whenever bytes arrive
FIRST_WAITS = (1, 2)  # before the first byte: usually there is no network at all
OFFLINE = "without a network, use data=python_docs, data=python_stdlib or data=text data.path=FILE"


def fetch(url: str, sha256: str, folder: Path, say: Callable[[str], None] = print) -> Path:
    """Return the local copy of a file behind an http(s) URL; no network is needed if `folder` has it already.

    The file gets its name only once its hash is known to be `sha256` (64 hex digits). An interrupted download resumes.
    Raises `UserError` naming the URL or the folder, the reason and the remedy.
    """
    if not re.fullmatch("[0-9a-fA-F]{64}", sha256):
        raise UserError(f"data.sha256={sha256!r} is not 64 hex digits: give what sha256sum FILE prints for {url}")
    name = re.sub("[^A-Za-z0-9._-]+", "_", unquote(re.split("[?#]", url)[0].rsplit("/", 1)[-1]))[-100:]
    target = folder / f"{sha256[:16].lower()}-{name}"
    if target.is_file():
        return target
    with one_at_a_time(folder / f".{target.name}.lock", f"downloading {url}", say), explain_unwritable(folder):
        if not target.is_file():  # another process may have finished it while we waited
            part = folder / f"{target.name}.part"
            try:
                with part.open("a+b") as stream:
                    _download(url, sha256.lower(), stream, say)
                publish(part, target)
            finally:
                if part.exists() and part.stat().st_size == 0:
                    part.unlink()
    return target


def _download(url: str, sha256: str, stream: BufferedRandom, say: Callable[[str], None]) -> None:
    """Complete a file; if it resumed an earlier attempt and the hash is wrong, download it again from the start."""
    for last in (False, True):
        resumed = _receive(url, stream, say)
        stream.seek(0)
        found = hashlib.file_digest(stream, "sha256").hexdigest()
        if found == sha256:
            return
        stream.truncate(0)
        if last or not resumed:
            break
    raise UserError(
        f"{url}: the SHA-256 is {found[:16]}..., not {sha256[:16]}...: the file has changed, or another server "
        "answered; check the URL and data.sha256="
    )


def _receive(url: str, stream: BufferedRandom, say: Callable[[str], None]) -> bool:
    """Append the rest of a file, in as many attempts as it takes; return whether the last one resumed another."""
    import requests  # here, because it imports slowly
    import urllib3

    broken = urllib3.exceptions.HTTPError  # raised while reading an answer
    waits = iter(FIRST_WAITS)
    most = stream.seek(0, os.SEEK_END)
    while True:
        try:
            return _receive_once(url, stream, say)
        except (requests.RequestException, broken) as error:
            here = stream.seek(0, os.SEEK_END)
            if here > most:  # so that a server that starts over and gets no further is not retried forever
                most, waits, say = here, iter(WAITS), lambda line: None  # announce the download only once
            wait = next(waits, None)
            if wait is None or not isinstance(error, (requests.ConnectionError, requests.Timeout, broken)):
                kept = f"{here:,} bytes are kept for the next attempt; " if here else ""
                raise UserError(f"{url}: cannot be downloaded ({_reason(error)}); {kept}{OFFLINE}") from None
        time.sleep(wait)


def _receive_once(url: str, stream: BufferedRandom, say: Callable[[str], None]) -> bool:
    """Append what one answer holds of the rest of a file, or write it anew; return whether it resumed."""
    import requests

    here = stream.seek(0, os.SEEK_END)
    headers = {"Accept-Encoding": "identity"}  # the file's own bytes
    if here:
        headers["Range"] = f"bytes={here}-"
    with requests.get(url, headers=headers, stream=True, timeout=TIMEOUT) as answer:
        status = answer.status_code
        if here and status == 416:
            return True  # nothing is left to send: the hash tells whether the file is complete
        if status not in (200, 206):
            temporary = status == 429 or status >= 500
            reason = f"HTTP {status} {http.client.responses.get(status, '')}".rstrip()
            raise (requests.ConnectionError if temporary else requests.HTTPError)(reason)
        resumes = status == 206 and answer.headers.get("Content-Range", "").startswith(f"bytes {here}-")
        if here and not resumes:
            stream.truncate(0)
            here = stream.seek(0)
        if status == 206 and not resumes:
            raise requests.ConnectionError("the server sent the wrong part")
        answer.raw.enforce_content_length = True  # so that a body that ends early is an error in urllib3 1 too
        length = answer.raw.length_remaining
        total = None if length is None else here + length
        say(f"downloading {url}" + (f" ({total / 1e6:,.1f} MB)" if total is not None else ""))
        with progress_bar(total, here) as bar:
            for block in answer.raw.stream(BLOCK, decode_content=False):
                stream.write(block)
                bar.update(len(block))
    return resumes


def _reason(error: BaseException) -> str:
    """Return the innermost reason of a network error, without the layers around it."""
    while not getattr(error, "strerror", None) and (inner := error.__cause__ or error.__context__):
        error = inner
    if isinstance(error, http.client.IncompleteRead):
        return "the connection was cut"
    return getattr(error, "strerror", None) or str(error)
