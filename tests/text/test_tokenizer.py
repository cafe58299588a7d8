"""Text to ids and back: published ids, independent encoders as oracles, round trips, cuts, training, the command."""

import base64
import dataclasses
import hashlib
import io
import json
import os
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import regex
import tiktoken
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as HuggingFace
from tokenizers import models, pre_tokenizers, trainers

from gpt import tokens as show_tokens
from gpt.errors import UserError, command_line
from gpt.exchange import checkpoint
from gpt.text import shards
from gpt.text.pieces import PIECE, cut
from gpt.text.tokenizer import (
    BYTE_PATTERN,
    END_OF_TEXT,
    GPT2_PATTERN,
    Tokenizer,
    TokenizerConfig,
    byte_tokenizer,
    gpt2_tokenizer,
    train_bpe,
)

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
TEXTS = {
    "story": STORY,
    "spaced": SPACED,
    "foreign": FOREIGN,
    "spelled": f"{END_OF_TEXT} <|endoftext {END_OF_TEXT}{END_OF_TEXT}",
    "contractions": "I'LL we'll don't 'tis x's they'd've you're I'm ''s'm'll",
    "empty": "",
}
EVERY_TEXT = pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)

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
RANKS = {base64.b64decode(line.split()[0]): int(line.split()[1]) for line in ASSET.read_text().splitlines()}
EVERY = pytest.mark.parametrize("tokenizer", [GPT2, BYTE, BPE, ODD], ids=["gpt2", "byte", "bpe", "odd"])
USUAL = pytest.mark.parametrize("tokenizer", [GPT2, BYTE, BPE], ids=["gpt2", "byte", "bpe"])
LEARNT = pytest.mark.parametrize("tokenizer", [GPT2, BPE, ODD], ids=["gpt2", "bpe", "odd"])

# Characters whose class every version of Unicode agrees on, and the seams of the pattern.
FRAGMENTS = ["a", "é", "\u017f", "中", "1", "²", "!", "'", "'s", "'S", "'ll", "\0", "\x1c", "\u200b", "\u0301", "😀"]
SPACES = [" ", "  ", "\n", "\r\n", "\t", "\x0b", "\x85", "\xa0", "\u3000", " " * 7, " " * 999, " " * 1000, "\r\n" * 503]
seams = st.lists(st.sampled_from([*FRAGMENTS, *SPACES, END_OF_TEXT]), max_size=23).map("".join)
spelled = st.lists(st.sampled_from(["<", "|", "<|", "end", "of", "text", "endoftext", "|>", END_OF_TEXT, " "])).map(
    "".join
)
valid_text = st.text(st.characters(exclude_categories=["Cs"])) | seams | spelled
some = settings(deadline=None, max_examples=300)
many = settings(deadline=None, max_examples=700)


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


def encode_pieces(tokenizer: Tokenizer, pieces: list[str]) -> list[int]:
    """The ids of pieces, one after the other."""
    return [token for piece in pieces for token in tokenizer.encode_piece(piece).tolist()]


def stand_ins() -> dict[int, str]:
    """GPT-2's printable character for each byte, as its encoder.py defines it."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


def merge_of(token: bytes) -> list[bytes]:
    """The pair that makes a token of GPT-2: what the merges before it leave of its bytes."""
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 2:
        pairs = [a + b for a, b in pairwise(parts)]
        i = min(range(len(pairs)), key=lambda i: RANKS.get(pairs[i], len(RANKS)))
        parts[i : i + 2] = [pairs[i]]
    return parts


@pytest.fixture(scope="module")
def hugging_face_gpt2() -> HuggingFace:
    """GPT-2 on the engine of `transformers`, with that engine's own pattern; its merges follow from the ranks."""
    letter = stand_ins()

    def spell(token: bytes) -> str:
        return "".join(letter[byte] for byte in token)

    merges = [tuple(map(spell, merge_of(token))) for token in sorted(RANKS, key=RANKS.__getitem__) if len(token) > 1]
    model = HuggingFace(models.BPE(vocab={spell(token): rank for token, rank in RANKS.items()}, merges=merges))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return model


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


@EVERY_TEXT
def test_gpt2_equals_hugging_face(hugging_face_gpt2, text):
    """The same ids as the engine of `transformers`, whose pattern and merging are its own."""
    assert GPT2.encode(text) == hugging_face_gpt2.encode(text).ids


@some
@given(seams)
def test_gpt2_equals_hugging_face_at_seams(hugging_face_gpt2, text):
    """Also where the pattern's alternatives meet."""
    assert GPT2.encode(text) == hugging_face_gpt2.encode(text).ids


@EVERY_TEXT
@LEARNT
def test_equals_slow_encoding(tokenizer, text):
    """The possessive pattern, the cuts and tiktoken's merging change nothing against the definition."""
    assert tokenizer.encode(text) == slow_encode(text, ranks_of(tokenizer))


