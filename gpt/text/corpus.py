"""Text in: which corpus, which files it is made of, and its documents in pieces of a bounded size."""

import contextlib
import glob
import hashlib
import itertools
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from gpt.errors import UserError, require_choice
from gpt.files import write_text
from gpt.text import python_docs as stdlib
from gpt.text.formats import explain_unreadable, looks_like_text, read_documents
from gpt.text.hub_datasets import fetch_dataset, find_revision
from gpt.text.pieces import cut
from gpt.text.url import fetch

ONE_WORD = ("python_docs", "python_stdlib", "tinyshakespeare")  # corpora that need no more than their name
NAMES = (*ONE_WORD, "text", "huggingface", "mix")
TINY_SHAKESPEARE = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
    "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
)
REMEMBERED = 1 << 20  # bytes: the hash of a file from this size on is kept with its time, so that it is read only once


@dataclass
class DataConfig:
    """Which text to train on, and what of it validates."""

    name: str = "python_docs"  # one of NAMES
    path: Any = None  # text: a file, folder, glob or URL, or a list; mix: a list of those; huggingface: the data set
    weights: list[float] = field(default_factory=list)  # for mix: of each of the paths
    text_field: str = "text"  # for .jsonl, .parquet and data sets: the key or column that holds the text
    errors: str = "strict"  # or replace: U+FFFD in place of what is not UTF-8
    sha256: str | None = None  # for a URL: the hash that its file must have
    subset: str | None = None  # for huggingface: the configuration of the data set
    split: str = "train"  # for huggingface
    revision: str | None = None  # for huggingface: the commit of the data set; by default the newest
    max_bytes: int | None = None  # for huggingface: take no more text than this
    cache: str | None = None  # the folder of prepared text; by default data/cache
    validation_bytes: int = 1_000_000  # validation is a tenth of the text, at most this much
    prompts: list[str] = field(default_factory=lambda: [""])  # sampled through training; "" starts a document

    def __post_init__(self) -> None:
        require_choice("data.name", self.name, NAMES)
        require_choice("data.errors", self.errors, ("strict", "replace"))
        if not all(
            isinstance(p, str | int | float | None) for p in (self.path if isinstance(self.path, list) else [self.path])
        ):
            raise ValueError(f"data.path={self.path!r} is not a path, nor a list of paths")
        if self.name == "text" and not self.paths:
            raise ValueError("data=text needs data.path=FILE: a file, a folder or a quoted glob such as 'books/*.txt'")
        if self.name == "huggingface" and len(self.paths) != 1:
            raise ValueError("data=huggingface needs data.path=NAME: a data set such as roneneldan/TinyStories")
        if sum(path.startswith(("http://", "https://")) for path in self.paths) > 1:
            raise ValueError(
                "data.path has several URLs, and data.sha256 is the hash of one: download the others first"
            )
        if self.name in ONE_WORD and self.paths:
            raise ValueError(f"data.path={self.path!r} is read only with data=text: add it, or leave the path out")
        if self.name == "mix" and (len(self.paths) < 2 or len(set(self.paths)) < len(self.paths)):
            raise ValueError("data=mix needs data.path='[python_docs, FILE]': two different corpora or more")
        if len(self.weights) != (len(self.paths) if self.name == "mix" else 0):
            raise ValueError(f"data.weights={self.weights} does not fit: it takes one for each data.path of data=mix")
        if not all(0 < weight < float("inf") for weight in self.weights):
            raise ValueError(f"data.weights={self.weights} is out of range: each must be above 0")
        if not 1 <= self.validation_bytes <= 10**9:
            raise ValueError(
                f"data.validation_bytes={self.validation_bytes} is out of range: it must be at least 1 and at most "
                "1000000000"
            )
        if self.max_bytes is not None and self.max_bytes < 1:
            raise ValueError(f"data.max_bytes={self.max_bytes} is out of range: it must be at least 1")

    @property
    def paths(self) -> list[str]:
        """`path` as a list."""
        paths = self.path if isinstance(self.path, list) else [self.path]
        return [str(path) for path in paths if path not in (None, "")]


class Piece(NamedTuple):
    """A piece of a document: of a short one all of it."""

    text: str
    begins: bool  # whether it is the document's first
    ends: bool  # whether it is its last


@dataclass(frozen=True)
class Corpus:
    """Files and the way to read documents from them; `builtin` gives further documents that lie in no file.

    `version` names whatever else decides what the documents are.
    """

    name: str
    files: tuple[Path, ...]
    read: Callable[[Path], Iterable[Iterable[str]]]
    builtin: Callable[[], Iterable[Iterable[str]]] = tuple
    version: str = ""

    def documents(self) -> Iterator[str]:
        """Every document that is not empty, always in the same order."""
        for blocks in itertools.chain.from_iterable(map(self._of_source, range(len(self.files) + 1))):
            if document := "".join(blocks):
                yield document

    def pieces(self, source: int = 0) -> Iterator[tuple[int, int, Piece]]:
        """All text in order: (number of the file, number of the piece in it, piece), from file number `source` on."""
        for number in range(source, len(self.files) + 1):
            count = 0
            for blocks in self._of_source(number):
                texts = cut(blocks)
                text, begins = next(texts, None), True
                while text is not None:
                    following = next(texts, None)
                    yield number, count, Piece(text, begins, following is None)
                    text, begins = following, False
                    count += 1

    def _of_source(self, number: int) -> Iterable[Iterable[str]]:
        return self.read(self.files[number]) if number < len(self.files) else self.builtin()

    def stamp(self) -> list[tuple[int, int]]:
        """Size and time of change of each file: what is other once one of them has changed."""
        return [(status.st_size, status.st_mtime_ns) for status in map(_status, self.files)]

    def sha256(self, cache: Path) -> str:
        """The hash of all that decides the documents: never stale, and not read again while a large file stands still.

        The hashes of large files are remembered in `cache` beside their size and times.
        """
        memory = _HashMemory(cache / "hashes.json")
        digest = hashlib.sha256(f"{self.name}\n{self.version}\n".encode())
        with ThreadPoolExecutor() as threads:
            for file, file_digest in zip(self.files, threads.map(memory.sha256, self.files), strict=True):
                digest.update(f"{''.join(file.suffixes)}\n{file_digest}\n".encode("utf-8", "replace"))
        memory.save()
        return digest.hexdigest()


