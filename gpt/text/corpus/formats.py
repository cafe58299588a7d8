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

from gpt.errors import UserError
from gpt.text.pieces import decoded, well_formed

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
_WHITE = codecs.BOM_UTF8 + b" \t\r"  # before the first character of a line
_REPLACE = ", or set data.errors=replace"

Documents = Iterator[Iterable[str]]


def read_documents(file: Path, text_field: str = "text", errors: str = "strict") -> Documents:
    """Yield a file's documents, by the reader of its suffix in `READERS`: else the whole text is one.

    `text_field` is the key or column that holds the text; if that is null, the document is empty. `errors` is
    "strict", or "replace" to read bytes that are not UTF-8 as U+FFFD. Raises `UserError` naming the file, the place in
    it and the remedy.
    """
    return reader_of(file)[0](file, text_field, errors)


def kind_of(file: Any) -> str:
    """Return the suffix that says how to read a file: the last one that is not a compression."""
    suffixes = [suffix.lower() for suffix in file.suffixes]
    return next((suffix for suffix in reversed(suffixes) if suffix not in PACKED), "")


def reader_of(file: Any) -> tuple[Callable[[Path, str, str], Documents], int]:
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


def is_table(file: Any) -> bool:
    """Whether a file holds a table, as CSV or as a JSON array, which `read_documents` takes for plain text."""
    kind = kind_of(file)
    if kind != ".json" or not isinstance(file, Path):
        return kind in (".csv", ".tsv")
    return _beginning(file).lstrip(_WHITE + b"\n").startswith(b"[")


@contextlib.contextmanager
def explain_unreadable(file: Path) -> Iterator[None]:
    """Turn an error about opening or reading a file into one line."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"{file}: cannot be read ({reason}); fix that, or move the file away") from None


# --- bytes ---


def _beginning(file: Path) -> bytes:
    """Return the first bytes of a file's content, and leave the file closed."""
    with contextlib.closing(_unpacked(file, 4096)) as blocks:
        return next(blocks, b"")[:4096]


def _unpacked(file: Path, size: int) -> Generator[bytes, None, None]:
    """Yield a file's content, decompressed if its suffix says so, in blocks of at least `size`; the last is shorter."""
    held: list[bytes] = []
    length = offset = 0
    with explain_unreadable(file):
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


def _text(file: Path, text_field: str, errors: str) -> Documents:
    """Read the whole file as one document, without a byte order mark."""
    blocks = filter(None, decoded(_checked(file), str(file), errors, _REPLACE))  # a block may end within a character
    yield itertools.chain([next(blocks).removeprefix("\ufeff")], blocks)


def _checked(file: Path) -> Iterator[bytes]:
    """Return the blocks of a text file; raise `UserError` if it is empty or binary."""
    blocks = _unpacked(file, BLOCK)
    first = next(blocks, b"")
    if not first:
        raise UserError(f"{file}: the file is empty; give a file with text in it")
    if first.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise UserError(f"{file}: its first two bytes say UTF-16; convert it first: iconv -f utf-16 -t utf-8")
    if 0 in first[:4096]:
        raise UserError(f"{file}: a binary file (a zero byte at offset {first.index(0)}); give a text file in UTF-8")
    return itertools.chain([first], blocks)


def _decode(encoded: bytes, place: str, errors: str) -> str:
    return "".join(decoded([encoded], place, errors, _REPLACE))


# --- JSON ---


def _json(file: Path, text_field: str, errors: str) -> Documents:
    """Read JSON lines if the first line is a complete object; else the whole text is one document."""
    is_lines = False
    if _beginning(file).lstrip(_WHITE).startswith(b"{"):  # an array may be one endless line
        first = next(_lines(file)).decode("utf-8-sig", "replace")  # UTF-8 is checked later
        with contextlib.suppress(ValueError, RecursionError):
            is_lines = isinstance(json.loads(first), dict)
    yield from (_json_lines if is_lines else _text)(file, text_field, errors)


def _lines(file: Path) -> Iterator[bytes]:
    """Yield lines without their newlines; no other character ends a line."""
    parts: list[bytes] = []
    for block in _checked(file):
        *complete, rest = block.split(b"\n")
        for line in complete:
            yield b"".join([*parts, line])
            parts = []
        parts.append(rest)
    if last := b"".join(parts):
        yield last


def _json_lines(file: Path, text_field: str, errors: str) -> Documents:
    """Read a document from each line."""
    for number, encoded in enumerate(_lines(file), start=1):
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


def _parquet(file: Path, text_field: str, errors: str) -> Documents:
    """Read a document from each row."""
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise UserError(f"{file}: this needs pyarrow, which is not installed: pip install pyarrow") from None
    with explain_unreadable(file), file.open("rb") as stream:
        try:
            table = parquet.ParquetFile(stream, buffer_size=BLOCK, pre_buffer=False, page_checksum_verification=True)
            is_text = re.compile("(dictionary<values=)?(large_)?string")
            names = [column.name for column in table.schema_arrow if is_text.match(str(column.type))]
            if names.count(text_field) != 1:
                raise UserError(
                    f"{file}: {text_field!r} is not a column of text; name one with data.text_field= "
                    f"({', '.join(names[:8])}{', ...' * (len(names) > 8)})"
                )
            row = 0
            for batch in table.iter_batches(64, columns=[text_field], use_threads=False):
                column = batch.column(0)
                if arrow.types.is_dictionary(column.type):
                    column = column.dictionary_decode()
                for encoded in column.cast(arrow.large_binary()):
                    yield (_decode(encoded.as_py() or b"", f"{file}: row {row}", errors),)
                    row += 1
        except (arrow.ArrowException, OSError, UnicodeDecodeError) as error:  # the last of a damaged column name
            reason = str(error).splitlines()[0].rstrip(".")
            raise UserError(
                f"{file}: cannot be read ({reason}): the file is damaged, packed or not parquet; fetch it again"
            ) from None


# --- the table ---

# To read a new format, add its suffix here, with a function of the file, `text_field` and `errors`, and version 1.
# Raise the version when the same file is read as other documents: it enters the hash of every corpus that holds such
# files, so that text prepared before is not used again. Version 0, of plain text and the first readers, adds nothing.
READERS: dict[str, tuple[Callable[[Path, str, str], Documents], int]] = {
    ".jsonl": (_json_lines, 0),
    ".ndjson": (_json_lines, 0),
    ".json": (_json, 0),
    ".parquet": (_parquet, 0),
}
