"""How well a model predicts a text: every token counts once, and the result is always the same."""

import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gpt.console import import_tqdm
from gpt.data.batches import validation_batches
from gpt.model.fast.chunked_loss import chunked_next_token_loss
from gpt.model.loss import IGNORE_INDEX
from gpt.model.transformer import GPT

TOKENS_AT_ONCE = 4096


def eval_batch_tokens(model: GPT, ranks: int = 1) -> int:
    """How many tokens to score in one pass; on CUDA as many as fit a sixteenth of the memory, divided by `ranks`.

    A pass holds up to 40 C bytes for each token, and more than 65,536 gain nothing. The whole memory counts, not what
    is free of it, because a resumed run must score the same batches to the bit.
    """
    weight = model.token_embedding.weight  # (V, C)
    if not weight.is_cuda:
        return TOKENS_AT_ONCE
    fitting = torch.cuda.get_device_properties(weight.device).total_memory / 16 / (40 * weight.shape[1])
    return max(TOKENS_AT_ONCE, min(2**16, 2 ** int(math.log2(fitting))) // ranks)


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


def sum_scores(scores: Iterable[Score]) -> Score:
    """The score of several texts together."""
    scores = list(scores)
    return Score(sum(s.nats for s in scores), sum(s.tokens for s in scores), sum(s.bytes for s in scores))


@torch.no_grad()
def score(model: GPT, batches: Iterable[tuple[Tensor, Tensor]], num_bytes: int) -> Score:
    """Score a model on batches of inputs and targets (B, T), with `IGNORE_INDEX` for targets that do not count.

    `num_bytes` is the size of the text in UTF-8. End-of-text tokens between documents add their nats but no bytes. The
    model stays in training or evaluation mode, whichever it was in.
    """
    was_training = model.training
    model.eval()
    device = model.token_embedding.weight.device
    nats, tokens = 0.0, 0
    for idx, targets in batches:
        counted = int((targets != IGNORE_INDEX).sum())
        idx, targets = idx.to(device), targets.to(device)
        mean = chunked_next_token_loss(model.hidden(idx), model.token_embedding.weight, targets)
        nats += mean.item() * counted  # summed in Python: Apple's GPUs have no float64
        tokens += counted
    model.train(was_training)
    return Score(nats, tokens, num_bytes)


def strided_score(model: GPT, tokens: np.ndarray, num_bytes: int, stride: int) -> Score:
    """Score a text, with an end-of-text before each document, in windows that begin `stride` tokens apart.

    Every token but the first counts once. With a stride of the whole context, the windows are those of validation:
    `context_length` inputs each. With a smaller one, they are those of the usual strided perplexity (Hugging Face,
    "Perplexity of fixed-length models"): `context_length` tokens, of which the last is only a target.
    """
    T = model.config.context_length
    B = max(1, eval_batch_tokens(model) // T)
    batches = validation_batches(tokens, B, T if stride == T else T - 1, IGNORE_INDEX, stride)
    count = -(-len(tokens) // (B * stride))
    bar = import_tqdm()(batches, total=count, unit="batch", delay=1, leave=False, disable=not sys.stderr.isatty())
    return score(model, bar, num_bytes)