@some
@given(seams)
def test_equals_slow_encoding_at_seams(text):
    """Also where the pattern's alternatives meet."""
    assert GPT2.encode(text) == slow_encode(text, RANKS)


# --- every tokenizer ---


@pytest.mark.parametrize(("tokenizer", "vocab_size"), [(GPT2, 50257), (BYTE, 257), (BPE, 401)])
def test_vocabulary(tokenizer, vocab_size):
    """End-of-text is the last id, and every other id stands for bytes of its own."""
    assert tokenizer.vocab_size == vocab_size
    assert tokenizer.end_of_text == vocab_size - 1
    assert tokenizer.decode([tokenizer.end_of_text]) == END_OF_TEXT
    assert len(ranks_of(tokenizer)) == vocab_size - 1
    assert b"" not in ranks_of(tokenizer)


def test_bytes_by_hand():
    """A byte is its own id, and a character may take several."""
    assert BYTE.encode("aé€\0\n") == [0x61, 0xC3, 0xA9, 0xE2, 0x82, 0xAC, 0x00, 0x0A]


@EVERY
@pytest.mark.parametrize("text", [END_OF_TEXT, f"a{END_OF_TEXT}b", f" {END_OF_TEXT}\n" * 3])
def test_spelled_end_of_text_stays_text(tokenizer, text):
    """Text never becomes the special id."""
    ids = tokenizer.encode(text)
    assert tokenizer.end_of_text not in ids
    assert tokenizer.decode(ids) == text
    assert encode_pieces(tokenizer, [text]) == ids


@EVERY
@many
@given(text=valid_text)
def test_round_trip(tokenizer, text):
    """Any text comes back as it was, from ids within the vocabulary: end-of-text, however it is spelled, is not one."""
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(0 <= token < tokenizer.end_of_text for token in ids)


@pytest.mark.parametrize(
    ("text", "replaced"),
    [
        ("\ud800", "\ufffd"),
        ("a\udc00b", "a\ufffdb"),
        ("\ud83dx\ude00", "\ufffdx\ufffd"),
        ("\ude00\ud83d", "\ufffd\ufffd"),
        ("\ud800\ud800\ud800 ", "\ufffd\ufffd\ufffd "),
        ("\ufeff\udfff😀", "\ufeff\ufffd😀"),
    ],
    ids=ascii,
)
@EVERY
def test_lone_surrogates(tokenizer, text, replaced):
    """Each half of a pair that has lost the other becomes U+FFFD, and nothing else changes."""
    ids = tokenizer.encode(text)
    assert ids == tokenizer.encode(replaced)
    assert tokenizer.decode(ids) == replaced


@pytest.mark.parametrize(
    "text",
    [
        " " * 1_000_000,
        " " * 1_000_000 + "end",
        "a" + " " * 1_000_000 + "b",
        "begin" + " " * 1_000_000,
        "a" + "\r\n" * 500_000 + "b",
        "a" * 1_000_000,
        "x " + "é" * 1_000_000,
        "1" * 1_000_000,
        "!" * 1_000_000,
        "'" * 1_000_000,
        "'s" * 500_000,
        "\u0301" * 1_000_000,
        "\x1c" * 1_000_000,
        "\0" * 1_000_000,
        "😀" * 1_000_000,
        "a1" * 500_000,
        " a" * 500_000,
        END_OF_TEXT * 76_923,
    ],
    ids=lambda text: ascii(text[:3] + text[-3:]),
)
@USUAL
def test_long_runs(tokenizer, text):
    """A run of a million neither panics nor takes more than a few seconds."""
    start = time.monotonic()
    ids = tokenizer.encode(text)
    seconds = time.monotonic() - start
    same = tokenizer.decode(ids) == text
    assert same  # said so, pytest does not print a million characters
    assert seconds < 5


