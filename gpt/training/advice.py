"""Warnings of a new run before its first step: the settings that do not suit its text, and those that would."""

import numpy as np

from gpt.data.token_dataset import MIXTURE_BLOCK, TokenDataset
from gpt.data.token_files import TokenSequence
from gpt.data.tokenizer import train_bpe
from gpt.training.config import Config
from gpt.training.schedule import Schedule

# benchmarks/LOG.md says how these were measured.
OVERFIT_LOSS_RATIO = 1.01  # a loss this many times the best is worse beyond noise, which is below 0.5%
# Beyond so many epochs a small text is learnt by heart: with split tokens, without, and with dropout.
MOST_EPOCHS, MOST_UNSPLIT, MOST_DROPPED = 20, 15, 30
DROPOUT = 0.2  # from which on it counts
EPOCHS_WITHOUT_BPE_DROPOUT, CHANCE, MOST_CHANCE = (
    5,
    0.04,
    0.5,
)  # no token is split up to so many epochs; a chance for each more; at most
EPOCHS, STEPS = 10, 30  # that suit a small text: the greater of the two
TOKENS_PER_ENTRY = 4  # of the vocabulary, in the training text: with fewer, most entries are too rare to be learnt
VOCABULARIES = (320, 512, 1024, 1536, 4096, 8192)  # to suggest
VALIDATION_TOKENS, UNCERTAINTY = 4000, 0.07  # the loss on so many varies by so much from one part of a text to another
NOT_ASCII, BYTES_PER_TOKEN = 0.25, 2.5  # of text that GPT-2's tokenizer cuts up: Chinese has 1.0 and 1.5, English 0, 4
SAMPLE, SAMPLES = 1 << 14, 8  # tokens of a corpus to look at together, and in about how many places


def list_warnings(config: Config, schedule: Schedule, text: TokenDataset) -> list[str]:
    """Return a line for each setting that does not suit the text: the value, the limit, and what to set instead."""
    checks = [_repeats(config, schedule, text)]
    if not config.init_from:  # which brings its own vocabulary
        checks.append(_cut_up(text) or _vocabulary(text))
    checks.append(_validation(config, text))
    return [line for line in checks if line]


def epochs(tokens: int, text: TokenDataset) -> dict[str, float]:
    """Return how often each corpus is seen in so many tokens of training."""
    each = zip(text.names, text.sources, text.weights, strict=True)
    return {name: tokens * share / MIXTURE_BLOCK / len(source.train) for name, source, share in each}


