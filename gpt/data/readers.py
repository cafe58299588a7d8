"""Readers: from a file to its documents in bounded memory, with one reader for each format."""

import codecs
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator
from operator import itemgetter
from pathlib import Path
from typing import IO, Any, NamedTuple

from gpt.console import shell_quote
from gpt.data.chunking import decode_stream, replace_surrogates, utf8_size
from gpt.data.compression import COMPRESSED_SUFFIXES, LEADING_BYTES, decompress, read_beginning
from gpt.data.data_config import DataConfig
from gpt.data.encodings import encoding_of_mark, file_encoding, guess_encodings
from gpt.errors import UserError
from gpt.files import user_errors

READ_BLOCK_BYTES = 1 << 20  # bytes to read at once
# Formats that are refused: how a file begins, the name of the format, and how to make text of it.
_UNTAR = "unpack it first, and give the folder: mkdir {0}.d && tar -xf {0} -C {0}.d"
_REFUSED_FORMATS = [
    (rb"%PDF-", "a PDF", "convert it to text first, for example with pdftotext {0} {0}.txt"),
    (rb"PK\x03\x04", "a zip archive", "unpack it first, and give the folder: unzip {0} -d {0}.d"),
    (rb"7z\xbc\xaf\x27\x1c", "a 7z archive", "unpack it first, and give the folder: 7z x {0} -o{0}.d"),
    (rb"Rar!\x1a\x07", "a rar archive", "unpack it first, and give the folder: unrar x {0} {0}.d/"),
    (rb"(?s)(?=.{1,100}\0).{257}ustar", "a tar archive", _UNTAR),
    (rb"\x1f\x8b\x08", "compressed with gzip", "add .gz to its name: mv {0} {0}.gz"),
    (rb"BZh[1-9]1AY&SY", "compressed with bzip2", "add .bz2 to its name: mv {0} {0}.bz2"),
    (rb"\xfd7zXZ\0", "compressed with xz", "add .xz to its name: mv {0} {0}.xz"),
    (rb"\x28\xb5\x2f\xfd", "compressed with zstd", "add .zst to its name: mv {0} {0}.zst"),
]
# The same for files of some suffixes. These formats come first.
_REFUSED_BY_SUFFIX = {
    (".docx", ".odt", ".epub"): (
        rb"PK\x03\x04",
        "a zip archive, as .docx, .odt and .epub are",
        "convert it to text first, for example with pandoc -t plain {0} -o {0}.txt",
    ),
    (".tgz", ".tbz2", ".txz"): (rb"\x1f\x8b|BZh|\xfd7zXZ", "a tar archive", _UNTAR),
}
_NAMED_SUFFIXES = (*itertools.chain(*_REFUSED_BY_SUFFIX), ".pdf", ".zip", ".7z", ".rar", ".tar")
# Beginnings of binary formats that may have no zero byte near the start.
_BINARY_BEGINNINGS = (b"%PDF-", b"PK\x03\x04", b"\x89PNG", b"GIF8", b"\xff\xd8\xff")
# Formats that are read as raw text: how a file begins, the name of the format, and a command that makes text of it.
_MARKUP_FORMATS = [
    (rb"\{\\rtf", "RTF", "pandoc -t plain {0} -o {0}.txt"),
    (rb"%!PS", "PostScript", "ps2ascii {0} {0}.txt"),
    (rb"<\?xml", "XML", "xmllint --xpath 'string(/)' {0} > {0}.txt"),
    (rb"(?i)<!doctype html|<html", "HTML", "pandoc -f html -t plain {0} -o {0}.txt"),
    (rb'\{\s*"|\[\s*\{\s*"', "JSON", "jq -c '.. | objects | select(has(\"{1}\"))' {0} > {0}.jsonl"),
]


class Document(NamedTuple):
    """A document in blocks of text of any size. Its blocks must be read before the next document is requested.

    `start` is the byte of the file at which it begins, or None if reading cannot begin within such a file.
    """

    blocks: Iterable[str]
    start: int | None = None


# --- plain text ---