@settings(deadline=None, max_examples=17)
@given(st.text(min_size=1, max_size=3), st.text(max_size=3), st.text(max_size=3))
def test_a_million_of_anything(unit, before, after):
    """Nothing panics."""
    text = before + unit * (1_000_000 // len(unit)) + after
    same = GPT2.decode(GPT2.encode(text)) == text
    assert same


def test_long_runs_by_hand():
    """GPT-2 has no token of two spaces before a word, and one of four letters a; a cut after 524,288 breaks no four."""
    assert 4 * PIECE == 524_288
    assert GPT2.encode(" " * 1_000_000 + "a") == [220] * 999_999 + [257]
    assert GPT2.encode("a" * 1_000_000) == [24794] * 250_000
    assert GPT2.encode("aaa" * 333_333) == [24794] * 249_999 + [46071]
    assert GPT2.decode([46071]) == "aaa"
    assert GPT2.decode([24794]) == "aaaa"


@EVERY
def test_decode_within_a_character(tokenizer):
    """Bytes that make no character show as U+FFFD, and as themselves in `decode_bytes`."""
    euro = tokenizer.encode("€")
    first = tokenizer.encode("a")[0]
    broken = (
        [*BYTE.encode("€")[:2]] if tokenizer is BYTE else [ranks_of(tokenizer)[b"\xe2"], ranks_of(tokenizer)[b"\x82"]]
    )
    assert tokenizer.decode_bytes(euro) == "€".encode()
    assert tokenizer.decode_bytes([*broken, first]) == b"\xe2\x82a"
    assert tokenizer.decode([*broken, first]) == "\ufffda"


@EVERY
def test_decode_takes_arrays(tokenizer):
    """Ids from a shard or a generator decode as a list does."""
    ids = tokenizer.encode(FOREIGN)
    assert tokenizer.decode(np.array(ids, dtype=np.uint16)) == FOREIGN
    assert tokenizer.decode(iter(ids)) == FOREIGN


# --- cuts ---

WHITE = regex.compile(r"\p{White_Space}")


def is_harmless(rest: str) -> bool:
    """Whether a cut before `rest` changes no id: it begins with white space that something else follows."""
    return bool(WHITE.match(rest)) and len(rest) > 1 and not WHITE.match(rest[1])


@LEARNT
@many
@given(text=valid_text, size=st.integers(1, 11))
@example(text="aa bb  cc\n\n dd", size=2)
@example(text="x" + " " * 1009 + "y" + "\n" * 1013, size=7)
def test_cuts_and_ids(tokenizer, text, size):
    """The ids of the pieces are those of the whole text; where cuts were forced, those of the texts between them."""
    pieces = list(cut([text], size))
    between, rest = [""], text
    for piece in pieces:
        if between != [""] and not is_harmless(rest):
            between.append("")
        between[-1] += piece
        rest = rest[len(piece) :]
    expected = [token for part in between for token in WHOLE[tokenizer.sha256].encode_ordinary(part)]
    assert encode_pieces(tokenizer, pieces) == expected
    assert tokenizer.decode(expected) == text


@LEARNT
@some
@given(
    words=st.lists(st.text(st.characters(exclude_categories=["Cs", "Z", "Cc"]), min_size=1, max_size=5)),
    size=st.integers(3, 11),
)
def test_words_are_never_cut(tokenizer, words, size):
    """Where every word is shorter than twice the size, no cut is forced, and the ids are those of the whole."""
    text = " ".join(words)
    pieces = list(cut([text], size))
    assert encode_pieces(tokenizer, pieces) == WHOLE[tokenizer.sha256].encode_ordinary(text)


@some
@given(text=valid_text, size=st.integers(1, 11))
def test_cuts_never_change_bytes(text, size):
    """Bytes are the same ids wherever the text is cut."""
    assert encode_pieces(BYTE, list(cut([text], size))) == list(text.encode())


@LEARNT
@some
@given(text=seams)
def test_encode_equals_tiktoken(tokenizer, text):
    """On text of one piece the ids are those of tiktoken itself."""
    assert tokenizer.encode(text) == WHOLE[tokenizer.sha256].encode_ordinary(text)


@LEARNT
def test_encode_equals_tiktoken_on_long_text(tokenizer):
    """And on several pieces of the default size, with runs of white space."""
    runs = [
        f"{end}{space * length}"
        for end in "a!\n"
        for space in " \u3000"
        for length in (499, 998, 999, 1000, 1001, 1999)
    ]
    text = (STORY + FOREIGN + "".join(runs) + "b") * 23
    assert len(list(cut([text]))) == 7
    assert tokenizer.encode(text) == WHOLE[tokenizer.sha256].encode_ordinary(text)


@EVERY
def test_pieces_are_arrays(tokenizer):
    """One dimension of uint32, also of nothing."""
    for piece in ("", "x", "x" + " " * 1009 + "y"):
        ids = tokenizer.encode_piece(piece)
        assert (ids.dtype, ids.ndim) == (np.uint32, 1)
        assert ids.tolist() == tokenizer.encode(piece)


@pytest.mark.parametrize("space", [" ", "\n", "\u3000"], ids=ascii)
def test_longest_run_within_a_piece(space):
    """The matcher's stack holds a million spaces inside a text: more than seven times what is in a piece at most."""
    assert list(map(len, cut(["x" + space * PIECE + "y"]))) == [PIECE, 2]
    (piece,) = cut([space * PIECE + "y"])
    for text in (piece, space * 7 * PIECE + "y"):
        alone = GPT2.encode(text[:-2])  # at a text's end a run needs no stack
        assert GPT2.encode_piece(text).tolist() == alone + GPT2.encode(space + "y")


MEGA = {
    "letters": ("a" * 10_000_000, 30),
    "spaces": (" " * 10_000_000, 20),
    "runs": (("a" + " " * 999) * 10_000, 5),
    "separators": ((" " * 999 + "\x1c") * 10_000, 5),
    "ideographs": ("日本語中文字符" * 476_190, 10),
}


@pytest.mark.parametrize(("text", "seconds"), MEGA.values(), ids=MEGA)
def test_encoding_takes_linear_time(text, seconds):
    """Ten megabytes that are hard to cut take seconds, here a tenth of the bound; forced cuts lose nothing."""
    start = time.process_time()
    ids = np.concatenate([GPT2.encode_piece(piece) for piece in cut([text])])
    assert time.process_time() - start < seconds
    same = GPT2.decode_bytes(ids.tolist()) == text.encode()
    assert same  # said so, pytest does not print ten megabytes


# --- training ---


def test_merges_by_hand():
    """A worked example: ug 10+5+5 = 20 times, un 12+4 = 16, hug 10+5 = 15, pun 12."""
    words = ["hug"] * 10 + ["pug"] * 5 + ["pun"] * 12 + ["bun"] * 4 + ["hugs"] * 5
    tokenizer = train_bpe(words, 261)
    assert [tokenizer.decode_bytes([token]) for token in range(256)] == [bytes([byte]) for byte in range(256)]
    assert [tokenizer.decode([token]) for token in range(256, 261)] == ["ug", "un", "hug", "pun", END_OF_TEXT]
    assert tokenizer.encode("hugs") == [258, ord("s")]
    assert tokenizer.encode("bug") == [ord("b"), 256]
    assert tokenizer.encode("mun pun") == [ord("m"), 257, ord(" "), 259]
    assert tokenizer.name == "bpe"


def test_pairs_merge_only_within_pieces_and_only_if_repeated():
    """A space belongs to the word after it; what occurs once is no token."""
    learnt = set(ranks_of(train_bpe(["ab cd ab ef ab"], 999))) - set(ranks_of(BYTE))
    assert learnt == {b"ab", b" ab"}


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


def test_training_compresses():
    """Its own text takes less than half as many tokens as bytes, and more tokens help more."""
    sizes = [len(train_bpe([STORY], vocab_size).encode(STORY)) for vocab_size in (257, 300, 500)]
    assert sizes[0] == len(STORY.encode())
    assert sizes[0] > sizes[1] > 2 * sizes[2] > 0
    assert sizes[2] < sizes[0] / 2


@EVERY_TEXT
def test_trained_pieces_equal_hugging_face(text):
    """tiktoken with the learnt ranks cuts text as the library that learnt them, with its own pattern and merges."""
    trainee = HuggingFace(models.BPE())
    trainee.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=400, min_frequency=2, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    trainee.train_from_iterator([STORY, FOREIGN], trainer)
    assert trainee.get_vocab_size() == BPE.vocab_size - 1
    byte_of = {letter: byte for byte, letter in stand_ins().items()}
    expected = [bytes(byte_of[letter] for letter in token) for token in trainee.encode(text).tokens]
    assert [BPE.decode_bytes([token]) for token in BPE.encode(text)] == expected


def test_training_survives_surrogates_and_no_text():
    """Lone surrogates are learnt as U+FFFD, and from nothing at all come the bytes."""
    assert train_bpe(["\ud800\ud800 \ud800"], 300).sha256 == train_bpe(["\ufffd\ufffd \ufffd"], 300).sha256
    assert train_bpe([], 300).vocab_size == 257


def test_merges_of_tokens_by_hand():
    """What a token was merged from; bytes alone, and tokens that no merge leads to."""
    words = ["hug"] * 10 + ["pug"] * 5 + ["pun"] * 12 + ["bun"] * 4 + ["hugs"] * 5
    trained = train_bpe(words, 260)
    assert [trained.merged_from(token) for token in (256, 257, 258)] == [[b"u", b"g"], [b"u", b"n"], [b"h", b"ug"]]
    assert trained.merged_from(104) == [b"h"]
    assert GPT2.merged_from(262) == [b" t", b"he"]
    assert GPT2.merged_from(15496) == [b"H", b"ello"]
    assert GPT2.merged_from(220) == [b" "]
    single = {bytes([byte]): byte for byte in range(256)}
    assert Tokenizer("odd", single | {b"abc": 256}, GPT2_PATTERN).merged_from(256) == [b"a", b"b", b"c"]
    assert Tokenizer("odd", single | {b"abcd": 256, b"bc": 257}, GPT2_PATTERN).merged_from(256) == [
        b"a",
        b"b",
        b"c",
        b"d",
    ]


@pytest.mark.parametrize("tokenizer", [BPE, ODD], ids=["bpe", "odd"])
def test_learnt_tokens_are_pairs(tokenizer):
    """Every token that was learnt was merged from two earlier ones."""
    ranks = ranks_of(tokenizer)
    for token in range(256, tokenizer.end_of_text):
        left, right = tokenizer.merged_from(token)
        assert left + right == tokenizer.decode_bytes([token])
        assert max(ranks[left], ranks[right]) < token


def test_merges_of_gpt2():
    """Of 516 tokens, as the oracle has them, from which `tokenizers` makes GPT-2's ids."""
    tokens = range(256, 50256, 97)
    assert [GPT2.merged_from(token) for token in tokens] == [merge_of(GPT2.decode_bytes([token])) for token in tokens]
    assert len(tokens) == 516


# --- stored and refused ---


@EVERY
def test_stored_round_trip(tokenizer):
    """Plain strings through JSON give the same tokenizer."""
    stored = tokenizer.to_dict()
    assert {type(value) for value in stored.values()} == {str}
    again = Tokenizer.from_dict(json.loads(json.dumps(stored)))
    assert (again.name, again.sha256, again.vocab_size) == (tokenizer.name, tokenizer.sha256, tokenizer.vocab_size)
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


def tampered(**changes: str) -> dict[str, str]:
    """The stored trained tokenizer with some of its strings replaced."""
    return BPE.to_dict() | changes


LINES = BPE.to_dict()["ranks"].splitlines(keepends=True)


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        (tampered(sha256="0" * 64), "do not match their hash"),
        (tampered(pattern=BYTE_PATTERN), "do not match their hash"),
        (tampered(ranks="".join(LINES[:-1])), "do not match their hash"),
        (tampered(ranks="".join(LINES).replace("YQ== 97\n", "YQ== 98\n").replace("Yg== 98\n", "Yg== 97\n")), "hash"),
        (tampered(ranks="".join([*LINES, LINES[-1]])), "twice"),
        (tampered(ranks="".join(LINES[:300] + LINES[301:])), "ids are not 0 to"),
        (tampered(ranks="".join(LINES[256:])), "ids are not 0 to"),
        (tampered(ranks=""), "no token for the byte 0"),
    ],
    ids=["hash", "pattern", "shorter", "swapped", "twice", "gap", "no bytes", "empty"],
)
def test_damaged_store_is_refused(stored, message):
    """Whatever is changed, one line says so."""
    with pytest.raises(UserError, match=message) as caught:
        Tokenizer.from_dict(stored)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("line", ["YWE=", "YWE= 400 x", "Y 400", "YWE= five"])
