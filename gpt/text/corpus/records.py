"""Records with a text in each: JSON lines and parquet, in bounded memory."""

import contextlib
import itertools
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from gpt.errors import UserError
from gpt.files import explain
from gpt.text.corpus.config import DataConfig
from gpt.text.corpus.plain import BLOCK, Document, read_lines, read_text
from gpt.text.corpus.unpack import WHITE, beginning_of
from gpt.text.pieces import decoded, well_formed

_CONVERT = ", or set data.encoding=windows-1252 or data.errors=replace"


def read_json(file: Path, data: DataConfig) -> Iterator[Document]:
    """Read JSON lines if the first line is a complete object; else plain text."""
    return (read_json_lines if is_json_lines(file, data) else read_text)(file, data)


def is_json_lines(file: Path, data: DataConfig) -> bool:
    """Whether the first line that is not empty is a complete object."""
    if beginning_of(file, data.encoding).startswith(b"{"):  # an array may be one endless line
        first = next(line for line in read_lines(file, data) if line.strip(WHITE))
        with contextlib.suppress(ValueError, RecursionError):
            return isinstance(json.loads(first.decode("utf-8-sig", "replace")), dict)  # UTF-8 is checked later
    return False


def read_json_lines(file: Path, data: DataConfig) -> Iterator[Document]:
    """Read a document from each line."""
    for number, encoded in enumerate(read_lines(file, data), start=1):
        place = f"{file}: line {number}"
        line = "".join(decoded([encoded], place, data.errors, _CONVERT))
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
        yield Document([_text_of(held.get(data.text_field, 0), place, data.text_field, held)])


def _text_of(value: Any, place: str, text_field: str, keys: Iterable[str]) -> str:
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
                        yield Document([_text_of(value, place, text_field, names)])
                    else:
                        yield Document(decoded([value or b""], place, data.errors, ", or set data.errors=replace"))
                    row += 1
        except (arrow.ArrowException, OSError, UnicodeDecodeError) as error:  # the last of a damaged column name
            reason = str(error).splitlines()[0].rstrip(".")
            raise UserError(
                f"{file}: cannot be read ({reason}): the file is damaged, packed or not parquet; fetch it again"
            ) from None
