"""Each epoch shows every window once, any step can be computed alone, and validation counts every token once."""

import math
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gpt.data.batches import assign_sources, count_sequences, permute, training_batch, validation_batches
from gpt.data.token_dataset import MIXTURE_BLOCK as BLOCK
from gpt.data.token_files import TokenSequence, map_tokens
from harness import ROOT, write_token_sequence

IGNORE_INDEX = -7  # any id that no token has
T = 7
n = 101  # 14 windows of 7 tokens in an epoch, and 3 tokens over
PER_EPOCH = 14

EXAMPLES = settings(max_examples=100, deadline=None, derandomize=True, database=None)
KEYS = st.integers(0, 2**64 - 1).map(np.uint64)


def corpus_batch(tokens: np.ndarray, *arguments: int) -> tuple[Tensor, Tensor]:
    """A batch of one corpus."""
    return training_batch([write_token_sequence(tokens)], (BLOCK,), *arguments)


def windows(first: int, count: int, seed: int = 5, tokens: np.ndarray | None = None) -> list[list[int]]:
    """The inputs of `count` windows of a circle whose tokens are their own positions, or of other tokens."""
    idx, _ = corpus_batch(np.arange(n) if tokens is None else tokens, seed, first, count, T)
    return idx.tolist()


def equal(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> bool:
    return torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])


# --- training ---


