"""Batches: which tokens each step sees, as a pure function of the seed and the step.

A corpus is a circle of n tokens: its last is followed by its first, which is an end-of-text. It is cut into n // T
windows. Each epoch shows each window once. Their order, and where they are cut, follow from the seed and the number of
the epoch. Where windows become longer during a run, the epoch goes on where it was, but in an order of its own: some of
it is shown twice, and as much not at all.

A corpus in many shards is several circles, each of a few of the shards, which take turns: half of the windows of a turn
are of one circle and half of the next, so that only the shards of two circles are needed at a time.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from gpt.text.prepared import MIXTURE_WINDOWS
from gpt.text.shards import Circle, Shards


def training_batch(
    corpora: Sequence[Shards],
    shares: Sequence[int],
    seed: int,
    first: int,
    batch_size: int,
    context_length: int,
) -> tuple[Tensor, Tensor]:
    """Return windows `first` to `first + batch_size` of the whole training, as inputs and targets, each (B, T).

    Targets are the inputs' next tokens. Windows are numbered through all epochs, so a batch may reach into the next.
    Of `MIXTURE_WINDOWS` windows, corpus i provides `shares[i]`, in a seeded order; each corpus has its own epochs.
    """
    numbers = np.arange(first, first + batch_size, dtype=np.uint64)
    source, own = mixture_place(numbers, shares, seed) if len(corpora) > 1 else (np.zeros_like(numbers), numbers)
    block = np.empty((batch_size, context_length + 1), dtype=np.int64)
    for i, tokens in enumerate(corpora):
        here = source == i
        if here.any():
            block[here] = _windows(tokens, seed, own[here], context_length)
    ids = torch.from_numpy(block)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def mixture_place(numbers: np.ndarray, shares: Sequence[int], seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return which corpus provides each window of a mixture, and which of its own windows that is.

    Windows fall into blocks of `MIXTURE_WINDOWS`; each block deals out the corpora's next windows in its own order.
    """
    block, place = np.divmod(numbers, np.uint64(MIXTURE_WINDOWS))
    slot = permute(place, MIXTURE_WINDOWS, _mix(np.uint64(seed) ^ np.uint64(0x313), block))
    ends = np.cumsum(shares).astype(np.uint64)
    source = np.searchsorted(ends, slot, side="right")
    each = np.array(shares, dtype=np.uint64)[source]
    return source, block * each + slot - (ends[source] - each)


def windows_given(count: int, shares: Sequence[int], seed: int) -> list[int]:
    """Return how many of the first `count` windows of a mixture each corpus provides."""
    blocks, rest = divmod(count, MIXTURE_WINDOWS)
    source, _ = mixture_place(np.arange(count - rest, count, dtype=np.uint64), shares, seed)
    return [blocks * share + int((source == i).sum()) for i, share in enumerate(shares)]


def _windows(tokens: Shards, seed: int, numbers: np.ndarray, context_length: int) -> np.ndarray:
    """Return the windows of one corpus with these numbers: (B, T + 1) token ids."""
    order = permute(np.arange(len(tokens.groups)), len(tokens.groups), np.uint64(seed))  # of the groups in each epoch
    counts = tokens.sizes[order] // np.uint64(context_length)  # of windows in each
    early = counts // np.uint64(2) if len(order) > 1 else np.zeros_like(counts)  # those in the turn of the one before
    late = counts - early
    sizes = late + np.roll(early, -1)  # of the turns
    ends = np.cumsum(sizes)
    epoch, place = np.divmod(numbers, ends[-1])
    turn = np.searchsorted(ends, place, side="right")
    place -= (ends - sizes)[turn]
    is_late = (place + np.uint64(1)) * late[turn] // sizes[turn] > (before := place * late[turn] // sizes[turn])
    which = np.where(is_late, turn, (turn + 1) % len(order))
    own = np.where(is_late, early[turn] + before, place - before)
    block = np.empty((len(numbers), context_length + 1), dtype=np.int64)
    for i in np.unique(which):
        here, circle = which == i, tokens.circle(order[i], following=order[(i + 1) % len(order)])
        block[here] = _of_circle(circle, seed, epoch[here], own[here], context_length)
    return block


def _of_circle(
    tokens: np.ndarray | Circle, seed: int, epoch: np.ndarray, place: np.ndarray, context_length: int
) -> np.ndarray:
    """Return the windows at these places in the order of these epochs."""
    n, T = len(tokens), context_length
    assert n > T, "prepare refuses a text this short"
    window = permute(place, n // T, _mix(np.uint64(seed), epoch))
    shift = np.where(epoch > 0, _mix(np.uint64(seed) ^ np.uint64(0x5A17), epoch) % np.uint64(T), np.uint64(0))
    start = window * np.uint64(T) + shift
    positions = (start[:, None] + np.arange(T + 1, dtype=np.uint64)) % np.uint64(n)
    return tokens[positions].astype(np.int64)


def validation_batches(
    tokens: np.ndarray, batch_size: int, context_length: int, ignore: int, stride: int | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield inputs and targets, each (B, T), that predict every token but the first exactly once.

    Windows are `stride` apart: by default a context, so that they do not overlap. The last batch is padded with the
    target `ignore`, so that a compiled model sees only one shape: B is `batch_size`, or the number of windows if that
    is less.
    """
    T = min(context_length, len(tokens) - 1)
    S = min(stride or T, T)
    count = 1 + -(-(len(tokens) - 1 - T) // S)
    B = min(batch_size, count)
    for first in range(0, count, B):
        starts = np.arange(first, first + B) * S
        positions = starts[:, None] + np.arange(T + 1)  # (B, T + 1)
        inside = positions < len(tokens)
        block = torch.from_numpy(np.where(inside, tokens[np.minimum(positions, len(tokens) - 1)], 0).astype(np.int64))
        is_new = (starts[:, None] == 0) | (np.arange(T) >= T - S)  # not a target of the window before
        targets = torch.where(torch.from_numpy(inside[:, 1:] & is_new), block[:, 1:], ignore)
        yield block[:, :-1].contiguous(), targets


def permute(index: np.ndarray, size: int, key) -> np.ndarray:
    """Map each index by a permutation of range(size), in memory that does not grow with `size`.

    `key` seeds it: one key for all indices, or an array with one for each. A Feistel network of four rounds permutes
    the next power of four; indices that land outside go round again until they land inside (Black and Rogaway 2002,
    "Ciphers with Arbitrary Finite Domains").
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = np.uint64((1 << half) - 1)
    result, keys = index.astype(np.uint64), np.full(len(index), key, dtype=np.uint64)
    outside = np.ones(len(result), dtype=bool)
    while outside.any():
        x, key = result[outside], keys[outside]
        left, right = x >> np.uint64(half), x & mask
        for turn in range(4):
            left, right = right, left ^ (_mix(key ^ np.uint64(turn), right) & mask)
        result[outside] = (left << np.uint64(half)) | right
        outside[outside] = result[outside] >= size
    return result


def _mix(key, value):
    """Hash a key and a value, or arrays, to 64 bits: the finaliser of SplitMix64 (Steele et al. 2014), twice."""
    with np.errstate(over="ignore"):
        x = np.asarray(value, dtype=np.uint64) + key * np.uint64(0x9E3779B97F4A7C15)
        for _ in range(2):
            x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            x = x ^ (x >> np.uint64(31))
            x = x + np.uint64(0x9E3779B97F4A7C15)
    return x
