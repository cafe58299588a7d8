"""Which tokens each step sees: every window once an epoch, any step at once, every validation token once."""

import time
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gpt.batches import permute, train_batch, validation_batches
from gpt.loss import IGNORE

T = 7
n = 101  # 14 windows of 7 tokens in an epoch, and 3 tokens over
PER_EPOCH = 14

EXAMPLES = settings(max_examples=100, deadline=None, derandomize=True, database=None)
KEYS = st.integers(0, 2**64 - 1).map(np.uint64)


def windows(first: int, count: int, seed: int = 5, tokens: np.ndarray | None = None) -> list[list[int]]:
    """The inputs of `count` windows of a circle whose tokens are their own positions, or of other tokens."""
    idx, _ = train_batch(np.arange(n) if tokens is None else tokens, seed, first, count, T)
    return idx.tolist()


def equal(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> bool:
    return torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])


# --- training ---


def test_shapes_and_types():
    """Inputs and targets are (B, T) of 64-bit ids, whatever type the shards have."""
    for dtype in (np.uint16, np.uint32, np.int64):
        idx, targets = train_batch(np.arange(n, dtype=dtype), 5, 0, 3, T)
        assert idx.shape == targets.shape == (3, T)
        assert idx.dtype == targets.dtype == torch.int64
        assert idx.is_contiguous() and targets.is_contiguous()


def test_targets_are_the_next_tokens():
    """Each target is the token after its input, also where the circle closes."""
    tokens = np.random.default_rng(3).permutation(n)
    after = dict(zip(tokens.tolist(), np.roll(tokens, -1).tolist(), strict=True))
    idx, targets = train_batch(tokens, 5, 0, 50 * PER_EPOCH, T)
    assert targets.tolist() == [[after[token] for token in window] for window in idx.tolist()]
    assert any(window[-1] == tokens[-1] for window in idx.tolist())  # a target beyond the end of the array
    assert any(tokens[-1] in window[:-1] for window in idx.tolist())  # a window that goes on beyond it


@pytest.mark.parametrize("epoch", [0, 1, 2, 1000])
@pytest.mark.parametrize("length", [97, 98, n])
def test_an_epoch_sees_each_window_once(epoch, length):
    """The windows of an epoch lie side by side on the circle: no token twice, and none left out but n mod T."""
    per_epoch = length // T
    seen = windows(epoch * per_epoch, per_epoch, tokens=np.arange(length))
    assert all((b - a) % length == 1 for window in seen for a, b in pairwise(window))
    assert len({token for window in seen for token in window}) == per_epoch * T == length - length % T
    starts = sorted(window[0] for window in seen)
    gaps = sorted((b - a) % length for a, b in pairwise([*starts, starts[0]]))
    assert gaps == [T] * (per_epoch - 1) + [T + length % T]
    assert epoch or starts[0] == 0


