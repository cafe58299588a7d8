"""Plain text: from bytes to documents, in bounded memory, from the beginning of a file or from within it."""

import codecs
import itertools
import re
from collections.abc import Iterable, Iterator
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

from gpt.console import quote
from gpt.errors import UserError
from gpt.text.corpus.config import DataConfig
from gpt.text.corpus.unpack import PACKED, WHITE, unpacked
from gpt.text.pieces import decoded, size_of, well_formed

BLOCK = 1 << 20  # bytes to read at once
# How files begin that are never read, what they are, and what makes text of them.
_REFUSED = [
    (rb"%PDF-", "a PDF", "pdftotext {0} {0}.txt"),
    (rb"PK\x03\x04", "a zip archive, as .docx, .odt and .epub are", "pandoc -t plain {0} -o {0}.txt"),
]
_ENCODING = ", or set data.encoding=windows-1252 or data.errors=replace"


class Document(NamedTuple):
    """A document in blocks of text of any size, to be read before the next document is asked for.

    `start` is the byte of the file at which it begins, or None if reading cannot begin within such a file.
    """

    blocks: Iterable[str]
    start: int | None = None


def read_text(file: Path, data: DataConfig, start: int = 0) -> Iterator[Document]:
    """Read the documents between separators, without these and a byte order mark; without a separator it is one.

    From `start` on, a byte at which a document or a piece of one begins, these are the same documents.
    """
    text = decoded(read_blocks(file, data, start), str(file), data.errors, _ENCODING, start=start)
    can_enter = file.suffix.lower() not in PACKED and data.encoding == "utf-8" and data.errors == "strict"
    first = next(filter(None, text), "")  # a block may be empty, where it ends within a character
    if start == 0 and first.startswith("\ufeff"):
        first, start = first[1:], len(codecs.BOM_UTF8)
    text = itertools.chain([first], text)
    if data.separator is None:
        return iter([Document(text, start if can_enter else None)])
    parts = itertools.groupby(_parts(text, data.separator, start), key=itemgetter(0))
    return (Document((part for _, part in document), begin if can_enter else None) for begin, document in parts)


def _parts(blocks: Iterator[str], separator: str, start: int) -> Iterator[tuple[int, str]]:
    """Yield each part of a text with the byte at which its document begins; the text itself begins at `start`.

    A separator takes the line ends around it along.
    """
    ends = re.compile(rf"(?:\r?\n)?{re.escape(separator)}(?:\r?\n)?")
    begin, held = start, ""
    for block in itertools.chain(filter(None, blocks), [""]):
        held, done = held + block, 0
        for found in ends.finditer(held):
            if found.end() > len(held) - 2 and block:  # the next block may begin with the end of this line
                break
            yield begin, held[done : found.start()]
            start += size_of(held[done : found.end()])
            begin, done = start, found.end()
        rest = max(done, len(held) - len(separator) - 5) if block else len(held)
        yield begin, held[done:rest]
        start += size_of(held[done:rest])
        held = held[rest:]


def read_lines(file: Path, data: DataConfig) -> Iterator[bytes]:
    """Yield lines without their newlines; no other character ends a line."""
    parts: list[bytes] = []
    for block in read_blocks(file, data):
        *complete, rest = block.split(b"\n")
        for line in complete:
            yield b"".join([*parts, line])
            parts = []
        parts.append(rest)
    if last := b"".join(parts):
        yield last


def read_blocks(file: Path, data: DataConfig, start: int = 0) -> Iterator[bytes]:
    """Return the blocks of a text file, in UTF-8 if it is so; raise `UserError` if it is empty or binary."""
    blocks: Iterator[bytes] = unpacked(file, BLOCK, start)
    if start:
        return blocks
    if data.encoding != "utf-8":
        text = decoded(blocks, str(file), data.errors, encoding=data.encoding)
        blocks = (well_formed(block).encode() for block in text if block)
    first = next(blocks, b"")
    if not first:
        raise UserError(f"{file}: the file is empty; give a file with text in it")
    if first.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        convert = "convert it first: iconv -f utf-16 -t utf-8"
        raise UserError(f"{file}: its first two bytes say UTF-16; {convert}, or set data.encoding=utf-16")
    if found := known_by(first[:99].lstrip(WHITE), _REFUSED):
        what, command = found
        raise UserError(f"{file}: {what}; make text of it first, for example with {command.format(quote(str(file)))}")
    if 0 in first[:4096]:
        raise UserError(f"{file}: a binary file (a zero byte at offset {first.index(0)}); give a text file in UTF-8")
    return itertools.chain([first], blocks)


def known_by(beginning: bytes, formats: list[tuple[bytes, str, str]]) -> tuple[str, str] | None:
    """Return what a file is by its beginning, and what makes text of it."""
    return next(((what, command) for start, what, command in formats if re.match(start, beginning)), None)
