"""Marks for a model to pass: models of token counts, checked by hand, and the very figures of gzip and xz."""

import math
import random
import shutil
import subprocess
from collections.abc import Sequence

import numpy as np
import pytest

from gpt.data import baselines as module
from gpt.data.baselines import MAX_COMPRESSED_BYTES, MIN_COMPRESSED_BYTES, measure_baselines, sample
from gpt.data.token_dataset import TokenSource
from gpt.data.tokenizer import Tokenizer
from harness import write_token_sequence

WORDS = [b"alpha ", b"beta ", b"gamma\n", "naïve ".encode(), b"zeta, "]
TEXT = b"".join(random.Random(7).choices(WORDS, k=20_011))
BYTES = Tokenizer("byte", {bytes([byte]): byte for byte in range(256)}, r"(?s:.{1,1000})")


def prepared(train: Sequence[int], validation: Sequence[int]) -> TokenSource:
    """A corpus of bytes in memory; 256 is end-of-text."""
    texts = [np.array(list(ids), dtype=np.uint16) for ids in (train, validation)]
    size = int((texts[1] < 256).sum())
    return TokenSource(write_token_sequence(texts[0]), texts[1], BYTES, {"splits": {"validation": {"bytes": size}}})


def test_by_hand():
    """Training on 0 1 0 1 0 2: four pairs, (0, 1) twice; validation 0 1 2 1 needs three predictions.

    After 0, which three tokens follow, two of a kind and one of another: (2 + 2 p(1)) / (3 + 2). After 1, where 0
    follows both times: (0 + 1 p(2)) / (2 + 1). After 2, which nothing follows: p(1) alone.
    """
    p1, p2 = 3 / 263, 2 / 263  # one more than counted, of six and a vocabulary of 257
    found = measure_baselines([prepared([0, 1, 0, 1, 0, 2], [0, 1, 2, 1])])
    assert list(found) == ["unigram", "bigram"]
    assert found["unigram"] == pytest.approx(-math.log2(p1 * p2 * p1) / 4, rel=1e-12)
    assert found["bigram"] == pytest.approx(-math.log2((2 + 2 * p1) / 5 * (p2 / 3) * p1) / 4, rel=1e-12)


def test_bigrams_add_up_to_one():
    """What follows a token has a probability for each token of the vocabulary, one in all."""
    train = [*b"abracadabra", 256, *b"banana"]
    bits = [measure_baselines([prepared(train, [*b"a", other])])["bigram"] for other in range(257)]
    sizes = [2] * 256 + [1]  # bytes of text
    assert sum(2 ** (-bit * size) for bit, size in zip(bits, sizes, strict=True)) == pytest.approx(1.0, rel=1e-12)


def test_mixtures():
    """The counts are of all texts, no bigram reaches from one into the next, and neither does a prediction."""
    a, b = prepared([0, 1, 0], [1, 0]), prepared([2, 3], [3, 2, 3])
    p = [3 / 262, 2 / 262, 2 / 262, 2 / 262]
    found = measure_baselines([a, b])
    assert found["unigram"] == pytest.approx(-math.log2(p[0] * p[2] * p[3]) / 5, rel=1e-12)
    assert found["bigram"] == pytest.approx(-math.log2((1 + p[0]) / 2 * p[2] * ((1 + p[3]) / 2)) / 5, rel=1e-12)


def test_long_texts(monkeypatch):
    """A text that is longer than what is counted gives rows from its beginning to its end; blocks change nothing."""
    ids = np.arange(50_021) % 251
    rows = sample(ids, 3 * module.ROW_TOKENS)
    assert rows.shape == (3, module.ROW_TOKENS) and rows[0, 0] == 0 and rows[-1, -1] == ids[-1]
    assert (np.diff(rows) % 251 == 1).all()
    assert np.array_equal(sample(ids, len(ids)), ids[None])
    corpus = prepared(TEXT[:9_973], TEXT[:7_919])
    whole = measure_baselines([corpus])
    monkeypatch.setattr(module, "COUNT_BLOCK_TOKENS", 101)
    assert measure_baselines([corpus]) == pytest.approx(whole, rel=1e-12)


def test_compressors_are_those_of_the_command_line():
    """Within the few bytes that headers and checksums take."""
    found = measure_baselines([prepared(TEXT[:999], TEXT[:11]), prepared(TEXT[:999], TEXT[11:])])
    assert list(found) == ["unigram", "bigram", "gzip -9", "xz -9e"]
    for name in ("gzip -9", "xz -9e"):
        if not shutil.which(name.split()[0]):
            pytest.skip(f"this machine has no {name.split()[0]}: its figure is NOT compared")
        packed = subprocess.run([*name.split(), "--stdout"], input=TEXT, capture_output=True, check=True).stdout
        assert found[name] == pytest.approx(8 * len(packed) / len(TEXT), abs=8 * 64 / len(TEXT)), name


@pytest.mark.parametrize(
    ("size", "compared"), [(MIN_COMPRESSED_BYTES - 1, 0), (MIN_COMPRESSED_BYTES, 2), (MAX_COMPRESSED_BYTES + 1, 0)]
)
def test_no_compressor_for_short_and_long_texts(size, compared):
    """A short text flatters any model, and xz takes minutes over a long one."""
    corpus = prepared([97, 97], b"a" * MIN_COMPRESSED_BYTES)
    corpus.metadata["splits"]["validation"]["bytes"] = size
    assert len(measure_baselines([corpus])) == 2 + compared
