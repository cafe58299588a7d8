"""Batches: the sequences of a step, as a pure function of the seed, the step and the sequence length.

A dataset of n tokens is cut into n // T sequences of T tokens. Each epoch shows each sequence once, in an order that
depends only on the seed and the epoch. From the second epoch on, the cuts are shifted by a random offset, and the last
sequence may continue at the first token. So a run resumes at any step without a record of what it has seen.

Letters in shapes: B sequences in a batch, T tokens in a sequence.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from gpt.data.token_dataset import MIXTURE_BLOCK
from gpt.data.token_files import TokenSequence


def training_batch(
    sources: Sequence[TokenSequence], weights: Sequence[int], seed: int, first: int, batch_size: int, length: int
) -> tuple[Tensor, Tensor]:
    """Return the sequences `first` to `first + batch_size` of a run as inputs and targets, each (B, T).

    Targets are the inputs' next tokens. Sequences are numbered through all epochs, so a batch may span two epochs.

    Args:
        sources: The training tokens of each source of the dataset.
        weights: How many of `MIXTURE_BLOCK` sequences come from each source.
        seed: The seed of the order.
        first: The number of the first sequence.
        batch_size: The number of sequences, B.
        length: The tokens of a sequence, T.
    """
    numbers = np.arange(first, first + batch_size, dtype=np.uint64)
    source = np.zeros(batch_size, dtype=np.int64)
    if len(sources) > 1:
        source, numbers = assign_sources(numbers, weights, seed)
    block = np.empty((batch_size, length + 1), dtype=np.int64)  # (B, T + 1)
    for i in np.unique(source):
        positions = sequence_positions(len(sources[i]), seed, numbers[source == i], length)
        block[source == i] = sources[i][positions]
    ids = torch.from_numpy(block)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def sequence_positions(num_tokens: int, seed: int, numbers: np.ndarray, length: int) -> np.ndarray:
    """Return the positions of the tokens of these sequences, and of the token after each: (B, T + 1).

    Args:
        num_tokens: The tokens of the source.
        seed: The seed of the order.
        numbers: The numbers of the sequences, through all epochs: (B,).
        length: The tokens of a sequence, T.
    """
    assert num_tokens > length, "prepare refuses a text this short"
    epoch, number = np.divmod(numbers, np.uint64(num_tokens // length))
    index = permute(number, num_tokens // length, _hash(np.uint64(seed), epoch))
    shift = _hash(np.uint64(seed) ^ np.uint64(0x5A17), epoch) % np.uint64(length)
    start = index * np.uint64(length) + np.where(epoch > 0, shift, np.uint64(0))
    return (start[:, None] + np.arange(length + 1, dtype=np.uint64)) % np.uint64(num_tokens)


def assign_sources(numbers: np.ndarray, weights: Sequence[int], seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the source of each sequence of a mixture, and the number of the sequence within that source.

    In each block of `MIXTURE_BLOCK` sequences, source i provides its next `weights[i]`, in a seeded order.
    """
    block, offset = np.divmod(numbers, np.uint64(MIXTURE_BLOCK))
    slot = permute(offset, MIXTURE_BLOCK, _hash(np.uint64(seed) ^ np.uint64(0x313), block))
    slot_ends = np.cumsum(weights).astype(np.uint64)
    source = np.searchsorted(slot_ends, slot, side="right")
    weight = np.array(weights, dtype=np.uint64)[source]
    return source, block * weight + slot - (slot_ends[source] - weight)


def count_sequences(total: int, weights: Sequence[int], seed: int) -> list[int]:
    """Return how many of the first `total` sequences of a mixture come from each source."""
    blocks, rest = divmod(total, MIXTURE_BLOCK)
    source, _ = assign_sources(np.arange(total - rest, total, dtype=np.uint64), weights, seed)
    return [blocks * weight + int((source == i).sum()) for i, weight in enumerate(weights)]


def validation_batches(
    tokens: np.ndarray, batch_size: int, context_length: int, ignore_index: int, stride: int | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield inputs and targets, each (B, T), that predict every token but the first exactly once.

    B is `batch_size`, or less if there are fewer sequences. T is `context_length`, or less if the text is shorter.

    Args:
        tokens: The validation text.
        batch_size: The number of sequences, at most.
        context_length: The tokens of a sequence, at most.
        ignore_index: The target of padding, and of tokens that the sequence before has predicted. The last batch is
            padded so that a compiled model sees only one shape.
        stride: The distance between sequences. By default it is T, so that they do not overlap.
    """
    T = min(context_length, len(tokens) - 1)
    S = min(stride or T, T)
    num_sequences = 1 + -(-(len(tokens) - 1 - T) // S)
    B = min(batch_size, num_sequences)
    for first in range(0, num_sequences, B):
        starts = np.arange(first, first + B) * S
        positions = starts[:, None] + np.arange(T + 1)  # (B, T + 1)
        exists = positions < len(tokens)
        block = torch.from_numpy(np.where(exists, tokens[np.minimum(positions, len(tokens) - 1)], 0).astype(np.int64))
        is_new = (starts[:, None] == 0) | (np.arange(T) >= T - S)  # (B, T)
        targets = torch.where(torch.from_numpy(exists[:, 1:] & is_new), block[:, 1:], ignore_index)
        yield block[:, :-1].contiguous(), targets


def permute(index: np.ndarray, size: int, key) -> np.ndarray:
    """Map each index below `size` to its place in a random order of range(size), without storing that order.

    An order of a billion sequences would take 8 GB, and NumPy's next version may draw another one. Instead each place
    is computed as a cipher encrypts a block. Write the index as two halves of equally many bits. Four times, swap the
    halves, and change the second by a hash of the first (exclusive or). Each of these steps can be undone, so no two
    indices meet: this is a permutation (a Feistel network) of all numbers of that many bits. If a result is not below
    `size`, encrypt it again until it is (cycle walking: Black and Rogaway 2002, "Ciphers with Arbitrary Finite
    Domains"). Fewer than four rounds are needed on average.

    Args:
        index: The indices, each below `size`.
        size: The number of things to order.
        key: Selects the order: one key for all indices, or an array with a key for each.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)  # bits
    mask = np.uint64((1 << half) - 1)
    result = index.astype(np.uint64)
    keys = np.full(len(index), key, dtype=np.uint64)
    is_too_large = np.ones(len(result), dtype=bool)
    while is_too_large.any():
        x, key = result[is_too_large], keys[is_too_large]
        left, right = x >> np.uint64(half), x & mask
        for round_number in range(4):
            left, right = right, left ^ (_hash(key ^ np.uint64(round_number), right) & mask)
        result[is_too_large] = (left << np.uint64(half)) | right
        is_too_large[is_too_large] = result[is_too_large] >= size
    return result


def _hash(key, value):
    """Hash a key and a value, or arrays, to 64 bits: the finalizer of SplitMix64 (Steele et al. 2014), twice."""
    with np.errstate(over="ignore"):
        x = np.asarray(value, dtype=np.uint64) + key * np.uint64(0x9E3779B97F4A7C15)
        for _ in range(2):
            x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            x = x ^ (x >> np.uint64(31))
            x = x + np.uint64(0x9E3779B97F4A7C15)
    return x
