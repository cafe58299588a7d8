"""Readers: from a file to its documents, in bounded memory. One for each format; plain text may begin within a file."""

import codecs
import contextlib
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from gpt.console import quote
from gpt.data.chunking import decode_stream, replace_surrogates, utf8_size
from gpt.data.compression import COMPRESSED_SUFFIXES, LEADING_BYTES, decompress, read_beginning
from gpt.data.data_config import DataConfig
from gpt.errors import UserError
from gpt.files import explain

READ_BLOCK_BYTES = 1 << 20  # to read at once
_ENCODING_HINT = ", or set data.encoding=windows-1252 or data.errors=replace"
# How files begin that are never read, what they are, and what makes text of them.
_REFUSED = [
    (rb"%PDF-", "a PDF", "pdftotext {0} {0}.txt"),
    (rb"PK\x03\x04", "a zip archive, as .docx, .odt and .epub are", "pandoc -t plain {0} -o {0}.txt"),
]
_NOT_TEXT = (b"%PDF-", b"PK\x03\x04", b"\x89PNG", b"GIF8", b"\xff\xd8\xff")  # may have no zero byte near the start
# How files begin that are read as they are, what they are, and what makes text of them.
_MARKUP = [
    (rb"\{\\rtf", "RTF", "pandoc -t plain {0} -o {0}.txt"),
    (rb"%!PS", "PostScript", "ps2ascii {0} {0}.txt"),
    (rb"<\?xml", "XML", "xmllint --xpath 'string(/)' {0} > {0}.txt"),
    (rb"(?i)<!doctype html|<html", "HTML", "pandoc -f html -t plain {0} -o {0}.txt"),
    (rb'\{\s*"|\[\s*\{\s*"', "JSON", "jq -c '.. | objects | select(has(\"{1}\"))' {0} > {0}.jsonl"),
]


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
    text = decode_stream(read_blocks(file, data, start), str(file), data.errors, _ENCODING_HINT, start=start)
    can_enter = file.suffix.lower() not in COMPRESSED_SUFFIXES and data.encoding == "utf-8" and data.errors == "strict"
    first = next(filter(None, text), "")  # a block may be empty, where it ends within a character
    if start == 0 and first.startswith("\ufeff"):
        first, start = first[1:], len(codecs.BOM_UTF8)
    text = itertools.chain([first], text)
    if data.separator is None:
        return iter([Document(text, start if can_enter else None)])
    parts = itertools.groupby(_split_by_separator(text, data.separator, start), key=itemgetter(0))
    return (Document((part for _, part in document), begin if can_enter else None) for begin, document in parts)


def _split_by_separator(blocks: Iterator[str], separator: str, start: int) -> Iterator[tuple[int, str]]:
    """Yield each part of a text with the byte at which its document begins; the text itself begins at `start`.

    A separator takes the line ends around it along.
    """
    ends = re.compile(rf"(?:\r?\n)?{re.escape(separator)}(?:\r?\n)?")
    begin, buffer = start, ""
    for block in itertools.chain(filter(None, blocks), [""]):
        buffer, done = buffer + block, 0
        for found in ends.finditer(buffer):
            if found.end() > len(buffer) - 2 and block:  # the next block may begin with the end of this line
                break
            yield begin, buffer[done : found.start()]
            start += utf8_size(buffer[done : found.end()])
            begin, done = start, found.end()
        rest = max(done, len(buffer) - len(separator) - 5) if block else len(buffer)
        yield begin, buffer[done:rest]
        start += utf8_size(buffer[done:rest])
        buffer = buffer[rest:]


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
    blocks: Iterator[bytes] = decompress(file, READ_BLOCK_BYTES, start)
    if start:
        return blocks
    if data.encoding != "utf-8":
        text = decode_stream(blocks, str(file), data.errors, encoding=data.encoding)
        blocks = (replace_surrogates(block).encode() for block in text if block)
    first = next(blocks, b"")
    if not first:
        raise UserError(f"{file}: the file is empty; give a file with text in it")
    if first.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        convert = "convert it first: iconv -f utf-16 -t utf-8"
        raise UserError(f"{file}: its first two bytes say UTF-16; {convert}, or set data.encoding=utf-16")
    if found := match_beginning(first[:99].lstrip(LEADING_BYTES), _REFUSED):
        what, command = found
        raise UserError(f"{file}: {what}; make text of it first, for example with {command.format(quote(str(file)))}")
    if 0 in first[:4096]:
        raise UserError(f"{file}: a binary file (a zero byte at offset {first.index(0)}); give a text file in UTF-8")
    return itertools.chain([first], blocks)


