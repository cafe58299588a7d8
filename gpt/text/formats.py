"""From files to documents: text, JSON lines and parquet, compressed or not, in bounded memory.

A document is an iterable of blocks of text of any size; read it before you ask for the next document.
"""

import bz2
import codecs
import contextlib
import gzip
import importlib
import itertools
import json
import lzma
import math
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

from gpt.errors import UserError
from gpt.text.pieces import NotUTF8Error, decoded, well_formed

BLOCK = 1 << 20  # bytes to read at once
PACKED = (".gz", ".bz2", ".xz", ".zst")
_JSON_LINES = (".jsonl", ".ndjson")
_TABLES = (".csv", ".tsv")
UNPACKED_BYTES, UNPACKED_TIMES = 1 << 28, 500  # a file may unpack to this many bytes and this many times its own size
LINE_BYTES = 1 << 26  # of JSON, at most, since a line is held in memory several times over
_NOT_TEXT = (b"%PDF-", b"PK\x03\x04", b"\x89PNG", b"GIF8", b"\xff\xd8\xff")  # may have no zero byte near the start


def read_documents(file: Path, text_field: str = "text", errors: str = "strict") -> Iterator[Iterable[str]]:
    """Yield a file's documents: one for each line of .jsonl and .ndjson or row of .parquet, else the whole text.

    A .json file counts as lines if its first line is a complete object. `text_field` is the key or column that holds
    the text; if that is null, the document is empty. `errors` is "strict", or "replace" to read bytes that are not
    UTF-8 as U+FFFD. Raises `UserError` naming the file, the place in it and the remedy.
    """
    kind = kind_of(file)
    if kind == ".parquet":
        yield from _parquet_rows(file, text_field, errors)
        return
    blocks = _checked(file, _unpacked(file, BLOCK))
    if kind == ".json":
        first, blocks = _first_line(blocks)
        kind = ".jsonl" if len(first) > LINE_BYTES or _is_object(first) else ""
    if kind in _JSON_LINES:
        yield from _json_lines(file, _lines(file, blocks), text_field, errors)
    else:
        yield _decoded(file, blocks, errors)


def kind_of(file: Path) -> str:
    """Return the suffix that says how to read a file: the last one that is not a compression."""
    suffixes = [suffix.lower() for suffix in file.suffixes]
    return next((suffix for suffix in reversed(suffixes) if suffix not in PACKED), "")


def looks_like_text(file: Path) -> bool:
    """Whether to read a file that was found in a folder: not if it is empty or begins like a binary file."""
    if kind_of(file) == ".parquet":
        return True
    try:
        beginning = next(_unpacked(file, 4096), b"")[:4096]
    except UserError:  # report it later rather than skip it
        return True
    return bool(beginning) and 0 not in beginning and not beginning.startswith(_NOT_TEXT)


def tables_among(files: Iterable[Path]) -> list[Path]:
    """Return the files that hold a table, as CSV or as a JSON array, and that `read_documents` takes for plain text."""
    return [file for file in files if kind_of(file) in _TABLES or (kind_of(file) == ".json" and _is_array(file))]


@contextlib.contextmanager
def explain_unreadable(file: Path) -> Iterator[None]:
    """Turn an error about opening or reading a file into one line."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"{file}: cannot be read ({reason}); fix that, or move the file away") from None


def require(module: str, file: object, extra: str) -> ModuleType:
    """Import a module that an optional extra installs; raise `UserError` if it is missing."""
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.split(".")[0]
        raise UserError(f"{file}: this needs {package}, which is not installed: pip install -e '.[{extra}]'") from None


# --- bytes ---


def _unpacked(file: Path, size: int) -> Iterator[bytes]:
    """Yield a file's content, decompressed if its suffix says so, in blocks of at least `size`; the last is shorter."""
    held: list[bytes] = []
    length = offset = 0
    with explain_unreadable(file):
        most = _most_unpacked(file)
        try:
            for block in _content(file, size):
                held.append(block)
                length += len(block)
                offset += len(block)
                if offset > most:
                    raise _unpacks_to_too_much(file, most)
                if length >= size:
                    yield b"".join(held)
                    held, length = [], 0
        except (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error, _Damaged) as error:
            damaged = _unpacking_failed(file, offset, error)
        except OSError as error:
            if error.errno is not None:
                raise
            damaged = _unpacking_failed(file, offset, error)  # this is how bz2 reports damage
        else:
            if length:
                yield b"".join(held)
            return
    raise damaged