def read_text(file: Path, data: DataConfig, start: int = 0) -> Iterator[Document]:
    """Read the documents between separators. Without a separator the file is one document.

    Separators and a byte order mark belong to no document. `start` is a byte at which a document or a chunk of one
    begins. The documents from there on are the same as in a reading of the whole file.
    """
    encoding = "utf-8" if start else file_encoding(file, data.encodings)
    blocks = read_blocks(file, encoding, data.errors, start)
    text = decode_stream(blocks, str(file), data.errors, _suggest_encodings, start=start)
    is_plain = file.suffix.lower() not in COMPRESSED_SUFFIXES
    can_begin_within = is_plain and encoding == "utf-8" and data.errors == "strict"
    first = next(filter(None, text), "")  # a block may be empty if it ends within a character
    if start == 0 and first.startswith("\ufeff"):
        first = first[1:]
        start = len(codecs.BOM_UTF8)
    text = itertools.chain([first], text)
    if data.separator is None:
        return iter([Document(text, start if can_begin_within else None)])
    parts = itertools.groupby(_split_by_separator(text, data.separator, start), key=itemgetter(0))
    return (
        Document((part for _, part in document), document_start if can_begin_within else None)
        for document_start, document in parts
    )


def _split_by_separator(blocks: Iterator[str], separator: str, start: int) -> Iterator[tuple[int, str]]:
    """Yield each part of a text with the byte at which its document begins. The text itself begins at `start`.

    A line end before and after a separator belongs to the separator.
    """
    pattern = re.compile(rf"(?:\r?\n)?{re.escape(separator)}(?:\r?\n)?")
    document_start = start
    buffer = ""
    for block in itertools.chain(filter(None, blocks), [""]):
        is_last = not block
        buffer += block
        consumed = 0
        for match in pattern.finditer(buffer):
            if match.end() > len(buffer) - 2 and not is_last:  # the next block may begin with the end of this line
                break
            yield document_start, buffer[consumed : match.start()]
            start += utf8_size(buffer[consumed : match.end()])
            document_start = start
            consumed = match.end()
        end = len(buffer) if is_last else max(consumed, len(buffer) - len(separator) - 5)
        yield document_start, buffer[consumed:end]
        start += utf8_size(buffer[consumed:end])
        buffer = buffer[end:]


def read_lines(file: Path, data: DataConfig) -> Iterator[bytes]:
    """Yield lines without their newlines. No other character ends a line."""
    parts: list[bytes] = []
    for block in read_blocks(file, file_encoding(file, data.encodings), data.errors):
        *complete, rest = block.split(b"\n")
        for line in complete:
            yield b"".join([*parts, line])
            parts = []
        parts.append(rest)
    if last := b"".join(parts):
        yield last


def read_blocks(file: Path, encoding: str, errors: str, start: int = 0) -> Iterator[bytes]:
    """Return the blocks of a text file, converted from an encoding to UTF-8; refuse empty and binary files.

    Bytes that should be UTF-8 already are not checked.
    """
    blocks: Iterator[bytes] = decompress(file, READ_BLOCK_BYTES, start)
    if start:
        return blocks
    if encoding != "utf-8":
        text = decode_stream(blocks, str(file), errors, encoding=encoding)
        blocks = (replace_surrogates(block).encode() for block in text if block)
    first = next(blocks, b"")
    if not first:
        raise UserError(f"{file}: the file is empty; give a file with text in it")
    if refused := _detect_refused(file, first[:512].lstrip(LEADING_BYTES)):
        name, remedy = refused
        raise UserError(f"{file}: {name}; {remedy.format(shell_quote(str(file)))}")
    if 0 in first[:4096]:
        raise UserError(f"{file}: a binary file (a zero byte at offset {first.index(0)}); give a text file in UTF-8")
    return itertools.chain([first], blocks)


def _detect_refused(file: Path, beginning: bytes) -> tuple[str, str] | None:
    """Return the name of a format that is refused, and how to make text of it; None for other files."""
    suffix = format_suffix(file)
    by_suffix = [refused for suffixes, refused in _REFUSED_BY_SUFFIX.items() if suffix in suffixes]
    return match_beginning(beginning, by_suffix + _REFUSED_FORMATS)


