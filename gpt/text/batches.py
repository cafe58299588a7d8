"""Which tokens a training step sees: a pure function of the seed and the step, so that any step can be made again.

The corpus is a circle of n tokens, cut into n // T windows. Each epoch sees each window once, in an order of its own
and with the cuts at places of its own; both follow from the seed and the number of the epoch. The circle closes at the
first token, an end-of-text, as every document begins.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from gpt.model.loss import IGNORE
from gpt.text.shards import Tokens

Array = np.ndarray | Tokens
SHARES = 1000  # windows of a mixture among which each corpus has exactly its share


def train_batch(tokens: Array, seed: int, first: int, batch_size: int, context_length: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets, each (B, T), of the windows number `first` to `first + batch_size` of the whole training.

    Targets are the inputs' next tokens. Windows are numbered through all epochs, so a batch may reach into the next.
    """
    numbers = np.arange(first, first + batch_size, dtype=np.uint64)
    return _pair(_windows(tokens, seed, numbers, context_length))


def mixed_batch(
    corpora: Sequence[Array], shares: Sequence[int], seed: int, first: int, batch_size: int, context_length: int
) -> tuple[Tensor, Tensor]:
    """As `train_batch`, of several corpora: of each `SHARES` windows, corpus i gives `shares[i]`, in a seeded order.

    Each corpus has epochs of its own, in which it gives each of its windows once.
    """
    if len(corpora) == 1:
        return train_batch(corpora[0], seed, first, batch_size, context_length)
    numbers = np.arange(first, first + batch_size, dtype=np.uint64)
    source, own = mixture_place(numbers, shares, seed)
    block = np.empty((batch_size, context_length + 1), dtype=np.int64)
    for i, tokens in enumerate(corpora):
        here = source == i
        if here.any():
            block[here] = _windows(tokens, seed, own[here], context_length)
    return _pair(block)


def mixture_place(numbers: np.ndarray, shares: Sequence[int], seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Which corpus gives each window of a mixture, and which of that corpus's windows it is.

    The windows fall into blocks of `SHARES`; in each, a permutation of its own deals out the corpora's next ones.
    """
    block, place = np.divmod(numbers, np.uint64(SHARES))
    slot = np.empty_like(place)
    for b in np.unique(block):
        of_block = block == b
        slot[of_block] = permute(place[of_block], SHARES, _mix(np.uint64(seed) ^ np.uint64(0x313), b))
    ends = np.cumsum(shares).astype(np.uint64)
    source = np.searchsorted(ends, slot, side="right")
    each = np.array(shares, dtype=np.uint64)[source]
    return source, block * each + slot - (ends[source] - each)


def windows_given(count: int, shares: Sequence[int], seed: int) -> list[int]:
    """How many of the first `count` windows of a mixture each corpus gives."""
    blocks, rest = divmod(count, SHARES)
    source, _ = mixture_place(np.arange(count - rest, count, dtype=np.uint64), shares, seed)
    return [blocks * share + int((source == i).sum()) for i, share in enumerate(shares)]


def _windows(tokens: Array, seed: int, numbers: np.ndarray, context_length: int) -> np.ndarray:
    """The windows of one corpus by their numbers: (B, T + 1) token ids."""
    n, T = len(tokens), context_length
    assert n > T, "prepare refuses a text this short"
    per_epoch = n // T
    epoch, place = np.divmod(numbers, np.uint64(per_epoch))
    window = np.empty_like(place)
    shift = np.empty_like(place)
    for e in np.unique(epoch):
        of_epoch = epoch == e
        window[of_epoch] = permute(place[of_epoch], per_epoch, _mix(np.uint64(seed), e))
        shift[of_epoch] = _mix(np.uint64(seed) ^ np.uint64(0x5A17), e) % np.uint64(T) if e else 0
    start = window * np.uint64(T) + shift
    positions = (start[:, None] + np.arange(T + 1, dtype=np.uint64)) % np.uint64(n)
    return tokens[positions].astype(np.int64)


def _pair(block: np.ndarray) -> tuple[Tensor, Tensor]:
    """(B, T + 1) ids as inputs and targets."""
    ids = torch.from_numpy(block)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def validation_batches(tokens: Array, batch_size: int, context_length: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and targets, each (B, T), that predict every token but the first exactly once.

    Windows do not overlap. The last batch is filled up with targets of `IGNORE`, so that a compiled model meets one
    shape only: B is `batch_size`, or the number of windows where that is less.
    """
    T = min(context_length, len(tokens) - 1)
    count = -(-(len(tokens) - 1) // T)
    B = min(batch_size, count)
    for first in range(0, count, B):
        starts = np.arange(first, first + B) * T
        positions = starts[:, None] + np.arange(T + 1)  # (B, T + 1)
        inside = positions < len(tokens)
        block = torch.from_numpy(np.where(inside, tokens[np.minimum(positions, len(tokens) - 1)], 0).astype(np.int64))
        targets = torch.where(torch.from_numpy(inside[:, 1:]), block[:, 1:], IGNORE)
        yield block[:, :-1].contiguous(), targets


def permute(index: np.ndarray, size: int, key) -> np.ndarray:
    """Where a seeded permutation of range(size) sends each index: in memory that does not grow with `size`.

    A Feistel network of four rounds permutes the next power of four; indices that fall outside go round again until
    they fall inside (Black and Rogaway 2002, "Ciphers with Arbitrary Finite Domains").
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = np.uint64((1 << half) - 1)
    result = index.astype(np.uint64)
    outside = np.ones(len(result), dtype=bool)
    while outside.any():
        x = result[outside]
        left, right = x >> np.uint64(half), x & mask
        for turn in range(4):
            left, right = right, left ^ (_mix(key ^ np.uint64(turn), right) & mask)
        result[outside] = (left << np.uint64(half)) | right
        outside[outside] = result[outside] >= size
    return result


def _mix(key, value):
    """A 64-bit hash of a key and a value, or of arrays: the finaliser of SplitMix64 (Steele et al. 2014), twice."""
    with np.errstate(over="ignore"):
        x = np.asarray(value, dtype=np.uint64) + key * np.uint64(0x9E3779B97F4A7C15)
        for _ in range(2):
            x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            x = x ^ (x >> np.uint64(31))
            x = x + np.uint64(0x9E3779B97F4A7C15)
    return x
