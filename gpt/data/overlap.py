"""Find passages of a text that occur verbatim in the training text, in tokens."""

from collections.abc import Sequence

import numpy as np

from gpt.data.token_dataset import TokenSource
from gpt.data.token_files import TokenSequence

MIN_COPY_TOKENS = 8  # shorter passages are common phrases; a power of two
MAX_SEARCHED_TOKENS = 1 << 26  # of a corpus: it takes seconds
SEARCH_BLOCK_TOKENS = 1 << 15  # its hashes fit into the processor's cache
HASH_BASE = np.uint64(0x9E3779B97F4A7C15)  # of the polynomial that hashes a run of tokens, modulo 2^64

Passage = tuple[int, int]  # the first token of a passage in a text, and the token after its last


def find_common_spans(text: np.ndarray, corpus: TokenSequence | np.ndarray) -> list[Passage]:
    """Find the passages of `MIN_COPY_TOKENS` or more that a text (N,) has in common with a corpus of token ids.

    They are in order, and none lies within another. Only the first `MAX_SEARCHED_TOKENS` of the corpus are searched.
    One pass over it, block by block, finds the spans in which every run of `MIN_COPY_TOKENS` occurs in the text, by
    64-bit hashes. Every longer passage lies within one of these spans.
    """
    text_hashes = _hash_runs(text)
    spans: set[str] = set()
    is_candidate = np.zeros(1 << 16, bool)  # 16 bits of the hash rule out most runs of the corpus
    is_candidate[text_hashes >> np.uint64(48)] = True
    limit = min(len(corpus), MAX_SEARCHED_TOKENS)
    step = max(SEARCH_BLOCK_TOKENS, len(text))
    for start in range(0, limit, step):
        # Blocks overlap, so a passage that begins in one lies within it.
        block = corpus[start : min(limit, start + step + len(text) - 1)]
        hashes = _hash_runs(block)
        runs = np.flatnonzero(is_candidate[hashes >> np.uint64(48)])
        runs = runs[np.isin(hashes[runs], text_hashes)]  # the positions of runs that occur in the text
        firsts = runs[np.diff(runs, prepend=-2) > 1].tolist()
        lasts = runs[np.diff(runs, append=1 << 62) > 1].tolist()
        letters = _to_letters(block)
        spans |= {letters[first : last + MIN_COPY_TOKENS] for first, last in zip(firsts, lasts, strict=True)}
    letters = _to_letters(text)
    common = "\U0010ffff".join(spans)
    passages = []
    end = 0
    for start in range(len(letters)):
        previous_end = end
        end = max(start, end)
        while end < len(letters) and letters[start : end + 1] in common:
            end += 1
        if end > previous_end and end - start >= MIN_COPY_TOKENS:
            passages.append((start, end))
    return passages


def find_copies(ids: list[int], sources: Sequence[TokenSource]) -> list[Passage]:
    """Return the passages of a text that occur in the training text of any source."""
    return [passage for source in sources for passage in find_common_spans(np.array(ids, dtype=np.int64), source.train)]


def drop_overlaps(passages: list[Passage], texts: list[str]) -> list[Passage]:
    """Cut passages so that no two overlap, the longest in characters first. `texts` holds the text of each token."""
    disjoint: list[Passage] = []
    while passages:
        longest = max(passages, key=lambda passage: len("".join(texts[slice(*passage)])))
        disjoint.append(longest)
        rests = []
        for first, end in passages:
            rests += [(first, min(end, longest[0])), (max(first, longest[1]), end)]
        passages = [(first, end) for first, end in rests if first < end]
    return sorted(disjoint)


def _to_letters(tokens: np.ndarray) -> str:
    """Turn each token into a character, because Python finds strings fast."""
    return tokens.astype("<u4").tobytes().decode("utf-32-le", "surrogatepass")


def _hash_runs(tokens: np.ndarray) -> np.ndarray:
    """Return the hashes of all runs of `MIN_COPY_TOKENS` tokens. Two hashes of k tokens give one of 2k tokens."""
    hashes = (tokens.astype(np.uint64) + np.uint64(1)) * HASH_BASE
    k = 1
    while k < MIN_COPY_TOKENS:
        hashes = hashes[: max(0, len(hashes) - k)] * HASH_BASE ** np.uint64(k) + hashes[k:]
        k *= 2
    return hashes