def _suggest_encodings(text: bytes, position: int) -> str:
    """Return the remedy for a text that is not UTF-8: encodings to choose from, each with what it makes of the text."""
    guesses = list(guess_encodings(text, position))
    if not guesses:
        return "set data.encoding= to its encoding, or data.errors=replace"
    choices = "; ".join(f'data.encoding={name} reads "{sample}"' for name, sample in guesses)
    command = f"convert it with iconv -f {guesses[0][0]} -t utf-8"
    return f"choose the one that reads right: {choices}; or {command}, or set data.errors=replace"


def match_beginning(beginning: bytes, formats: list[tuple[bytes, str, str]]) -> tuple[str, str] | None:
    """Return the name of the format that a file begins like, and how to make text of it."""
    return next(((name, command) for pattern, name, command in formats if re.match(pattern, beginning)), None)


# --- records with a text in each ---


def read_json(file: Path, data: DataConfig) -> Iterator[Document]:
    """Read JSON lines if the first line is a complete object, and plain text otherwise."""
    return (read_json_lines if is_json_lines(file, data) else read_text)(file, data)


def _read_decoded_beginning(file: Path, data: DataConfig) -> bytes:
    return read_beginning(file, file_encoding(file, data.encodings))


def is_json_lines(file: Path, data: DataConfig) -> bool:
    """Return True if the first line that is not empty is a complete JSON object."""
    if not _read_decoded_beginning(file, data).startswith(b"{"):  # do not read an array: it may be one endless line
        return False
    first = next(line for line in read_lines(file, data) if line.strip(LEADING_BYTES))
    try:
        return isinstance(json.loads(first.decode("utf-8-sig", "replace")), dict)  # the reader checks UTF-8
    except (ValueError, RecursionError):
        return False


def read_json_lines(file: Path, data: DataConfig) -> Iterator[Document]:
    """Read a document from each line: an object with the key `data.text_field`, a string, or a list of messages."""
    for number, encoded in enumerate(read_lines(file, data), start=1):
        place = f"{file}: line {number}"
        line = "".join(decode_stream([encoded], place, data.errors, _suggest_encodings))
        if number == 1:
            line = line.removeprefix("\ufeff")
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            problem = "too large or too deeply nested"
            if isinstance(error, json.JSONDecodeError):
                problem = f"{error.msg.removesuffix(' at')}, column {error.colno}"
            spans_lines = re.fullmatch(r"\s*[\[{]+\s*", line)
            hint = _suggest_lines(file, ".[]" if "[" in line else ".") if spans_lines else ""
            raise UserError(f"{place} is not JSON ({problem}); every line must be one JSON object{hint}") from None
        if isinstance(record, dict):
            yield Document([_record_text(record.get(data.text_field, 0), place, data.text_field, record)])
        else:
            yield Document([_bare_text(record, file, place)])


def _record_text(value: Any, place: str, text_field: str, keys: Iterable[str]) -> str:
    """Return a value as a document: text unchanged, null as no text, and a list of messages as paragraphs."""
    value = _join_messages(value)
    if not isinstance(value, str | None):
        listing = _list_names(keys) or "it has none"
        raise UserError(f"{place} has no text under {text_field!r}; name the key with data.text_field= ({listing})")
    return replace_surrogates(value or "")


def _bare_text(value: Any, file: Path, place: str) -> str:
    """Return a line without keys as a document: text unchanged, and a list of messages as paragraphs."""
    text = _join_messages(value)
    if isinstance(text, str):
        return replace_surrogates(text)
    kind, hint = "a number, true, false or null", ""
    if isinstance(value, list):
        column = next((i for i, entry in enumerate(value) if isinstance(entry, str)), 0)
        is_whole_text = all(isinstance(entry, dict | list | str) for entry in value)
        kind, hint = "an array", _suggest_lines(file, ".[]" if is_whole_text else f".[{column}]")
    raise UserError(f"{place} is {kind}; every line must be one JSON object, or a string{hint}")


