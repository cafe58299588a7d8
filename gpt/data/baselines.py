"""Bits per byte of simple predictors on the validation text, for a model to beat."""

import gzip
import lzma
from collections.abc import Sequence

import numpy as np

from gpt.data.token_dataset import TokenSource
from gpt.data.token_files import TokenSequence

MIN_COMPRESSED_BYTES = 10_000  # below, a compressor has too little to learn from, which flatters any model
MAX_COMPRESSED_BYTES = 10_000_000  # above, xz takes minutes
COUNTED_TOKENS = 1 << 22  # training tokens that the counts are of, which take a quarter of a second
ROW_TOKENS = 1 << 12  # tokens in a row, of those
NOVELTY_TRAIN_TOKENS, NOVELTY_VALIDATION_TOKENS = (
    1 << 18,
    1 << 17,
)  # training and validation tokens that say how new a text is
COUNT_BLOCK_TOKENS = 1 << 20  # validation tokens


def measure_baselines(sources: Sequence[TokenSource]) -> dict[str, float]:
    """Return the bits per byte of the validation texts together: two models of token counts, and two compressors.

    The counts are of training text. A bigram that it lacks falls back on the unigram (Witten and Bell 1991). The
    compressors see the validation text alone; they are left out where that is very short or very long.
    """
    size = sum(source.metadata["splits"]["validation"]["bytes"] for source in sources)
    found = {name: bits / size for name, bits in zip(("unigram", "bigram"), _count_models(sources), strict=True)}
    if MIN_COMPRESSED_BYTES <= size <= MAX_COMPRESSED_BYTES:
        text = b"".join(block for source in sources for block in source.validation_text())
        # As xz itself does: a dictionary no larger than the text, which saves 700 MB of memory.
        method = {"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": size}
        found["gzip -9"] = 8 * len(gzip.compress(text, 9, mtime=0)) / size
        found["xz -9e"] = 8 * len(lzma.compress(text, filters=[method])) / size
    return found


def sample(tokens: TokenSequence | np.ndarray, size: int) -> np.ndarray:
    """Return about `size` tokens in rows that are evenly spaced over a text, or all of a shorter one in a single row.

    The result is (rows, tokens in a row), of int64.
    """
    if len(tokens) <= size:
        return tokens[: len(tokens)].astype(np.int64)[None]
    starts = np.linspace(0, len(tokens) - ROW_TOKENS, max(1, size // ROW_TOKENS)).astype(np.int64)
    return tokens[starts[:, None] + np.arange(ROW_TOKENS)].astype(np.int64)


def measure_novelty(sources: Sequence[TokenSource]) -> float:
    """Return the bits per byte that lzma needs for some validation text after some training text.

    They are few where texts repeat one another, and many where each page is new.
    """
    seen = unseen = b""
    for source in sources:
        decode = source.tokenizer.decode_bytes
        seen += decode(sample(source.train, NOVELTY_TRAIN_TOKENS // len(sources)).ravel().tolist())
        unseen += decode(sample(source.validation, NOVELTY_VALIDATION_TOKENS // len(sources)).ravel().tolist())
    return 8 * (len(lzma.compress(seen + unseen)) - len(lzma.compress(seen))) / len(unseen)


def _count_models(sources: Sequence[TokenSource]) -> tuple[float, float]:
    """The bits that a unigram and a bigram model need for all validation tokens but each text's first."""
    V = sources[0].tokenizer.vocab_size
    texts = [sample(source.train, COUNTED_TOKENS // len(sources)) for source in sources]
    tokens = np.concatenate([text.ravel() for text in texts])
    unigram = (np.bincount(tokens, minlength=V) + 1) / (len(tokens) + V)  # (V,)
    pairs, counts = np.unique(
        np.concatenate([(text[:, :-1] * V + text[:, 1:]).ravel() for text in texts]), return_counts=True
    )
    kinds = np.bincount(pairs // V, minlength=V)  # of tokens that follow each token
    follow = np.bincount(pairs // V, weights=counts, minlength=V)  # how many follow it
    bits = np.zeros(2)
    for source in sources:
        for start in range(0, len(source.validation) - 1, COUNT_BLOCK_TOKENS):
            ids = source.validation[start : start + COUNT_BLOCK_TOKENS + 1].astype(np.int64)
            before, targets = ids[:-1], ids[1:]
            wanted = before * V + targets
            places = np.searchsorted(pairs, wanted).clip(max=len(pairs) - 1)
            together = np.where(pairs[places] == wanted, counts[places], 0)
            fallback = np.maximum(kinds[before], 1)
            bigram = (together + fallback * unigram[targets]) / (follow[before] + fallback)
            bits -= np.log2(unigram[targets]).sum(), np.log2(bigram).sum()
    return float(bits[0]), float(bits[1])
