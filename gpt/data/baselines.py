"""Bits per byte of simple predictors on the validation text, for a model to beat."""

import gzip
import lzma
from collections.abc import Sequence

import numpy as np

from gpt.data.token_dataset import TokenSource
from gpt.data.token_files import TokenSequence

MIN_COMPRESSED_BYTES = 10_000  # in a shorter text a compressor learns too little, and any model looks good
MAX_COMPRESSED_BYTES = 10_000_000  # for a longer text xz takes minutes
COUNTED_TOKENS = 1 << 22  # training tokens for the unigram and bigram counts, a quarter of a second
ROW_TOKENS = 1 << 12  # tokens in a row of a sample
NOVELTY_TRAIN_TOKENS = 1 << 18
NOVELTY_VALIDATION_TOKENS = 1 << 17
COUNT_BLOCK_TOKENS = 1 << 20  # validation tokens that are scored at once


def measure_baselines(sources: Sequence[TokenSource]) -> dict[str, float]:
    """Return the bits per byte of all validation texts together: two models of token counts, and two compressors.

    The counts are of training text. A bigram that does not occur there falls back on the unigram (Witten and Bell
    1991). The compressors see the validation text alone, and are left out if it is very short or very long.
    """
    size = sum(source.metadata["splits"]["validation"]["bytes"] for source in sources)
    unigram_bits, bigram_bits = _count_model_bits(sources)
    baselines = {"unigram": unigram_bits / size, "bigram": bigram_bits / size}
    if MIN_COMPRESSED_BYTES <= size <= MAX_COMPRESSED_BYTES:
        text = b"".join(block for source in sources for block in source.validation_text())
        # Like xz itself, use a dictionary no larger than the text. That saves 700 MB of memory.
        method = {"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": size}
        baselines["gzip -9"] = 8 * len(gzip.compress(text, 9, mtime=0)) / size
        baselines["xz -9e"] = 8 * len(lzma.compress(text, filters=[method])) / size
    return baselines


def sample(tokens: TokenSequence | np.ndarray, size: int) -> np.ndarray:
    """Return about `size` tokens in rows at even distances, or all of a shorter text in a single row.

    The result is (rows, tokens in a row), of int64.
    """
    if len(tokens) <= size:
        return tokens[: len(tokens)].astype(np.int64)[None]
    starts = np.linspace(0, len(tokens) - ROW_TOKENS, max(1, size // ROW_TOKENS)).astype(np.int64)
    return tokens[starts[:, None] + np.arange(ROW_TOKENS)].astype(np.int64)


def measure_novelty(sources: Sequence[TokenSource]) -> float:
    """Return the bits per byte that lzma needs for some validation text after some training text.

    They are few if texts repeat one another, and many if each page is new.
    """
    train = validation = b""
    for source in sources:
        decode = source.tokenizer.decode_bytes
        train += decode(sample(source.train, NOVELTY_TRAIN_TOKENS // len(sources)).ravel().tolist())
        validation += decode(sample(source.validation, NOVELTY_VALIDATION_TOKENS // len(sources)).ravel().tolist())
    return 8 * (len(lzma.compress(train + validation)) - len(lzma.compress(train))) / len(validation)


def _count_model_bits(sources: Sequence[TokenSource]) -> tuple[float, float]:
    """Return the bits that a unigram and a bigram model need for all validation tokens but each text's first."""
    V = sources[0].tokenizer.vocab_size
    samples = [sample(source.train, COUNTED_TOKENS // len(sources)) for source in sources]
    tokens = np.concatenate([rows.ravel() for rows in samples])
    unigram = (np.bincount(tokens, minlength=V) + 1) / (len(tokens) + V)  # (V,)
    # A bigram (a, b) is the number a * V + b.
    bigrams, counts = np.unique(
        np.concatenate([(rows[:, :-1] * V + rows[:, 1:]).ravel() for rows in samples]), return_counts=True
    )
    num_followers = np.bincount(bigrams // V, minlength=V)  # how many different tokens follow each token
    follower_counts = np.bincount(bigrams // V, weights=counts, minlength=V)  # how many tokens follow each token
    bits = np.zeros(2)
    for source in sources:
        for start in range(0, len(source.validation) - 1, COUNT_BLOCK_TOKENS):
            ids = source.validation[start : start + COUNT_BLOCK_TOKENS + 1].astype(np.int64)
            context, targets = ids[:-1], ids[1:]
            pairs = context * V + targets
            index = np.searchsorted(bigrams, pairs).clip(max=len(bigrams) - 1)
            pair_counts = np.where(bigrams[index] == pairs, counts[index], 0)
            fallback = np.maximum(num_followers[context], 1)
            bigram = (pair_counts + fallback * unigram[targets]) / (follower_counts[context] + fallback)
            bits -= np.log2(unigram[targets]).sum(), np.log2(bigram).sum()
    return float(bits[0]), float(bits[1])
