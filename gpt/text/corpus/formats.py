"""From files to documents: text, JSON lines and parquet, compressed or not, in bounded memory.

A document is an iterable of blocks of text of any size; read it before you ask for the next document.
"""

import bz2
import codecs
import contextlib
import gzip
import itertools
import json
import lzma
import re
import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from gpt.console import quote
from gpt.errors import UserError
from gpt.files import explain
from gpt.text.corpus.config import DataConfig
from gpt.text.pieces import decoded, well_formed, without_mark

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

BLOCK = 1 << 20  # bytes to read at once
_UNPACKERS: dict[str, Callable[[], Any]] = {
    ".bz2": bz2.BZ2Decompressor,
    ".xz": lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ),
    # The largest window, that of zstd --long=31; memory grows only as a frame needs it.
    ".zst": lambda: zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: 31}),
}
PACKED = (".gz", *_UNPACKERS)
_NOT_TEXT = (b"%PDF-", b"PK\x03\x04", b"\x89PNG", b"GIF8", b"\xff\xd8\xff")  # may have no zero byte near the start
_WHITE = codecs.BOM_UTF8 + b" \t\r\n"  # before the first character of a text
# How files begin, what they are, and what makes text of them: first those that are never read.
_REFUSED = [
    (rb"%PDF-", "a PDF", "pdftotext {0} {0}.txt"),
    (rb"PK\x03\x04", "a zip archive, as .docx, .odt and .epub are", "pandoc -t plain {0} -o {0}.txt"),
]
_MARKUP = [
    (rb"\{\\rtf", "RTF", "pandoc -t plain {0} -o {0}.txt"),
    (rb"%!PS", "PostScript", "ps2ascii {0} {0}.txt"),
    (rb"<\?xml", "XML", "xmllint --xpath 'string(/)' {0} > {0}.txt"),
    (rb"(?i)<!doctype html|<html", "HTML", "pandoc -f html -t plain {0} -o {0}.txt"),
    (rb'\{\s*"|\[\s*\{\s*"', "JSON", "jq -c '.. | objects | select(has(\"{1}\"))' {0} > {0}.jsonl"),
]
_ENCODING = ", or set data.encoding=windows-1252 or data.errors=replace"

Documents = Iterator[Iterable[str]]


def read_documents(file: Path, data: DataConfig) -> Documents:
    """Yield a file's documents, by the reader of its suffix in `READERS`: else by `data.separator`, or as one.

    `data.text_field` is the key or column that holds the text; if that is null, the document is empty. Raises
    `UserError` naming the file, the place in it and the remedy.
    """
    return reader_of(file)[0](file, data)


def kind_of(file: Any) -> str:
    """Return the suffix that says how to read a file: the last one that is not a compression."""
    suffixes = [suffix.lower() for suffix in file.suffixes]
    return next((suffix for suffix in reversed(suffixes) if suffix not in PACKED), "")


def reader_of(file: Any) -> tuple[Callable[[Path, DataConfig], Documents], int]:
    """Return the reader of a file's suffix and its version; of an unknown one, those of plain text."""
    return READERS.get(kind_of(file), (_text, 0))


def looks_like_text(file: Path) -> bool:
    """Whether to read a file that was found in a folder: not if it is empty or begins like a binary file."""
    if kind_of(file) == ".parquet":  # binary by design
        return True
    try:
        beginning = _beginning(file)
    except UserError:  # report it later rather than skip it
        return True
    return bool(beginning) and 0 not in beginning and not beginning.startswith(_NOT_TEXT)


def markup_of(file: Any, data: DataConfig) -> tuple[str, str] | None:
    """Return what a file is that `read_documents` takes for plain text, and what makes text of it, {0} for its name.

    It goes by the name, and by the beginning of a file that is here.
    """
    if (kind := kind_of(file)) in (".csv", ".tsv"):
        return "a table", "convert it to .jsonl or .parquet and set data.text_field=COLUMN"
    if reader_of(file)[0] not in (_text, _json) or not isinstance(file, Path):
        return None
    if _is_json_lines(file, data):
        return None if kind == ".json" else ("JSON lines", "mv {0} {0}.jsonl")
    beginning = _beginning(file, data.encoding)
    return _known(b'{"' if kind == ".json" and beginning.startswith(b"[") else beginning, _MARKUP)


def _known(beginning: bytes, formats: list[tuple[bytes, str, str]]) -> tuple[str, str] | None:
    return next(((what, command) for start, what, command in formats if re.match(start, beginning)), None)


# --- bytes ---


def _beginning(file: Path, encoding: str = "utf-8") -> bytes:
    """Return the first bytes of a file's content, from its first character on, and leave the file closed."""
    with contextlib.closing(_unpacked(file, 4096)) as blocks:
        first = next(blocks, b"")[:4096]
    return (first if encoding == "utf-8" else first.decode(encoding, "ignore").encode(errors="ignore")).lstrip(_WHITE)


