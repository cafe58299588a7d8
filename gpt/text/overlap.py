"""How much of a text stands verbatim in the training text, in tokens."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from gpt.text.shards import Shards, Tokens

LEAST = 8  # tokens: shorter passages are common phrases
SEARCHED = 1 << 26  # tokens of a corpus, at most: it takes seconds
AT_ONCE = 1 << 15  # tokens of the corpus, whose hashes then stay in the processor's cache
BASE = np.uint64(0x9E3779B97F4A7C15)  # of the polynomial that hashes a run of tokens, modulo 2^64


class Overlap(NamedTuple):
    """The passages of a text, of `LEAST` tokens or more, that a corpus contains."""

    copied: np.ndarray  # bool, for each token: whether it is in such a passage
    start: int  # of the longest
    length: int  # of the longest, in tokens; 0 if there is none


def find_overlap(text: np.ndarray, corpus: np.ndarray | Tokens) -> Overlap:
    """Find what a text (N,) has in common with a corpus of token ids.

    Every pass over the corpus asks which runs of n tokens it contains, so its memory does not grow with the corpus. The
    greatest n is found by bisection, since whoever contains a run contains its parts. Of a large corpus the first
    `SEARCHED` tokens count.
    """
    found: list[int] = np.flatnonzero(_contained(text, corpus, LEAST)).tolist()
    copied = np.zeros(len(text), bool)
    for start in found:
        copied[start : start + LEAST] = True
    if not found:
        return Overlap(copied, 0, 0)
    least, most, start = LEAST, _longest_run(copied), found[0]
    while least < most:
        middle = (least + most + 1) // 2
        places: list[int] = np.flatnonzero(_contained(text, corpus, middle)).tolist()
        if places:
            least, start = middle, places[0]
        else:
            most = middle - 1
    return Overlap(copied, start, least)


def find_copies(ids: list[int], sources: Sequence[Shards]) -> tuple[list[bool], str]:
    """For each token of a text, whether it stands in a passage of the training text; and the longest such passage."""
    found = [find_overlap(np.array(ids, dtype=np.int64), source.train) for source in sources]
    longest = max(found, key=lambda one: one.length)
    passage = sources[0].tokenizer.decode(ids[longest.start : longest.start + longest.length])
    return np.logical_or.reduce([one.copied for one in found]).tolist(), passage


def _contained(text: np.ndarray, corpus: np.ndarray | Tokens, n: int) -> np.ndarray:
    """For each run of n tokens of a text, whether the corpus has it. Two runs are equal if their 64-bit hashes are."""
    wanted = _hashes(text, n)
    contained = np.zeros(len(wanted), bool)
    few = np.zeros(1 << 16, bool)  # most runs of the corpus are ruled out by 16 bits of their hash
    few[wanted >> np.uint64(48)] = True
    end = min(SEARCHED, len(corpus))
    for start in range(0, end - n + 1, AT_ONCE):
        hashes = _hashes(np.asarray(corpus[start : min(end, start + AT_ONCE + n - 1)]), n)
        likely = hashes[few[hashes >> np.uint64(48)]]
        if len(likely):
            contained |= np.isin(wanted, likely)
    return contained


def _hashes(tokens: np.ndarray, n: int) -> np.ndarray:
    """The hashes of all runs of n tokens: those of 2k tokens come from those of k, those of k + 1 from those of k."""
    ones = (tokens.astype(np.uint64) + np.uint64(1)) * BASE
    hashes, k = ones, 1
    for bit in f"{n:b}"[1:]:
        hashes, k = hashes[: max(0, len(hashes) - k)] * BASE ** np.uint64(k) + hashes[k:], 2 * k
        if bit == "1":
            hashes, k = hashes[: max(0, len(hashes) - 1)] * BASE + ones[k:], k + 1
    return hashes


def _longest_run(marks: np.ndarray) -> int:
    """The length of the longest run of True."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], marks, [False]]).astype(np.int8)))
    return int((edges[1::2] - edges[::2]).max(initial=0))