@pytest.mark.parametrize("lengths", [[T + 1], [2 * T], [2 * T + 1], [n], [n, 53, 17]], ids=str)
def test_targets_are_the_next_tokens(lengths):
    """Each target is the token after its input in the same corpus. The end of a corpus is followed by its start."""
    chooser = np.random.default_rng(3)
    corpora = [1000 * i + chooser.permutation(length) for i, length in enumerate(lengths)]
    after = {int(a): int(b) for tokens in corpora for a, b in zip(tokens, np.roll(tokens, -1), strict=True)}
    weights = (BLOCK,) if len(corpora) == 1 else (500, 300, 200)
    idx, targets = training_batch([write_token_sequence(tokens) for tokens in corpora], weights, 5, 0, BLOCK, T)
    assert idx.dtype == targets.dtype == torch.int64
    assert idx.is_contiguous() and targets.is_contiguous()
    assert targets.tolist() == [[after[token] for token in window] for window in idx.tolist()]
    assert torch.equal(idx[:, 1:], targets[:, :-1])
    for tokens in corpora:
        assert any(window[-1] == tokens[-1] for window in idx.tolist())  # a target beyond the end of the array
        assert any(tokens[-1] in window[:-1] for window in idx.tolist())  # a window across the end


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
    """Each epoch and seed has an order of its own, and together they cut at every place and leave out no token."""
    epochs = [windows(epoch * PER_EPOCH, PER_EPOCH) for epoch in range(30)]
    orders = {tuple((window[0] - min(w[0] for w in epoch)) // T for window in epoch) for epoch in epochs}
    assert len(orders) == 30
    assert len({str(windows(1000 * PER_EPOCH, PER_EPOCH, seed)) for seed in range(20)}) == 20
    assert {window[0] % T for epoch in epochs for window in epoch if window[0] < PER_EPOCH * T} == set(range(T))
    assert {token for epoch in epochs[1:] for window in epoch for token in window} == set(range(n))


CORPORA = [np.arange(1000, 1000 + 101), np.arange(2000, 2000 + 311), np.arange(3000, 3000 + 17)]
MIXTURE = (211, 786, 3)  # of the first corpus 15 epochs in each thousand windows, of the last one epoch and a half


@pytest.mark.parametrize(("corpora", "weights"), [(CORPORA[:1], (BLOCK,)), (CORPORA, MIXTURE)], ids=["one", "mixture"])
@EXAMPLES
@given(first=st.integers(0, 10**12), sizes=st.lists(st.integers(1, 2 * PER_EPOCH + 1), min_size=1, max_size=5))
def test_cuts_into_batches_do_not_matter(corpora, weights, first, sizes):
    """Batches of any sizes, across the ends of epochs too, put together are the one batch of all their windows."""
    sources = [write_token_sequence(tokens) for tokens in corpora]
    firsts = np.cumsum([first, *sizes])
    parts = [training_batch(sources, weights, 5, int(at), size, T) for at, size in zip(firsts, sizes, strict=False)]
    joined = training_batch(sources, weights, 5, first, sum(sizes), T)
    assert equal(joined, (torch.cat([idx for idx, _ in parts]), torch.cat([targets for _, targets in parts])))


# --- shards ---

LENGTHS = [20 + 13 * (i % 7) for i in range(537)]


def shards(folder: Path, lengths: list[int] = LENGTHS) -> TokenSequence:
    """Files whose tokens are their own positions in the whole text."""
    folder.mkdir(exist_ok=True)
    for i, part in enumerate(np.split(np.arange(sum(lengths), dtype=np.uint32), np.cumsum(lengths)[:-1])):
        (folder / f"{i}").write_bytes(part.tobytes())
    return TokenSequence([map_tokens(folder / f"{i}", "uint32") for i in range(len(lengths))])


def test_shards_are_one_text(tmp_path):
    """The files of a text have the very order of the text that they are cut from."""
    text = shards(tmp_path)
    for first in (0, 17, 1000):
        one = training_batch([text], (BLOCK,), 5, first, 31, T)
        assert equal(one, corpus_batch(np.arange(len(text)), 5, first, 31, T))


@EXAMPLES
@given(st.lists(st.integers(0, 9), max_size=7), st.integers(-3, 70), st.integers(-3, 70))
def test_slices_of_shards(lengths, start, stop):
    """Slices and parts equal slices of the concatenated arrays. Empty files do not matter."""
    whole = np.arange(sum(lengths), dtype=np.uint16)
    text = TokenSequence(np.split(whole, np.cumsum(lengths)[:-1]) if lengths else [])
    assert len(text) == len(whole)
    assert text[start:stop].tolist() == whole[start:stop].tolist()
    assert text.part(max(0, start), max(0, stop))[:].tolist() == whole[max(0, start) : max(0, stop)].tolist()


ORDER = {  # of sequences of 7 of 101 tokens, as version 0.5 had it: number of the first, seed -> where each begins
    (0, 5): [14, 56, 42, 84, 28, 35, 0, 21, 91, 49, 63, 70, 7, 77, 9, 79, 44, 93, 30, 16],
    (30, 5): [2, 16, 44, 58, 30, 37, 72, 93, 23, 65, 86, 79, 86, 44, 2, 9, 23, 58, 30, 93],
    (10**6, 11): [45, 80, 31, 24, 10, 38, 81, 74, 4, 60, 95, 88, 32, 53, 39, 46, 11, 67, 25, 18],
}


@pytest.mark.parametrize(("first", "seed"), ORDER)
def test_the_order_is_that_of_before(first, seed):
    """Bit for bit, on every machine: runs depend on it."""
    assert [window[0] for window in windows(first, 20, seed)] == ORDER[first, seed]


OPEN_MANY_FILES = """
import resource, sys
from pathlib import Path
soft, hard = map(int, sys.argv[2:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
from gpt.data.token_files import TokenSequence, raise_open_file_limit, map_tokens
from gpt.data.token_dataset import token_file_errors
files = sorted(Path(sys.argv[1]).iterdir(), key=lambda file: int(file.name))
raise_open_file_limit(len(files))
try:
    with token_file_errors(files[0], "a hint"):
        print(len(TokenSequence([map_tokens(file, "uint32") for file in files])))
except ValueError as error:
    print(error)
"""


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such limit")
def test_more_files_than_a_process_may_open(tmp_path):
    """The limit that macOS begins with does not matter; one that cannot be raised is named."""
    text = shards(tmp_path)
    for limits, said in (((256, 2048), f"{len(text)}\n"), ((256, 256), "; allow more open files with ulimit -n, and")):
        command = [sys.executable, "-c", OPEN_MANY_FILES, str(tmp_path), *map(str, limits)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert said in done.stdout, done.stdout + done.stderr


# --- mixtures ---


def mixed(first: int, count: int, seed: int = 5) -> list[list[int]]:
    """Return the inputs of windows of a mixture. The thousands of a token are the number of its corpus."""
    idx, _ = training_batch([write_token_sequence(tokens) for tokens in CORPORA], MIXTURE, seed, first, count, T)
    return idx.tolist()


@st.composite
def share_lists(draw) -> list[int]:
    """Shares of up to seven corpora: whole numbers above 0 that sum to BLOCK."""
    cuts = draw(st.lists(st.integers(1, BLOCK - 1), max_size=6, unique=True))
    return np.diff([0, *sorted(cuts), BLOCK]).tolist()


@EXAMPLES
@given(share_lists(), st.integers(0, 2**63 - 1), st.integers(0, 10**6))
def test_mixture_deals_out_each_window_once(shares, seed, block):
    """In a block of a thousand, corpus i gives its next `shares[i]` windows, each once: so in any number of blocks."""
    numbers = np.arange(block * BLOCK, (block + 1) * BLOCK, dtype=np.uint64)
    source, own = assign_sources(numbers, shares, seed)
    for corpus, share in enumerate(shares):
        assert np.array_equal(np.sort(own[source == corpus]), np.arange(block * share, (block + 1) * share))


def test_mixture_by_epochs():
    """Each corpus is seen as it would be alone: in every epoch of its own each of its windows once."""
    seen = mixed(0, 28 * BLOCK)
    for tokens, share in zip(CORPORA, MIXTURE, strict=True):
        own = [window for window in seen if window[0] // 1000 == tokens[0] // 1000]
        assert len(own) == 28 * share
        assert sorted(own) == sorted(windows(0, 28 * share, tokens=tokens))


def test_mixture_is_in_a_seeded_order():
    """Neither one corpus after the other nor the same order in each block or with each seed, and evenly spread."""
    orders = [tuple(w[0] // 1000 for w in mixed(b * BLOCK, BLOCK, seed)) for b in range(7) for seed in range(7)]
    assert len(set(orders)) == 49
    firsts = [order[:100].count(1) for order in orders]
    assert min(firsts) > 0 and max(firsts) < 45  # 21 are expected
    assert np.mean(firsts) == pytest.approx(21.1, abs=2)


@EXAMPLES
@given(share_lists(), st.integers(0, 2**63 - 1), st.integers(0, 5003))
def test_count_sequences_are_counted(shares, seed, count):
    """The counts equal the lengths of explicit lists."""
    source, _ = assign_sources(np.arange(count, dtype=np.uint64), shares, seed)
    assert count_sequences(count, shares, seed) == [int((source == corpus).sum()) for corpus in range(len(shares))]


def test_count_sequences_by_hand():
    """Complete blocks give the weights. A trillion windows take no longer than one block."""
    assert count_sequences(0, MIXTURE, 5) == [0, 0, 0]
    assert count_sequences(2000, MIXTURE, 5) == [422, 1572, 6]
    given_, more = (count_sequences(count, MIXTURE, 5) for count in (10**12, 10**12 + 1))
    assert given_ == [211 * 10**9, 786 * 10**9, 3 * 10**9]
    [corpus], _ = assign_sources(np.array([10**12], dtype=np.uint64), MIXTURE, 5)
    assert [b - a for a, b in zip(given_, more, strict=True)] == [int(i == corpus) for i in range(3)]


# --- the permutation ---


@EXAMPLES
@given(st.integers(1, 3000), KEYS)
def test_permute_is_a_bijection(size, key):
    """This holds for any size and key, and an index has the same image alone and among others."""
    image = permute(np.arange(size), size, key)
    assert np.array_equal(np.sort(image), np.arange(size))
    some = np.arange(0, size, 97)
    assert np.array_equal(permute(some[::-1], size, key), image[some][::-1])


def test_permute_huge_sizes():
    """A size that fills no memory: a thousand of 10^12 places at once, all different, and spread over all of them."""
    image = permute(np.arange(1000), 10**12, 5)
    assert len(set(image.tolist())) == 1000
    assert image.max() < 10**12
    assert image.mean() == pytest.approx(0.5e12, rel=0.1)


# --- validation ---


@pytest.mark.parametrize("length", [2, 3, T - 1, T, T + 1, T + 2, 3 * T - 1, 3 * T, 3 * T + 1, 3 * T + 2, n])
@pytest.mark.parametrize("batch_size", [1, 2, 3, 100])
def test_validation_predicts_every_token_once(length, batch_size):
    """In order, and from the token before it; only places past the end are ignored."""
    tokens = np.arange(1000, 1000 + length, dtype=np.uint32)
    batches = list(validation_batches(tokens, batch_size, T, IGNORE_INDEX))
    width = min(T, length - 1)
    predicted = []
    for idx, targets in batches:
        assert idx.shape == targets.shape and idx.shape[1] == width
        assert idx.dtype == targets.dtype == torch.int64
        counted = targets != IGNORE_INDEX
        assert torch.equal(targets[counted], idx[counted] + 1)
        predicted += targets[counted].tolist()
    assert predicted == list(range(1001, 1000 + length))
    windows = -(-(length - 1) // width)
    rows = min(batch_size, windows)
    assert [len(idx) for idx, _ in batches] == [rows] * math.ceil(windows / rows)
    ignored = torch.cat([targets for _, targets in batches]).eq(IGNORE_INDEX).flatten()
    assert ignored.sum() == len(batches) * rows * width - (length - 1)
    assert not ignored[: length - 1].any()
