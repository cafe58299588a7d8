"""Files to documents: text, JSON lines and parquet, packed or not, in memory that does not grow with the file.

A document is an iterable of blocks of text, of any size, to be read before the next document is asked for.
"""

import bz2
import codecs
import contextlib
import gzip
import importlib
import itertools
import json
import lzma
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
_NOT_TEXT = (b"%PDF-", b"PK\x03\x04", b"\x89PNG", b"GIF8", b"\xff\xd8\xff")  # may have no zero byte at their beginning


def read_documents(file: Path, text_field: str = "text", errors: str = "strict") -> Iterator[Iterable[str]]:
    """The documents of a file: one a line of .jsonl, .ndjson and .json lines, one a row of .parquet, else the text.

    A .json file is read as lines where its first line is a whole object. `text_field` is the key or column that holds
    the text; where that is null the document is empty. `errors` is "strict", or "replace" for U+FFFD in place of bytes
    that are no UTF-8. What cannot be read raises `UserError` naming the file, the place in it and the remedy.
    """
    kind = kind_of(file)
    if kind == ".parquet":
        yield from _parquet_rows(file, text_field, errors)
        return
    blocks = _checked(file, _unpacked(file, BLOCK))
    if kind == ".json":
        first, blocks = _first_line(blocks)
        kind = ".jsonl" if _is_object(first) else ""
    if kind in _JSON_LINES:
        yield from _json_lines(file, _lines(blocks), text_field, errors)
    else:
        yield _decoded(file, blocks, errors)


def kind_of(file: Path) -> str:
    """The suffix that says how a file is read: the last one that is no packing."""
    suffixes = [suffix.lower() for suffix in file.suffixes]
    return next((suffix for suffix in reversed(suffixes) if suffix not in PACKED), "")


def looks_like_text(file: Path) -> bool:
    """Whether a file that nobody named is to be read: not where it is empty, or binary by its beginning."""
    if kind_of(file) == ".parquet":
        return True
    try:
        beginning = next(_unpacked(file, 4096), b"")[:4096]
    except UserError:  # it is to be named, not passed over
        return True
    return bool(beginning) and 0 not in beginning and not beginning.startswith(_NOT_TEXT)


@contextlib.contextmanager
def explain_unreadable(file: Path) -> Iterator[None]:
    """Turn a file that cannot be opened or read into one line."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"{file}: cannot be read ({reason}); mend that, or move the file away") from None


def require(module: str, file: object, extra: str) -> ModuleType:
    """Import what an optional extra installs; `UserError` where it is absent."""
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.split(".")[0]
        raise UserError(f"{file}: this takes {package}, which is not installed: pip install -e '.[{extra}]'") from None


# --- bytes ---


def _unpacked(file: Path, size: int) -> Iterator[bytes]:
    """The content of a file in blocks of at least `size`, the last one shorter, unpacked where its suffix says so."""
    held: list[bytes] = []
    length = offset = 0
    with explain_unreadable(file):
        try:
            for block in _content(file, size):
                held.append(block)
                length += len(block)
                offset += len(block)
                if length >= size:
                    yield b"".join(held)
                    held, length = [], 0
        except (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error, _Damaged) as error:
            damaged = _unpacking_failed(file, offset, error)
        except OSError as error:
            if error.errno is not None:
                raise
            damaged = _unpacking_failed(file, offset, error)  # bz2 says it so
        else:
            if length:
                yield b"".join(held)
            return
    raise damaged


class _Damaged(Exception):
    """A packed file is not what its suffix says."""


def _unpacking_failed(file: Path, offset: int, error: Exception) -> UserError:
    return UserError(
        f"{file}: cannot be unpacked beyond byte {offset:,} of its content ({error}): "
        "the file is damaged, cut short, or not what its name says; fetch it again"
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
    """Member by member: the libraries' own streams take a damaged one, or one cut short, for the end of the file."""
    member = None
    for packed in _read(stream, 1 << 8):  # little, as it may unpack to 100,000 times as much
        while packed:
            if member is None or member.eof:
                member = unpacker()
            yield member.decompress(packed)
            packed = member.unused_data
    if member is not None and not member.eof:
        raise EOFError("it ends within what is packed")