def match_beginning(beginning: bytes, formats: list[tuple[bytes, str, str]]) -> tuple[str, str] | None:
    """Return what a file is by its beginning, and what makes text of it."""
    return next(((what, command) for start, what, command in formats if re.match(start, beginning)), None)


# --- records with a text in each ---


def read_json(file: Path, data: DataConfig) -> Iterator[Document]:
    """Read JSON lines if the first line is a complete object; else plain text."""
    return (read_json_lines if is_json_lines(file, data) else read_text)(file, data)


def is_json_lines(file: Path, data: DataConfig) -> bool:
    """Whether the first line that is not empty is a complete object."""
    if read_beginning(file, data.encoding).startswith(b"{"):  # an array may be one endless line
        first = next(line for line in read_lines(file, data) if line.strip(LEADING_BYTES))
        with contextlib.suppress(ValueError, RecursionError):
            return isinstance(json.loads(first.decode("utf-8-sig", "replace")), dict)  # UTF-8 is checked later
    return False


def read_json_lines(file: Path, data: DataConfig) -> Iterator[Document]:
    """Read a document from each line."""
    for number, encoded in enumerate(read_lines(file, data), start=1):
        place = f"{file}: line {number}"
        line = "".join(decode_stream([encoded], place, data.errors, _ENCODING_HINT))
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
        buffer = record if isinstance(record, dict) else {}
        yield Document([_record_text(buffer.get(data.text_field, 0), place, data.text_field, buffer)])


def _record_text(value: Any, place: str, text_field: str, keys: Iterable[str]) -> str:
    """Return a value as a document: a text as it is, a list of messages with a paragraph for each."""
    if isinstance(value, list) and None not in (said := [_message_text(message) for message in value]):
        value = "\n\n".join(map(str, said))
    if not isinstance(value, str | None):
        others = f" ({_first_names(keys)})" if keys else ""
        raise UserError(f"{place} has no text under {text_field!r}; name the key with data.text_field={others}")
    return replace_surrogates(value or "")


def _message_text(message: Any) -> str | None:
    """Return a message {role, content} or {from, value} as "user: Hello", None if it is none."""
    for speaker, content in (("role", "content"), ("from", "value")):
        if isinstance(message, dict) and isinstance(message.get(speaker), str) and content in message:
            parts = message[content] if isinstance(message[content], list) else [{"text": message[content]}]
            texts = [part.get("text") or "" for part in parts if isinstance(part, dict)]  # none of a picture
            return f"{message[speaker]}: {''.join(map(str, texts))}"
    return None


def _first_names(names: Iterable[str]) -> str:
    first = list(itertools.islice(names, 9))
    return ", ".join([*first[:8], "..."] if len(first) > 8 else first)


