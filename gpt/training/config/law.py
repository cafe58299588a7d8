"""What a model of some size reaches on a text after some training: a law fitted to this project's own runs.

Its form follows Kaplan et al. 2020 (arXiv:2001.08361) and Hoffmann et al. 2022 (arXiv:2203.15556), what repeated text
is worth Muennighoff et al. 2023 (arXiv:2305.16264). `python benchmarks/search.py --law` fits its numbers, and
benchmarks/LOG.md has them beside the runs.
"""

import math
from dataclasses import dataclass, replace

from gpt.model.transformer import ModelConfig

FALL = 0.275  # the power by which bits per byte follow what is lacking in size and text
SIZE_POWER = 0.509  # of the weights in the blocks, in millions
TEXT = 2.91  # what a million tokens that have not been seen are worth in that
REPEATS, REPEATS_POWER = 4.04, 0.342  # epochs that repetition is worth at most, by tokens over weights
BY_HEART, BY_HEART_POWER = 0.0017, 0.235  # what an epoch costs by being learnt by heart, by weights over tokens


def _member(layers: int, channels: int, context: int = 128) -> ModelConfig:
    return ModelConfig(context, channels, layers, num_heads=channels // (32 if channels <= 256 else 64))


# What model=auto chooses from, on every machine, so that runs compare. From 12 layers on, nothing was measured.
FAMILY = (
    _member(2, 64),
    _member(3, 96),
    _member(4, 128),  # mini
    _member(6, 192),
    _member(8, 256),
    _member(12, 384, 256),
    _member(12, 512, 512),
    _member(12, 768, 1024),  # GPT-2 small
    _member(24, 1024, 1024),  # GPT-2 medium
)


@dataclass(frozen=True)
class Law:
    """The law on one text: how many training tokens there are, and the bits per byte after a usual probe."""

    train_tokens: int
    level: float = 2.0

    def through(self, model: ModelConfig, tokens: float, bits: float) -> "Law":
        """The law on a text of which a model needs `bits` per byte after so many tokens."""
        return replace(self, level=self.level * bits / self.bits_per_byte(model, tokens))

    def bits_per_byte(self, model: ModelConfig, tokens: float) -> float:
        """What a model needs that has trained on so many tokens, with rates that fell until then."""
        return self.level * self._lacking(model, tokens) / self._lacking(FAMILY[0], 1e6)

    def best_tokens(self, model: ModelConfig, tokens: float) -> float:
        """After how many of so many tokens a model is best: all of them, unless it learns the text by heart."""
        return min((tokens * 0.95**i for i in range(400)), key=lambda some: self.bits_per_byte(model, some))

    def _lacking(self, model: ModelConfig, tokens: float) -> float:
        size, text, seen = 12 * model.num_layers * model.d_model**2 / 1e6, self.train_tokens / 1e6, tokens / 1e6
        epochs, most = seen / text, REPEATS * (text / size) ** REPEATS_POWER
        if epochs > 1:
            seen = text * (1 + most * (1 - math.exp((1 - epochs) / most)))
        by_heart = math.exp(BY_HEART * epochs * (size / text) ** BY_HEART_POWER)
        return (size**-SIZE_POWER + TEXT / seen) ** FALL * by_heart