def test_unreadable_table_is_refused(line):
    """A line that is no token and rank."""
    with pytest.raises(ValueError):
        Tokenizer.from_dict(tampered(ranks="".join([*LINES, line])))


SINGLE = {bytes([byte]): byte for byte in range(256)}


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ({token: rank for token, rank in SINGLE.items() if rank < 255}, "no token for the byte 255"),
        ({b"ab" if token == b"\x07" else token: rank for token, rank in SINGLE.items()}, "no token for the byte 7"),
        (SINGLE | {b"ab": 255}, "its 257 ids are not 0 to 256, each once"),
        (SINGLE | {b"ab": 257}, "its 257 ids are not 0 to 256, each once"),
        (SINGLE | {b"\0": -1}, "its 256 ids are not 0 to 255, each once"),
        ({}, "no token for the byte 0"),
    ],
    ids=["missing", "replaced", "duplicate", "gap", "negative", "none"],
)
def test_impossible_ranks_are_refused(ranks, message):
    """tiktoken would panic on these, or lose text without a word."""
    with pytest.raises(UserError, match=message) as caught:
        Tokenizer("odd", ranks, GPT2_PATTERN)
    assert str(caught.value).startswith("tokenizer 'odd': ")


def test_config_ranges():
    """The default is valid, the ends of the range are in it, and what lies outside is named."""
    assert dataclasses.asdict(TokenizerConfig()) == {"name": "bpe", "vocab_size": 1536}
    for name, vocab_size in [("bpe", 257), ("bpe", 1_000_000), ("gpt2", 1), ("byte", 1)]:
        assert TokenizerConfig(name, vocab_size).vocab_size == vocab_size
    for vocab_size in (-1, 0, 256, 1_000_001):
        with pytest.raises(ValueError, match=rf"tokenizer\.vocab_size={vocab_size} is out of range.*257.*1000000"):
            TokenizerConfig("bpe", vocab_size)
    with pytest.raises(ValueError, match=r"tokenizer\.name='word' is not known: choose from bpe, gpt2, byte"):
        TokenizerConfig("word")


