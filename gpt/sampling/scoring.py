"""Scoring: the loss of a model on a text. Every token counts once, and the result is deterministic."""

import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gpt.console import import_tqdm
from gpt.data.batches import validation_batches
from gpt.hardware.device import without_cudnn_attention
from gpt.model.fast.chunked_loss import chunked_next_token_loss
from gpt.model.loss import IGNORE_INDEX
from gpt.model.transformer import GPT

MIN_BATCH_TOKENS = 4096


def eval_batch_tokens(model: GPT, ranks: int = 1) -> int:
    """Return how many tokens to score in one pass. On CUDA they fill a sixteenth of the memory, divided by `ranks`.

    A pass holds up to 40 C bytes for each token, and more than 65,536 gain nothing. The total memory counts, not the
    free memory, because a resumed run must score the same batches bit for bit.
    """
    weight = model.token_embedding.weight  # (V, C)
    if not weight.is_cuda:
        return MIN_BATCH_TOKENS
    fitting = torch.cuda.get_device_properties(weight.device).total_memory / 16 / (40 * weight.shape[1])
    return max(MIN_BATCH_TOKENS, min(2**16, 2 ** int(math.log2(fitting))) // ranks)


@dataclass(frozen=True)
class Score:
    """The summed loss of a text in nats, its predicted tokens, and its bytes."""

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
    """Return the score of several texts together."""
    scores = list(scores)
    return Score(sum(s.nats for s in scores), sum(s.tokens for s in scores), sum(s.bytes for s in scores))


@torch.no_grad()
@without_cudnn_attention()
def score(model: GPT, batches: Iterable[tuple[Tensor, Tensor]], num_bytes: int) -> Score:
    """Score a model on batches of inputs and targets (B, T), with `IGNORE_INDEX` for targets that do not count.

    `num_bytes` is the size of the text in UTF-8. End-of-text tokens between documents add nats but no bytes. A model in
    training mode is in training mode again afterwards.
    """
    was_training = model.training
    model.eval()
    device = model.token_embedding.weight.device
    nats = 0.0
    num_tokens = 0
    for idx, targets in batches:
        num_targets = int((targets != IGNORE_INDEX).sum())
        idx, targets = idx.to(device), targets.to(device)
        hidden, head_weight = model.forward_features(idx), model.token_embedding.weight
        mean_loss = chunked_next_token_loss(hidden, head_weight, targets, compiled=model.is_compiled)
        nats += mean_loss.item() * num_targets  # summed in Python: Apple's GPUs have no float64
        num_tokens += num_targets
    model.train(was_training)
    return Score(nats, num_tokens, num_bytes)


def strided_score(model: GPT, tokens: np.ndarray, num_bytes: int, stride: int) -> Score:
    """Score a text in windows that begin `stride` tokens apart. Every token but the first counts once.

    If the stride is the context length, the windows are the same as in validation: `context_length` inputs each. With
    a smaller stride, a window has `context_length` tokens, and the last is only a target. Source: Hugging Face,
    "Perplexity of fixed-length models".

    Args:
        model: The model to score.
        tokens: The token ids of the text, with an end-of-text before each document.
        num_bytes: The size of the text in UTF-8.
        stride: How many tokens a window begins after the one before, from 1 to `context_length`.
    """
    T = model.config.context_length
    B = max(1, eval_batch_tokens(model) // T)
    batches = validation_batches(tokens, B, T if stride == T else T - 1, IGNORE_INDEX, stride)
    num_batches = -(-len(tokens) // (B * stride))
    bar = import_tqdm()(batches, total=num_batches, unit="batch", delay=1, leave=False, disable=not sys.stderr.isatty())
    return score(model, bar, num_bytes)