def _most_unpacked(file: Path) -> float:
    """Return how many bytes a file may unpack to; text packs three to ten times, the dullest logs 100 times."""
    packed = file.suffix.lower() in (*PACKED, ".parquet")
    return UNPACKED_BYTES + UNPACKED_TIMES * file.stat().st_size if packed else math.inf


def _unpacks_to_too_much(file: Path, most: float) -> UserError:
    return UserError(
        f"{file}: unpacks to more than {most:,} bytes, over {UNPACKED_TIMES} times its own size, as no text does: "
        "leave it out, or decompress it yourself and name the result"
    )


class _Damaged(Exception):
    """A compressed file is not what its suffix says."""


def _unpacking_failed(file: Path, offset: int, error: Exception) -> UserError:
    return UserError(
        f"{file}: cannot be decompressed beyond byte {offset:,} of its content ({error}): "
        "the file is damaged, truncated, or not what its name says; fetch it again"
    )


def _content(file: Path, size: int) -> Iterator[bytes]:
    suffix = file.suffix.lower()
    if suffix == ".gz":
        return _read(gzip.open(file), size)  # type: ignore[arg-type]
    stream = file.open("rb")
    if suffix == ".bz2":
        return _members(stream, bz2.BZ2Decompressor)
    if suffix == ".xz":
        return _members(stream, lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ))
    if suffix == ".zst":
        return _zstd_frames(stream)
    return _read(stream, size)


def _read(stream: BinaryIO, size: int) -> Iterator[bytes]:
    with stream:
        while block := stream.read(size):
            yield block


def _members(stream: BinaryIO, unpacker: Callable[[], Any]) -> Iterator[bytes]:
    """Decompress member by member: the libraries' own streams take a damaged or truncated member for the end."""
    member = None
    for packed in _read(stream, 1 << 8):  # little, because zstd may make 8 MB of it at once
        while packed:
            if member is None or member.eof:
                member = unpacker()
                most = (BLOCK,) if hasattr(member, "needs_input") else ()  # others may make a million times as much
            yield member.decompress(packed, *most)
            while most and not (member.eof or member.needs_input):
                yield member.decompress(b"", *most)
            packed = member.unused_data
    if member is not None and not member.eof:
        raise EOFError("the compressed data ends early")


def _zstd_frames(stream: BinaryIO) -> Iterator[bytes]:
    import zstandard

    window = 1 << 31  # the largest, of zstd --long=31; memory grows only as a frame needs it
    try:
        yield from _members(stream, lambda: zstandard.ZstdDecompressor(max_window_size=window).decompressobj())
    except zstandard.ZstdError as error:
        raise _Damaged(error) from None


def _checked(file: Path, blocks: Iterator[bytes]) -> Iterator[bytes]:
    """Return the blocks of a text file; raise `UserError` if it is empty or binary."""
    first = next(blocks, b"")
    if not first:
        raise UserError(f"{file}: the file is empty; give a file with text in it")
    if first.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise UserError(f"{file}: its first two bytes say UTF-16; convert it first: iconv -f utf-16 -t utf-8")
    if 0 in first[:4096]:
        raise UserError(f"{file}: a binary file (a zero byte at offset {first.index(0)}); give a text file in UTF-8")
    return itertools.chain([first], blocks)


def _first_line(blocks: Iterator[bytes]) -> tuple[bytes, Iterator[bytes]]:
    """Return the first line, or enough of it to see that it is not an object or too long, and all of the blocks."""
    held: list[bytes] = []
    length = 0
    for block in blocks:
        held.append(block)
        length += len(block)
        is_long = length > LINE_BYTES
        if is_long or b"\n" in block or held[0].lstrip(codecs.BOM_UTF8 + b" \t\r")[:1] not in (b"", b"{"):
            break
    return b"".join(held).split(b"\n", 1)[0], itertools.chain(held, blocks)


