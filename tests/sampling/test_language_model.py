"""A text grows from tokens: in whole characters, and never past a stop string."""

from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt.data.tokenizer import BYTE_PATTERN, Tokenizer, byte_tokenizer
from gpt.sampling.language_model import Completion

EOT = 256  # the byte tokenizer's end-of-text
BYTES = byte_tokenizer()


def pieces_of(tokens: Iterable[int], stops: tuple[str, ...] = (), tokenizer: Tokenizer = BYTES) -> list[str]:
    """The piece that a stream gives for each token, then what it held back, then its finish reason."""
    stream, pieces, fed = Completion(tokenizer, stops), [], []
    for token in tokens:
        fed.append(token)
        before = len(stream.text)
        stream.feed(token)
        pieces.append(stream.text[before:])
        if stream.finish_reason is not None:
            break
    else:
        before = len(stream.text)
        stream.finish()
        pieces.append(stream.text[before:])
    assert stream.finish_reason in ("end_of_text", "stop", "length")
    assert stream.tokens == fed
    return [*pieces, stream.finish_reason]


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ("aé€😀b".encode(), ["a", "", "é", "", "", "€", "", "", "", "😀", "b", ""]),
        (b"\xffa", ["\ufffd", "a", ""]),
        (b"\xc3\xc3\xa9", ["", "\ufffd", "é", ""]),
        (b"a\xf0\x9f", ["a", "", "", "\ufffd"]),
    ],
)
def test_never_half_a_character(data, expected):
    """Bytes become text as soon as a character is whole; those that make none become U+FFFD."""
    assert pieces_of(data) == [*expected, "length"]
    assert "".join(expected) == data.decode("utf-8", "replace")


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("12ENxEND34", ("END",), ["1", "2", "", "", "ENx", "", "", "", "stop"]),
        ("ababac", ("abac",), ["", "", "", "ab", "", "", "stop"]),
        ("1xy2b3", ("xyz", "b"), ["1", "", "", "xy2", "", "stop"]),
        ("1xyz", ("y", "xyz"), ["1", "", "x", "stop"]),  # at y the text is over, and xyz never came
        ("aaa", ("aaaa", "ab"), ["", "", "", "aaa", "length"]),
    ],
)
def test_stop_strings(text, stops, expected):
    """A stop string and what follows are never shown; text that only began like one is released."""
    assert pieces_of(text.encode(), stops) == expected


def test_end_of_text():
    """End-of-text ends the text, releases what was held back, and is never shown."""
    assert pieces_of([49, EOT, 50], ("12",)) == ["", "1", "end_of_text"]
    assert pieces_of([EOT]) == ["", "end_of_text"]
    assert pieces_of([0xF0, 0x9F, EOT]) == ["", "", "\ufffd", "end_of_text"]
    assert pieces_of(b"<|endoftext|>")[-1] == "length"


def test_stop_within_a_token():
    """A token of several characters may end one stop string and hold what must not be shown."""
    ranks = {bytes([byte]): byte for byte in range(256)} | {b"ND34": 256, "😀é".encode()[1:]: 257}
    tokenizer = Tokenizer("test", ranks, BYTE_PATTERN)
    assert pieces_of([49, 69, 256, 50], ("END",), tokenizer) == ["1", "", "", "stop"]
    assert pieces_of([69, 256, 50], ("ENDE",), tokenizer) == ["", "END34", "2", "", "length"]
    assert pieces_of([0xF0, 257], (), tokenizer) == ["", "😀é", "", "length"]
    assert pieces_of([256, 256], ("4ND", "3"), tokenizer) == ["ND", "stop"]


ANY_TOKENS = st.lists(
    st.one_of(
        st.sampled_from([*b"ab\xed\xa0", *"€😀".encode()]),  # these meet in characters and stop strings now and then
        st.integers(0, 255),
    ),
    max_size=31,
)
ANY_TEXT = st.text(alphabet="ab€😀\ufffd", min_size=1, max_size=5)


@settings(max_examples=307, deadline=None)
@given(ANY_TOKENS, ANY_TEXT)
def test_streamed_text_is_decoded_then_cut(tokens, stop):
    """With a stop string: decode_stream at once, then cut where it first stands."""
    *pieces, reason = pieces_of(tokens, (stop,))
    whole = BYTES.decode(tokens)
    assert "".join(pieces) == whole.split(stop)[0]
    assert reason == ("stop" if stop in whole else "length")


@settings(max_examples=307, deadline=None)
@given(ANY_TOKENS, st.lists(ANY_TEXT, max_size=5))
def test_several_stop_strings(tokens, stops):
    """No text before the cut holds one, and at the cut stands one; without any, it is all decode_stream at once."""
    *pieces, reason = pieces_of(tokens, tuple(stops))
    text, whole = "".join(pieces), BYTES.decode(tokens)
    assert whole.startswith(text)
    assert not any(stop in text for stop in stops)
    assert (reason == "stop") is any(stop in whole for stop in stops)
    assert any(whole.startswith(stop, len(text)) for stop in stops) if reason == "stop" else text == whole


@settings(max_examples=101, deadline=None)
@given(ANY_TOKENS, ANY_TEXT)
def test_as_much_as_can_be_is_shown(tokens, stop):
    """At every token all is shown but the longest tail that may yet become the stop string."""
    plain, stream = Completion(BYTES), Completion(BYTES, (stop,))
    for token in tokens:
        plain.feed(token)
        stream.feed(token)
        if stream.finish_reason is not None:
            break
        longest = max(n for n in range(len(stop)) if plain.text.endswith(stop[:n]))
        assert stream.text == plain.text.removesuffix(stop[:longest])
