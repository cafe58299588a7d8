"""The text to train on: which files hold it, and its documents in pieces of bounded size."""

import contextlib
import hashlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple

from gpt.console import quote, say
from gpt.errors import UserError
from gpt.files import explain
from gpt.text.corpus import python_docs
from gpt.text.corpus.config import DataConfig, is_url
from gpt.text.corpus.files import each_once, find_remote_files, find_text_files
from gpt.text.corpus.formats import markup_of, read_documents, reader_of
from gpt.text.corpus.plain import Document
from gpt.text.corpus.remote import Remote, local
from gpt.text.hashes import hash_files
from gpt.text.pieces import cut, size_of

TINY_SHAKESPEARE: dict[str, Any] = {
    "path": "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
    "sha256": "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
}
Say = Callable[[str], None]  # prints a line, or does with it what a caller likes


class Piece(NamedTuple):
    """A piece of a document; a short document is one piece."""

    text: str
    begins: bool  # is the first of its document
    ends: bool  # is the last of its document


class Place(NamedTuple):
    """A place in a corpus at which reading can begin: the number of a file, and the byte in it.

    `begins` says whether a document begins there; `characters` is the length of the text before.
    """

    file: int
    byte: int
    begins: bool
    characters: int


START = Place(0, 0, True, 0)


@dataclass(frozen=True)
class Corpus:
    """Files, and how to read documents from them; `version` names whatever else determines the documents.

    `read` takes a file and the byte to begin at, which is 0 but in files whose documents have a `start`.
    """

    name: str
    files: tuple[Path | Remote, ...]
    read: Callable[[Any, int], Iterable[Document]]
    version: str = ""

    def pieces(self, first: Place = START) -> Iterator[tuple[int, int | None, Piece]]:
        """Yield (number of the file, byte at which reading can begin with this piece, piece) in order.

        The byte is None where reading cannot begin with the piece. The pieces from a place on are the same as those
        that all of the text has there, since where `cut` cuts depends only on what follows.
        """
        for number, file in enumerate(self.files[first.file :], first.file):
            is_first = number == first.file
            begins = first.begins or not is_first
            for blocks, byte in self.read(file, first.byte if is_first else 0):
                for text, after in pairwise(chain(cut(blocks), [""])):  # pieces are never empty
                    yield number, byte, Piece(text, begins, ends=not after)
                    begins, byte = False, byte if byte is None else byte + size_of(text)
                begins = True

    def up_to(self, end: Place) -> "Corpus":
        """Return the corpus without the files behind a place."""
        return replace(self, files=self.files[: end.file + (end.byte > 0)])

    def stamp(self) -> list[tuple]:
        """Return the size and modification time, or tag, of each file, to compare later."""
        return [_stamp(file) for file in self.files]

    def require_unchanged(self, stamps: Sequence[tuple], files: Iterable[int]) -> None:
        """Raise `UserError` naming the first of these files that is not as `stamp` found it."""
        for number in files:
            if _stamp(self.files[number]) != stamps[number]:
                what = "is not as it was when the preparation of the text began"
                raise UserError(f"{self.files[number]}: {what}: put it back, or begin again")

    def sha256(self, cache: Path) -> str:
        """Return the hash of everything that determines the documents; `cache` remembers that of large files."""
        return self.identity(hash_files(self.files, cache))

    def identity(self, digests: Iterable[str]) -> str:
        """Return the hash of everything that determines the documents, given that of each file."""
        digest = hashlib.sha256(f"{self.name}\n{self.version}\n".encode())
        for file, file_digest in zip(self.files, digests, strict=True):
            _, version = reader_of(file)
            kind = "".join(file.suffixes) + f" {version}" * (version > 0)
            digest.update(f"{kind}\n{file_digest}\n".encode("utf-8", "replace"))
        return digest.hexdigest()

    def require_text(self, size: int) -> None:
        """Raise `UserError` if `size`, the bytes of all documents together, is 0."""
        if not size:
            files = ", ".join(map(str, self.files[:3])) + ", ..." * (len(self.files) > 3)
            raise UserError(f"{files}: every document is empty; give a text, or its key with data.text_field=")


def open_corpus(data: DataConfig, cache: Path, say: Say = say) -> Corpus:
    """Return the configured corpus, downloading it if necessary; raise `UserError` if there is nothing to read."""
    if data.name == "python_stdlib":
        return Corpus("python_stdlib", python_docs.files(), lambda file, _: [Document(python_docs.read_source(file))])
    if data.name == "python_docs":
        modules = python_docs.files()

        def read_docs(file: Path, _: int) -> Iterator[Document]:
            yield from (Document([text]) for text in python_docs.read_docstrings(file))
            if file == modules[-1]:
                yield from (Document([text]) for text in python_docs.builtin_docs())

        return Corpus("python_docs", modules, read_docs, sys.version)
    files = _files_of(data, cache, say)
    raw: dict[tuple[str, str], list[Path | Remote]] = {}
    for file in files:
        with contextlib.suppress(UserError):  # about a file that cannot be read, which its reader raises again
            if found := markup_of(file, data):
                raw.setdefault(found, []).append(file)
    for (what, remedy), alike in raw.items():
        others = f" and {len(alike) - 1:,} more" if len(alike) > 1 else ""
        remedy = remedy.format(quote(str(alike[0])), data.text_field)
        say(f"{alike[0].name}{others}: {what}, taken as raw text, markup included; for the text alone: {remedy}")
    return corpus_of(data, files)


def corpus_of(data: DataConfig, files: tuple[Path | Remote, ...]) -> Corpus:
    """Return the corpus of these files."""
    version = "\n".join([data.text_field, data.errors, *(f"{key}={value}" for key, value in data.reading.items())])

    def read(file: Path | Remote, start: int) -> Iterator[Document]:
        documents = read_documents(local(file), data, start)
        return (Document(blocks) for blocks, _ in documents) if isinstance(file, Remote) else documents

    return Corpus(data.name, files, read, version)


def _stamp(file: Path | Remote) -> tuple:
    if isinstance(file, Remote):
        return file.size, file.tag
    with explain(file):
        status = file.stat()
    return status.st_size, status.st_mtime_ns


def _files_of(data: DataConfig, cache: Path, say: Say) -> tuple[Path | Remote, ...]:
    """Return the files that the paths name, each once."""
    if data.name == "tinyshakespeare":
        data = replace(data, name="text", **TINY_SHAKESPEARE)
    if data.sha256 is not None:
        return (Remote(data.paths[0], None, "", cache, data.cache_bytes, data.sha256, say),)
    files: list[Path | Remote] = []
    for path in data.paths:
        files += (
            find_remote_files(path, cache, data.cache_bytes, say) if is_url(path) else find_text_files(path, cache, say)
        )
    here = set(each_once(file for file in files if isinstance(file, Path)))
    return tuple(dict.fromkeys(file for file in files if file in here or isinstance(file, Remote)))