def _lines(file: Path, blocks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield lines without their newlines; no other character ends a line. Raise `UserError` if one is far too long."""
    parts: list[bytes] = []
    number, length = 1, 0
    for block in blocks:
        *complete, rest = block.split(b"\n")
        for line in complete:
            yield b"".join([*parts, line])
            parts, length = [], 0
        number += len(complete)
        parts.append(rest)
        length += len(rest)
        if length > LINE_BYTES:
            raise UserError(
                f"{file}: line {number} is longer than {LINE_BYTES:,} bytes: divide it into several documents, or give "
                "the text itself as a .txt file"
            )
    if last := b"".join(parts):
        yield last


# --- text ---


def _decoded(file: Path, blocks: Iterable[bytes], errors: str) -> Iterator[str]:
    """Yield the text of a file, without a byte order mark."""
    begun = False
    try:
        for text in decoded(blocks, errors):
            yield text if begun else text.removeprefix("\ufeff")
            begun = begun or bool(text)
    except NotUTF8Error as error:
        remedy = "convert it first, for example with iconv -t utf-8, or set data.errors=replace"
        raise UserError(f"{file}: not UTF-8 ({error}); {remedy}") from None


def _decode(encoded: bytes, place: str, errors: str) -> str:
    try:
        return encoded.decode("utf-8", errors)
    except UnicodeDecodeError as error:
        raise UserError(
            f"{place} is not UTF-8 (byte 0x{encoded[error.start]:02x} at offset {error.start}); "
            "convert it first, or set data.errors=replace"
        ) from None


# --- JSON lines ---


def _is_array(file: Path) -> bool:
    return next(_unpacked(file, 4096), b"").lstrip(codecs.BOM_UTF8 + b" \t\r\n").startswith(b"[")


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line.decode("utf-8-sig", "replace")), dict)  # UTF-8 is checked later
    except (ValueError, RecursionError):
        return False


def _json_lines(file: Path, lines: Iterable[bytes], text_field: str, errors: str) -> Iterator[Iterable[str]]:
    for number, encoded in enumerate(lines, start=1):
        place = f"{file}: line {number}"
        line = _decode(encoded, place, errors)
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
        document = record.get(text_field, 0) if isinstance(record, dict) else 0
        if not isinstance(document, str | None):
            raise UserError(f"{place} has no text under {text_field!r}; name the key with data.text_field=")
        yield (well_formed(document or ""),)


# --- parquet ---


def _parquet_rows(file: Path, text_field: str, errors: str) -> Iterator[Iterable[str]]:
    if file.suffix.lower() in PACKED:
        raise UserError(f"{file}: parquet compresses its own columns; decompress the file first")
    parquet = require("pyarrow.parquet", file, "parquet")
    arrow = require("pyarrow", file, "parquet")
    place = f"{file}:"
    with explain_unreadable(file):
        stream = file.open("rb")
    with stream:
        try:
            table = parquet.ParquetFile(stream, buffer_size=BLOCK, pre_buffer=False, page_checksum_verification=True)
            names = table.schema_arrow.names
            if (count := names.count(text_field)) != 1:
                raise UserError(
                    f"{file}: has {count or 'no'} column{'s' * (count > 1)} {text_field!r}; "
                    f"name one with data.text_field= ({', '.join(names[:8])}{', ...' * (len(names) > 8)})"
                )
            kind = table.schema_arrow.field(text_field).type
            if arrow.types.is_dictionary(kind):
                kind = kind.value_type
            if str(kind) not in ("string", "large_string", "string_view"):
                raise UserError(
                    f"{file}: the column {text_field!r} holds {kind}, not text; name another with data.text_field="
                )
            most, length = _most_unpacked(file), 0
            for group in range(table.num_row_groups):
                place, row = f"{file}: row group {group}", 0
                columns = map(table.metadata.row_group(group).column, range(table.metadata.num_columns))
                if sum(c.total_uncompressed_size for c in columns if c.path_in_schema == text_field) > most:
                    raise _unpacks_to_too_much(file, most)
                for batch in table.iter_batches(64, row_groups=[group], columns=[text_field], use_threads=False):
                    column = batch.column(0)
                    if arrow.types.is_dictionary(column.type):
                        column = column.dictionary_decode()
                    for encoded in column.cast(arrow.large_binary()):
                        document = encoded.as_py() or b""
                        length += len(document)
                        if length > most:
                            raise _unpacks_to_too_much(file, most)
                        yield (_decode(document, f"{file}: row {row} of row group {group}", errors),)
                        row += 1
        except (
            arrow.ArrowException,
            OSError,
            UnicodeDecodeError,
        ) as error:  # UnicodeDecodeError: a damaged column name
            reason = str(error).splitlines()[0].rstrip(".")
            raise UserError(
                f"{place} cannot be read ({reason}): the file is damaged or not parquet; fetch it again"
            ) from None