def _status(file: Path) -> os.stat_result:
    with explain_unreadable(file):
        return file.stat()


class _HashMemory:
    """SHA-256 of files, with those of large ones kept from one process to the next.

    A file whose size, inode and times of change are those of before is taken to be the same. One that has changed in
    the last seconds is not kept: it could change again without showing.
    """

    def __init__(self, store: Path):
        self._store = store
        self._changed = False
        try:
            stored = json.loads(store.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            stored = {}
        entries = stored.items() if isinstance(stored, dict) else ()
        self._known = {name: entry for name, entry in entries if _is_remembered(entry)}

    def sha256(self, file: Path) -> str:
        with explain_unreadable(file), file.open("rb") as stream:
            status = os.fstat(stream.fileno())
            stamp = [status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns]
            settled = max(status.st_mtime, status.st_ctime) < time.time() - 2
            name = str(file.resolve())
            if status.st_size >= REMEMBERED and self._known.get(name, [None])[0] == stamp:
                return self._known[name][1]
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        if status.st_size >= REMEMBERED and settled:
            self._known[name] = [stamp, digest]
            self._changed = True
        return digest

    def save(self) -> None:
        """Keep what is new; where the folder cannot be written, it will be computed again."""
        if self._changed:
            with contextlib.suppress(OSError):
                self._store.parent.mkdir(parents=True, exist_ok=True)
                write_text(self._store, json.dumps(self._known))


def pinned(config: DataConfig, cache: Path) -> DataConfig:
    """The configuration with the commit of a hub's data set in it, so that a run can continue on the same text."""
    if config.name != "huggingface":
        return config
    return replace(config, revision=find_revision(config, cache / "downloads"))


def _is_remembered(entry: object) -> bool:
    """Whether an entry of the store is one of ours: a stamp and a hash."""
    return isinstance(entry, list) and len(entry) == 2 and bool(re.fullmatch("[0-9a-f]{64}", str(entry[1])))


def open_corpus(config: DataConfig, cache: Path, say: Callable[[str], None] = print) -> Corpus:
    """The corpus that the configuration names, fetched where need be. `UserError` where there is nothing to read."""
    if config.name == "python_stdlib":
        return Corpus("python_stdlib", stdlib.files(), _each(stdlib.read_source))
    if config.name == "python_docs":
        builtin = _each(lambda _: stdlib.builtin_docs())
        return Corpus(
            "python_docs", stdlib.files(), _each(stdlib.read_docstrings), lambda: builtin(Path()), sys.version
        )
    downloads = cache / "downloads"
    if config.name == "tinyshakespeare":
        files: tuple[Path, ...] = (fetch(*TINY_SHAKESPEARE, downloads, say),)
    elif config.name == "huggingface":
        files = fetch_dataset(config, downloads, say)
    else:
        found: dict[Path, None] = {}  # each file once, in the order of the paths
        for path in config.paths:
            if re.match(r"https?://", path):
                if config.sha256 is None:
                    raise UserError(f"data.path={path!r} needs the hash of its file: data.sha256=")
                found[fetch(path, config.sha256, downloads, say)] = None
            else:
                found |= dict.fromkeys(find_text_files(path, say))
        files = tuple(found)

    def read(file: Path) -> Iterator[Iterable[str]]:
        return read_documents(file, "text" if config.name == "huggingface" else config.text_field, config.errors)

    return Corpus(config.name, files, read, version=f"{config.text_field}\n{config.errors}")


def _each(read: Callable[[Path], Iterable[str]]) -> Callable[[Path], Iterator[Iterable[str]]]:
    return lambda file: ((document,) for document in read(file))


def find_text_files(path: str, say: Callable[[str], None] = print) -> tuple[Path, ...]:
    """The files that `path` names: itself, every text file below a folder, or what a glob matches; in sorted order.

    In a folder, hidden, empty and binary files are passed over; a file that is named must be text.
    """
    try:
        root = Path(path).expanduser()
        root.stat()
    except (FileNotFoundError, ValueError):
        pass  # it may be a glob
    except (OSError, RuntimeError) as error:
        raise UserError(f"data.path={path!r} cannot be read ({getattr(error, 'strerror', None) or error})") from None
    if root.is_file():
        return (root,)
    if root.is_dir():
        inside = (p for p in sorted(root.rglob("*")) if p.is_file())
        visible = [p for p in inside if not any(part.startswith(".") for part in p.relative_to(root).parts)]
        is_text = {p: looks_like_text(p) for p in visible}
        found = [p for p in visible if is_text[p]]
        if others := [p for p in visible if not is_text[p]]:
            some = ", ".join(str(p.relative_to(root)) for p in others[:3]) + ", ..." * (len(others) > 3)
            say(f"passing over {len(others)} of {len(visible)} files below {root}, empty or not text: {some}")
    else:
        found = [Path(name) for name in sorted(glob.glob(str(root), recursive=True)) if Path(name).is_file()]
    if not found:
        what = (
            "a folder without text files" if root.is_dir() else "neither a file, a folder, nor a glob that matches any"
        )
        raise UserError(f"data.path={path!r} is {what}: give the path of your text")
    return tuple(found)
