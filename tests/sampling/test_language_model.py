"""A completion grows in whole characters, and never past a stop string."""

from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt.data.tokenizer import BYTE_PATTERN, Tokenizer, byte_tokenizer
from gpt.sampling.language_model import Completion

EOT = 256  # the byte tokenizer's end-of-text
BYTES = byte_tokenizer()


def pieces_of(tokens: Iterable[int], stops: tuple[str, ...] = (), tokenizer: Tokenizer = BYTES) -> list[str]:
    """Return the new text after each token, then the text that was pending at the end, then the finish reason."""
    completion, pieces, fed = Completion(tokenizer, stops), [], []
    for token in tokens:
        length = len(completion.text)
        completion.feed(token)
        fed.append(token)
        pieces.append(completion.text[length:])
        if completion.finish_reason is not None:
            break
    else:
        length = len(completion.text)
        completion.finish()
        pieces.append(completion.text[length:])
    assert completion.finish_reason in ("end_of_text", "stop", "length")
    assert completion.tokens == fed
    return [*pieces, completion.finish_reason]


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ("aé€😀b".encode(), ["a", "", "é", "", "", "€", "", "", "", "😀", "b", ""]),
        (b"\xffa", ["\ufffd", "a", ""]),
        (b"\xc3\xc3\xa9", ["", "\ufffd", "é", ""]),
        (b"a\xf0\x9f", ["a", "", "", "\ufffd"]),
    ],
)
def test_text_grows_in_whole_characters(data, expected):
    """Bytes become text as soon as a character is complete. Bytes that form none become U+FFFD."""
    assert pieces_of(data) == [*expected, "length"]
    assert "".join(expected) == data.decode("utf-8", "replace")


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("12ENxEND34", ("END",), ["1", "2", "", "", "ENx", "", "", "", "stop"]),
        ("ababac", ("abac",), ["", "", "", "ab", "", "", "stop"]),
        ("1xy2b3", ("xyz", "b"), ["1", "", "", "xy2", "", "stop"]),
        ("1xyz", ("y", "xyz"), ["1", "", "x", "stop"]),  # the text ends at y, before xyz is complete
        ("aaa", ("aaaa", "ab"), ["", "", "", "aaa", "length"]),
    ],
)
def test_text_ends_before_a_stop_string(text, stops, expected):
    """Text that only begins like one is released."""
    assert pieces_of(text.encode(), stops) == expected


def test_end_of_text_ends_a_text():
    """Pending characters are released, and the token itself has no text."""
    assert pieces_of([49, EOT, 50], ("12",)) == ["", "1", "end_of_text"]
    assert pieces_of([EOT]) == ["", "end_of_text"]
    assert pieces_of([0xF0, 0x9F, EOT]) == ["", "", "\ufffd", "end_of_text"]
    assert pieces_of(b"<|endoftext|>")[-1] == "length"


def test_a_stop_string_may_end_within_a_token():
    """The rest of the token is not shown."""
    ranks = {bytes([byte]): byte for byte in range(256)} | {b"ND34": 256, "😀é".encode()[1:]: 257}
    tokenizer = Tokenizer("test", ranks, BYTE_PATTERN)
    assert pieces_of([49, 69, 256, 50], ("END",), tokenizer) == ["1", "", "", "stop"]
    assert pieces_of([69, 256, 50], ("ENDE",), tokenizer) == ["", "END34", "2", "", "length"]
    assert pieces_of([0xF0, 257], (), tokenizer) == ["", "😀é", "", "length"]
    assert pieces_of([256, 256], ("4ND", "3"), tokenizer) == ["ND", "stop"]


ANY_TOKENS = st.lists(
    st.one_of(
        st.sampled_from([*b"ab\xed\xa0", *"€😀".encode()]),  # they often form characters and stop strings
        st.integers(0, 255),
    ),
    max_size=31,
)
ANY_TEXT = st.text(alphabet="ab€😀\ufffd", min_size=1, max_size=5)


@settings(max_examples=151, deadline=None)
@given(ANY_TOKENS, ANY_TEXT)
def test_streamed_text_is_decoded_then_cut(tokens, stop):
    """The result equals all tokens decoded at once and cut at the stop string."""
    *pieces, reason = pieces_of(tokens, (stop,))
    decoded = BYTES.decode(tokens)
    assert "".join(pieces) == decoded.split(stop)[0]
    assert reason == ("stop" if stop in decoded else "length")


@settings(max_examples=151, deadline=None)
@given(ANY_TOKENS, st.lists(ANY_TEXT, max_size=5))
def test_several_stop_strings(tokens, stops):
    """The text before the cut has none of them, and one begins at the cut."""
    *pieces, reason = pieces_of(tokens, tuple(stops))
    text, decoded = "".join(pieces), BYTES.decode(tokens)
    assert decoded.startswith(text)
    assert not any(stop in text for stop in stops)
    assert (reason == "stop") is any(stop in decoded for stop in stops)
    if reason == "stop":
        assert any(decoded.startswith(stop, len(text)) for stop in stops)
    else:
        assert text == decoded


@settings(max_examples=101, deadline=None)
@given(ANY_TOKENS, ANY_TEXT)
def test_as_much_as_can_be_is_shown(tokens, stop):
    """Only the longest tail that may become the stop string is pending."""
    plain, stopping = Completion(BYTES), Completion(BYTES, (stop,))
    for token in tokens:
        plain.feed(token)
        stopping.feed(token)
        if stopping.finish_reason is not None:
            break
        longest = max(n for n in range(len(stop)) if plain.text.endswith(stop[:n]))
        assert stopping.text == plain.text.removesuffix(stop[:longest])
