"""Text to ids and back: GPT-2's published ids, two independent encoders as oracles, round trips, cuts, training."""

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
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as HuggingFace
from tokenizers import models, pre_tokenizers, trainers

from gpt.errors import UserError
from gpt.tokenizer import (
    BYTE_PATTERN,
    END_OF_TEXT,
    GPT2_PATTERN,
    Tokenizer,
    TokenizerConfig,
    byte_tokenizer,
    gpt2_tokenizer,
    split_safely,
    train_bpe,
)

ASSET = Path(__file__).parents[1] / "gpt/assets/r50k_base.tiktoken"

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

GPT2, BYTE, BPE = gpt2_tokenizer(), byte_tokenizer(), train_bpe([STORY, FOREIGN], 401)
RANKS = {base64.b64decode(line.split()[0]): int(line.split()[1]) for line in ASSET.read_text().splitlines()}
EVERY = pytest.mark.parametrize("tokenizer", [GPT2, BYTE, BPE], ids=["gpt2", "byte", "bpe"])
LEARNT = pytest.mark.parametrize("tokenizer", [GPT2, BPE], ids=["gpt2", "bpe"])

# Characters whose class every version of Unicode agrees on, and the seams of the pattern.
FRAGMENTS = ["a", "é", "\u017f", "中", "1", "²", "!", "'", "'s", "'S", "'ll", "\0", "\x1c", "\u200b", "\u0301", "😀"]
SPACES = [" ", "  ", "\n", "\r\n", "\t", "\x0b", "\x85", "\xa0", "\u3000", " " * 7, " " * 999, " " * 1000, "\r\n" * 503]
seams = st.lists(st.sampled_from([*FRAGMENTS, *SPACES, END_OF_TEXT]), max_size=23).map("".join)
valid_text = st.text(st.characters(exclude_categories=["Cs"])) | seams
without_deadline = settings(deadline=None, max_examples=100)


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


@without_deadline
@given(seams)
def test_gpt2_equals_hugging_face_at_seams(hugging_face_gpt2, text):
    """Also where the pattern's alternatives meet."""
    assert GPT2.encode(text) == hugging_face_gpt2.encode(text).ids


@EVERY_TEXT
@LEARNT
def test_equals_slow_encoding(tokenizer, text):
    """The possessive pattern, the cuts and tiktoken's merging change nothing against the definition."""
    assert tokenizer.encode(text) == slow_encode(text, ranks_of(tokenizer))


@without_deadline
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
    """Text never becomes the special id, one by one or as a document."""
    ids = tokenizer.encode(text)
    assert tokenizer.end_of_text not in ids
    assert tokenizer.decode(ids) == text
    assert [document.tolist() for document in tokenizer.encode_documents([text])] == [ids]


@EVERY
@without_deadline
@given(text=valid_text)
def test_round_trip(tokenizer, text):
    """Any text comes back as it was, from ids within the vocabulary."""
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
    assert [document.tolist() for document in tokenizer.encode_documents([text])] == [ids]


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
    ],
    ids=["spaces", "front", "middle", "end", "lines", "letters", "accents", "digits", "marks"],
)
@EVERY
def test_long_runs(tokenizer, text):
    """A run of a million neither panics nor takes more than a few seconds."""
    start = time.monotonic()
    ids = tokenizer.encode(text)
    seconds = time.monotonic() - start
    assert tokenizer.decode(ids) == text
    assert seconds < 5


def test_long_runs_by_hand():
    """GPT-2 has no token of two spaces before a word, and one of four letters a."""
    assert GPT2.encode(" " * 1_000_000 + "a") == [220] * 999_999 + [257]
    assert GPT2.encode("a" * 1_000_000) == [24794] * 250_000
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


@pytest.mark.parametrize(
    ("text", "size", "parts"),
    [
        ("", 3, [""]),
        ("aa", 3, ["aa"]),
        ("aa bb cc dd", 3, ["aa bb", " cc", " dd"]),
        ("aa  bb\n\ncc", 2, ["aa ", " bb\n", "\ncc"]),
        ("aaaaaaaaaaa", 3, ["aaaaaaaaaaa"]),
        ("x" + " " * 1000 + "y", 5003, ["x" + " " * 999, " y"]),
        ("x" + " " * 999 + "y", 5003, ["x" + " " * 999 + "y"]),
        ("x" + "\n" * 1000, 5003, ["x" + "\n" * 1000]),
    ],
)
def test_cuts_by_hand(text, size, parts):
    """Cuts come before the last white space of a run that something follows, after `size` characters or a long run."""
    assert list(split_safely(text, size)) == parts


@LEARNT
@without_deadline
@given(text=valid_text, size=st.integers(1, 11))
def test_cuts_change_nothing(tokenizer, text, size):
    """The parts are the text, and their ids are the ids of the whole."""
    parts = list(split_safely(text, size))
    assert "".join(parts) == text
    assert [token for part in parts for token in tokenizer.encode(part)] == tokenizer.encode(text)


def test_long_text_is_cut():
    """A long text falls into parts of about the size asked for, none of them empty."""
    parts = list(split_safely(STORY * 200))
    assert len(parts) == len(STORY) * 200 // (1 << 16) + 1
    assert all(1 << 16 <= len(part) < (1 << 16) + 100 for part in parts[:-1])
    assert 0 < len(parts[-1]) < (1 << 16) + 100


@pytest.mark.parametrize("threads", [1, 2, 5])
@EVERY
def test_documents_are_encoded_one_by_one(tokenizer, threads):
    """Short, long and empty documents keep their order and their own ids, on any number of threads."""
    documents = [*TEXTS.values(), STORY * 150, "", "x", SPACED * 40]
    encoded = list(tokenizer.encode_documents(iter(documents), threads))
    assert all(ids.ndim == 1 and ids.dtype == np.int64 for ids in encoded)
    assert [ids.tolist() for ids in encoded] == [tokenizer.encode(document) for document in documents]


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
    assert dataclasses.asdict(TokenizerConfig()) == {"name": "bpe", "vocab_size": 1024}
    for name, vocab_size in [("bpe", 257), ("bpe", 1_000_000), ("gpt2", 1), ("byte", 1)]:
        assert TokenizerConfig(name, vocab_size).vocab_size == vocab_size
    for vocab_size in (-1, 0, 256, 1_000_001):
        with pytest.raises(ValueError, match=rf"tokenizer\.vocab_size={vocab_size} is out of range.*257.*1000000"):
            TokenizerConfig("bpe", vocab_size)
    with pytest.raises(ValueError, match=r"tokenizer\.name='word' is not known: choose from bpe, gpt2, byte"):
        TokenizerConfig("word")