# --- python -m gpt.text.tokenizer ---


def output(capsys, *arguments: str) -> str:
    """What the command prints, run in this process; it must not say a word on stderr."""
    show_tokens.main(list(arguments))
    printed = capsys.readouterr()
    assert printed.err == ""
    return printed.out


def refusal(capsys, *arguments: str) -> str:
    """The one line on stderr with which it ends, and its exit code 2."""
    with pytest.raises(SystemExit) as end, command_line("gpt.text.tokenizer"):
        show_tokens.main(list(arguments))
    assert end.value.code == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("gpt.text.tokenizer: ")
    assert printed.err.endswith("\n")
    assert printed.err.count("\n") == 1
    return printed.err


def give_stdin(monkeypatch, content: bytes) -> None:
    """Let standard input hold these bytes."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content), encoding="utf-8"))


def command(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess:
    """The command in a process of its own, as UTF-8."""
    line = [sys.executable, "-m", "gpt.text.tokenizer", *arguments]
    environment = os.environ | {"PYTHONUTF8": "1"}
    return subprocess.run(line, cwd=ASSET.parents[2], env=environment, input=stdin, capture_output=True, text=True)


def prepared(folder: Path, tokenizer: Tokenizer) -> Path:
    """A prepared corpus of a few tokens, as gpt.text.shards writes it."""
    folder.mkdir()
    dtype, splits = shards.width(tokenizer), {}
    for split in shards.SPLITS:
        writer = shards.Writer(folder, split, dtype)
        writer.append(np.array([2, 3, 5, 7], dtype))
        writer.close()
        splits[split] = {"tokens": writer.length, "sha256": writer.hashes}
    manifest = {"tokenizer": tokenizer.sha256, "dtype": dtype.name, "shard_bytes": shards.SHARD_BYTES, "splits": splits}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer.to_dict()))
    return folder


GREETING = "Hello, naïve 世界!"
GREETED = f"""\
Hello│,│·naïve│·│<e4><b8>│<96>│<e7><95>│<8c>│!

 15496  48 65 6c 6c 6f           Hello = H + ello
    11  2c                       ,
 41492  20 6e 61 c3 af 76 65     ·naïve = ·na + ïve
   220  20                       ·
 10310  e4 b8                    <e4><b8> = <e4> + <b8>
   244  96                       <96>
 45911  e7 95                    <e7><95> = <e7> + <95>
   234  8c                       <8c>
     0  21                       !

