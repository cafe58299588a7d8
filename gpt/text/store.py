"""A folder on this machine or behind a URL, into which files come whole or not at all; what its library raises."""

import contextlib
import itertools
import logging
import math
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec

from gpt.console import say
from gpt.errors import OutsideError, UserError, is_disk_full, reason
from gpt.files import explain, home_path, replacing, sync_parents
from gpt.text.cache import sealed, unsealed
from gpt.text.corpus.config import is_url

ATTEMPTS = 14  # at a request, with a pause after each that doubles up to 15 seconds: two minutes in all
WAIT = 120  # seconds after which no attempt begins, where each of them takes long
QUIET = 3  # seconds before a line says that a store does not answer
PATIENCE = 30  # seconds without a byte
DRIVERS = {"s3": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "hf": "huggingface_hub"}  # scheme -> package
OFFLINE = "without a network, use data=python_docs, data=python_stdlib or data.path=FILE"
MEND = "put an intact copy in its place, or prepare the text again, in an empty folder"
_PASSING = (408, 425, 429)  # requests that a server refuses for now: too slow, too early, too many
_LOGIN = "give the credentials as to the store's own tools, such as aws, gcloud and hf"
_BUGS = (AssertionError, AttributeError, NameError, TypeError)  # of a program, which are no user's business


class Store:
    """A folder of few and large files; `folder` is its path if it is on this machine.

    `mend` says what to do about damage.
    """

    def __init__(self, url: str | Path, mend: str = MEND):
        self.mend = mend
        self.url = str(url).rstrip("/") or "/"
        if is_url(self.url):
            self._fs, self._path = open_store(self.url)
            is_local = isinstance(self._fs, fsspec.implementations.local.LocalFileSystem)
            self.folder = Path(self._path) if is_local else None
        else:
            self.folder = home_path(self.url).absolute()

    def read(self, name: str) -> bytes | None:
        """Return the content of a small file; None if there is none."""

        def content() -> bytes | None:
            try:
                if self.folder:
                    return (self.folder / name).read_bytes()
                self._fs.invalidate_cache()  # of an earlier listing, which may lack the file
                return self._fs.cat_file(f"{self._path}/{name}")
            except FileNotFoundError:
                return None

        return self._ask(content, name)

    def read_json(self, name: str) -> dict | None:
        """Return what `write_json` wrote; `UserError` if it is damaged."""
        content = self.read(name)
        try:
            return None if content is None else unsealed(content.decode("utf-8"), name)
        except ValueError as error:
            raise OutsideError(f"{self.url}: is damaged ({error}); {self.mend}") from None

    def write(self, name: str, content: bytes) -> None:
        """Put a small file into the folder, in place of an older one."""
        if self.folder is None:
            return self._ask(lambda: self._fs.pipe_file(f"{self._path}/{name}", content), name)
        with self._replacing(name) as temporary:
            temporary.write_bytes(content)

    def write_json(self, name: str, content: dict) -> None:
        """Put a small file into the folder that notices damage."""
        self.write(name, sealed(content).encode())

    def delete(self, name: str) -> None:
        """Delete a file of the folder."""
        self._ask(
            lambda: (self.folder / name).unlink() if self.folder else self._fs.rm_file(f"{self._path}/{name}"), name
        )

    def sizes(self) -> dict[str, int]:
        """Return the size of each file in the folder."""

        def found() -> dict[str, int]:
            if self.folder:
                return {file.name: file.stat().st_size for file in self.folder.iterdir()}
            self._fs.invalidate_cache()
            files = self._fs.find(self._path, detail=True)
            return {name.rsplit("/", 1)[-1]: info["size"] for name, info in files.items()}

        return self._ask(found)

    def _ask(self, ask: Callable[[], Any], name: str = "") -> Any:
        """Return an answer; wait for a store that is away."""
        url = f"{self.url}/{name}".rstrip("/")
        if self.folder:
            with explain(Path(url)):
                return ask()
        with explain_store(url):
            return retried(lambda _: ask(), url, say)

    @contextlib.contextmanager
    def _replacing(self, name: str) -> Iterator[Path]:
        assert self.folder is not None
        if not self.folder.is_dir():
            self.folder.mkdir(parents=True, exist_ok=True)
            sync_parents(self.folder)
        with replacing(self.folder / name) as temporary:
            yield temporary


def open_store(url: str) -> tuple[fsspec.AbstractFileSystem, str]:
    """Return the file system behind a URL, and the path there. Credentials are those of the store's own tools."""
    for driver in ("gcsfs", "s3fs"):
        logging.getLogger(driver).setLevel(logging.CRITICAL)  # whatever is an error is raised as well
    options: dict[str, Any] = {}
    with explain_store(url):
        if url.startswith("http"):
            from aiohttp import ClientTimeout

            timeout = ClientTimeout(sock_connect=PATIENCE, sock_read=PATIENCE)
            raw = {"auto_decompress": False, "headers": {"Accept-Encoding": "identity"}}
            options = {"client_kwargs": {"trust_env": True, "timeout": timeout, **raw}, "encoded": True}
        elif url.startswith("hf:"):
            options = {"block_size": 1}  # what it reads beyond each block that we ask for
        return fsspec.core.url_to_fs(url, **options)


def retried(ask: Callable[[int], Any], url: str, say: Callable[[str], None], wait: float = math.inf) -> Any:
    """Return the answer to `ask(attempt)`; after an error that may pass, ask again, with ever longer pauses.

    `wait` is the number of seconds after which to give up, if that is less than `WAIT`.
    """
    begin, silent = time.monotonic(), True
    for attempt in itertools.count():
        try:
            return ask(attempt)
        except (ImportError, MemoryError, *_BUGS):
            raise
        except Exception as error:
            waited = time.monotonic() - begin
            if attempt + 1 >= ATTEMPTS or waited >= min(wait, WAIT) or _remedy(error):
                raise
            if silent and waited >= QUIET:
                say(f"{url}: does not answer ({reason(error)}): waiting for it, for about two minutes at most")
                silent = False
        time.sleep(min(15, 2**attempt / 5))


@contextlib.contextmanager
def explain_store(url: str) -> Iterator[None]:
    """Turn what the library of a store raises into one line, unless the disk is full."""
    try:
        yield
    except (UserError, MemoryError, *_BUGS):
        raise
    except ImportError as error:
        driver = DRIVERS.get(url.partition("://")[0])
        install = f": pip install {driver}" if driver else ""
        raise UserError(f"{url}: needs a driver that is not installed{install} ({reason(error)})") from None
    except Exception as error:  # each store has a library of its own
        if is_disk_full(error):
            raise
        remedy = _remedy(error)
        kind = UserError if remedy else OutsideError
        what = f"{type(error).__name__}: {reason(error)}"
        raise kind(f"{url}: cannot be used ({what}); {remedy or OFFLINE}") from None


def _remedy(error: Exception) -> str:
    """Return what to do about an error; nothing if it may pass by itself."""
    status = getattr(error, "status", None) or getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, FileNotFoundError) or status in (404, 410):
        return "there is no such file: check the spelling"
    if isinstance(error, PermissionError) or status in (401, 403) or "Credentials" in type(error).__name__:
        return f"{_LOGIN}, or check the spelling"
    if re.search("range.* not satisfiable", str(error), re.IGNORECASE):
        return "the file has become shorter: run the command again"
    never = isinstance(error, ValueError | IsADirectoryError) or 400 <= (status or 0) < 500
    return "check the spelling" if never and status not in _PASSING else ""