def _suggest_lines(file: Path, jq_filter: str) -> str:
    """Return the command that makes JSON lines of other JSON, as the end of a message."""
    name = shell_quote(str(file))
    return f", for example with jq -c '{jq_filter}' {name} > {shell_quote(f'{file}.jsonl')}"


def _join_messages(value: Any) -> Any:
    """Return a list of messages as paragraphs, and any other value unchanged."""
    if not isinstance(value, list):
        return value
    messages = [_message_text(message) for message in value]
    return value if None in messages else "\n\n".join(map(str, messages))


def _message_text(message: Any) -> str | None:
    """Return a message {role, content} or {from, value} as "user: Hello". Return None for anything else."""
    for speaker, content in (("role", "content"), ("from", "value")):
        if isinstance(message, dict) and isinstance(message.get(speaker), str) and content in message:
            parts = message[content] if isinstance(message[content], list) else [{"text": message[content]}]
            texts = [part.get("text") or "" for part in parts if isinstance(part, dict)]  # a picture has no text
            return f"{message[speaker]}: {''.join(map(str, texts))}"
    return None


def _list_names(names: Iterable[str]) -> str:
    names = list(itertools.islice(names, 9))
    return ", ".join([*names[:8], "..."] if len(names) > 8 else names)


def read_parquet(file: Path, data: DataConfig) -> Iterator[Document]:
    """Read a document from each row of a parquet file."""
    return _read_table(file, data, "parquet", _open_parquet)


def read_arrow(file: Path, data: DataConfig) -> Iterator[Document]:
    """Read a document from each row of an Arrow file, such as save_to_disk of Hugging Face's datasets writes."""
    return _read_table(file, data, "Arrow", _open_arrow)


def _read_table(
    file: Path, data: DataConfig, format_name: str, open_table: Callable[[IO[bytes], str], tuple[Any, Iterator[Any]]]
) -> Iterator[Document]:
    """Read a document from each row. `open_table` returns the schema of the file, and its rows in batches."""
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError:
        raise UserError(f"{file}: this needs pyarrow, which is not installed: pip install pyarrow") from None
    with user_errors(file), file.open("rb") as stream:
        try:
            schema, batches = open_table(stream, data.text_field)
            names = _text_columns(schema, str(file), data.text_field)
            row = 0
            for batch in batches:
                column = batch.column(data.text_field)
                if pyarrow.types.is_dictionary(column.type):
                    column = column.dictionary_decode()
                is_chat = pyarrow.types.is_nested(column.type)
                for buffer in column if is_chat else column.cast(pyarrow.large_binary()):
                    place, value = f"{file}: row {row}", buffer.as_py()
                    if is_chat:
                        yield Document([_record_text(value, place, data.text_field, names)])
                    else:
                        blocks = decode_stream([value or b""], place, data.errors, lambda *_: "set data.errors=replace")
                        yield Document(blocks)
                    row += 1
        except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:  # the last: a damaged column name
            problem = str(error).splitlines()[0].rstrip(".")
            cause = f"the file is damaged, compressed or not {format_name}"
            raise UserError(f"{file}: cannot be read ({problem}): {cause}; fetch it again") from None


def _open_parquet(stream: IO[bytes], text_field: str) -> tuple[Any, Iterator[Any]]:
    """Return the schema of a parquet file, and its rows in batches. A batch has only the column of the text."""
    from pyarrow.parquet import ParquetFile

    table = ParquetFile(stream, buffer_size=READ_BLOCK_BYTES, pre_buffer=False, page_checksum_verification=True)
    return table.schema_arrow, table.iter_batches(64, columns=[text_field], use_threads=False)


def _open_arrow(stream: IO[bytes], text_field: str) -> tuple[Any, Iterator[Any]]:
    """Return the schema of an Arrow file or stream, and its rows in batches."""
    from pyarrow import ipc

    is_file = stream.read(6) == b"ARROW1"
    stream.seek(0)
    if not is_file:
        reader = ipc.open_stream(stream)
        return reader.schema, iter(reader)
    reader = ipc.open_file(stream)
    return reader.schema, map(reader.get_batch, range(reader.num_record_batches))


