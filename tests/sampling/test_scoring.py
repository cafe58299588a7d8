"""Scoring: the loss of a text against slow sums and numbers by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from gpt.data.batches import validation_batches
from gpt.model.loss import IGNORE_INDEX
from gpt.model.transformer import GPTConfig
from gpt.sampling.scoring import score, strided_score
from models import make_idx, random_model

VOCAB, CONTEXT = 101, 13
SHAPE = GPTConfig(CONTEXT, 35, 2, 7, vocab_size=VOCAB)


def test_score_equals_a_slow_sum():
    """Every token but the first counts once, summed one by one over the windows of a text."""
    model, tokens = random_model(SHAPE), make_idx(VOCAB, 1, 59)[0]
    nats = 0.0
    for start in range(0, 58, CONTEXT):
        window = tokens[start : start + CONTEXT + 1]
        with torch.no_grad():
            logits = model(window[None, :-1])[0]
        for row, target in zip(logits, window[1:], strict=True):
            nats += F.cross_entropy(row, target).item()
    for batch_size in (1, 3, 7):
        result = score(model, validation_batches(tokens.numpy(), batch_size, CONTEXT, IGNORE_INDEX), num_bytes=211)
        assert (result.tokens, result.bytes) == (58, 211)
        assert result.nats == pytest.approx(nats, rel=1e-6)
    assert abs(nats / 58 - math.log(VOCAB)) > 0.1


def test_uniform_model():
    """A model of zeros gives every token the same probability: log(V) nats for each."""
    model = random_model(SHAPE)
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    result = score(model, validation_batches(np.arange(53) % VOCAB, 3, CONTEXT, IGNORE_INDEX), num_bytes=13)
    assert result.tokens == 52
    assert result.nats_per_token == pytest.approx(math.log(VOCAB), rel=1e-6)
    assert result.perplexity == pytest.approx(VOCAB, rel=1e-6)
    assert result.bits_per_byte == pytest.approx(4 * math.log2(VOCAB), rel=1e-6)


@pytest.mark.parametrize("training", [True, False])
def test_a_score_does_not_change_the_model(training):
    """Dropout has no effect on a score, and the model keeps its mode."""
    model, tokens = random_model(replace(SHAPE, dropout=0.5)).train(training), make_idx(VOCAB, 1, 59)[0].numpy()
    scores = [score(model, validation_batches(tokens, 3, CONTEXT, IGNORE_INDEX), 211).nats for _ in range(2)]
    assert (
        scores[0]
        == scores[1]
        == score(random_model(SHAPE), validation_batches(tokens, 3, CONTEXT, IGNORE_INDEX), 211).nats
    )
    assert all(module.training is training for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("stride", [1, 2, 5, 11, 12])
@pytest.mark.parametrize("length", [2, 12, 13, 14, 59])
def test_strided_score_equals_a_slow_sum(stride, length):
    """Every token but the first counts once, with at least the context length less the stride before it."""
    model, tokens = random_model(SHAPE), make_idx(VOCAB, 1, length)[0]
    nats = 0.0
    end = 1
    for start in range(0, length, stride):
        for i in range(end, min(start + CONTEXT, length)):
            assert start == 0 or i - start >= CONTEXT - stride
            with torch.no_grad():
                nats += F.cross_entropy(model(tokens[None, start:i])[0, -1], tokens[i]).item()
        end = max(end, start + CONTEXT)
    result = strided_score(model, tokens.numpy(), 211, stride)
    assert (result.tokens, result.bytes) == (length - 1, 211)
    assert result.nats == pytest.approx(nats, rel=1e-5)


def test_stride_of_the_context_length_is_validation():
    """The windows are the same, and the scores are equal bit for bit."""
    model, tokens = random_model(SHAPE), make_idx(VOCAB, 1, 59)[0].numpy()
    assert strided_score(model, tokens, 211, CONTEXT) == score(
        model, validation_batches(tokens, 4096 // CONTEXT, CONTEXT, IGNORE_INDEX), 211
    )
