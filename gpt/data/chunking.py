"""Text made ready to count, encode or print: decoded, without lone surrogates, and in chunks of bounded size."""

import codecs
import itertools
import re
from collections.abc import Iterable, Iterator

from gpt.errors import UserError

CHUNK_CHARS = 1 << 17  # a chunk takes some milliseconds to encode, so threads rarely contend

# What \s matches in GPT-2's pattern: Unicode's White_Space. Python's own \s includes four more control characters.
WHITESPACE = "\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
_LAST_SPACE = re.compile(f"[{WHITESPACE}](?=[^{WHITESPACE}])")

_SIGNS = {" ": "·", "\t": "→", "\n": "⏎\n"}
_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_RAW = ("utf-8", "surrogateescape")  # bytes that are not UTF-8 survive decoding and encoding


def replace_surrogates(text: str) -> str:
    """Replace every lone surrogate, half a character that UTF-8 cannot hold, by U+FFFD."""
    try:
        text.encode("utf-8")
        return text
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def utf8_size(text: str) -> int:
    """Return the bytes that a text takes in UTF-8."""
    return len(text) if text.isascii() else len(text.encode())


def decode_stream(
    blocks: Iterable[bytes], place: str, errors: str = "strict", hint: str = "", encoding: str = "utf-8", start: int = 0
) -> Iterator[str]:
    """Decode blocks of any size, yielding one for each; `UserError` names the first byte that is not of the encoding.

    `hint` is what to do besides converting the text; `start` is the byte at which the blocks begin.
    """
    decoder, offset = codecs.getincrementaldecoder(encoding)(errors), start
    for block, last in itertools.chain(((block, False) for block in blocks), [(b"", True)]):
        pending = len(decoder.getstate()[0])  # the first bytes of a character
        try:
            yield decoder.decode(block, last)
        except UnicodeDecodeError as error:
            at = error.start + offset - pending
            where = f"byte 0x{error.object[error.start]:02x} at offset {at}"
            if encoding != "utf-8":
                what = f"not {encoding} ({where})"
                raise UserError(f"{place}: {what}; set another data.encoding=, or data.errors=replace") from None
            guess = "utf-16" if at == 0 and error.object.startswith(_UTF16) else "windows-1252"
            convert = f"convert it first, for example with iconv -f {guess} -t utf-8"
            raise UserError(f"{place}: not UTF-8 ({where}); {convert}{hint}") from None
        offset += len(block)


def strip_byte_order_mark(blocks: Iterator[str]) -> Iterator[str]:
    """Take the byte order mark from the beginning of a text."""
    first = next(filter(None, blocks), "")  # a block may be empty, where it ends within a character
    return itertools.chain([first.removeprefix("\ufeff")], blocks)


def split_into_chunks(blocks: Iterable[str], size: int = CHUNK_CHARS) -> Iterator[str]:
    """Split a document into chunks of `size` to `4 * size` characters; the last may be shorter.

    GPT-2's pattern always ends a token before the last white space of a run that something follows. A cut there does
    not change a document's tokens. Only a text without such a place is cut anywhere. The cuts depend on the document
    alone, not on the blocks that it arrives in. An empty document has no chunks.
    """
    buffer = ""
    for block in blocks:
        buffer += block  # in place, while no chunk is cut off
        start = 0
        while len(buffer) - start > 4 * size:
            match = _LAST_SPACE.search(buffer, start + size, start + 4 * size)
            end = match.start() if match else start + 4 * size
            yield buffer[start:end]
            start = end
        buffer = buffer[start:]
    while match := _LAST_SPACE.search(buffer, size):
        yield buffer[: match.start()]
        buffer = buffer[match.start() :]
    if buffer:
        yield buffer


def show_token(token: bytes) -> str:
    """Make a token visible: signs for white space, <e2><82> for partial and invisible characters."""
    return "".join(
        _SIGNS.get(c) or (c if c.isprintable() else "".join(f"<{byte:02x}>" for byte in c.encode(*_RAW)))
        for c in token.decode(*_RAW)
    )


def token_label(token: bytes) -> str:
    """Make a token visible on one line."""
    return show_token(token).replace("\n", "")