def _unpacked(file: Path, size: int) -> Generator[bytes, None, None]:
    """Yield a file's content, decompressed if its suffix says so, in blocks of at least `size`; the last is shorter."""
    held: list[bytes] = []
    length = offset = 0
    with explain(file):
        try:
            with contextlib.closing(_content(file, size)) as blocks:
                for block in blocks:
                    held.append(block)
                    length += len(block)
                    offset += len(block)
                    if length >= size:
                        yield b"".join(held)
                        held, length = [], 0
        except Exception as error:  # each library has its own for damage, bz2 an OSError without a number
            if isinstance(error, MemoryError) or getattr(error, "errno", None) is not None:
                raise
            raise UserError(
                f"{file}: cannot be decompressed beyond byte {offset:,} of its content ({error}): "
                "the file is damaged, truncated, or not what its name says; fetch it again"
            ) from None
        if length:
            yield b"".join(held)


def _content(file: Path, size: int) -> Generator[bytes, None, None]:
    """Yield a file's content in blocks of any size."""
    suffix = file.suffix.lower()
    opener: Any = gzip.open if suffix == ".gz" else Path.open
    with opener(file, "rb") as stream:
        if suffix in _UNPACKERS:
            yield from _members(stream, _UNPACKERS[suffix])
        else:
            yield from iter(lambda: stream.read(size), b"")


def _members(stream: IO[bytes], unpacker: Callable[[], Any]) -> Iterator[bytes]:
    """Decompress member by member.

    This replaces `bz2.open` and `lzma.open`, which take a damaged second member for the end of the file.
    """
    member = None
    while packed := stream.read(1 << 8):  # little, because zstd may make 8 MB of it at once
        while packed:
            if member is None or member.eof:
                member = unpacker()
            yield member.decompress(packed)
            packed = member.unused_data
    if member is not None and not member.eof:
        raise EOFError("the compressed data ends early")


# --- text ---


def _text(file: Path, data: DataConfig) -> Documents:
    """Read the documents between separators, without these and a byte order mark; without a separator it is one."""
    text = without_mark(decoded(_checked(file, data), str(file), data.errors, _ENCODING))
    if data.separator is None:
        return iter([text])
    numbered = itertools.groupby(_numbered(text, data.separator), key=lambda part: part[0])
    return ((part for _, part in parts) for _, parts in numbered)


def _numbered(blocks: Iterator[str], separator: str) -> Iterator[tuple[int, str]]:
    """Yield each part of a text with the number of its document. A separator takes the line ends around it along."""
    ends = re.compile(rf"(?:\r?\n)?{re.escape(separator)}(?:\r?\n)?")
    number, held = 0, ""
    for block in itertools.chain(filter(None, blocks), [""]):
        held, start = held + block, 0
        for found in ends.finditer(held):
            if found.end() > len(held) - 2 and block:  # the next block may begin with the end of this line
                break
            yield number, held[start : found.start()]
            number, start = number + 1, found.end()
        rest = max(start, len(held) - len(separator) - 5) if block else len(held)
        yield number, held[start:rest]
        held = held[rest:]


def _checked(file: Path, data: DataConfig) -> Iterator[bytes]:
    """Return the blocks of a text file, in UTF-8 if it is so; raise `UserError` if it is empty or binary."""
    blocks: Iterator[bytes] = _unpacked(file, BLOCK)
    if data.encoding != "utf-8":
        text = decoded(blocks, str(file), data.errors, encoding=data.encoding)
        blocks = (well_formed(block).encode() for block in text if block)
    first = next(blocks, b"")
    if not first:
        raise UserError(f"{file}: the file is empty; give a file with text in it")
    if first.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        convert = "convert it first: iconv -f utf-16 -t utf-8"
        raise UserError(f"{file}: its first two bytes say UTF-16; {convert}, or set data.encoding=utf-16")
    if found := _known(first[:99].lstrip(_WHITE), _REFUSED):
        what, command = found
        raise UserError(f"{file}: {what}; make text of it first, for example with {command.format(quote(str(file)))}")
    if 0 in first[:4096]:
        raise UserError(f"{file}: a binary file (a zero byte at offset {first.index(0)}); give a text file in UTF-8")
    return itertools.chain([first], blocks)


def _decode(encoded: bytes, place: str, errors: str, remedy: str = _ENCODING) -> str:
    return "".join(decoded([encoded], place, errors, remedy))


# --- JSON ---


def _json(file: Path, data: DataConfig) -> Documents:
    """Read JSON lines if the first line is a complete object; else plain text."""
    return (_json_lines if _is_json_lines(file, data) else _text)(file, data)


def _is_json_lines(file: Path, data: DataConfig) -> bool:
    """Whether the first line that is not empty is a complete object."""
    if _beginning(file, data.encoding).startswith(b"{"):  # an array may be one endless line
        first = next(line for line in _lines(file, data) if line.strip(_WHITE))
        with contextlib.suppress(ValueError, RecursionError):
            return isinstance(json.loads(first.decode("utf-8-sig", "replace")), dict)  # UTF-8 is checked later
    return False


