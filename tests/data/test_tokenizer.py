"""Text to ids and back: published ids, independent encoders as oracles, round trips, cuts, training."""

import base64
import hashlib
import json
from itertools import pairwise
from pathlib import Path

import pytest
import regex
import tiktoken
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gpt.data.chunking import split_into_chunks
from gpt.data.tokenizer import (
    BYTE_PATTERN,
    END_OF_TEXT,
    GPT2_PATTERN,
    Tokenizer,
    TokenizerConfig,
    byte_tokenizer,
    gpt2_tokenizer,
    train_bpe,
)
from harness import refusal

ASSET = Path(__file__).parents[2] / "gpt/assets/r50k_base.tiktoken"

# GPT-2's pattern as OpenAI published it (encoder.py): no possessive quantifier, no anchor.
ORIGINAL = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")

STORY = (
    """It was the best of times, it was the worst of times; it was the age of wisdom, it was the age of foolishness.
The tokens of a text aren't its words: "the", " the" and "The" are three, and they've  nothing    in common.
    def main(argument, *arguments):\n        return 1234567890 + len(arguments)  # 2²³ ≠ 10 €, naïve café\r
"""
    * 5
)

SPACED = (
    "A run of a thousand spaces" + " " * 1000 + "and one that is shorter" + " " * 999 + "\nand\t\tthe end" + "\n" * 1009
)
FOREIGN = (
    "Ünïcödé ﬁne, 中文字符。日本語テキスト — Привет, мир! नमस्ते 😀👩\u200d👩\u200d👧 \u05e9\u05c1\u05dc\u05d5 "
    "e\u0301 \u017f İ ½ Ⅷ \x00\x1c\x85\ufeff\u200b\u3000\u2028x"
)

ODD_TEXTS = [
    "\0" * 1009,
    "\x1c\x85" * 503,
    "é" * 997,
    FOREIGN * 3,
    "\ud800 \udfff" * 7,
    " " * 5003 + "x",
    "\r\n" * 11,
    "",
]

GPT2, BYTE, BPE = gpt2_tokenizer(), byte_tokenizer(), train_bpe([STORY, FOREIGN], 401)
ODD = train_bpe(ODD_TEXTS, 379)
EVERY = pytest.mark.parametrize("tokenizer", [GPT2, BYTE, BPE, ODD], ids=["gpt2", "byte", "bpe", "odd"])
LEARNT = pytest.mark.parametrize("tokenizer", [GPT2, BPE, ODD], ids=["gpt2", "bpe", "odd"])

# Characters whose class every version of Unicode agrees on, and the seams of the pattern.
FRAGMENTS = ["a", "é", "\u017f", "中", "1", "²", "!", "'", "'s", "'S", "'ll", "\0", "\x1c", "\u200b", "\u0301", "😀"]
SPACES = [" ", "  ", "\n", "\r\n", "\t", "\x0b", "\x85", "\xa0", "\u3000", " " * 7, " " * 999, " " * 1000, "\r\n" * 503]
short_seams = st.lists(st.sampled_from([*FRAGMENTS, *SPACES[:9], END_OF_TEXT]), max_size=23).map("".join)
seams = st.lists(st.sampled_from([*FRAGMENTS, *SPACES, END_OF_TEXT]), max_size=23).map("".join)
spelled = st.lists(st.sampled_from(["<", "|", "<|", "end", "of", "text", "endoftext", "|>", END_OF_TEXT, " "])).map(
    "".join
)
valid_text = st.text(st.characters(exclude_categories=["Cs"])) | seams | spelled
some = settings(deadline=None, max_examples=150)
many = settings(deadline=None, max_examples=300)


def slow_encode(text: str, ranks: dict[bytes, int]) -> list[int]:
    """Byte-pair encoding as defined: within each piece, merge the first pair of the lowest rank until there is none."""
    ids = []
    for piece in ORIGINAL.findall(text):
        parts = [bytes([byte]) for byte in piece.encode()]
        while pairs := [(ranks[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in ranks]:
            i = min(pairs)[1]
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        ids += [ranks[part] for part in parts]
    return ids


def ranks_of(tokenizer: Tokenizer) -> dict[bytes, int]:
    """Each token's bytes and its id, end-of-text aside."""
    return {tokenizer.decode_bytes([token]): token for token in range(tokenizer.end_of_text)}


def whole(tokenizer: Tokenizer) -> tiktoken.Encoding:
    """tiktoken itself with the same ranks and the same pattern, to encode a text in one piece."""
    return tiktoken.Encoding("whole", pat_str=GPT2_PATTERN, mergeable_ranks=ranks_of(tokenizer), special_tokens={})


WHOLE = {tokenizer.sha256: whole(tokenizer) for tokenizer in (GPT2, BPE, ODD)}


# --- GPT-2 ---


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("Hello world", [15496, 995]),
        (" Hello world", [18435, 995]),
        ("Hello, do you like tea?", [15496, 11, 466, 345, 588, 8887, 30]),
        ("Every effort moves you", [6109, 3626, 6100, 345]),
        ("Akwirw ier", [33901, 86, 343, 86, 220, 959]),
        (END_OF_TEXT, [27, 91, 437, 1659, 5239, 91, 29]),
        ("", []),
    ],
)
def test_published_ids(text, ids):
    """Ids that OpenAI's encoder gives, as the documentation of `transformers` and the notes' source print them."""
    assert GPT2.encode(text) == ids
    assert GPT2.decode(ids) == text


