"""Warnings before the first step about settings that do not suit the text, and the settings that would."""

import numpy as np

from gpt.data.token_dataset import MIXTURE_BLOCK, TokenDataset
from gpt.data.token_files import TokenSequence
from gpt.data.tokenizer import train_bpe
from gpt.training.config import Config
from gpt.training.schedule import Schedule

# benchmarks/LOG.md has the measurements behind these constants.
OVERFIT_LOSS_RATIO = 1.01  # a validation loss this many times the best is worse beyond noise, which is below 0.5%
# After so many epochs a model begins to memorize a small text.
MAX_EPOCHS, MAX_EPOCHS_WITHOUT_BPE_DROPOUT, MAX_EPOCHS_WITH_DROPOUT = 20, 15, 30
MIN_EFFECTIVE_DROPOUT = 0.2
# Up to so many epochs BPE dropout does not help. Its probability grows with each further epoch.
EPOCHS_WITHOUT_BPE_DROPOUT = 5
BPE_DROPOUT_PER_EPOCH, MAX_BPE_DROPOUT = 0.04, 0.5
SUGGESTED_EPOCHS, MIN_SUGGESTED_STEPS = 10, 30  # for a small text: the longer of the two
MIN_TOKENS_PER_VOCAB_ENTRY = 4  # with fewer training tokens, most entries are too rare to be learnt
SUGGESTED_VOCAB_SIZES = (320, 512, 1024, 1536, 4096, 8192)
# The loss on so few validation tokens varies by this fraction from one part of a text to another.
MIN_VALIDATION_TOKENS, VALIDATION_UNCERTAINTY = 4000, 0.07
# GPT-2's tokenizer makes 1.5 bytes a token of Chinese, and 4 of English.
MIN_NON_ASCII_FRACTION, MIN_BYTES_PER_TOKEN = 0.25, 2.5
EXCERPT_TOKENS, NUM_EXCERPTS = 1 << 14, 8  # of a corpus, to measure its tokens


def list_warnings(config: Config, schedule: Schedule, dataset: TokenDataset) -> list[str]:
    """Return a line for each setting that does not suit the text: the value, the limit, and what to set instead."""
    lines = [_check_epochs(config, schedule, dataset)]
    if not config.init_from:  # the initial weights fix the vocabulary
        lines.append(_check_gpt2_tokenizer(dataset) or _check_vocab_size(dataset))
    lines.append(_check_validation_size(config, dataset))
    return [line for line in lines if line]


def count_epochs(tokens: int, dataset: TokenDataset) -> dict[str, float]:
    """Return how often each corpus is seen in so many tokens of training."""
    corpora = zip(dataset.names, dataset.sources, dataset.weights, strict=True)
    return {name: tokens * weight / MIXTURE_BLOCK / len(source.train) for name, source, weight in corpora}