def _lines(file: Path, data: DataConfig) -> Iterator[bytes]:
    """Yield lines without their newlines; no other character ends a line."""
    parts: list[bytes] = []
    for block in _checked(file, data):
        *complete, rest = block.split(b"\n")
        for line in complete:
            yield b"".join([*parts, line])
            parts = []
        parts.append(rest)
    if last := b"".join(parts):
        yield last


def _json_lines(file: Path, data: DataConfig) -> Documents:
    """Read a document from each line."""
    for number, encoded in enumerate(_lines(file, data), start=1):
        place = f"{file}: line {number}"
        line = _decode(encoded, place, data.errors)
        if number == 1:
            line = line.removeprefix("\ufeff")
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            reason = "too large or too deeply nested"
            if isinstance(error, json.JSONDecodeError):
                reason = f"{error.msg.removesuffix(' at')}, column {error.colno}"
            raise UserError(f"{place} is not JSON ({reason}); every line must be one JSON object") from None
        held = record if isinstance(record, dict) else {}
        yield (_document(held.get(data.text_field, 0), place, data.text_field, held),)


def _document(value: Any, place: str, text_field: str, keys: Iterable[str]) -> str:
    """Return a value as a document: a text as it is, a list of messages with a paragraph for each."""
    if isinstance(value, list) and None not in (said := [_said(message) for message in value]):
        value = "\n\n".join(map(str, said))
    if not isinstance(value, str | None):
        others = f" ({_some(keys)})" if keys else ""
        raise UserError(f"{place} has no text under {text_field!r}; name the key with data.text_field={others}")
    return well_formed(value or "")


def _said(message: Any) -> str | None:
    """Return a message {role, content} or {from, value} as "user: Hello", None if it is none."""
    for speaker, content in (("role", "content"), ("from", "value")):
        if isinstance(message, dict) and isinstance(message.get(speaker), str) and content in message:
            parts = message[content] if isinstance(message[content], list) else [{"text": message[content]}]
            texts = [part.get("text") or "" for part in parts if isinstance(part, dict)]  # none of a picture
            return f"{message[speaker]}: {''.join(map(str, texts))}"
    return None


def _some(names: Iterable[str]) -> str:
    first = list(itertools.islice(names, 9))
    return ", ".join([*first[:8], "..."] if len(first) > 8 else first)


# --- parquet ---


def _parquet(file: Path, data: DataConfig) -> Documents:
    """Read a document from each row."""
    text_field = data.text_field
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise UserError(f"{file}: this needs pyarrow, which is not installed: pip install pyarrow") from None
    with explain(file), file.open("rb") as stream:
        try:
            table = parquet.ParquetFile(stream, buffer_size=BLOCK, pre_buffer=False, page_checksum_verification=True)
            is_text = re.compile(r"(dictionary<values=)?(large_)?string|(large_)?list<\w+: struct<.*\b(role|from): ")
            names = [column.name for column in table.schema_arrow if is_text.match(str(column.type))]
            if names.count(text_field) != 1:
                others = _some(f"{column.name} is {column.type!s:.60}" for column in table.schema_arrow)
                remedy = f"name one with data.text_field= ({_some(names)})" if names else f"it has none ({others})"
                raise UserError(f"{file}: {text_field!r} is not a column of text; {remedy}")
            row = 0
            for batch in table.iter_batches(64, columns=[text_field], use_threads=False):
                column = batch.column(0)
                if arrow.types.is_dictionary(column.type):
                    column = column.dictionary_decode()
                is_chat = arrow.types.is_nested(column.type)
                for held in column if is_chat else column.cast(arrow.large_binary()):
                    place, value = f"{file}: row {row}", held.as_py()
                    if is_chat:
                        yield (_document(value, place, text_field, names),)
                    else:
                        yield (_decode(value or b"", place, data.errors, ", or set data.errors=replace"),)
                    row += 1
        except (arrow.ArrowException, OSError, UnicodeDecodeError) as error:  # the last of a damaged column name
            reason = str(error).splitlines()[0].rstrip(".")
            raise UserError(
                f"{file}: cannot be read ({reason}): the file is damaged, packed or not parquet; fetch it again"
            ) from None


# --- the table ---

# To read a new format, add its suffix here, with a function of the file and the keys of `data`, and version 1.
# Raise the version when the same file is read as other documents: it enters the hash of every corpus that holds such
# files, so that text prepared before is not used again. Version 0, of plain text and the first readers, adds nothing.
READERS: dict[str, tuple[Callable[[Path, DataConfig], Documents], int]] = {
    ".jl": (_json_lines, 1),
    ".jsonl": (_json_lines, 0),
    ".ndjson": (_json_lines, 0),
    ".json": (_json, 0),
    ".parquet": (_parquet, 0),
}