def test_asset_is_openais():
    """The rank table is the published one, by the hash that tiktoken itself demands of r50k_base."""
    digest = hashlib.sha256(ASSET.read_bytes()).hexdigest()
    assert digest == "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"


@LEARNT
@some
@given(text=short_seams)
@example(text=STORY)
@example(text=SPACED)
@example(text=FOREIGN)
@example(text=f"{END_OF_TEXT} <|endoftext {END_OF_TEXT}{END_OF_TEXT}")
@example(text="I'LL we'll don't 'tis x's they'd've you're I'm ''s'm'll")
def test_equals_slow_encoding(tokenizer, text):
    """The possessive pattern, the cuts and tiktoken's merging change nothing against the definition."""
    assert tokenizer.encode(text) == slow_encode(text, tokenizer.ranks)


# --- every tokenizer ---


@pytest.mark.parametrize(("tokenizer", "vocab_size"), [(GPT2, 50257), (BYTE, 257), (BPE, 401)])
def test_vocabulary(tokenizer, vocab_size):
    """End-of-text is the last id, and every other id stands for bytes of its own."""
    assert tokenizer.vocab_size == vocab_size
    assert tokenizer.end_of_text == vocab_size - 1
    assert tokenizer.decode([tokenizer.end_of_text]) == END_OF_TEXT
    assert len(ranks_of(tokenizer)) == vocab_size - 1
    assert b"" not in ranks_of(tokenizer)


@EVERY
@many
@given(text=valid_text)
def test_round_trip(tokenizer, text):
    """Any text comes back as it was, from ids within the vocabulary: end-of-text, however it is spelled, is not one."""
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(0 <= token < tokenizer.end_of_text for token in ids)


@EVERY
def test_lone_surrogates(tokenizer):
    """Each half of a pair that has lost the other becomes U+FFFD, and nothing else changes."""
    assert tokenizer.decode(tokenizer.encode("\ufeff\udfff😀\ud83dx\ude00")) == "\ufeff\ufffd😀\ufffdx\ufffd"


@pytest.mark.parametrize(
    "text",
    ["a" + " " * 1_000_000 + "b", "a" * 1_000_000, "a" + "\r\n" * 500_000 + "b", "'s" * 500_000],
    ids=lambda text: ascii(text[:3] + text[-3:]),
)
@pytest.mark.parametrize("tokenizer", [GPT2, BYTE], ids=["gpt2", "byte"])
def test_long_runs(tokenizer, text):
    """A run of a million neither makes tiktoken panic nor takes quadratic time, which would be hours."""
    is_same = tokenizer.decode(tokenizer.encode(text)) == text
    assert is_same  # pytest would print a million characters of a comparison


@EVERY
def test_decode_within_a_character(tokenizer):
    """Bytes that make no character show as U+FFFD, and as themselves in `decode_bytes`."""
    ids = [tokenizer.ranks[bytes([byte])] for byte in b"\xe2\x82a"]
    assert tokenizer.decode_bytes(ids) == b"\xe2\x82a"
    assert tokenizer.decode(ids) == "\ufffda"


# --- cuts ---

WHITE = regex.compile(r"\p{White_Space}")


def is_harmless(rest: str) -> bool:
    """Return True if a cut before `rest` changes no id: it begins with a single white space."""
    return bool(WHITE.match(rest)) and len(rest) > 1 and not WHITE.match(rest[1])


@LEARNT
@many
@given(text=valid_text, size=st.integers(1, 11))
@example(text="aa bb  cc\n\n dd", size=2)
@example(text="x" + " " * 1009 + "y" + "\n" * 1013, size=7)
@example(text=(STORY + FOREIGN + SPACED) * 3, size=211)
def test_cuts_and_ids(tokenizer, text, size):
    """The ids of chunks equal the ids of the text. At a forced cut they equal the ids of the texts on both sides."""
    pieces = list(split_into_chunks([text], size))
    between, rest = [""], text
    for piece in pieces:
        if between != [""] and not is_harmless(rest):
            between.append("")
        between[-1] += piece
        rest = rest[len(piece) :]
    expected = [token for part in between for token in WHOLE[tokenizer.sha256].encode_ordinary(part)]
    assert [token for piece in pieces for token in tokenizer.encode_chunk(piece).tolist()] == expected
    assert tokenizer.decode(expected) == text


# --- training ---

HUGS = ["hug"] * 10 + ["pug"] * 5 + ["pun"] * 12 + ["bun"] * 4 + ["hugs"] * 5


