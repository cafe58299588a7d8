"""Well-formed text; and cuts: of the document alone, at white space where there is any, in little time and memory."""

import re
from collections.abc import Iterator

import pytest
import regex
import tiktoken
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gpt.data.chunking import CHUNK_CHARS, WHITESPACE, decode_argument, replace_surrogates, split_into_chunks

WHITE = regex.compile(r"\p{White_Space}")
EVERY_CHARACTER = [chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000]

# White space of one to three bytes, what Python alone calls white space, letters of one to four bytes.
LETTERS = "ab \n\t\x85\u2028\u3000\x1c\u200bé中😀"
words = st.text(LETTERS, max_size=23)
blocks_of_text = st.lists(words | st.sampled_from(["a" * 47, " " * 47, "a " * 23, " a" * 23]), max_size=17)
sizes = st.integers(1, 13)
many = settings(deadline=None, max_examples=300)


def slow_cut(text: str, size: int) -> list[str]:
    """The cuts as defined: of each piece's first `4 * size` characters, the first one that may be and is not early."""
    pieces = []
    while text:
        view = text[: 4 * size]
        ends = [i for i in range(size, len(view) - 1) if WHITE.match(view[i]) and not WHITE.match(view[i + 1])]
        end = ends[0] if ends else len(view)
        pieces.append(text[:end])
        text = text[end:]
    return pieces


# --- cuts ---


@pytest.mark.parametrize(
    ("text", "size", "pieces"),
    [
        ("", 3, []),
        ("aa bb cc dd", 3, ["aa bb", " cc", " dd"]),
        ("aa  bb\n\ncc", 2, ["aa ", " bb\n", "\ncc"]),
        ("aa\x1cbb\u200bcc dd", 2, ["aa\x1cbb\u200bcc", " dd"]),
        ("a" * 11, 2, ["a" * 8, "a" * 3]),
        (" " * 11, 2, [" " * 8, " " * 3]),
        ("aaaaaa aa", 2, ["aaaaaa", " aa"]),
        ("aaaaaaa aa", 2, ["aaaaaaa ", "aa"]),  # it would take a look beyond eight characters to cut before the space
    ],
)
def test_cuts_by_hand(text, size, pieces):
    """Before the last white space of a run that something follows, or else at four times the size."""
    assert list(split_into_chunks([text], size)) == pieces == slow_cut(text, size)


@many
@given(blocks_of_text, sizes)
@example(["aaaaaaa", " ", "aa"], 2)
@example(["", "a" * 8, "", " a", ""], 2)
def test_cuts_are_of_the_document_alone(blocks, size):
    """However a document is handed over, its cuts are the defined ones."""
    text = "".join(blocks)
    expected = slow_cut(text, size)
    assert list(split_into_chunks(blocks, size)) == expected
    assert list(split_into_chunks([text], size)) == expected
    assert list(split_into_chunks(iter(text), size)) == expected


@many
@given(blocks_of_text, sizes)
def test_pieces_come_early(blocks, size):
    """No piece waits for more than `4 * size` characters beyond what came out before, and the block they came in."""
    taken = returned = 0

    def reading() -> Iterator[str]:
        nonlocal taken
        for block in blocks:
            assert taken - returned <= 4 * size
            taken += len(block)
            yield block

    for piece in split_into_chunks(reading(), size):
        returned += len(piece)
    assert taken == returned == sum(map(len, blocks))


def test_white_space_is_what_the_tokenizers_pattern_takes():
    """WHITESPACE is tiktoken's \\s and Unicode's White_Space; Python adds the four separators from U+001C on."""
    ours = re.findall(f"[{WHITESPACE}]", "".join(EVERY_CHARACTER))
    bytes_alone = {bytes([byte]): byte for byte in range(256)}
    matcher = tiktoken.Encoding("spaces", pat_str=r"\s", mergeable_ranks=bytes_alone, special_tokens={})
    assert matcher.decode(matcher.encode_ordinary("".join(EVERY_CHARACTER))) == "".join(ours)
    assert ours == [character for character in EVERY_CHARACTER if WHITE.match(character)]
    assert {c for c in EVERY_CHARACTER if c.isspace()} - set(ours) == {"\x1c", "\x1d", "\x1e", "\x1f"}
    assert len(ours) == 25


MEGA = {
    "letters": "a" * 10_000_000,
    "spaces": " " * 10_000_000,
    "runs": ("a" + " " * 999) * 10_000,
}


@pytest.mark.parametrize("length", [1009, 10_000_001])
@pytest.mark.parametrize("text", MEGA.values(), ids=MEGA)
def test_long_texts_are_cut(text, length):
    """Ten megabytes of anything, in blocks of any length, are cut. In quadratic time this would take hours."""
    blocks = [text[i : i + length] for i in range(0, len(text), length)]
    count = size = 0
    for piece in split_into_chunks(blocks):
        count, size = count + 1, size + len(piece)
    assert size == len(text)
    assert len(text) // (4 * CHUNK_CHARS) < count <= len(text) // CHUNK_CHARS + 1


# --- well-formed text ---


HALVES = ["\ud800", "\ud83d", "\udbff", "\udc00", "\ude00", "\udfff"]


@many
@given(st.lists(st.sampled_from([*HALVES, "a", "\ufffd", "😀", "\ufeff"]) | st.characters(), max_size=29).map("".join))
@example("\ud83d\ud83d\ude00\ude00")
def test_well_formed(text):
    """It changes halves only, so that it can be encoded, and it changes nothing twice."""
    pairs = re.sub("[\ud800-\udbff][\udc00-\udfff]", lambda m: _join(*m.group()), text)
    assert replace_surrogates(text) == re.sub("[\ud800-\udfff]", "\ufffd", pairs)
    assert replace_surrogates(replace_surrogates(text)) == replace_surrogates(text)


def _join(high: str, low: str) -> str:
    """The character of a surrogate pair (Unicode 3.9, D91)."""
    return chr(0x10000 + (ord(high) - 0xD800) * 0x400 + ord(low) - 0xDC00)


def test_arguments_are_utf8_in_every_locale():
    """The locale C leaves the bytes of a character undecoded. Other text stays, and half a character is replaced."""
    assert decode_argument("caf\udcc3\udca9") == "café"
    assert decode_argument("café\n😀") == "café\n😀"
    assert decode_argument("a\udcff") == "a\ufffd"
    assert decode_argument("a\ud83d") == "a\ufffd"