9 tokens, 21 bytes, 16 characters: 2.33 bytes per token; vocabulary 50,257, sha256 {GPT2.sha256[:12]}...
"""


def test_command_shows_a_text(capsys, monkeypatch, tmp_path):
    """The text with its borders, each token with its bytes and its merge, and the counts; from any source."""
    assert output(capsys, "--text", GREETING) == GREETED
    assert output(capsys, "gpt2", "--text", GREETING) == GREETED
    (tmp_path / "text").write_text(GREETING, encoding="utf-8")
    assert output(capsys, "--file", str(tmp_path / "text")) == GREETED
    give_stdin(monkeypatch, GREETING.encode())
    assert output(capsys) == GREETED


def test_command_as_a_process():
    """It is `python -m gpt.text.tokenizer`, although the module then exists twice; it ends well, and quietly on an error."""
    shown = command(stdin=GREETING)
    assert (shown.returncode, shown.stdout, shown.stderr) == (0, GREETED, "")
    refused = command("--text", "a", "--file", "b")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.startswith(
        "gpt.text.tokenizer: argument --file: not allowed with argument --text; see python -m"
    )


def test_command_shows_what_cannot_be_seen(capsys):
    """White space as signs, a line's end also as one; control characters never reach the terminal."""
    out = output(capsys, "byte", "--text", "a\tb \n\n\x1b[31m\r\u200b€")
    assert out.split("\n\n")[0] == ("a│→│b│·│⏎│\n⏎│\n<1b>│[│3│1│m│<0d>│<e2>│<80>│<8b>│<e2>│<82>│<ac>")
    assert "\n    10  0a                       ⏎\n    27  1b                       <1b>\n" in out
    assert "\x1b" not in out
    assert show_tokens.visible("x\u3000é€\n\n\x85".encode() + b"\xe2\x82") == "x<e3><80><80>é€⏎\n⏎\n<c2><85><e2><82>"


def test_command_in_color(capsys, monkeypatch):
    """Colours in turn, of which none goes beyond a line; on a terminal that wants them, or always, or never."""
    colored = output(capsys, "byte", "--text", "ab\n\ncdé", "--color", "always")
    starts = [f"\x1b[38;5;16;48;5;{color}m" for color in show_tokens.PASTELS]
    a, b, c, d, e, f, g, h = (starts[i % len(starts)] for i in range(8))
    end = "\x1b[0m"
    assert colored.startswith(
        f"{a}a{end}{b}b{end}{c}⏎{end}\n{d}⏎{end}\n{e}c{end}{f}d{end}{g}<c3>{end}{h}<a9>{end}\n\n"
        f"    97  61                       {a}a{end}\n"
    )
    assert len(set(starts)) == len(starts) == 5
    two_lines = Tokenizer("odd", SINGLE | {b"\n\n": 256}, GPT2_PATTERN)
    show_tokens.show(two_lines, ["\n\n", "a"], False, show_tokens.PASTELS)
    assert capsys.readouterr().out.startswith(f"{a}⏎{end}\n{a}⏎{end}\n{b}a{end}\n\n")
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    arguments = ["byte", "--text", "ab\n\ncdé"]
    plain = output(capsys, *arguments)
    assert "\x1b" not in plain
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert output(capsys, *arguments) == colored
    assert output(capsys, *arguments, "--color", "never") == plain
    for name, value in [("NO_COLOR", "1"), ("TERM", "dumb")]:
        with monkeypatch.context() as environment:
            environment.setenv(name, value)
            assert output(capsys, *arguments).replace("│", "") == plain.replace("│", "")
            assert "\x1b" not in output(capsys, *arguments)
            assert output(capsys, *arguments, "--color", "always") == colored
    monkeypatch.setenv("NO_COLOR", "")
    assert output(capsys, *arguments) == colored


