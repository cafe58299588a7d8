"""Which passages of a text stand verbatim in the training text, in tokens."""

from collections.abc import Sequence

import numpy as np

from gpt.data.token_dataset import TokenSource
from gpt.data.token_files import TokenSequence

MIN_COPY_TOKENS = 8  # tokens: shorter passages are common phrases; a power of two
MAX_SEARCHED_TOKENS = 1 << 26  # tokens of a corpus, at most: it takes seconds
SEARCH_BLOCK_TOKENS = 1 << 15  # tokens of the corpus, whose hashes then stay in the processor's cache
HASH_BASE = np.uint64(0x9E3779B97F4A7C15)  # of the polynomial that hashes a run of tokens, modulo 2^64

Passage = tuple[int, int]  # of a text: its first token, and the one after its last


def find_common_spans(text: np.ndarray, corpus: TokenSequence | np.ndarray) -> list[Passage]:
    """Find the passages of `MIN_COPY_TOKENS` or more that a text (N,) has in common with a corpus of token ids.

    They are in order, and none lies in another. Of a large corpus the first `MAX_SEARCHED_TOKENS` count. One pass over it,
    block by block, finds the spans that consist of runs of `MIN_COPY_TOKENS`, by their 64-bit hashes. Every longer
    passage lies in one of these.
    """
    wanted, spans = _hashes(text), set()
    few = np.zeros(1 << 16, bool)  # most runs of the corpus are ruled out by 16 bits of their hash
    few[wanted >> np.uint64(48)] = True
    limit, step = min(len(corpus), MAX_SEARCHED_TOKENS), max(SEARCH_BLOCK_TOKENS, len(text))
    for start in range(0, limit, step):
        block = corpus[start : min(limit, start + step + len(text) - 1)]  # a passage that begins in the step is whole
        hashes = _hashes(block)
        here = np.flatnonzero(few[hashes >> np.uint64(48)])
        here = here[np.isin(hashes[here], wanted)]
        firsts = here[np.diff(here, prepend=-2) > 1].tolist()
        lasts = here[np.diff(here, append=1 << 62) > 1].tolist()
        letters = _letters(block)
        spans |= {letters[first : last + MIN_COPY_TOKENS] for first, last in zip(firsts, lasts, strict=True)}
    letters, common = _letters(text), "\U0010ffff".join(spans)
    passages, end = [], 0
    for start in range(len(letters)):
        before, end = end, max(start, end)
        while end < len(letters) and letters[start : end + 1] in common:
            end += 1
        if end > before and end - start >= MIN_COPY_TOKENS:
            passages.append((start, end))
    return passages


def find_copies(ids: list[int], sources: Sequence[TokenSource]) -> list[Passage]:
    """Return the passages of a text that stand in the training text of any corpus."""
    return [passage for source in sources for passage in find_common_spans(np.array(ids, dtype=np.int64), source.train)]


def drop_overlaps(passages: list[Passage], texts: list[str]) -> list[Passage]:
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
    """The hashes of all runs of `MIN_COPY_TOKENS` tokens: those of 2k tokens come from those of k."""
    hashes, k = (tokens.astype(np.uint64) + np.uint64(1)) * HASH_BASE, 1
    while k < MIN_COPY_TOKENS:
        hashes, k = (hashes[: max(0, len(hashes) - k)] * HASH_BASE ** np.uint64(k) + hashes[k:], 2 * k)
    return hashes