def _text_columns(schema: Any, file: str, text_field: str) -> list[str]:
    """Return the names of a table's columns of text or chats; `UserError` unless `text_field` is one of them."""
    text_type = re.compile(r"(dictionary<values=)?(large_)?string|(large_)?list<\w+: struct<.*\b(role|from): ")
    names = [column.name for column in schema if text_type.match(str(column.type))]
    if names.count(text_field) != 1:
        types = _list_names(f"{column.name} is {column.type!s:.60}" for column in schema)
        hint = f"name one with data.text_field= ({_list_names(names)})" if names else f"it has none ({types})"
        raise UserError(f"{file}: {text_field!r} is not a column of text; {hint}")
    return names


# --- which reader ---

Reader = Callable[[Path, DataConfig], Iterator[Document]]

# To read a new format, add its suffix here, with a function of the file and the keys of `data`, and version 1.
# Raise the version when the same file gives other documents. The version enters the hash of every corpus with such
# files, so text that was prepared before is prepared again. Version 0 belongs to plain text and the first readers.
READERS: dict[str, tuple[Reader, int]] = {
    ".arrow": (read_arrow, 1),
    ".jl": (read_json_lines, 1),
    ".jsonl": (read_json_lines, 0),
    ".ndjson": (read_json_lines, 0),
    ".json": (read_json, 0),
    ".parquet": (read_parquet, 0),
}


def read_documents(file: Path, data: DataConfig, start: int = 0) -> Iterator[Document]:
    """Yield a file's documents with the reader for its suffix in `READERS`, or else as plain text.

    Raises `UserError` naming the file, the place in it and the remedy.

    Args:
        file: The file.
        data: `text_field` is the key or column of the text; a null there is an empty document. `separator` separates
            the documents of plain text.
        start: The byte of plain text to begin at.
    """
    return read_text(file, data, start) if start else reader_for(file)[0](file, data)


def format_suffix(file: Any) -> str:
    """Return the suffix that names a file's format: the last one that is not a compression."""
    suffixes = [suffix.lower() for suffix in file.suffixes]
    return next((suffix for suffix in reversed(suffixes) if suffix not in COMPRESSED_SUFFIXES), "")


def reader_for(file: Any) -> tuple[Reader, int]:
    """Return the reader for a file's suffix, and its version. An unknown suffix means plain text."""
    return READERS.get(format_suffix(file), (read_text, 0))


def looks_like_text(file: Path) -> bool:
    """Return True unless a file is empty or begins like a binary file."""
    if format_suffix(file) in (".arrow", ".parquet"):  # binary by design
        return True
    try:
        beginning = read_beginning(file)
    except UserError:  # report it later rather than skip it
        return True
    if encoding_of_mark(beginning):
        return True
    return bool(beginning) and 0 not in beginning and not beginning.startswith(_BINARY_BEGINNINGS)


def detect_skipped(file: Path) -> tuple[str, str] | None:
    """Return the name of a format that folders skip, and how to make text of it; None for other files.

    Many files are zip archives inside, such as checkpoints. So the suffix must fit too.
    """
    return _detect_refused(file, read_beginning(file)) if format_suffix(file) in _NAMED_SUFFIXES else None


def detect_markup(file: Any, data: DataConfig) -> tuple[str, str] | None:
    """Return the name of a format that is read as raw text, and how to make text of it; None for other files.

    In the command, {0} stands for the file and {1} for `data.text_field`. Remote files are judged by their names.
    """
    suffix = format_suffix(file)
    if suffix in (".csv", ".tsv"):
        return "a table", "convert it to .jsonl or .parquet and set data.text_field=COLUMN"
    if reader_for(file)[0] not in (read_text, read_json) or not isinstance(file, Path):
        return None
    beginning = _read_decoded_beginning(file, data)
    if beginning.startswith(b"{") and is_json_lines(file, data):
        return None if suffix == ".json" else ("JSON lines", "mv {0} {0}.jsonl")
    if suffix == ".json" and beginning.startswith(b"["):
        beginning = b'{"'  # any array
    return match_beginning(beginning, _MARKUP_FORMATS)
