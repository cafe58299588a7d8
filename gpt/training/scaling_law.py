"""What a model of some size reaches on a text after some training: a law fitted to this project's own runs.

What a model lacks in size and in training adds up, each by a power, as in Hoffmann et al. 2022 (arXiv:2203.15556); an
untrained one lacks everything, so the fall begins slowly, and how far it goes depends on the text.
`python benchmarks/search.py --law` fits the numbers, and benchmarks/LOG.md has what they predict beside what came.
"""

import math
from dataclasses import dataclass, replace

from gpt.model.transformer import ModelConfig

# Bits per byte are a power of what a model lacks: FALL where a text repeats itself, and less the more novel it is.
LOSS_EXPONENT = 2.74
NOVELTY_SCALE = 2.66  # a text as novel as this has the power FALL / e
# What a model lacks is what it lacks in size plus what it lacks in training.
SIZE_EXPONENT = 0.19  # of the weights in its blocks, in millions
TOKENS_PER_WEIGHT = 2.35  # so many million tokens of training count as much as a million weights
TOKENS_EXPONENT = 0.515  # of the tokens of training over that
# What learning a text by heart adds: this share of the bits for a million weights, times the square of the epochs.
OVERFIT_FACTOR = 0.000342
OVERFIT_EXPONENT = 0.562  # of the weights, in millions


def _member(layers: int, channels: int, context: int = 128) -> ModelConfig:
    return ModelConfig(context, channels, layers, num_heads=channels // (32 if channels <= 256 else 64))


PROBE_MODEL = _member(2, 64)  # whose bits per byte say how hard a text is
# What model=auto chooses from, on every machine, so that runs compare. From 12 layers on, nothing was measured.
CANDIDATE_MODELS = (
    _member(3, 96),
    _member(4, 128),  # as large as mini
    _member(6, 192),
    _member(8, 256),
    _member(12, 384, 256),
    _member(12, 512, 512),
    _member(12, 768, 1024),  # GPT-2 small
    _member(24, 1024, 1024),  # GPT-2 medium
)


@dataclass(frozen=True)
class ScalingLaw:
    """The law on one text: its training tokens, its novelty (as in references.py), the bits per byte after a probe."""

    train_tokens: int
    novelty: float = 1.7
    level: float = 2.0

    def calibrate(self, model: ModelConfig, tokens: float, bits: float) -> "ScalingLaw":
        """The law on a text of which a model needs `bits` per byte after so many tokens."""
        return replace(self, level=self.level * bits / self.bits_per_byte(model, tokens))

    def bits_per_byte(self, model: ModelConfig, tokens: float) -> float:
        """What a model needs that has trained on so many tokens, with rates that fell until then."""
        return self.level * self._lacking(model, tokens) / self._lacking(PROBE_MODEL, 1e6)

    def best_tokens(self, model: ModelConfig, tokens: float) -> float:
        """After how many of so many tokens a model is best: all of them, unless it learns the text by heart."""
        return min((tokens * 0.95**i for i in range(400)), key=lambda some: self.bits_per_byte(model, some))

    def _lacking(self, model: ModelConfig, tokens: float) -> float:
        size, text, seen = 12 * model.num_layers * model.d_model**2 / 1e6, self.train_tokens / 1e6, tokens / 1e6
        by_heart = 1 + OVERFIT_FACTOR * (seen / text) ** 2 * size**OVERFIT_EXPONENT
        lacking = size**-SIZE_EXPONENT + (TOKENS_PER_WEIGHT / seen) ** TOKENS_EXPONENT
        return (lacking / (1 + lacking)) ** (
            LOSS_EXPONENT * math.exp(-((self.novelty / NOVELTY_SCALE) ** 2))
        ) * by_heart
