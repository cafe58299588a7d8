"""The encoding of a text: UTF-8, as its byte order mark says, or as the user names it. Never by a guess."""

import codecs
import contextlib
import itertools
import re
from collections.abc import Iterable
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
    """Return the encoding that the byte order mark at the beginning of a text names. The mark of UTF-8 is no news."""
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


def guess_encodings(text: bytes, position: int) -> Iterable[tuple[str, str]]:
    """Yield up to three encodings that may be the one of a text, each with 40 characters as it decodes them.

    Args:
        text: Part of the text.
        position: Of the first byte that is not UTF-8.
    """
    from charset_normalizer import from_bytes

    start = max(text.rfind(b"\n", 0, position) + 1, position - _SAMPLE_BYTES // 2)
    sample = text[start : start + _SAMPLE_BYTES]
    line_end = sample.rfind(b"\n", position - start)
    if line_end > 0:  # otherwise the sample may end within a character
        sample = sample[:line_end]
    guesses = []
    matches = list(from_bytes(sample))
    for match in matches:
        alternatives = match.could_be_from_charset
        encoding = next((name for name in _COMMON_ENCODINGS if name in alternatives), match.encoding)
        is_as_good = match.chaos <= matches[0].chaos + _SIMILAR_CHAOS
        guesses.append((not (is_as_good and encoding in _COMMON_ENCODINGS), encoding, str(match)))
    for _, encoding, text_read in sorted(guesses, key=lambda guess: guess[0])[:_MAX_GUESSES]:
        decoded = " ".join(text_read.split())
        first = next((i for i, character in enumerate(decoded) if not character.isascii()), 0)
        start = max(0, first - _SHOWN_CHARS // 4)
        yield display_name(encoding), decoded[start : start + _SHOWN_CHARS]


def display_name(encoding: str) -> str:
    """Return the usual name of an encoding, which iconv takes as well. Python has other names for some."""
    return re.sub(r"^(koi8|iso8859)_", r"\1-", re.sub(r"^cp(125\d)$", r"windows-\1", encoding))