def read_parquet(file: Path, data: DataConfig) -> Iterator[Document]:
    """Read a document from each row."""
    text_field = data.text_field
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise UserError(f"{file}: this needs pyarrow, which is not installed: pip install pyarrow") from None
    with explain(file), file.open("rb") as stream:
        try:
            table = parquet.ParquetFile(
                stream, buffer_size=READ_BLOCK_BYTES, pre_buffer=False, page_checksum_verification=True
            )
            is_text = re.compile(r"(dictionary<values=)?(large_)?string|(large_)?list<\w+: struct<.*\b(role|from): ")
            names = [column.name for column in table.schema_arrow if is_text.match(str(column.type))]
            if names.count(text_field) != 1:
                others = _first_names(f"{column.name} is {column.type!s:.60}" for column in table.schema_arrow)
                hint = f"name one with data.text_field= ({_first_names(names)})" if names else f"it has none ({others})"
                raise UserError(f"{file}: {text_field!r} is not a column of text; {hint}")
            row = 0
            for batch in table.iter_batches(64, columns=[text_field], use_threads=False):
                column = batch.column(0)
                if arrow.types.is_dictionary(column.type):
                    column = column.dictionary_decode()
                is_chat = arrow.types.is_nested(column.type)
                for buffer in column if is_chat else column.cast(arrow.large_binary()):
                    place, value = f"{file}: row {row}", buffer.as_py()
                    if is_chat:
                        yield Document([_record_text(value, place, text_field, names)])
                    else:
                        yield Document(
                            decode_stream([value or b""], place, data.errors, ", or set data.errors=replace")
                        )
                    row += 1
        except (arrow.ArrowException, OSError, UnicodeDecodeError) as error:  # the last of a damaged column name
            reason = str(error).splitlines()[0].rstrip(".")
            raise UserError(
                f"{file}: cannot be read ({reason}): the file is damaged, packed or not parquet; fetch it again"
            ) from None


# --- which reader ---

Reader = Callable[[Path, DataConfig], Iterator[Document]]

# To read a new format, add its suffix here, with a function of the file and the keys of `data`, and version 1.
# Raise the version when the same file is read as other documents: it enters the hash of every corpus that holds such
# files, so that text prepared before is not used again. Version 0, of plain text and the first readers, adds nothing.
READERS: dict[str, tuple[Reader, int]] = {
    ".jl": (read_json_lines, 1),
    ".jsonl": (read_json_lines, 0),
    ".ndjson": (read_json_lines, 0),
    ".json": (read_json, 0),
    ".parquet": (read_parquet, 0),
}


def read_documents(file: Path, data: DataConfig, start: int = 0) -> Iterator[Document]:
    """Yield a file's documents, by the reader of its suffix in `READERS`: else by `data.separator`, or as one.

    `data.text_field` is the key or column that holds the text; if that is null, the document is empty. `start` is the
    byte of plain text to begin at. Raises `UserError` naming the file, the place in it and the hint.
    """
    return read_text(file, data, start) if start else reader_for(file)[0](file, data)


def format_suffix(file: Any) -> str:
    """Return the suffix that says how to read a file: the last one that is not a compression."""
    suffixes = [suffix.lower() for suffix in file.suffixes]
    return next((suffix for suffix in reversed(suffixes) if suffix not in COMPRESSED_SUFFIXES), "")


def reader_for(file: Any) -> tuple[Reader, int]:
    """Return the reader of a file's suffix and its version; of an unknown one, those of plain text."""
    return READERS.get(format_suffix(file), (read_text, 0))


def looks_like_text(file: Path) -> bool:
    """Whether to read a file that was found in a folder: not if it is empty or begins like a binary file."""
    if format_suffix(file) == ".parquet":  # binary by design
        return True
    try:
        beginning = read_beginning(file)
    except UserError:  # report it later rather than skip it
        return True
    return bool(beginning) and 0 not in beginning and not beginning.startswith(_NOT_TEXT)


def detect_markup(file: Any, data: DataConfig) -> tuple[str, str] | None:
    """Return what a file is that `read_documents` takes for plain text, and what makes text of it, {0} for its name.

    It goes by the name, and by the beginning of a file that is here.
    """
    if (kind := format_suffix(file)) in (".csv", ".tsv"):
        return ("a table", "convert it to .jsonl or .parquet and set data.text_field=COLUMN")
    if reader_for(file)[0] not in (read_text, read_json) or not isinstance(file, Path):
        return None
    if is_json_lines(file, data):
        return None if kind == ".json" else ("JSON lines", "mv {0} {0}.jsonl")
    beginning = read_beginning(file, data.encoding)
    return match_beginning(b'{"' if kind == ".json" and beginning.startswith(b"[") else beginning, _MARKUP)