def _zstd_frames(stream: BinaryIO) -> Iterator[bytes]:
    import zstandard

    window = 1 << 31  # the greatest, of zstd --long=31; memory is taken as the frame needs it
    try:
        yield from _members(stream, lambda: zstandard.ZstdDecompressor(max_window_size=window).decompressobj())
    except zstandard.ZstdError as error:
        raise _Damaged(error) from None


def _checked(file: Path, blocks: Iterator[bytes]) -> Iterator[bytes]:
    """The blocks of a text file; `UserError` where it is empty or binary."""
    first = next(blocks, b"")
    if not first:
        raise UserError(f"{file}: the file is empty; give a file with text in it")
    if first.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise UserError(f"{file}: UTF-16, by its first two bytes; convert it first: iconv -f utf-16 -t utf-8")
    if 0 in first[:4096]:
        raise UserError(f"{file}: a binary file (a zero byte at offset {first.index(0)}); give a text file in UTF-8")
    return itertools.chain([first], blocks)


def _first_line(blocks: Iterator[bytes]) -> tuple[bytes, Iterator[bytes]]:
    """The first line, or as much of it as shows that it is no object, and all of the blocks."""
    held: list[bytes] = []
    for block in blocks:
        held.append(block)
        if b"\n" in block or held[0].lstrip(codecs.BOM_UTF8 + b" \t\r")[:1] not in (b"", b"{"):
            break
    return b"".join(held).split(b"\n", 1)[0], itertools.chain(held, blocks)


def _lines(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """Lines without their ends; only a newline ends one."""
    parts: list[bytes] = []
    for block in blocks:
        *complete, rest = block.split(b"\n")
        for line in complete:
            yield b"".join([*parts, line])
            parts = []
        parts.append(rest)
    if last := b"".join(parts):
        yield last


# --- text ---


def _decoded(file: Path, blocks: Iterable[bytes], errors: str) -> Iterator[str]:
    """The text of a file, without a byte order mark."""
    begun = False
    try:
        for text in decoded(blocks, errors):
            yield text if begun else text.removeprefix("\ufeff")
            begun = begun or bool(text)
    except NotUTF8Error as error:
        remedy = "convert it first, for example with iconv -t utf-8, or say data.errors=replace"
        raise UserError(f"{file}: not UTF-8 ({error}); {remedy}") from None


def _decode(encoded: bytes, place: str, errors: str) -> str:
    try:
        return encoded.decode("utf-8", errors)
    except UnicodeDecodeError as error:
        raise UserError(
            f"{place} is not UTF-8 (byte 0x{encoded[error.start]:02x} at its offset {error.start}); "
            "convert it first, or say data.errors=replace"
        ) from None


# --- JSON lines ---


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line.decode("utf-8-sig", "replace")), dict)  # whether it is UTF-8 is seen later
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
            reason = "beyond what can be read"
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
        raise UserError(f"{file}: parquet packs its columns itself; unpack the file first")
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
            for group in range(table.num_row_groups):
                place, row = f"{file}: row group {group}", 0
                for batch in table.iter_batches(64, row_groups=[group], columns=[text_field], use_threads=False):
                    column = batch.column(0)
                    if arrow.types.is_dictionary(column.type):
                        column = column.dictionary_decode()
                    for encoded in column.cast(arrow.large_binary()):
                        yield (_decode(encoded.as_py() or b"", f"{file}: row {row} of row group {group}", errors),)
                        row += 1
        except (arrow.ArrowException, OSError, UnicodeDecodeError) as error:  # the last of a column's name
            reason = str(error).splitlines()[0].rstrip(".")
            raise UserError(
                f"{place} cannot be read ({reason}): the file is damaged or not parquet; fetch it again"
            ) from None