def test_merges_by_hand():
    """A worked example: ug 10+5+5 = 20 times, un 12+4 = 16, hug 10+5 = 15, pun 12."""
    tokenizer = train_bpe(HUGS, 261)
    assert [tokenizer.decode_bytes([token]) for token in range(256)] == [bytes([byte]) for byte in range(256)]
    assert [tokenizer.decode([token]) for token in range(256, 261)] == ["ug", "un", "hug", "pun", END_OF_TEXT]
    assert tokenizer.encode("hugs") == [258, ord("s")]
    assert tokenizer.encode("bug") == [ord("b"), 256]
    assert tokenizer.encode("mun pun") == [ord("m"), 257, ord(" "), 259]
    assert tokenizer.name == "bpe"


def test_training_is_deterministic():
    """The same text gives the same tokens, and another text others."""
    trained = [train_bpe([STORY, FOREIGN], 401) for _ in range(2)]
    assert trained[0].to_dict() == trained[1].to_dict() == BPE.to_dict()
    assert train_bpe([STORY], 509).sha256 != BPE.sha256


@pytest.mark.parametrize(
    ("text", "vocab_size", "expected"), [(STORY, 257, 257), (STORY, 389, 389), ("ab", 401, 257), ("", 257, 257)]
)
def test_vocab_size(text, vocab_size, expected):
    """The size asked for, unless the text has too few pairs that repeat."""
    tokenizer = train_bpe([text], vocab_size)
    assert tokenizer.vocab_size == expected
    assert tokenizer.decode(tokenizer.encode(FOREIGN)) == FOREIGN


# --- stored and refused ---


@EVERY
def test_stored_round_trip(tokenizer):
    """Plain strings through JSON give the same tokenizer."""
    stored = tokenizer.to_dict()
    assert {type(value) for value in stored.values()} == {str}
    again = Tokenizer.from_dict(json.loads(json.dumps(stored)))
    assert again.to_dict() == stored
    assert again.encode(FOREIGN) == tokenizer.encode(FOREIGN)


def test_hash_tells_tokenizers_apart():
    """Ranks, their order and the pattern each change it; the name, which changes no id, does not."""
    ranks = {bytes([byte]): byte for byte in range(256)} | {b"ab": 256, b"bc": 257}
    swapped = ranks | {b"ab": 257, b"bc": 256}
    hashes = [
        Tokenizer(*arguments).sha256
        for arguments in [("a", ranks, GPT2_PATTERN), ("a", swapped, GPT2_PATTERN), ("a", ranks, BYTE_PATTERN)]
    ]
    assert len({*hashes, GPT2.sha256, BYTE.sha256, BPE.sha256}) == 6
    assert Tokenizer("b", ranks, GPT2_PATTERN).sha256 == hashes[0]


def tampered(**changes: object) -> dict:
    """The stored trained tokenizer with some of its parts replaced, and a hash that fits unless that is one of them."""
    stored = BPE.to_dict() | changes
    sha256 = hashlib.sha256(f"{stored['pattern']}\n{stored['ranks']}".encode()).hexdigest()
    return stored | ({} if "sha256" in changes else {"sha256": sha256})


LINES = BPE.to_dict()["ranks"].splitlines(keepends=True)
NO_STRINGS = "the tokenizer is not a dictionary of the strings name"
MALFORMED = "the rank table is malformed: each line must be a token in base64 and its rank"


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        ([], NO_STRINGS),
        ({}, NO_STRINGS),
        (BPE.to_dict() | {"ranks": 7}, NO_STRINGS),
        (tampered(sha256="0" * 64), "do not match their hash"),
        (tampered(ranks="".join(LINES[:300] + LINES[301:])), "ids must be 0 to"),
        (tampered(ranks="".join(LINES) + f"eHh4eHg= {2**32}\n"), "ids must be 0 to"),
        (tampered(ranks="".join(LINES) + "eHh4eHg= 399\n"), "ids must be 0 to"),
        (tampered(ranks=""), "no token for byte 0"),
        (tampered(ranks="".join(LINES) + f"{base64.b64encode(b'x' * 1025).decode()} {len(LINES)}\n"), "of 1,025 bytes"),
        *((tampered(ranks="".join([*LINES, line])), MALFORMED) for line in ("YWE= 400 x", "Y 400", "é 400")),
        # tiktoken would panic on some patterns, and others would drop text in silence or never end.
        (tampered(pattern="(?:a|a)*b"), "the tokenizer's pattern="),
        (tampered(name="../../etc"), "the tokenizer's name="),
    ],
    ids=lambda value: ascii(value)[-37:],
)
def test_damaged_store_is_refused(stored, message):
    """Every change is refused with one line."""
    assert message in refusal(Tokenizer.from_dict, stored)


def test_config_ranges():
    """The ends of the range are valid, and what lies outside is named."""
    for name, vocab_size in [("bpe", 257), ("bpe", 1_000_000), ("gpt2", 1), ("byte", 1)]:
        assert TokenizerConfig(name, vocab_size).vocab_size == vocab_size
    for vocab_size in (256, 1_000_001):
        line = f"tokenizer.vocab_size={vocab_size} is out of range: it must be at least 257 and at most"
        assert refusal(TokenizerConfig, "bpe", vocab_size).startswith(line)
    assert refusal(TokenizerConfig, "word") == "tokenizer.name='word' is not known: choose from bpe, gpt2, byte"
