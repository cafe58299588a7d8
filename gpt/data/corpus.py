"""A corpus: which files hold the text to train on, and its documents in chunks of bounded size."""

import hashlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple

from gpt.console import print_line
from gpt.data import python_docs
from gpt.data.chunking import split_into_chunks, utf8_size
from gpt.data.data_config import DataConfig, is_url
from gpt.data.download import RemoteFile
from gpt.data.file_hashes import hash_files
from gpt.data.find_files import drop_duplicate_files, find_remote_files, find_text_files, print_formats
from gpt.data.readers import Document, detect_markup, read_documents, reader_for
from gpt.errors import UserError
from gpt.files import user_errors

TINY_SHAKESPEARE: dict[str, Any] = {
    "path": "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
    "sha256": "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
}
Say = Callable[[str], None]  # prints a line


class Chunk(NamedTuple):
    """A chunk of a document. A short document is one chunk."""

    text: str
    starts_document: bool
    ends_document: bool


class ShardStart(NamedTuple):
    """A place in a corpus at which reading can begin: the number of a file, and a byte in it.

    `starts_document` is True if a document begins there. `characters` is the length of the text before.
    """

    file: int
    byte: int
    starts_document: bool
    characters: int


FIRST_SHARD = ShardStart(0, 0, True, 0)


@dataclass(frozen=True)
class Corpus:
    """Files, and how to read documents from them.

    Attributes:
        name: A word for messages and folder names.
        files: The files.
        read: Reads the documents of a file from a byte on. The byte is 0 unless the documents have a `start`.
        version: Everything else that determines the documents.
        validation_files: The number of files at the end that are the validation text. If 0, a part of each text is.
    """

    name: str
    files: tuple[Path | RemoteFile, ...]
    read: Callable[[Any, int], Iterable[Document]]
    version: str = ""
    validation_files: int = 0

    def chunks(
        self, start: ShardStart = FIRST_SHARD, end: ShardStart | None = None
    ) -> Iterator[tuple[int, int | None, Chunk]]:
        """Yield (number of the file, byte at which reading can begin with this chunk, chunk) from `start` to `end`.

        The byte is None where reading cannot begin with the chunk. From any `start`, the chunks are the same as those
        that a reading of the whole text yields there: `split_into_chunks` decides by the text that follows.
        """
        byte: int | None
        for number in range(start.file, len(self.files)):
            if end is not None and (number, 0) == (end.file, end.byte):
                return
            is_first_file = number == start.file
            starts_document = start.starts_document or not is_first_file
            for blocks, byte in self.read(self.files[number], start.byte if is_first_file else 0):
                for text, next_text in pairwise(chain(split_into_chunks(blocks), [""])):  # chunks are never empty
                    if end is not None and (number, byte) == (end.file, end.byte):
                        return
                    yield number, byte, Chunk(text, starts_document, ends_document=not next_text)
                    starts_document = False
                    byte = None if byte is None else byte + utf8_size(text)
                starts_document = True

    def fingerprints(self) -> list[tuple]:
        """Return the size and modification time, or tag, of each file, to compare later."""
        return [_fingerprint(file) for file in self.files]

    def require_unchanged(self, fingerprints: Sequence[tuple], files: Iterable[int]) -> None:
        """Raise `UserError` naming the first of these files whose fingerprint has changed."""
        for number in files:
            if _fingerprint(self.files[number]) != fingerprints[number]:
                change = "has changed since the preparation of the text began"
                remedy = "put it back, or if a program writes to it, such as a log, leave it out of data.path"
                raise UserError(f"{self.files[number]}: {change}: {remedy}")

    def sha256(self, cache: Path) -> str:
        """Return the hash of everything that determines the documents. `cache` remembers the hashes of large files."""
        return self.identity(hash_files(self.files, cache))

    def identity(self, digests: Iterable[str]) -> str:
        """Return the hash of everything that determines the documents, given the hash of each file."""
        validation = f"{self.validation_files} files for validation\n" if self.validation_files else ""
        digest = hashlib.sha256(f"{self.name}\n{self.version}\n{validation}".encode())
        for file, file_digest in zip(self.files, digests, strict=True):
            _, version = reader_for(file)
            format_name = "".join(file.suffixes) + f" {version}" * (version > 0)
            digest.update(f"{format_name}\n{file_digest}\n".encode("utf-8", "replace"))
        return digest.hexdigest()

    def require_text(self, size: int) -> None:
        """Raise `UserError` if `size`, the bytes of all documents together, is 0."""
        if not size:
            files = ", ".join(map(str, self.files[:3])) + ", ..." * (len(self.files) > 3)
            raise UserError(f"{files}: every document is empty; give a text, or its key with data.text_field=")


