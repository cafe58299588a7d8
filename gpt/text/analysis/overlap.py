"""How much of a text stands verbatim in the training text, in tokens."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from gpt.text.prepared import PreparedText

LEAST = 8  # tokens: shorter passages are common phrases
SEARCHED = 1 << 26  # tokens of a corpus, at most: it takes seconds
AT_ONCE = 1 << 15  # tokens of the corpus, whose hashes then stay in the processor's cache
BASE = np.uint64(0x9E3779B97F4A7C15)  # of the polynomial that hashes a run of tokens, modulo 2^64


class Overlap(NamedTuple):
    """The passages of a text, of `LEAST` tokens or more, that a corpus contains."""

    copied: np.ndarray  # bool, for each token: whether it is in such a passage
    start: int  # of the longest
    length: int  # of the longest, in tokens; 0 if there is none


def find_overlap(text: np.ndarray, corpus: np.ndarray) -> Overlap:
    """Find what a text (N,) has in common with a corpus of token ids.

    Every pass over the corpus asks which runs of n tokens it contains, block by block, so its memory does not grow with
    the corpus. The greatest n is found by bisection, since a corpus that contains a run contains its parts, so only
    the first pass reads all blocks. Of a large corpus the first `SEARCHED` tokens count.
    """
    found, blocks = _contained(text, corpus, LEAST, range(0, min(SEARCHED, len(corpus)), AT_ONCE))
    copied = np.zeros(len(text), bool)
    for start in found:
        copied[start : start + LEAST] = True
    if not found:
        return Overlap(copied, 0, 0)
    edges = np.flatnonzero(np.diff(copied, prepend=False, append=False))  # where runs of copied tokens begin and end
    least, most = LEAST, int((edges[1::2] - edges[::2]).max())
    while least < most:
        middle = (least + most + 1) // 2
        places, within = _contained(text, corpus, middle, blocks)
        if places:
            least, found, blocks = middle, places, within
        else:
            most = middle - 1
    return Overlap(copied, found[0], least)


def find_copies(ids: list[int], sources: Sequence[PreparedText]) -> tuple[list[bool], str]:
    """For each token of a text, whether it stands in a passage of the training text; and the longest such passage."""
    found = [find_overlap(np.array(ids, dtype=np.int64), source.at_hand) for source in sources]
    longest = max(found, key=lambda one: one.length)
    passage = sources[0].tokenizer.decode(ids[longest.start : longest.start + longest.length])
    return np.logical_or.reduce([one.copied for one in found]).tolist(), passage


def _contained(text: np.ndarray, corpus: np.ndarray, n: int, blocks: Iterable[int]) -> tuple[list[int], list[int]]:
    """The starts of those runs of n tokens of a text that begin in some blocks of a corpus; and in which of the blocks.

    Two runs are equal if their 64-bit hashes are.
    """
    wanted = _hashes(text, n)
    contained = np.zeros(len(wanted), bool)
    few = np.zeros(1 << 16, bool)  # most runs of the corpus are ruled out by 16 bits of their hash
    few[wanted >> np.uint64(48)] = True
    end, within = min(SEARCHED, len(corpus)), []
    for start in blocks:
        hashes = _hashes(corpus[start : min(end, start + AT_ONCE + n - 1)], n)
        equal = np.isin(wanted, hashes[few[hashes >> np.uint64(48)]])
        if equal.any():
            contained |= equal
            within.append(start)
    return np.flatnonzero(contained).tolist(), within


def _hashes(tokens: np.ndarray, n: int) -> np.ndarray:
    """The hashes of all runs of n tokens: those of 2k tokens come from those of k, those of k + 1 from those of k."""
    ones = (tokens.astype(np.uint64) + np.uint64(1)) * BASE
    hashes, k = ones, 1
    for bit in f"{n:b}"[1:]:
        hashes, k = hashes[: max(0, len(hashes) - k)] * BASE ** np.uint64(k) + hashes[k:], 2 * k
        if bit == "1":
            hashes, k = hashes[: max(0, len(hashes) - 1)] * BASE + ones[k:], k + 1
    return hashes
