"""Prepared text in shards, on a disk or behind a URL: fetched in groups, the next one while this one is used."""

import contextlib
import errno
import hashlib
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import fsspec
import numpy as np

from gpt.console import say
from gpt.errors import OutsideError, UserError
from gpt.files import mark_as_cache, replacing, sync_parents
from gpt.text.cache import make_cache, sealed, unsealed
from gpt.text.corpus.remote import WAIT, Remote, explain_store, local, open_store, retried

MEND = "prepare it again, in an empty folder"
GROUP = 160  # files, at most, whose windows are shuffled together: as many as ten shards have
OPEN_FILES = 4096  # at once, at most: of two groups, and all others


class Store:
    """A folder of prepared text: a local one, or behind a URL. Files come into it whole or not at all."""

    def __init__(self, url: str):
        self.url = url.rstrip("/")
        self._fs, self._path = open_store(self.url)
        self.is_local = isinstance(self._fs, fsspec.implementations.local.LocalFileSystem)

    def read(self, name: str) -> bytes | None:
        """Return the content of a small file; None if there is none."""

        def content(_: int) -> bytes | None:
            try:
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
            raise OutsideError(f"{self.url}: is damaged ({error}); {MEND}") from None

    def write(self, name: str, content: bytes) -> None:
        """Put a file into the folder, in place of an older one."""
        with explain_store(f"{self.url}/{name}"):
            if self.is_local:
                folder = Path(self._path)
                if not folder.is_dir():
                    folder.mkdir(parents=True, exist_ok=True)
                    sync_parents(folder)
                mark_as_cache(folder)
                with replacing(folder / name) as temporary:
                    temporary.write_bytes(content)
            else:
                self._ask(lambda _: self._fs.pipe_file(f"{self._path}/{name}", content), name)

    def write_json(self, name: str, content: dict) -> None:
        """Put a small file into the folder that notices damage."""
        self.write(name, sealed(content).encode())

    def sizes(self) -> dict[str, int]:
        """Return the size of each file in the folder."""
        self._fs.invalidate_cache()
        found = self._ask(lambda _: self._fs.find(self._path, detail=True))
        return {name.rsplit("/", 1)[-1]: info["size"] for name, info in found.items()}

    def _ask(self, ask: Callable[[int], Any], name: str = "") -> Any:
        """Return an answer of the file system; wait for one that is away, unless it is this machine's own."""
        url = f"{self.url}/{name}".rstrip("/")
        with explain_store(url):
            return retried(ask, url, say, 0 if self.is_local else WAIT)

    def file(self, name: str, size: int, sha256: str, cache: Path, room: int) -> Path | Remote:
        """Return a file of the folder, which `local` makes one to open."""
        if self.is_local:
            return Path(self._path) / name
        return Remote(f"{self.url}/{name}", size, "", cache, room, sha256)


def check(file: Path, tokens: np.ndarray, sha256: str, vocab_size: int, cache: Path) -> None:
    """Raise `ValueError` unless a file's tokens have this hash and are in the vocabulary.

    The cache remembers, by an empty file, that they are; the file is read again if its size or time has changed.
    """
    status = file.stat()
    stamp = sha256, vocab_size, str(file.resolve()), status.st_size, status.st_ino, status.st_mtime_ns
    known = cache / "checked" / hashlib.sha256(repr(stamp).encode()).hexdigest()
    if known.exists():
        return
    if hashlib.sha256(tokens.data).hexdigest() != sha256:
        raise ValueError("its SHA-256 is not the one in the manifest")
    if (highest := tokens.max()) >= vocab_size:
        raise ValueError(f"it has the id {highest:,}, and the vocabulary {vocab_size:,} entries")
    with contextlib.suppress(OSError):  # the next process checks it again
        make_cache(cache)
        known.parent.mkdir(exist_ok=True)
        known.touch()


class Circle:
    """Several arrays of tokens, one after the other, to be indexed as one."""

    def __init__(self, parts: Sequence[np.ndarray]):
        self._parts = parts
        self._ends = np.cumsum([len(part) for part in parts])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, positions: np.ndarray) -> np.ndarray:
        """Return the tokens at positions of any shape."""
        which = np.searchsorted(self._ends, positions, side="right")
        found = np.empty(positions.shape, self._parts[0].dtype)
        for i in np.unique(which):
            here = which == i
            found[here] = self._parts[i][positions[here].astype(np.int64) - (self._ends[i] - len(self._parts[i]))]
        return found


class Shards:
    """The training tokens of a corpus in several files, of which three groups at a time are needed on this machine.

    Of n groups, each has every n-th file, and so resembles the whole text.
    """

    def __init__(
        self,
        files: Sequence[Path | Remote],
        lengths: Sequence[int],
        dtype: np.dtype,
        check: Callable[[int, Path, np.ndarray], None] = lambda shard, file, tokens: None,
    ):
        number = -(-len(files) // GROUP)
        self.groups = [range(first, len(files), number) for first in range(number)]
        self.sizes = np.array([sum(lengths[shard] for shard in group) for group in self.groups], dtype=np.uint64)
        self.lengths = lengths
        self._files = files
        self._dtype = dtype
        self._check = check
        self._open: dict[int, Circle] = {}
        _allow_open_files()

    def __len__(self) -> int:
        return sum(self.lengths)

    def __getitem__(self, shard: int) -> np.ndarray:
        """Open a shard, after fetching it if need be, and check it unless it is known: (tokens,), on disk."""
        try:
            file = local(self._files[shard])
        except UserError as error:  # such as a name that is gone, which no user has given
            raise OutsideError(str(error)) from None
        try:
            if file.resolve().parent != file.parent.resolve():
                raise ValueError("it is a link out of its folder")
            found = np.asarray(np.memmap(file, self._dtype, mode="r"))
            if len(found) != self.lengths[shard]:
                raise ValueError(f"it has {len(found):,} tokens where the manifest says {self.lengths[shard]:,}")
            self._check(shard, file, found)
        except (OSError, ValueError) as error:
            remedy = "delete it" if isinstance(self._files[shard], Remote) else "put an intact copy in its place"
            if isinstance(error, OSError) and error.errno == errno.EMFILE:
                remedy = f"allow {OPEN_FILES} with ulimit -n"
            raise OutsideError(f"{file}: cannot be read ({error}); {remedy}, and run the command again") from None
        return found

    def circle(self, group: int, following: int) -> Circle:
        """Return the shards of a group as one text, and begin to fetch the group that follows."""
        if group not in self._open:
            circle = Circle([self[shard] for shard in self.groups[group]])
            self._open = dict([*self._open.items()][-1:]) | {group: circle}
            threading.Thread(target=self._fetch, args=(following,), daemon=True).start()
        return self._open[group]

    def _fetch(self, group: int) -> None:
        with contextlib.suppress(UserError, OSError):  # which the one who needs the shard meets again
            for shard in self.groups[group]:
                self[shard]


def _allow_open_files() -> None:
    """Let this process have as many files open as it needs, if it may: macOS begins with 256."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource  # which Windows lacks

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
        if soft != resource.RLIM_INFINITY and soft < wanted:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
