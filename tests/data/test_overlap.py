"""Copied passages: what the slow search finds, at any size of the blocks."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpt.data import overlap
from gpt.data.overlap import MIN_COPY_TOKENS, drop_overlaps, find_common_spans

few = st.lists(st.integers(0, 1), max_size=41)  # of two tokens, so that texts have much in common


def slow(text: list[int], corpus: list[int]) -> tuple[int, int]:
    """The length and the start of the first longest common passage."""
    inside = bytes(corpus)
    for length in range(len(text), MIN_COPY_TOKENS - 1, -1):
        for start in range(len(text) - length + 1):
            if bytes(text[start : start + length]) in inside:
                return length, start
    return 0, 0


@given(few, few, few, few)
def test_any_texts(a, b, c, d):
    """It finds the longest passage, and exactly the tokens of passages of eight or more. Each occurs in the corpus."""
    text, corpus = a + b + c, d + b + a
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(overlap, "SEARCH_BLOCK_TOKENS", 13)
        found = find_common_spans(np.array(text, int), np.array(corpus, "uint16"))
    longest = max(found, key=lambda one: one[1] - one[0], default=(0, 0))
    assert (longest[1] - longest[0], longest[0]) == slow(text, corpus)
    assert all(bytes(text[start:end]) in bytes(corpus) for start, end in found)
    assert all(a < c and b < d for (a, b), (c, d) in pairwise(found))
    cut = drop_overlaps(found, ["x"] * len(text))
    assert all(b <= c for (_, b), (c, _) in pairwise(cut))
    assert max((b - a for a, b in cut), default=0) == longest[1] - longest[0]
    marks = np.zeros(len(text), bool)
    for start, end in cut:
        assert bytes(text[start:end]) in bytes(corpus)
        marks[start:end] = True
    inside, copied = bytes(corpus), np.zeros(len(text), bool)
    for start in range(len(text) - MIN_COPY_TOKENS + 1):
        if bytes(text[start : start + MIN_COPY_TOKENS]) in inside:
            copied[start : start + MIN_COPY_TOKENS] = True
    assert marks.tolist() == copied.tolist()


def test_only_the_beginning_of_a_large_corpus(monkeypatch):
    """What stands behind the searched part is not found."""
    corpus = np.arange(97, dtype="uint32")
    assert find_common_spans(corpus[60:80].astype(int), corpus) == [(0, 20)]
    monkeypatch.setattr(overlap, "MAX_SEARCHED_TOKENS", 71)
    assert find_common_spans(corpus[60:80].astype(int), corpus) == [(0, 11)]