def suggest_steps(config: Config, text: TokenDataset) -> int:
    """Return the number of steps after which validation on a small text is about at its best."""
    return max(STEPS, EPOCHS * text.train_tokens // config.trainer.tokens_per_step)


def suggest_bpe_dropout(config: Config, schedule: Schedule, text: TokenDataset) -> float:
    """Return the chance to split tokens that suits how often a text is seen, of several the one that is seen least."""
    seen = min(epochs(schedule.total_steps * config.trainer.tokens_per_step, text).values())
    return round(min(MOST_CHANCE, CHANCE * max(0.0, seen - EPOCHS_WITHOUT_BPE_DROPOUT)), 3)


def suggest_shorter_horizon(config: Config, text: TokenDataset, best_step: int) -> int:
    """Return the horizon to suggest once validation, which was best at `best_step`, has turned."""
    return min(best_step, suggest_steps(config, text))


def _repeats(config: Config, schedule: Schedule, text: TokenDataset) -> str:
    if schedule.expected_bits:  # model=auto ends before that
        return ""
    tokens = schedule.total_steps * config.trainer.tokens_per_step
    each = epochs(tokens, text)
    name, most = max(each.items(), key=lambda item: item[1])
    limit = MOST_EPOCHS if config.data.bpe_dropout else MOST_UNSPLIT
    limit = MOST_DROPPED if config.model.dropout >= DROPOUT else limit
    suitable = suggest_steps(config, text)
    if most <= limit or (len(each) == 1 and schedule.total_steps <= suitable):
        return ""
    what, hint = "the text", f"try horizon={suitable}steps" if suitable < schedule.total_steps else "give more text"
    if len(each) > 1:
        what = name
        if tokens / text.train_tokens <= limit:
            hint = f"try a smaller weight for it in data.weights, which are {config.data.weights}"
    return (
        f"{schedule.total_steps:,} steps would read {what} {most:,.0f} times; beyond about {limit} a model only "
        f"memorises it: {hint}"
    )


def _vocabulary(text: TokenDataset) -> str:
    size, tokens, fitting = text.tokenizer.vocab_size, text.train_tokens, _suitable_size(text)
    if tokens >= TOKENS_PER_ENTRY * size or fitting >= size:
        return ""
    return (
        f"a vocabulary of {size:,} is large for {tokens:,} tokens of text: each entry occurs {tokens / size:.1f} times "
        f"on average, fewer than {TOKENS_PER_ENTRY}: try tokenizer=bpe tokenizer.vocab_size={fitting}"
    )


def _suitable_size(text: TokenDataset) -> int:
    """The vocabulary that suits the size of the text."""
    most = 6.5 * _bytes(text, "train") ** 0.5
    return max(size for size in VOCABULARIES if size <= max(most, VOCABULARIES[0]))


def _validation(config: Config, text: TokenDataset) -> str:
    tokens = sum(len(source.validation) for source in text.sources)
    if tokens >= VALIDATION_TOKENS:
        return ""
    size, training = (_bytes(text, split) for split in ("validation", "train"))
    larger = 10 * config.data.validation_bytes < size + training
    return (
        f"the validation text has {tokens:,} tokens ({size:,} bytes), under {VALIDATION_TOKENS:,}: on another text "
        f"of that size the loss could differ by {UNCERTAINTY * (VALIDATION_TOKENS / tokens) ** 0.25:.0%}; "
        + ("try data.validation_bytes=1000000" if larger else "only more text helps")
    )


def compare_tokenizers(text: TokenDataset) -> str:
    """Say how long the tokens of a tokenizer that came with weights are, and those of one of the text's own."""
    tokenizer = text.tokenizer
    encoded, each = _sampled(text)
    decoded = encoded.decode("utf-8", errors="replace")
    own = train_bpe([decoded], max(VOCABULARIES[0], min(tokenizer.vocab_size, _suitable_size(text))))
    would = len(encoded) / len(own.encode(decoded))
    return (
        f"init_from brings its tokenizer, {tokenizer.name} (vocabulary {tokenizer.vocab_size:,}): {each:.2f} bytes per "
        f"token of this text; one that is trained on it (vocabulary {own.vocab_size:,}) would have {would:.2f}"
    )


def _cut_up(text: TokenDataset) -> str:
    if text.tokenizer.name != "gpt2":
        return ""
    encoded, each = _sampled(text)
    if each > BYTES_PER_TOKEN or (np.frombuffer(encoded, np.uint8) > 127).mean() < NOT_ASCII:
        return ""
    return (
        f"GPT-2's tokenizer cuts this text into {each:.1f} bytes a token, and English into 4: try "
        f"tokenizer=bpe tokenizer.vocab_size={_suitable_size(text)}"
    )


def _sampled(text: TokenDataset) -> tuple[bytes, float]:
    """Some of the training text, and its bytes per token."""
    ids = np.concatenate([part for source in text.sources for part in _samples(source.train)])
    encoded = text.tokenizer.decode_bytes(ids[ids != text.tokenizer.end_of_text].tolist())
    return encoded, len(encoded) / len(ids)


def _bytes(text: TokenDataset, split: str) -> int:
    return sum(source.metadata["splits"][split]["bytes"] for source in text.sources)


def _samples(tokens: TokenSequence) -> list[np.ndarray]:
    """Stretches of tokens, evenly spaced; all tokens if they are few."""
    every = max(SAMPLE, len(tokens) // SAMPLES)
    return [tokens[start : start + SAMPLE] for start in range(0, len(tokens), every)]
