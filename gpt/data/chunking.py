"""Text made ready to count, encode or print: decoded, without lone surrogates, and in chunks of bounded size."""

import codecs
import itertools
import re
from collections.abc import Callable, Iterable, Iterator

from gpt.data.encodings import guess_encodings
from gpt.errors import UserError

CHUNK_CHARS = 1 << 17  # a chunk takes some milliseconds to encode, so threads rarely contend

# What \s matches in GPT-2's pattern: Unicode's White_Space. Python's own \s includes four more control characters.
WHITESPACE = "\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
_LAST_SPACE = re.compile(f"[{WHITESPACE}](?=[^{WHITESPACE}])")

_VISIBLE_WHITESPACE = {" ": "·", "\t": "→", "\n": "⏎\n"}
_KEEP_BYTES = ("utf-8", "surrogateescape")  # bytes that are not UTF-8 survive decoding and encoding


def replace_surrogates(text: str) -> str:
    """Replace every lone surrogate, half a character that UTF-8 cannot hold, by U+FFFD."""
    try:
        text.encode("utf-8")
        return text
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def decode_argument(text: str) -> str:
    """Return a command's argument as the UTF-8 text that the shell passed, in every locale.

    Python leaves bytes undecoded that are not of the locale's encoding; the locale C has only ASCII. Bytes that are not
    UTF-8 either become U+FFFD.
    """
    try:
        return text.encode(*_KEEP_BYTES).decode("utf-8", "replace")
    except UnicodeEncodeError:  # half a character, which Windows allows in a name
        return replace_surrogates(text)


def utf8_size(text: str) -> int:
    """Return the bytes that a text takes in UTF-8."""
    return len(text) if text.isascii() else len(text.encode())


def suggest_conversion(text: bytes, position: int) -> str:
    """Return the remedy for a text that is not UTF-8: a command that converts it."""
    guesses = [encoding for encoding, _ in guess_encodings(text, position)] or ["ITS_ENCODING"]
    return f"convert it first, for example with iconv -f {guesses[0]} -t utf-8"


def decode_stream(
    blocks: Iterable[bytes],
    place: str,
    errors: str = "strict",
    remedy: Callable[[bytes, int], str] = suggest_conversion,
    encoding: str = "utf-8",
    start: int = 0,
) -> Iterator[str]:
    """Decode blocks of any size, and yield one text for each. `UserError` names the first byte that is invalid.

    Args:
        blocks: The bytes.
        place: Where they come from, for the error.
        errors: `strict`, or `replace` for U+FFFD in place of invalid bytes.
        remedy: Returns the end of the error, from a block that is not UTF-8 and the position of its first invalid byte.
        encoding: The encoding.
        start: The offset of the first byte.
    """
    decoder = codecs.getincrementaldecoder(encoding)(errors)
    offset = start
    for block, is_end in itertools.chain(((block, False) for block in blocks), [(b"", True)]):
        num_pending = len(decoder.getstate()[0])  # the first bytes of an incomplete character
        try:
            yield decoder.decode(block, is_end)
        except UnicodeDecodeError as error:
            position = error.start + offset - num_pending
            invalid = f"byte 0x{error.object[error.start]:02x} at offset {position}"
            if encoding != "utf-8":
                hint = "set another data.encoding=, or data.errors=replace"
                raise UserError(f"{place}: not {encoding} ({invalid}); {hint}") from None
            raise UserError(f"{place}: not UTF-8 ({invalid}); {remedy(error.object, error.start)}") from None
        offset += len(block)


def strip_byte_order_mark(blocks: Iterator[str]) -> Iterator[str]:
    """Remove the byte order mark from the beginning of a text."""
    first = next(filter(None, blocks), "")  # a block may be empty if it ends within a character
    return itertools.chain([first.removeprefix("\ufeff")], blocks)


def split_into_chunks(blocks: Iterable[str], size: int = CHUNK_CHARS) -> Iterator[str]:
    """Split a document into chunks of `size` to `4 * size` characters. The last chunk may be shorter.

    GPT-2's pattern always ends a token before the last white space of a run that precedes other characters. A cut there
    does not change a document's tokens. A text without such a place is cut anywhere. The cuts depend on the document
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
    return "".join(map(_show_character, token.decode(*_KEEP_BYTES)))


def _show_character(character: str) -> str:
    if character in _VISIBLE_WHITESPACE:
        return _VISIBLE_WHITESPACE[character]
    if character.isprintable():
        return character
    return "".join(f"<{byte:02x}>" for byte in character.encode(*_KEEP_BYTES))


def token_label(token: bytes) -> str:
    """Make a token visible on one line."""
    return show_token(token).replace("\n", "")