def test_command_counts(capsys):
    """One is one, thousands have commas, and of nothing there is no ratio."""
    known = f"vocabulary 257, sha256 {BYTE.sha256[:12]}...\n"
    assert output(capsys, "byte", "--text", "") == f"0 tokens, 0 bytes, 0 characters; {known}"
    out = output(capsys, "byte", "--text", "a")
    assert (
        out == f"a\n\n    97  61                       a\n\n1 token, 1 byte, 1 character: 1.00 bytes per token; {known}"
    )
    out = output(capsys, "byte", "--text", "é" * 1009)
    assert out.endswith(f"│<c3>│<a9>\n\n2,018 tokens, 2,018 bytes, 1,009 characters: 1.00 bytes per token; {known}")


def test_command_lists_short_texts(capsys):
    """Up to forty tokens by themselves, any number with --table, which shows no text."""
    assert output(capsys, "byte", "--text", "a" * 40).count("\n    97  61 ") == 40
    assert output(capsys, "byte", "--text", "a" * 41).count("\n") == 3
    table = output(capsys, "byte", "--table", "--text", "a" * 41)
    assert table.startswith("    97  61                       a\n" * 41 + "41 tokens, ")
    assert table.count("\n") == 42
    assert output(capsys, "byte", "--table", "--text", "").startswith("0 tokens, ")
    assert "\x1b[38;5;16;48;5;194mb" in output(capsys, "byte", "--table", "--text", "ab", "--color", "always")


def test_command_json(capsys):
    """All of it for scripts, on a line, the bytes of each token in hexadecimal."""
    out = output(capsys, "--json", "--text", GREETING, "--color", "always")
    assert out.isascii()
    assert out.count("\n") == 1
    pieces = ["48656c6c6f", "2c", "206e61c3af7665", "20", "e4b8", "96", "e795", "8c", "21"]
    assert json.loads(out) == {
        "tokenizer": "gpt2",
        "vocab_size": 50257,
        "sha256": GPT2.sha256,
        "tokens": 9,
        "bytes": 21,
        "characters": 16,
        "ids": [15496, 11, 41492, 220, 10310, 244, 45911, 234, 0],
        "pieces": pieces,
    }
    empty = json.loads(output(capsys, "byte", "--json", "--text", ""))
    assert (empty["tokens"], empty["ids"], empty["pieces"]) == (0, [], [])


def test_command_takes_a_long_text_in_pieces(capsys, tmp_path):
    """Ids, counts, colours and borders go on from piece to piece, and characters from block to block of bytes."""
    text = "€ and seven words\n" * 29_989
    assert len(list(cut([text]))) == 5
    file = tmp_path / "long"
    file.write_text(text, encoding="utf-8")
    assert json.loads(output(capsys, "--json", "--file", str(file)))["ids"] == GPT2.encode(text)
    shown, _, last = output(capsys, "--file", str(file)).rpartition("\n\n")
    same = shown == ("€│·and│·seven│·words│⏎│\n" * 29_989).removesuffix("│\n")
    assert last.startswith("149,945 tokens, 599,780 bytes, 539,802 characters: 4.00 bytes per token")
    assert same
    painted = output(capsys, "--color", "always", "--file", str(file))
    assert painted.count("\x1b[38;5;16;48;5;189m") == 149_945 // 5


@pytest.mark.parametrize("source", ["run", "checkpoints", "file", "prepared", "huggingface"])
def test_command_opens_what_holds_a_tokenizer(capsys, tmp_path, source):
    """A run, its folder of checkpoints, one checkpoint, a prepared corpus, a Hugging Face GPT-2."""
    best = tmp_path / "run/checkpoints/best.ckpt"
    checkpoint.save({"format": 1, "state_dict": {}, "config": {}, "tokenizer": BPE.to_dict()}, best)
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "config.json").write_text('{"model_type": "gpt2", "vocab_size": 50257}')
    path, tokenizer = {
        "run": (tmp_path / "run", BPE),
        "checkpoints": (best.parent, BPE),
        "file": (best, BPE),
        "prepared": (prepared(tmp_path / "prepared", ODD), ODD),
        "huggingface": (theirs, GPT2),
    }[source]
    said = json.loads(output(capsys, str(path), "--json", "--text", STORY))
    assert (said["sha256"], said["ids"]) == (tokenizer.sha256, tokenizer.encode(STORY))
    assert bytes.fromhex("".join(said["pieces"])).decode() == STORY