def open_corpus(data: DataConfig, cache: Path, print_line: Say = print_line) -> Corpus:
    """Return the configured corpus, and print which files are markup. Raise `UserError` if there is nothing to read."""
    if data.name == "python_stdlib":
        modules = python_docs.find_modules()
        return Corpus("python_stdlib", modules, lambda file, _: [Document(python_docs.read_source(file))])
    if data.name == "python_docs":
        return _open_python_docs()
    files = _find_files(data, cache, print_line)
    validation: tuple[Path | RemoteFile, ...] = ()
    if data.validation_paths:
        validation = _find_files(replace(data, path=data.validation_path), cache, print_line)
        files = tuple(file for file in files if file not in validation)  # `path` may be the whole folder
        if not files:
            raise UserError(f"data.path={data.path!r} has no text but that for validation: give text to train on")
        files += validation
    treatment = "read as raw text with its markup; for the text alone:"
    print_formats(files, lambda file: detect_markup(file, data), treatment, print_line, data.text_field)
    return make_corpus(data, files, len(validation))


def _open_python_docs() -> Corpus:
    modules = python_docs.find_modules()

    def read_docs(file: Path, _: int) -> Iterator[Document]:
        yield from (Document([text]) for text in python_docs.read_docstrings(file))
        if file == modules[-1]:
            yield from (Document([text]) for text in python_docs.builtin_docs())

    return Corpus("python_docs", modules, read_docs, sys.version)


def make_corpus(data: DataConfig, files: tuple[Path | RemoteFile, ...], validation_files: int = 0) -> Corpus:
    """Return the corpus of these files.

    Args:
        data: How to read the files.
        files: The files.
        validation_files: The number of files at the end that are the validation text.
    """
    settings = [f"{key}={value}" for key, value in data.reader_settings.items()]
    version = "\n".join([data.text_field, data.errors, *settings])

    formats_of_pages: set[str] = set()

    def read(file: Path | RemoteFile, start: int) -> Iterator[Document]:
        if isinstance(file, Path):
            return read_documents(file, data, start)
        copy = file.fetch()
        format_name, _ = detect_markup(copy, data) or ("", "")
        if format_name and format_name not in formats_of_pages:
            formats_of_pages.add(format_name)
            advice = "if that is a page about the text, give the URL of the text itself"
            file.print_line(f"{file}: {format_name}, read as raw text with its markup; {advice}")
        return (Document(blocks) for blocks, _ in read_documents(copy, data))

    return Corpus(data.name, files, read, version, validation_files)


def _fingerprint(file: Path | RemoteFile) -> tuple:
    if isinstance(file, RemoteFile):
        return file.size, file.tag
    with user_errors(file):
        status = file.stat()
    return status.st_size, status.st_mtime_ns


def _find_files(data: DataConfig, cache: Path, print_line: Say) -> tuple[Path | RemoteFile, ...]:
    """Return the files that the paths name, each once."""
    if data.name == "tinyshakespeare":
        data = replace(data, name="text", **TINY_SHAKESPEARE)
    if data.sha256 is not None:
        return (RemoteFile(data.paths[0], None, "", cache, data.cache_bytes, data.sha256, print_line),)
    files: list[Path | RemoteFile] = []
    for path in data.paths:
        if is_url(path):
            files += find_remote_files(path, cache, data.cache_bytes, print_line)
        else:
            files += find_text_files(path, cache, print_line)
    local_files = set(drop_duplicate_files(file for file in files if isinstance(file, Path)))
    return tuple(dict.fromkeys(file for file in files if file in local_files or isinstance(file, RemoteFile)))
