"""Corpora: which text to train on, which files hold it, and its documents in pieces of bounded size."""

import functools
import glob
import hashlib
import itertools
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from gpt.errors import UserError, require_choice
from gpt.text import python_docs
from gpt.text.formats import explain_unreadable, looks_like_text, read_documents, tables_among
from gpt.text.hashes import HashMemory
from gpt.text.hub_datasets import Dataset, fetch_dataset, find_revision
from gpt.text.pieces import cut
from gpt.text.url import fetch

ONE_WORD = ("python_docs", "python_stdlib", "tinyshakespeare")  # corpora that need no path
NAMES = (*ONE_WORD, "text", "huggingface", "mix")
TINY_SHAKESPEARE = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
    "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
)
_CACHED = re.compile(r"hashes\.json|tokenizer-[0-9a-f]{16}\.json|downloads|\.preparing-.*")


@dataclass
class DataConfig:
    """Which text to train on, and how much of it is for validation."""

    name: str = "python_docs"  # one of NAMES
    path: Any = None  # text: a file, folder, glob or URL, or a list; mix: a list of those; huggingface: the data set
    weights: list[float] = field(default_factory=list)  # mix: one for each path
    text_field: str = "text"  # the key or column that holds the text in .jsonl, .parquet and data sets
    errors: str = "strict"  # or replace: U+FFFD for bytes that are not UTF-8
    sha256: str | None = None  # the hash that the file behind a URL must have
    subset: str | None = None  # huggingface: the configuration of the data set
    split: str = "train"  # huggingface
    revision: str | None = None  # huggingface: the commit of the data set; by default the newest
    max_bytes: int | None = None  # huggingface: take no more text than this
    cache: str | None = None  # the folder for prepared text; by default data/cache
    validation_bytes: int = 1_000_000  # a tenth of the text is for validation, at most this much
    prompts: list[str] | None = None  # sampled during training; "" starts a document; by default some of the text's

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
                "data.path has several URLs, and data.sha256 is the hash of only one: download the others first"
            )
        if self.name in ONE_WORD and self.paths:
            raise ValueError(f"data.path={self.path!r} works only with data=text: add that, or leave the path out")
        if self.name == "mix" and (len(self.paths) < 2 or len(set(self.paths)) < len(self.paths)):
            raise ValueError("data=mix needs at least two different corpora, such as data.path='[python_docs, FILE]'")
        if len(self.weights) != (len(self.paths) if self.name == "mix" else 0):
            raise ValueError(
                f"data.weights={self.weights} does not fit: only data=mix takes weights, one for each data.path"
            )
        if not all(0 < weight < float("inf") for weight in self.weights):
            raise ValueError(f"data.weights={self.weights} is out of range: each must be above 0")
        if not 1 <= self.validation_bytes <= 10**9:
            raise ValueError(
                f"data.validation_bytes={self.validation_bytes} is out of range: it must be at least 1 and at most "
                "1000000000"
            )
        if self.max_bytes is not None and self.max_bytes < 1:
            raise ValueError(f"data.max_bytes={self.max_bytes} is out of range: it must be at least 1")
        if self.cache:
            self.cache = os.path.expanduser(self.cache)

    @property
    def paths(self) -> list[str]:
        """`path` as a list."""
        paths = self.path if isinstance(self.path, list) else [self.path]
        return [str(path) for path in paths if path not in (None, "")]


class Piece(NamedTuple):
    """A piece of a document; a short document is one piece."""

    text: str
    begins: bool  # is the first of its document
    ends: bool  # is the last of its document


@dataclass(frozen=True)
class Corpus:
    """Files, and how to read documents from them.

    `builtin` yields further documents that lie in no file; `version` names whatever else determines the documents.
    """

    name: str
    files: tuple[Path, ...]
    read: Callable[[Path], Iterable[Iterable[str]]]
    builtin: Callable[[], Iterable[Iterable[str]]] = tuple
    version: str = ""

    def documents(self) -> Iterator[str]:
        """Yield every document that is not empty, always in the same order."""
        for blocks in itertools.chain.from_iterable(map(self._of_source, range(len(self.files) + 1))):
            if document := "".join(blocks):
                yield document

    def pieces(self, source: int = 0) -> Iterator[tuple[int, int, Piece]]:
        """Yield (number of the file, number of the piece in it, piece) in order, from file number `source` on."""
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
        """Return the size and modification time of each file, to compare later."""
        return [(status.st_size, status.st_mtime_ns) for status in map(_status, self.files)]

    def sha256(self, cache: Path) -> str:
        """Return the hash of everything that determines the documents.

        `cache` remembers the hashes of large files, so that unchanged ones are not read again.
        """
        memory = HashMemory(cache / "hashes.json")
        digest = hashlib.sha256(f"{self.name}\n{self.version}\n".encode())
        with ThreadPoolExecutor() as threads:
            for file, file_digest in zip(self.files, threads.map(memory.sha256, self.files), strict=True):
                digest.update(f"{''.join(file.suffixes)}\n{file_digest}\n".encode("utf-8", "replace"))
        memory.save()
        return digest.hexdigest()