def suggest_steps(config: Config, dataset: TokenDataset) -> int:
    """Return the number of steps after which the validation loss of a small text is about lowest."""
    return max(MIN_SUGGESTED_STEPS, SUGGESTED_EPOCHS * dataset.train_tokens // config.trainer.tokens_per_step)


def suggest_bpe_dropout(config: Config, num_steps: int, dataset: TokenDataset) -> float:
    """Return the probability of BPE dropout that suits how often the least-seen corpus is seen."""
    epochs = min(count_epochs(num_steps * config.trainer.tokens_per_step, dataset).values())
    return round(min(MAX_BPE_DROPOUT, BPE_DROPOUT_PER_EPOCH * max(0.0, epochs - EPOCHS_WITHOUT_BPE_DROPOUT)), 3)


def suggest_shorter_horizon(config: Config, dataset: TokenDataset, best_step: int) -> int:
    """Return a horizon in steps for a run whose validation loss was lowest at `best_step` and has risen since."""
    return min(best_step, suggest_steps(config, dataset))


def _check_epochs(config: Config, schedule: Schedule, dataset: TokenDataset) -> str:
    if schedule.expected_bits:  # model=auto has ended the run before it memorizes
        return ""
    tokens = schedule.total_steps * config.trainer.tokens_per_step
    corpus_epochs = count_epochs(tokens, dataset)
    name, epochs = max(corpus_epochs.items(), key=lambda item: item[1])
    is_mixture = len(corpus_epochs) > 1
    limit = MAX_EPOCHS if config.data.bpe_dropout else MAX_EPOCHS_WITHOUT_BPE_DROPOUT
    if config.model.dropout >= MIN_EFFECTIVE_DROPOUT:
        limit = MAX_EPOCHS_WITH_DROPOUT
    suggested_steps = suggest_steps(config, dataset)
    can_be_shorter = suggested_steps < schedule.total_steps
    if epochs <= limit or not (is_mixture or can_be_shorter):
        return ""
    hint = f"try horizon={suggested_steps}steps" if can_be_shorter else "give more text"
    if is_mixture and tokens / dataset.train_tokens <= limit:
        hint = f"try a smaller weight for it in data.weights, which are {config.data.weights}"
    return (
        f"{schedule.total_steps:,} steps would read {name if is_mixture else 'the text'} {epochs:,.0f} times; beyond "
        f"about {limit} a model only memorizes it: {hint}"
    )


def _check_vocab_size(dataset: TokenDataset) -> str:
    vocab_size, suggested_size = dataset.tokenizer.vocab_size, _suggest_vocab_size(dataset)
    tokens = dataset.train_tokens
    if tokens >= MIN_TOKENS_PER_VOCAB_ENTRY * vocab_size or suggested_size >= vocab_size:
        return ""
    return (
        f"a vocabulary of {vocab_size:,} is large for {tokens:,} tokens of text: each entry occurs "
        f"{tokens / vocab_size:.1f} times on average, fewer than {MIN_TOKENS_PER_VOCAB_ENTRY}: try tokenizer=bpe "
        f"tokenizer.vocab_size={suggested_size}"
    )


def _suggest_vocab_size(dataset: TokenDataset) -> int:
    limit = max(6.5 * _count_bytes(dataset, "train") ** 0.5, SUGGESTED_VOCAB_SIZES[0])
    return max(size for size in SUGGESTED_VOCAB_SIZES if size <= limit)


def _check_validation_size(config: Config, dataset: TokenDataset) -> str:
    tokens = sum(len(source.validation) for source in dataset.sources)
    if tokens >= MIN_VALIDATION_TOKENS:
        return ""
    validation_bytes = _count_bytes(dataset, "validation")
    can_be_larger = 10 * config.data.validation_bytes < validation_bytes + _count_bytes(dataset, "train")
    hint = "try data.validation_bytes=1000000" if can_be_larger else "only more text helps"
    uncertainty = VALIDATION_UNCERTAINTY * (MIN_VALIDATION_TOKENS / tokens) ** 0.25
    return (
        f"the validation text has {tokens:,} tokens ({validation_bytes:,} bytes), under {MIN_VALIDATION_TOKENS:,}: on "
        f"another text of that size the loss could differ by {uncertainty:.0%}; {hint}"
    )


def compare_tokenizers(dataset: TokenDataset) -> str:
    """Return a line that compares the tokenizer of initial weights with one trained on the text."""
    tokenizer = dataset.tokenizer
    encoded, bytes_per_token = _take_excerpts(dataset)
    text = encoded.decode("utf-8", errors="replace")
    vocab_size = max(SUGGESTED_VOCAB_SIZES[0], min(tokenizer.vocab_size, _suggest_vocab_size(dataset)))
    trained = train_bpe([text], vocab_size)
    return (
        f"init_from brings its tokenizer, {tokenizer.name} (vocabulary {tokenizer.vocab_size:,}): "
        f"{bytes_per_token:.2f} bytes per token of this text; a tokenizer trained on it (vocabulary "
        f"{trained.vocab_size:,}) would have {len(encoded) / len(trained.encode(text)):.2f}"
    )


def _check_gpt2_tokenizer(dataset: TokenDataset) -> str:
    if dataset.tokenizer.name != "gpt2":
        return ""
    encoded, bytes_per_token = _take_excerpts(dataset)
    non_ascii_fraction = (np.frombuffer(encoded, np.uint8) > 127).mean()
    if bytes_per_token > MIN_BYTES_PER_TOKEN or non_ascii_fraction < MIN_NON_ASCII_FRACTION:
        return ""
    return (
        f"GPT-2's tokenizer needs a token for each {bytes_per_token:.1f} bytes of this text, and for 4 bytes of "
        f"English: try tokenizer=bpe tokenizer.vocab_size={_suggest_vocab_size(dataset)}"
    )


def _take_excerpts(dataset: TokenDataset) -> tuple[bytes, float]:
    """Return excerpts of the training text, and their bytes per token."""
    ids = np.concatenate([part for source in dataset.sources for part in _slice_evenly(source.train)])
    encoded = dataset.tokenizer.decode_bytes(ids[ids != dataset.tokenizer.end_of_text].tolist())
    return encoded, len(encoded) / len(ids)


def _count_bytes(dataset: TokenDataset, split: str) -> int:
    return sum(source.metadata["splits"][split]["bytes"] for source in dataset.sources)


def _slice_evenly(tokens: TokenSequence) -> list[np.ndarray]:
    """Return evenly spaced slices of tokens; all tokens if they are few."""
    stride = max(EXCERPT_TOKENS, len(tokens) // NUM_EXCERPTS)
    return [tokens[start : start + EXCERPT_TOKENS] for start in range(0, len(tokens), stride)]
