"""How well a model predicts a text: every token counts once, and the result is always the same."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from gpt.model.chunked_loss import chunked_next_token_loss
from gpt.model.loss import IGNORE
from gpt.model.transformer import GPT


@dataclass(frozen=True)
class Score:
    """The nats of all predicted tokens of a text, summed, with the numbers of tokens and of bytes."""

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
def score(model: GPT, batches: Iterable[tuple[Tensor, Tensor]], num_bytes: int) -> Score:
    """Score a model on batches of inputs and targets (B, T), with `IGNORE` for targets that do not count.

    `num_bytes` is the size of the text in UTF-8. End-of-text tokens between documents add their nats but no bytes. The
    model stays in training or evaluation mode, whichever it was in.
    """
    was_training = model.training
    model.eval()
    device = model.token_embedding.weight.device
    nats, tokens = 0.0, 0
    for idx, targets in batches:
        idx, targets = idx.to(device), targets.to(device)
        counted = int((targets != IGNORE).sum())
        mean = chunked_next_token_loss(model.hidden(idx), model.token_embedding.weight, targets)
        nats += mean.item() * counted  # summed in Python: Apple's GPUs have no float64
        tokens += counted
    model.train(was_training)
    return Score(nats, tokens, num_bytes)
