"""Text to ids and back: published ids, independent encoders as oracles, round trips, cuts, training."""

import base64
import dataclasses
import hashlib
import json
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

from gpt.errors import UserError
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


@pytest.mark.slow
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


@pytest.mark.slow
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
        (tampered(ranks="".join([*LINES, LINES[-1]])), "has 1 duplicate tokens"),
        (tampered(ranks="".join(LINES[:300] + LINES[301:])), "ids must be 0 to"),
        (tampered(ranks="".join(LINES[256:])), "ids must be 0 to"),
        (tampered(ranks=""), "no token for byte 0"),
    ],
    ids=["hash", "pattern", "shorter", "swapped", "twice", "gap", "no bytes", "empty"],
)
def test_damaged_store_is_refused(stored, message):
    """Whatever is changed, one line says so."""
    with pytest.raises(UserError, match=message) as caught:
        Tokenizer.from_dict(stored)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "pattern",
    ["", "[xyz]", ".", "x*", "(", "(?:a|a)*b", GPT2_PATTERN + " ", GPT2_PATTERN.replace("++", "+"), "a" * 999],
)
def test_foreign_patterns_are_refused(pattern):
    """tiktoken would panic on some, and others would drop text in silence or never end; their hash is no excuse."""
    ranks = BPE.to_dict()["ranks"]
    sha256 = hashlib.sha256(f"{pattern}\n{ranks}".encode()).hexdigest()
    with pytest.raises(
        UserError, match=r"^tokenizer 'bpe': its pattern .* is unknown: it must be GPT-2's or"
    ) as caught:
        Tokenizer.from_dict(tampered(pattern=pattern, sha256=sha256))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 200


@pytest.mark.parametrize("name", ["", "BPE", "../../etc", "gpt2\n", "a" * 999])
def test_foreign_names_are_refused(name):
    """The name becomes part of a folder's."""
    with pytest.raises(UserError, match=r"^tokenizer '.*' is not known: it must be bpe, gpt2, byte$"):
        Tokenizer.from_dict(tampered(name=name))


@pytest.mark.parametrize("stored", [None, [], "bpe", 7, {}, *({key: "x"} for key in BPE.to_dict())], ids=repr)
def test_what_is_no_tokenizer_is_refused(stored):
    """Whatever it is instead, and whatever it lacks."""
    with pytest.raises(UserError, match=r"must be stored as a dictionary, not|the tokenizer has no "):
        Tokenizer.from_dict(stored)


@pytest.mark.parametrize("key", BPE.to_dict())
@pytest.mark.parametrize("value", [None, 7, 0.5, ["a"], {"a": "b"}, True, b"bytes"])
def test_parts_of_other_types_are_refused(key, value):
    """A string is expected of each."""
    with pytest.raises(UserError, match=f"the tokenizer has no {key}, or one that is not a string"):
        Tokenizer.from_dict(tampered(**{key: value}))


HUGE_TABLES = {
    "long rank": "YQ== " + "9" * 10**6,
    "high rank": "".join(LINES) + "eHh4eHg= 4294967296\n",
    "negative rank": "".join(LINES) + "eHh4eHg= -1\n",
    "long token": "".join(LINES) + base64.b64encode(bytes(10**6)).decode(),
    "many duplicates": "YQ== 97\n" * 10**5,
    "no bytes": "".join(f"{base64.b64encode(b'%06d' % i).decode()} {i}\n" for i in range(10**5)),
    "lines of nothing": "\n" * 10**6,
    "spaces": " " * 10**6,
    "not base64": "".join(LINES) + "Y!Q== 400\n",
    "not ascii": "".join(LINES) + "é 400\n",
}


@pytest.mark.parametrize("table", HUGE_TABLES.values(), ids=HUGE_TABLES)
def test_mangled_ranks_are_refused_quickly(table):
    """In a line and within a second, before tiktoken sees them, although their hash is right."""
    start = time.monotonic()
    with pytest.raises(UserError) as caught:
        sha256 = hashlib.sha256(f"{GPT2_PATTERN}\n{table}".encode()).hexdigest()
        Tokenizer.from_dict(tampered(ranks=table, sha256=sha256))
    assert time.monotonic() - start < 1
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 200


@pytest.mark.parametrize("line", ["YWE=", "YWE= 400 x", "Y 400", "YWE= five"])
def test_unreadable_table_is_refused(line):
    """A line that is no token and rank."""
    with pytest.raises(ValueError):
        Tokenizer.from_dict(tampered(ranks="".join([*LINES, line])))


SINGLE = {bytes([byte]): byte for byte in range(256)}


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ({token: rank for token, rank in SINGLE.items() if rank < 255}, "no token for byte 255"),
        ({b"ab" if token == b"\x07" else token: rank for token, rank in SINGLE.items()}, "no token for byte 7"),
        (SINGLE | {b"ab": 255}, "its 257 ids must be 0 to 256, each once"),
        (SINGLE | {b"ab": 257}, "its 257 ids must be 0 to 256, each once"),
        (SINGLE | {b"\0": -1}, "its 256 ids must be 0 to 255, each once"),
        ({}, "no token for byte 0"),
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
