"""A scaling law: the bits per byte that a model of some size reaches on a text after some training.

The loss grows with two terms, as in Hoffmann et al. 2022 (arXiv:2203.15556): one falls with the size of the model, the
other with the tokens of training. Their sum x is squashed to x / (1 + x), so that the loss of a new model is finite and
falls slowly at first. A power of the result is the loss. Its exponent is smaller for texts that repeat little.

`python benchmarks/search.py --law` fits the constants to this project's own runs. benchmarks/LOG.md has predictions
beside results.
"""

import math
from dataclasses import dataclass, replace

from gpt.model.transformer import GPTConfig, ModelConfig

LOSS_EXPONENT = 2.74  # on a text that only repeats itself
NOVELTY_SCALE = 2.66  # on a text of this novelty, the exponent is LOSS_EXPONENT / e
SIZE_EXPONENT = 0.19
TOKENS_EXPONENT = 0.515
TOKENS_PER_WEIGHT = 2.35  # so many tokens reduce the loss as much as one weight, at a million weights
# Overfitting multiplies the loss by 1 + OVERFIT_FACTOR * epochs^2 * (million weights)^OVERFIT_EXPONENT.
OVERFIT_FACTOR = 0.000342
OVERFIT_EXPONENT = 0.562


def _model(num_layers: int, d_model: int, context_length: int = 128) -> ModelConfig:
    return ModelConfig(context_length, d_model, num_layers, num_heads=d_model // (32 if d_model <= 256 else 64))


PROBE_MODEL = _model(2, 64)  # its loss measures how hard a text is
# model=auto chooses from these models on every machine, so that runs can be compared. The law was fitted to models of
# fewer than 12 layers.
CANDIDATE_MODELS = (
    _model(3, 96),
    _model(4, 128),  # as large as mini
    _model(6, 192),
    _model(8, 256),
    _model(12, 384, 256),
    _model(12, 512, 512),
    _model(12, 768, 1024),  # GPT-2 small
    _model(24, 1024, 1024),  # GPT-2 medium
)


@dataclass(frozen=True)
class ScalingLaw:
    """The law on one text.

    Args:
        train_tokens: The tokens of the training text.
        novelty: How little the text repeats itself, as `gpt.data.baselines` measures it.
        probe_bits: The bits per byte that `PROBE_MODEL` reaches on the text after a million tokens.
    """

    train_tokens: int
    novelty: float = 1.7
    probe_bits: float = 2.0

    def calibrate(self, model: ModelConfig, tokens: float, bits: float) -> "ScalingLaw":
        """Return the law of a text on which a model reached `bits` per byte after training on `tokens` tokens."""
        return replace(self, probe_bits=self.probe_bits * bits / self.bits_per_byte(model, tokens))

    def bits_per_byte(self, model: ModelConfig, tokens: float) -> float:
        """Return the predicted loss of a model after so many tokens, if the learning rate has fallen by then."""
        return self.probe_bits * self._relative_loss(model, tokens) / self._relative_loss(PROBE_MODEL, 1e6)

    def best_tokens(self, model: ModelConfig, max_tokens: float) -> float:
        """Return the tokens after which a model is best: all of them, unless it overfits earlier."""
        amounts = (max_tokens * 0.95**i for i in range(400))
        return min(amounts, key=lambda tokens: self.bits_per_byte(model, tokens))

    def _relative_loss(self, model: ModelConfig, tokens: float) -> float:
        """Return the loss up to a factor of the text."""
        million_weights = GPTConfig(**vars(model)).costs().block_weights / 1e6
        million_train_tokens, million_tokens = self.train_tokens / 1e6, tokens / 1e6
        epochs = million_tokens / million_train_tokens
        overfit = 1 + OVERFIT_FACTOR * epochs**2 * million_weights**OVERFIT_EXPONENT
        terms = million_weights**-SIZE_EXPONENT + (TOKENS_PER_WEIGHT / million_tokens) ** TOKENS_EXPONENT
        exponent = LOSS_EXPONENT * math.exp(-((self.novelty / NOVELTY_SCALE) ** 2))
        return (terms / (1 + terms)) ** exponent * overfit