def test_epochs_differ():
    """Each epoch has an order of its own, and together they cut at every place and leave out no token."""
    epochs = [windows(epoch * PER_EPOCH, PER_EPOCH) for epoch in range(30)]
    orders = {tuple((window[0] - min(w[0] for w in epoch)) // T for window in epoch) for epoch in epochs}
    assert len(orders) == 30
    assert {window[0] % T for epoch in epochs for window in epoch if window[0] < PER_EPOCH * T} == set(range(T))
    assert {token for epoch in epochs[1:] for window in epoch for token in window} == set(range(n))


def test_the_order_is_not_that_of_the_text():
    """Windows that follow each other in training seldom do so in the text."""
    starts = [window[0] for window in windows(0, 1009, tokens=np.arange(1009 * T + 1))]
    neighbours = sum(b - a == T for a, b in pairwise(starts))
    assert neighbours < 10  # one is expected
    assert abs(np.corrcoef(starts, np.arange(1009))[0, 1]) < 0.15  # five standard deviations


def test_seeds_differ():
    """Another seed is another order, in every epoch, and other cuts."""
    for epoch in (0, 1, 1000):
        assert len({str(windows(epoch * PER_EPOCH, PER_EPOCH, seed)) for seed in range(20)}) == 20
    assert len({min(window[0] for window in windows(PER_EPOCH, PER_EPOCH, seed)) for seed in range(50)}) == T
    assert windows(0, PER_EPOCH, 0) != windows(0, PER_EPOCH, 2**63 - 1)


@EXAMPLES
@given(st.integers(0, 2**63 - 1), st.integers(0, 10**12), st.integers(1, 20))
def test_same_arguments_same_batch(seed, first, batch_size):
    """A batch is a function of its arguments: asked for again, after others, it is the same, and the text unchanged."""
    tokens = np.arange(n)
    batch = train_batch(tokens, seed, first, batch_size, T)
    train_batch(tokens, seed + 1, first + 1, 3, T)
    assert equal(batch, train_batch(tokens, seed, first, batch_size, T))
    assert np.array_equal(tokens, np.arange(n))


@EXAMPLES
@given(st.integers(0, 10**12), st.lists(st.integers(1, 2 * PER_EPOCH + 1), min_size=1, max_size=5))
def test_cuts_into_batches_do_not_matter(first, sizes):
    """Batches of any sizes, across the ends of epochs too, put together are the one batch of all their windows."""
    firsts = np.cumsum([first, *sizes])
    parts = [train_batch(np.arange(n), 5, int(at), size, T) for at, size in zip(firsts, sizes, strict=False)]
    whole = train_batch(np.arange(n), 5, first, sum(sizes), T)
    assert equal(whole, (torch.cat([idx for idx, _ in parts]), torch.cat([targets for _, targets in parts])))


@pytest.mark.parametrize("devices", [1, 2, 3])
@pytest.mark.parametrize("accumulation", [1, 2, 4])
def test_a_step_sees_the_same_windows_however_it_is_split(devices, accumulation):
    """Over any number of devices and micro-batches, a step of 24 windows has the same 24."""
    size = 24 // (devices * accumulation)
    for step in range(5):
        micro_steps = range(step * accumulation, (step + 1) * accumulation)
        firsts = [(micro_step * devices + rank) * size for micro_step in micro_steps for rank in range(devices)]
        split = [window for first in firsts for window in windows(first, size)]
        assert split == windows(step * 24, 24)


def test_batch_across_epochs():
    """A batch that begins in one epoch and ends two later takes the rest of the first and the start of the last."""
    assert windows(10, 2 * PER_EPOCH) == windows(10, 4) + windows(PER_EPOCH, PER_EPOCH) + windows(2 * PER_EPOCH, 10)


@pytest.mark.parametrize("length", [T + 1, 2 * T - 1, 2 * T, 2 * T + 1])
def test_shortest_texts(length):
    """A text of one window and a target, or little more, still gives whole windows."""
    idx, targets = train_batch(np.arange(length), 5, 0, 11, T)
    assert torch.equal((idx[:, :1] + torch.arange(T)) % length, idx)
    assert torch.equal((idx + 1) % length, targets)
    assert len({tuple(window) for window in idx.tolist()}) > 2  # the cuts move from epoch to epoch


# --- the permutation ---


@pytest.mark.parametrize("key", [0, 1, 3, np.uint64(2**64 - 1)])
def test_permute_small_sizes(key):
    """For each size up to 150, each index has a place of its own."""
    for size in range(1, 151):
        assert sorted(permute(np.arange(size), size, key).tolist()) == list(range(size)), size


@EXAMPLES
@given(st.integers(1, 3000), KEYS)
def test_permute_is_a_bijection(size, key):
    """So it has for any size and key, and each index goes where it goes alone."""
    image = permute(np.arange(size), size, key)
    assert np.array_equal(np.sort(image), np.arange(size))
    some = np.arange(0, size, 97)
    assert np.array_equal(permute(some[::-1], size, key), image[some][::-1])


@pytest.mark.parametrize(("size", "orders"), [(1, 1), (2, 2), (3, 6), (4, 24)])
def test_permute_reaches_every_order(size, orders):
    """Of few elements there are few orders, and the keys give them all."""
    assert len({tuple(permute(np.arange(size), size, key).tolist()) for key in range(1000)}) == orders


def test_permute_keys_differ():
    """Keys next to each other give permutations that agree in about as many places as random ones do."""
    images = [permute(np.arange(1009), 1009, key) for key in range(20)]
    agreements = [int((images[a] == images[b]).sum()) for a in range(20) for b in range(a)]
    assert max(agreements) < 12
    assert 0.5 < np.mean(agreements) < 1.5


def test_permute_huge_sizes():
    """A size that fills no memory: a thousand of 10^12 places at once, all different, and spread over all of them."""
    start = time.perf_counter()
    image = permute(np.arange(1000), 10**12, 5)
    assert time.perf_counter() - start < 1.0
    assert len(set(image.tolist())) == 1000
    assert image.max() < 10**12
    assert image.mean() == pytest.approx(0.5e12, rel=0.1)


def test_permute_leaves_its_argument_alone():
    """The indices are not changed in place, even where they already have the right type."""
    index = np.arange(11, dtype=np.uint64)
    permute(index, 11, 5)
    assert np.array_equal(index, np.arange(11))


# --- validation ---


@pytest.mark.parametrize("length", [2, 3, T - 1, T, T + 1, T + 2, 3 * T - 1, 3 * T, 3 * T + 1, 3 * T + 2, n])
@pytest.mark.parametrize("batch_size", [1, 2, 3, 100])
def test_validation_predicts_every_token_once(length, batch_size):
    """In order, and from the token before it; only places past the end are ignored."""
    tokens = np.arange(1000, 1000 + length, dtype=np.uint16)
    batches = list(validation_batches(tokens, batch_size, T))
    width = min(T, length - 1)
    predicted = []
    for idx, targets in batches:
        assert idx.shape == targets.shape and idx.shape[1] == width
        assert idx.dtype == targets.dtype == torch.int64
        counted = targets != IGNORE
        assert torch.equal(targets[counted], idx[counted] + 1)
        predicted += targets[counted].tolist()
    assert predicted == list(range(1001, 1000 + length))
    windows = -(-(length - 1) // width)
    assert [len(idx) for idx, _ in batches] == [batch_size] * (windows // batch_size) + [windows % batch_size] * (
        windows % batch_size > 0
    )
    ignored = torch.cat([targets for _, targets in batches]).eq(IGNORE).flatten()
    assert ignored.sum() == windows * width - (length - 1)
    assert not ignored[: length - 1].any()


def test_validation_hand_computed():
    """Eight tokens in windows of three: the last window has one target and two places past the end."""
    (idx, targets), (last_idx, last_targets) = validation_batches(np.array([3, 1, 4, 1, 5, 9, 2, 6]), 2, 3)
    assert idx.tolist() == [[3, 1, 4], [1, 5, 9]]
    assert targets.tolist() == [[1, 4, 1], [5, 9, 2]]
    assert last_idx[0, 0].item() == 2
    assert last_targets.tolist() == [[6, IGNORE, IGNORE]]


def test_validation_inputs_are_tokens():
    """Past the end, inputs are some valid id, so that the embedding finds it."""
    for idx, _ in validation_batches(np.full(T + 2, 3), 5, T):
        assert ((idx >= 0) & (idx <= 3)).all()
