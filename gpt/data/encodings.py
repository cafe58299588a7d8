"""The encoding of a text: UTF-8, the one of its byte order mark, or the one that the user names. Never a guess."""

import codecs
import contextlib
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

from gpt.data.compression import decompress

_BYTE_ORDER_MARKS = [  # the longer ones first: they begin like the shorter ones
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
]
_SAMPLE_BYTES = 1 << 16  # of which encodings are guessed
_MAX_GUESSES = 3
_SHOWN_CHARS = 40
_COMMON_ENCODINGS = ("cp1252", "shift_jis")  # named before others that read a sample alike, or nearly as well
_SIMILAR_CHAOS = 0.1  # a difference of charset-normalizer's measure that means little


def encoding_of_mark(beginning: bytes) -> str | None:
    """Return the encoding of the byte order mark that a text begins with; None without a mark, or for that of UTF-8."""
    return next((encoding for mark, encoding in _BYTE_ORDER_MARKS if beginning.startswith(mark)), None)


def file_encoding(file: Path, encodings: list[str]) -> str:
    """Return the encoding to read a file with.

    A byte order mark decides where UTF-8 is one of the encodings. Otherwise it is the first of them that decodes the
    whole file, or the last one.
    """
    if "utf-8" in encodings:
        with contextlib.closing(decompress(file, 4)) as blocks:
            marked = encoding_of_mark(next(blocks, b""))
        if marked is not None:
            return marked
    return next((encoding for encoding in encodings[:-1] if _decodes(file, encoding)), encodings[-1])


def _decodes(file: Path, encoding: str) -> bool:
    decoder = codecs.getincrementaldecoder(encoding)()
    with contextlib.closing(decompress(file, 1 << 20)) as blocks:
        try:
            for block in itertools.chain(blocks, [b""]):
                decoder.decode(block, final=not block)
        except UnicodeDecodeError:
            return False
    return True


def guess_encodings(text: bytes, position: int) -> Iterator[tuple[str, str]]:
    """Yield up to three likely encodings of a text, each with 40 characters that it decodes.

    Args:
        text: Part of the text.
        position: The position of its first byte that is not UTF-8.
    """
    from charset_normalizer import from_bytes

    line_start = max(text.rfind(b"\n", 0, position) + 1, position - _SAMPLE_BYTES // 2)
    sample = text[line_start : line_start + _SAMPLE_BYTES]
    line_end = sample.rfind(b"\n", position - line_start)
    if line_end > 0:  # otherwise the sample may end within a character
        sample = sample[:line_end]
    common: list[tuple[str, str]] = []
    others: list[tuple[str, str]] = []
    matches = list(from_bytes(sample))
    for match in matches:
        alternatives = match.could_be_from_charset
        encoding = next((name for name in _COMMON_ENCODINGS if name in alternatives), match.encoding)
        is_as_good = match.chaos <= matches[0].chaos + _SIMILAR_CHAOS
        (common if is_as_good and encoding in _COMMON_ENCODINGS else others).append((encoding, str(match)))
    for encoding, decoded in [*common, *others][:_MAX_GUESSES]:
        decoded = " ".join(decoded.split())
        first = next((i for i, character in enumerate(decoded) if not character.isascii()), 0)
        start = max(0, first - _SHOWN_CHARS // 4)
        yield display_name(encoding), decoded[start : start + _SHOWN_CHARS]


def display_name(encoding: str) -> str:
    """Return the usual name of an encoding, which iconv takes as well. Python has other names for some."""
    return re.sub(r"^(koi8|iso8859)_", r"\1-", re.sub(r"^cp(125\d)$", r"windows-\1", encoding))
