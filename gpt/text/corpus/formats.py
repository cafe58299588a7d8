"""Reading each kind of file as documents, and recognising a file by its name and its beginning."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gpt.errors import UserError
from gpt.text.corpus.config import DataConfig
from gpt.text.corpus.plain import Document, known_by, read_text
from gpt.text.corpus.records import is_json_lines, read_json, read_json_lines, read_parquet
from gpt.text.corpus.unpack import PACKED, beginning_of

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
_NOT_TEXT = (b"%PDF-", b"PK\x03\x04", b"\x89PNG", b"GIF8", b"\xff\xd8\xff")  # may have no zero byte near the start
# How files begin that are read as they are, what they are, and what makes text of them.
_MARKUP = [
    (rb"\{\\rtf", "RTF", "pandoc -t plain {0} -o {0}.txt"),
    (rb"%!PS", "PostScript", "ps2ascii {0} {0}.txt"),
    (rb"<\?xml", "XML", "xmllint --xpath 'string(/)' {0} > {0}.txt"),
    (rb"(?i)<!doctype html|<html", "HTML", "pandoc -f html -t plain {0} -o {0}.txt"),
    (rb'\{\s*"|\[\s*\{\s*"', "JSON", "jq -c '.. | objects | select(has(\"{1}\"))' {0} > {0}.jsonl"),
]


def read_documents(file: Path, data: DataConfig, start: int = 0) -> Iterator[Document]:
    """Yield a file's documents, by the reader of its suffix in `READERS`: else by `data.separator`, or as one.

    `data.text_field` is the key or column that holds the text; if that is null, the document is empty. `start` is the
    byte of plain text to begin at. Raises `UserError` naming the file, the place in it and the remedy.
    """
    return read_text(file, data, start) if start else reader_of(file)[0](file, data)


def kind_of(file: Any) -> str:
    """Return the suffix that says how to read a file: the last one that is not a compression."""
    suffixes = [suffix.lower() for suffix in file.suffixes]
    return next((suffix for suffix in reversed(suffixes) if suffix not in PACKED), "")


def reader_of(file: Any) -> tuple[Reader, int]:
    """Return the reader of a file's suffix and its version; of an unknown one, those of plain text."""
    return READERS.get(kind_of(file), (read_text, 0))


def looks_like_text(file: Path) -> bool:
    """Whether to read a file that was found in a folder: not if it is empty or begins like a binary file."""
    if kind_of(file) == ".parquet":  # binary by design
        return True
    try:
        beginning = beginning_of(file)
    except UserError:  # report it later rather than skip it
        return True
    return bool(beginning) and 0 not in beginning and not beginning.startswith(_NOT_TEXT)


def markup_of(file: Any, data: DataConfig) -> tuple[str, str] | None:
    """Return what a file is that `read_documents` takes for plain text, and what makes text of it, {0} for its name.

    It goes by the name, and by the beginning of a file that is here.
    """
    if (kind := kind_of(file)) in (".csv", ".tsv"):
        return "a table", "convert it to .jsonl or .parquet and set data.text_field=COLUMN"
    if reader_of(file)[0] not in (read_text, read_json) or not isinstance(file, Path):
        return None
    if is_json_lines(file, data):
        return None if kind == ".json" else ("JSON lines", "mv {0} {0}.jsonl")
    beginning = beginning_of(file, data.encoding)
    return known_by(b'{"' if kind == ".json" and beginning.startswith(b"[") else beginning, _MARKUP)