def _status(file: Path) -> os.stat_result:
    with explain_unreadable(file):
        return file.stat()


def pinned(config: DataConfig, cache: Path) -> DataConfig:
    """Return the configuration with the current commit of a hub data set, so that a run resumes on the same text."""
    if config.name != "huggingface":
        return config
    return replace(config, revision=find_revision(_dataset(config), cache / "downloads"))


def _dataset(config: DataConfig) -> Dataset:
    [name] = config.paths
    return Dataset(name, config.subset, config.split, config.revision, config.text_field, config.max_bytes)


def open_corpus(config: DataConfig, cache: Path, say: Callable[[str], None] = print) -> Corpus:
    """Return the configured corpus, downloading it if necessary; raise `UserError` if there is nothing to read."""
    if config.name == "python_stdlib":
        return Corpus("python_stdlib", python_docs.files(), _one_block_each(python_docs.read_source))
    if config.name == "python_docs":
        builtin = _one_block_each(lambda _: python_docs.builtin_docs())
        docstrings = _one_block_each(python_docs.read_docstrings)
        return Corpus("python_docs", python_docs.files(), docstrings, lambda: builtin(Path()), sys.version)
    downloads = cache / "downloads"
    if config.name == "tinyshakespeare":
        files: tuple[Path, ...] = (fetch(*TINY_SHAKESPEARE, downloads, say),)
    elif config.name == "huggingface":
        files = fetch_dataset(_dataset(config), downloads, say)
    else:
        found: list[Path] = []
        for path in config.paths:
            if re.match(r"https?://", path):
                if config.sha256 is None:
                    raise UserError(f"data.path={path!r} needs the hash of its file: data.sha256=")
                found.append(fetch(path, config.sha256, downloads, say))
            else:
                found += find_text_files(path, cache, say)
        files = _each_once(found)
        if tables := tables_among(files):
            others = f" and {len(tables) - 1:,} more are tables" if len(tables) > 1 else " is a table"
            remedy = "convert to .jsonl or .parquet and set data.text_field=COLUMN"
            say(f"{tables[0].name}{others}, taken as raw text, commas and quotes included: {remedy}")

    def read(file: Path) -> Iterator[Iterable[str]]:
        return read_documents(file, "text" if config.name == "huggingface" else config.text_field, config.errors)

    return Corpus(config.name, files, read, version=f"{config.text_field}\n{config.errors}")


def _one_block_each(read: Callable[[Path], Iterable[str]]) -> Callable[[Path], Iterator[Iterable[str]]]:
    return lambda file: ((document,) for document in read(file))


def find_text_files(path: str, cache: Path, say: Callable[[str], None] = print) -> tuple[Path, ...]:
    """Return, sorted, the files that `path` names: one file, all text files below a folder, or the matches of a glob.

    In folders and globs, what this program wrote is skipped: runs, sweeps, and the cache. In folders, hidden, empty and
    binary files are skipped, too; a file named explicitly must be text. A file with several names or links is
    returned once.
    """
    try:
        root = Path(path).expanduser()
        root.stat()
    except (FileNotFoundError, ValueError):
        pass  # it may be a glob
    except (OSError, RuntimeError) as error:
        raise UserError(f"data.path={path!r} cannot be read ({getattr(error, 'strerror', None) or error})") from None
    if root.is_file():
        return _each_once([root])
    is_folder = root.is_dir()
    if is_folder:
        entries = (Path(folder, name) for folder, names in _walk(root) for name in names if name[0] != ".")
        top, names = root, sorted(filter(Path.is_file, entries))
    else:
        top = next(folder for folder in root.parents if not glob.has_magic(str(folder)))
        names = list(filter(Path.is_file, map(Path, sorted({str(Path(name)) for name in _matches(root, {})}))))
    is_ours = _written_here(top, cache)
    found = _each_once(file for file in names if not is_ours(file))
    if passed := [file for file in names if is_ours(file)]:
        say(f"skipping {len(passed)} of {len(names)} files below {top}, of runs or the cache: {_some(passed, top)}")
    if is_folder:
        is_text = {file: looks_like_text(file) for file in found}
        if others := [file for file in found if not is_text[file]]:
            what = f"{len(others)} of {len(found)} files below {root}, empty or not text"
            say(f"skipping {what}: {_some(others, root)}")
            found = tuple(file for file in found if is_text[file])
    if not found:
        what = "not a file, a folder or a glob that matches any file"
        if is_folder:
            what = "a folder without text files"
        elif passed:
            what = "a glob that matches only files of runs or of the cache"
        elif root.exists():
            what = "a device, a pipe or a socket, not a file"
        raise UserError(f"data.path={path!r} is {what}: give the path of your text")
    return found


