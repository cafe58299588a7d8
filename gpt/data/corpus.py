"""A corpus: which files hold the text to train on, and its documents in chunks of bounded size."""

import contextlib
import hashlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple

from gpt.console import quote, say
from gpt.data import python_docs
from gpt.data.chunking import split_into_chunks, utf8_size
from gpt.data.data_config import DataConfig, is_url
from gpt.data.download import RemoteFile, fetch_if_remote
from gpt.data.file_hashes import hash_files
from gpt.data.find_files import drop_duplicate_files, find_remote_files, find_text_files
from gpt.data.readers import Document, detect_markup, read_documents, reader_for
from gpt.errors import UserError
from gpt.files import explain

TINY_SHAKESPEARE: dict[str, Any] = {
    "path": "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
    "sha256": "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
}
Say = Callable[[str], None]  # prints a line, or does with it what a caller likes


class Chunk(NamedTuple):
    """A chunk of a document; a short document is one chunk."""

    text: str
    starts_document: bool  # is the first of its document
    ends_document: bool  # is the last of its document


class ShardStart(NamedTuple):
    """A place in a corpus at which reading can begin: the number of a file, and the byte in it.

    `starts_document` says whether a document begins there; `characters` is the length of the text before.
    """

    file: int
    byte: int
    starts_document: bool
    characters: int


FIRST_SHARD = ShardStart(0, 0, True, 0)


@dataclass(frozen=True)
class Corpus:
    """Files, and how to read documents from them; `version` names whatever else determines the documents.

    `read` takes a file and the byte to begin at, which is 0 but in files whose documents have a `start`.
    """

    name: str
    files: tuple[Path | RemoteFile, ...]
    read: Callable[[Any, int], Iterable[Document]]
    version: str = ""
    validation_files: int = 0  # how many of the files, the last ones, are the validation text; 0: a part of all is

    def chunks(self, first: ShardStart = FIRST_SHARD) -> Iterator[tuple[int, int | None, Chunk]]:
        """Yield (number of the file, byte at which reading can begin with this chunk, chunk) in order.

        The byte is None where reading cannot begin with the chunk. The chunks from a place on are the same as those
        that all of the text has there, since `split_into_chunks` decides by what follows.
        """
        for number, file in enumerate(self.files[first.file :], first.file):
            is_first = number == first.file
            starts_document = first.starts_document or not is_first
            for blocks, byte in self.read(file, first.byte if is_first else 0):
                for text, after in pairwise(chain(split_into_chunks(blocks), [""])):  # chunks are never empty
                    yield number, byte, Chunk(text, starts_document, ends_document=not after)
                    starts_document, byte = (False, byte if byte is None else byte + utf8_size(text))
                starts_document = True

    def up_to(self, end: ShardStart) -> "Corpus":
        """Return the corpus without the files behind a place."""
        return replace(self, files=self.files[: end.file + (end.byte > 0)])

    def fingerprints(self) -> list[tuple]:
        """Return the size and modification time, or tag, of each file, to compare later."""
        return [_fingerprint(file) for file in self.files]

    def require_unchanged(self, fingerprints: Sequence[tuple], files: Iterable[int]) -> None:
        """Raise `UserError` naming the first of these files that is not as `fingerprints` found it."""
        for number in files:
            if _fingerprint(self.files[number]) != fingerprints[number]:
                what = "is not as it was when the preparation of the text began"
                raise UserError(f"{self.files[number]}: {what}: put it back, or begin again")

    def sha256(self, cache: Path) -> str:
        """Return the hash of everything that determines the documents; `cache` remembers that of large files."""
        return self.identity(hash_files(self.files, cache))

    def identity(self, digests: Iterable[str]) -> str:
        """Return the hash of everything that determines the documents, given that of each file."""
        validation = f"{self.validation_files} files for validation\n" if self.validation_files else ""
        digest = hashlib.sha256(f"{self.name}\n{self.version}\n{validation}".encode())
        for file, file_digest in zip(self.files, digests, strict=True):
            _, version = reader_for(file)
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
    files = _find_files(data, cache, say)
    validation: tuple[Path | RemoteFile, ...] = ()
    if data.validation_paths:
        validation = _find_files(replace(data, path=data.validation_path), cache, say)
        files = tuple(file for file in files if file not in validation)  # such as the whole folder
        if not files:
            raise UserError(f"data.path={data.path!r} has no text but that for validation: give text to train on")
        files += validation
    raw: dict[tuple[str, str], list[Path | RemoteFile]] = {}
    for file in files:
        with contextlib.suppress(UserError):  # about a file that cannot be read, which its reader raises again
            if found := detect_markup(file, data):
                raw.setdefault(found, []).append(file)
    for (what, hint), alike in raw.items():
        others = f" and {len(alike) - 1:,} more" if len(alike) > 1 else ""
        hint = hint.format(quote(str(alike[0])), data.text_field)
        say(f"{alike[0].name}{others}: {what}, taken as raw text, markup included; for the text alone: {hint}")
    return make_corpus(data, files, len(validation))


def make_corpus(data: DataConfig, files: tuple[Path | RemoteFile, ...], validation_files: int = 0) -> Corpus:
    """Return the corpus of these files, the last ones of them for validation."""
    version = "\n".join(
        [data.text_field, data.errors, *(f"{key}={value}" for key, value in data.reader_settings.items())]
    )

    def read(file: Path | RemoteFile, start: int) -> Iterator[Document]:
        documents = read_documents(fetch_if_remote(file), data, start)
        return (Document(blocks) for blocks, _ in documents) if isinstance(file, RemoteFile) else documents

    return Corpus(data.name, files, read, version, validation_files)


def _fingerprint(file: Path | RemoteFile) -> tuple:
    if isinstance(file, RemoteFile):
        return file.size, file.tag
    with explain(file):
        status = file.stat()
    return status.st_size, status.st_mtime_ns


def _find_files(data: DataConfig, cache: Path, say: Say) -> tuple[Path | RemoteFile, ...]:
    """Return the files that the paths name, each once."""
    if data.name == "tinyshakespeare":
        data = replace(data, name="text", **TINY_SHAKESPEARE)
    if data.sha256 is not None:
        return (RemoteFile(data.paths[0], None, "", cache, data.cache_bytes, data.sha256, say),)
    files: list[Path | RemoteFile] = []
    for path in data.paths:
        files += (
            find_remote_files(path, cache, data.cache_bytes, say) if is_url(path) else find_text_files(path, cache, say)
        )
    here = set(drop_duplicate_files(file for file in files if isinstance(file, Path)))
    return tuple(dict.fromkeys(file for file in files if file in here or isinstance(file, RemoteFile)))