def test_command_refusals(capsys, monkeypatch, tmp_path):
    """Each mistake is one line that names the value and the remedy."""
    choices = "choose gpt2, byte, or the path of a run, a checkpoint, a Hugging Face GPT-2 or a prepared corpus"
    assert f"'gpt3' is no tokenizer: {choices}; a text goes behind --text" in refusal(capsys, "gpt3", "--text", "a")
    assert "is no tokenizer" in refusal(capsys, "a long text\n" * 1009, "--text", "a")
    assert "missing: cannot be read (No such file" in refusal(capsys, "--file", str(tmp_path / "missing"))
    assert "cannot be read (Is a directory)" in refusal(capsys, "--file", str(tmp_path))
    assert "not allowed with argument --table" in refusal(capsys, "--table", "--json", "--text", "a")
    assert "see python -m gpt.text.tokenizer --help" in refusal(capsys, "--tex", "a")
    assert "a folder without checkpoints" in refusal(capsys, str(tmp_path), "--text", "a")
    (tmp_path / "file").write_bytes("é".encode() * 50_021 + b"\xe2\x82x")
    assert "file: not UTF-8 (byte 0xe2 at offset 100042)" in refusal(capsys, "--file", str(tmp_path / "file"))
    assert "file: not a checkpoint of this project" in refusal(capsys, str(tmp_path / "file"), "--text", "a")
    give_stdin(monkeypatch, "é".encode()[:1])
    assert "standard input: not UTF-8 (byte 0xc3 at offset 0)" in refusal(capsys, "byte")
    give_stdin(monkeypatch, b"a" * 65_535 + b"\xe2\x82" + b"\xffb")  # the character begins in one block of bytes
    assert "standard input: not UTF-8 (byte 0xe2 at offset 65535)" in refusal(capsys, "byte")
    monkeypatch.setattr(sys, "stdin", None)
    assert "there is no text: give --text TEXT or --file FILE, or pipe one in" in refusal(capsys)
    give_stdin(monkeypatch, b"a")
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    assert "there is no text" in refusal(capsys)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ('{"model_type": "llama", "vocab_size": 50257}', "a llama of 50257 tokens; give a gpt2 of 50257"),
        ('{"model_type": "gpt2", "vocab_size": 50265}', "a gpt2 of 50265 tokens; give a gpt2 of 50257"),
        ('{"model_type": "gpt2"}', "cannot be read as a Hugging Face model"),
        ("[]", "cannot be read as a Hugging Face model"),
        ("{", "cannot be read as a Hugging Face model"),
    ],
)
def test_command_refuses_other_models(capsys, tmp_path, config, message):
    """A Hugging Face directory that is none, or no GPT-2's."""
    (tmp_path / "config.json").write_text(config)
    assert message in refusal(capsys, str(tmp_path), "--text", "a")


def test_command_refuses_damage(capsys, tmp_path):
    """A checkpoint whose tokenizer is none, and a prepared corpus that was changed."""
    file = tmp_path / "odd.ckpt"
    for stored in (None, {}, {"name": "bpe"}, {key: text for key, text in BPE.to_dict().items() if key != "sha256"}):
        checkpoint.save({"format": 1, "state_dict": {}, "config": {}, "tokenizer": stored}, file)
        assert "odd.ckpt: what it holds as its tokenizer is none" in refusal(capsys, str(file), "--text", "a")
    folder = prepared(tmp_path / "prepared", BPE)
    (folder / "tokenizer.json").write_text(json.dumps(tampered(sha256="0" * 64)))
    assert "do not match their hash" in refusal(capsys, str(folder), "--text", "a")


def test_command_takes_arguments_that_are_not_utf8(capsys):
    """Python hands them on as lone surrogates: they are shown as U+FFFD."""
    assert output(capsys, "byte", "--text", "a\udcff").startswith("a│<ef>│<bf>│<bd>\n\n")


def test_command_starts_fast():
    """GPT-2's tokens need no torch, whose import takes seconds."""
    program = "import sys; from gpt.tokens import main; main(['--text', 'a']); print('torch' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", program], cwd=ASSET.parents[2], capture_output=True, text=True)
    assert said.stdout.endswith("\nFalse\n")


def test_command_ends_quietly_with_its_reader():
    """An endless text into a reader that takes a line, as `head -n 1` does."""
    endless = "import os\nwhile True: os.write(1, b'y\\n' * 4096)"
    with (
        subprocess.Popen([sys.executable, "-c", endless], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as source,
        subprocess.Popen(
            [sys.executable, "-m", "gpt.text.tokenizer"],
            cwd=ASSET.parents[2],
            env=os.environ | {"PYTHONUTF8": "1"},
            stdin=source.stdout,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        ) as shown,
    ):
        assert source.stdout and shown.stdout and shown.stderr
        source.stdout.close()  # the command alone reads it
        assert shown.stdout.readline().decode() == "y│⏎│\n"
        shown.stdout.close()
        assert shown.wait(30) == 0
        assert shown.stderr.read() == b""
        assert source.wait(30) != 0