def _some(files: list[Path], top: Path) -> str:
    names = [str(file.relative_to(top)) for file in files[:3]]
    return ", ".join([*names, "..."] if len(files) > 3 else names)


def _each_once(files: Iterable[Path]) -> tuple[Path, ...]:
    """Return files in their order, each once however many names and links lead to it."""
    first: dict[tuple[int, int | str], Path] = {}
    for file in files:
        status = _status(file)
        if not getattr(status, "st_blocks", 0) and str(file.resolve()).startswith(("/proc/", "/sys/")):
            raise UserError(f"{file}: is made up by the kernel as it is read, and may never end: give a file on disk")
        first.setdefault(_identity(file, status), file)
    return tuple(first.values())


def _identity(path: Path, status: os.stat_result) -> tuple[int, int | str]:
    """What is the same for every name of a file or folder; some network drives of Windows number none."""
    return status.st_dev, status.st_ino or str(path.resolve())


_Entered = set[tuple[int, int | str]]  # folders, by their identity


def _walk(top: Path | str, entered: _Entered | None = None) -> Iterator[tuple[str, list[str]]]:
    """Yield each folder from `top` down, hidden ones aside, with the names of the files in it.

    With `entered`, links to folders are followed, except to those entered before, so that none leads in a circle.
    """
    follow = entered is not None
    entered = set() if entered is None else entered
    for folder, inside, names in os.walk(top, onerror=_refuse_folder, followlinks=follow):
        identity = _identity(Path(folder), _status(Path(folder)))
        if identity in entered:
            inside.clear()
            continue
        entered.add(identity)
        inside[:] = sorted(name for name in inside if not name.startswith("."))
        yield folder, names


def _refuse_folder(error: OSError) -> NoReturn:
    raise UserError(f"{error.filename}: cannot be read ({error.strerror}); fix that, or move the folder away")


def _matches(pattern: Path, entered: dict[Path, _Entered]) -> Iterator[str]:
    """Yield what a glob matches, as `glob.glob` does, but each ** enters a folder once, so that links may be circles.

    `entered` holds the folders that each rest of the pattern was applied to.
    """
    parts = pattern.parts
    if "**" not in parts:
        yield from glob.glob(str(pattern))
        return
    at = parts.index("**")
    rest = Path(*itertools.dropwhile("**".__eq__, parts[at:]))
    for top in glob.glob(os.path.join(*parts[:at], "") if at else "./"):
        for folder, _ in _walk(top, entered.setdefault(rest, set())):
            yield from _matches(Path(glob.escape(folder), rest if rest.parts else "*"), entered)


def _written_here(top: Path, cache: Path) -> Callable[[Path], bool]:
    """Return what tells whether this program wrote a file below `top`: to a run, a sweep or the cache."""

    @functools.cache
    def is_in_ours(folder: Path) -> bool:
        here = _is_of_cache(folder, cache) or _is_ours(folder)
        return here or (folder not in (top, folder.parent) and is_in_ours(folder.parent))

    return lambda file: _is_of_cache(file, cache) or is_in_ours(file.parent)


def _is_ours(folder: Path) -> bool:
    """Whether a folder is a run, a sweep or prepared text, wherever it was moved to and whatever its name is now."""

    def has(*names: str) -> bool:
        return any((folder / name).exists() for name in names)

    is_run = has("config.yaml") and has(".lock", *(f"checkpoints/{name}.ckpt" for name in ("last", "best", "previous")))
    return is_run or has("multirun.yaml") or (has("manifest.json") and has("train-00000.bin"))


def _is_of_cache(path: Path, cache: Path) -> bool:
    """Whether something is one of the other entries of the cache, or of an earlier one, which holds prepared text."""
    if not _CACHED.fullmatch(path.name):
        return False
    folder = path.parent
    return (cache.exists() and folder.samefile(cache)) or any(folder.glob("*/train-00000.bin"))
