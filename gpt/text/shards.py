"""Training tokens in files, on a disk or behind a URL: fetched in groups, the next one while this one is used."""

import contextlib
import errno
import hashlib
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from gpt.errors import OutsideError, UserError
from gpt.text.cache import make_cache
from gpt.text.corpus.remote import Remote, local

GROUP = 160  # files, at most, whose windows are shuffled together: as many as ten shards have
OPEN_FILES = 4096  # at once, at most: of two groups, and all others


def check(file: Path, sha256: str, dtype: np.dtype, vocab_size: int, cache: Path | None) -> None:
    """Raise `ValueError` unless a file's tokens have this hash and are in the vocabulary.

    The cache, if there is one, remembers by an empty file that they are; the file is read again if its size or time has
    changed.
    """
    status, digest, highest = file.stat(), hashlib.sha256(), 0
    stamp = sha256, vocab_size, str(file.resolve()), status.st_size, status.st_ino, status.st_mtime_ns
    known = cache and cache / "checked" / hashlib.sha256(repr(stamp).encode()).hexdigest()
    if known and known.exists():
        return
    with file.open("rb") as stream:
        while block := stream.read(1 << 22):
            digest.update(block)
            highest = max(highest, int(np.frombuffer(block, dtype).max()))
    if digest.hexdigest() != sha256:
        raise ValueError("its SHA-256 is not the one in the manifest")
    if highest >= vocab_size:
        raise ValueError(f"it has the id {highest:,}, and the vocabulary {vocab_size:,} entries")
    if cache and known:
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
    """The tokens of a text in one file or many, of which three groups at a time are needed on this machine.

    Of n groups, each has every n-th file, and so resembles the whole text. A file is checked when it is first opened,
    by its size and by `check`; `mend` is what to do about damage.
    """

    def __init__(
        self,
        files: Sequence[Path | Remote],
        lengths: Sequence[int],
        dtype: np.dtype,
        check: Callable[[int, Path], None] = lambda shard, file: None,
        mend: str = "",
    ):
        number = -(-len(files) // GROUP)
        self.groups = [range(first, len(files), number) for first in range(number)]
        self.sizes = np.array([sum(lengths[shard] for shard in group) for group in self.groups], dtype=np.uint64)
        self.lengths = lengths
        self._files = files
        self._dtype = dtype
        self._check = check
        self._mend = mend
        self._checked: set[int] = set()
        self._open: dict[int, np.ndarray | Circle] = {}
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
            if shard not in self._checked:
                self._check(shard, file)
                self._checked.add(shard)
        except (OSError, ValueError) as error:
            too_many = isinstance(error, OSError) and error.errno == errno.EMFILE
            remedy = f"allow {OPEN_FILES} with ulimit -n, and run the command again" if too_many else self._mend
            raise OutsideError(f"{file}: cannot be read ({error}); {remedy}") from None
        return found

    def circle(self, group: int, following: int) -> np.ndarray | Circle:
        """Return the files of a group as one text, and begin to fetch the group that follows."""
        if group not in self._open:
            parts = [self[shard] for shard in self.groups[group]]
            circle = Circle(parts) if len(parts) > 1 else parts[0]
            self._open = dict([*self._open.items()][-1:]) | {group: circle}
            if following != group:
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
