"""How well a model predicts a text: the whole of it, every token once, always with the same result."""

import lzma
import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from gpt.model.loss import IGNORE, next_token_loss
from gpt.model.transformer import GPT


@dataclass(frozen=True)
class Score:
    """The sum of nats over all predicted tokens, and what it is spread over."""

    nats: float
    tokens: int
    bytes: int

    @property
    def nats_per_token(self) -> float:
        return self.nats / self.tokens

    @property
    def nats_per_byte(self) -> float:
        return self.nats / self.bytes

    @property
    def bits_per_byte(self) -> float:
        return self.nats_per_byte / math.log(2)

    @property
    def perplexity(self) -> float:
        return math.exp(self.nats_per_token)


def sum_of(scores: Iterable[Score]) -> Score:
    """The score of several texts together."""
    scores = list(scores)
    return Score(sum(s.nats for s in scores), sum(s.tokens for s in scores), sum(s.bytes for s in scores))


@torch.no_grad()
def evaluate(model: GPT, batches: Iterable[tuple[Tensor, Tensor]], num_bytes: int) -> Score:
    """Score a model on batches of inputs and targets (B, T), as `validation_batches` makes them from a text.

    `num_bytes` is the size of the text in UTF-8. The nats of end-of-text tokens between documents count, their bytes
    are none. The model is left in the mode, training or not, in which it came.
    """
    was_training = model.training
    model.eval()
    device = model.token_embedding.weight.device
    nats = torch.zeros((), dtype=torch.float64)
    tokens = 0
    for idx, targets in batches:
        idx, targets = idx.to(device), targets.to(device)
        counted = int((targets != IGNORE).sum())
        mean = next_token_loss(model.hidden(idx), model.token_embedding.weight, targets)
        nats += mean.double().cpu() * counted
        tokens += counted
    model.train(was_training)
    return Score(float(nats), tokens, num_bytes)


def xz_bits_per_byte(text: bytes) -> float:
    """What a strong general-purpose compressor makes of a text alone: a mark to beat."""
    # As xz does where it knows the size: a dictionary no larger than the text, which saves 700 MB for a small one.
    method = {"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": max(4096, len(text))}
    return 8 * len(lzma.compress(text, filters=[method])) / len(text)
