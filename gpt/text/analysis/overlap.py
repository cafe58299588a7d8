"""Which passages of a text stand verbatim in the training text, in tokens."""

from collections.abc import Sequence

import numpy as np

from gpt.text.prepared import PreparedText

LEAST = 8  # tokens: shorter passages are common phrases; a power of two
SEARCHED = 1 << 26  # tokens of a corpus, at most: it takes seconds
AT_ONCE = 1 << 15  # tokens of the corpus, whose hashes then stay in the processor's cache
BASE = np.uint64(0x9E3779B97F4A7C15)  # of the polynomial that hashes a run of tokens, modulo 2^64

Passage = tuple[int, int]  # of a text: its first token, and the one after its last


def find_overlap(text: np.ndarray, corpus: np.ndarray) -> list[Passage]:
    """Find the passages of `LEAST` tokens or more that a text (N,) has in common with a corpus of token ids.

    They are in order, and none lies in another. Of a large corpus the first `SEARCHED` tokens count. A pass over it,
    block by block, finds the stretches in which runs of `LEAST` tokens stand, by their 64-bit hashes; every longer
    passage lies in one of these.
    """
    wanted, stretches = _hashes(text), set()
    few = np.zeros(1 << 16, bool)  # most runs of the corpus are ruled out by 16 bits of their hash
    few[wanted >> np.uint64(48)] = True
    corpus, step = corpus[:SEARCHED], max(AT_ONCE, len(text))
    for start in range(0, len(corpus), step):
        block = corpus[start : start + step + len(text) - 1]  # a passage that begins in the step is whole
        hashes = _hashes(block)
        here = np.flatnonzero(few[hashes >> np.uint64(48)])
        here = here[np.isin(hashes[here], wanted)]
        firsts = here[np.diff(here, prepend=-2) > 1].tolist()
        lasts = here[np.diff(here, append=1 << 62) > 1].tolist()
        letters = _letters(block)
        stretches |= {letters[first : last + LEAST] for first, last in zip(firsts, lasts, strict=True)}
    letters, common = _letters(text), "\U0010ffff".join(stretches)
    passages, end = [], 0
    for start in range(len(letters)):
        before, end = end, max(start, end)
        while end < len(letters) and letters[start : end + 1] in common:
            end += 1
        if end > before and end - start >= LEAST:
            passages.append((start, end))
    return passages


def find_copies(ids: list[int], sources: Sequence[PreparedText]) -> list[Passage]:
    """Return the passages of a text that stand in the training text of any corpus."""
    return [passage for one in sources for passage in find_overlap(np.array(ids, dtype=np.int64), one.at_hand)]


def apart(passages: list[Passage], texts: list[str]) -> list[Passage]:
    """Cut passages so that no two overlap, the longest in characters first; `texts` are those of the tokens."""
    cut: list[Passage] = []
    while passages:
        first, end = longest = max(passages, key=lambda one: len("".join(texts[slice(*one)])))
        cut.append(longest)
        sides = [side for a, b in passages for side in ((a, min(b, first)), (max(a, end), b))]
        passages = [side for side in sides if side[0] < side[1]]
    return sorted(cut)


def _letters(tokens: np.ndarray) -> str:
    """Turn each token into a character, because Python finds strings fast."""
    return tokens.astype("<u4").tobytes().decode("utf-32-le", "surrogatepass")


def _hashes(tokens: np.ndarray) -> np.ndarray:
    """The hashes of all runs of `LEAST` tokens: those of 2k tokens come from those of k."""
    hashes, k = (tokens.astype(np.uint64) + np.uint64(1)) * BASE, 1
    while k < LEAST:
        hashes, k = hashes[: max(0, len(hashes) - k)] * BASE ** np.uint64(k) + hashes[k:], 2 * k
    return hashes
