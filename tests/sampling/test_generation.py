"""Generation: the cache against a plain loop, and filters against numbers by hand."""

import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gpt.errors import UserError
from gpt.model.transformer import GPT, GPTConfig
from gpt.sampling.generation import SamplingParams, filter_logits, generate, left_pad, next_token
from harness import refusal
from models import make_idx, random_model

VOCAB, CONTEXT = 101, 13
SHAPE = GPTConfig(CONTEXT, 35, 2, 7, vocab_size=VOCAB)
GREEDY = SamplingParams(temperature=0.0)
PLAIN = SamplingParams(temperature=1.0, top_p=1.0)


def collect(tokens: Iterator[Tensor]) -> Tensor:
    """Return all tokens that `generate` yields, as (B, new tokens)."""
    return torch.stack(list(tokens), dim=1)


@torch.no_grad()
def naive_greedy(model: GPT, idx: Tensor, new: int, slide: int) -> Tensor:
    """Return the tokens of a slow loop: the whole window goes through the model for every token."""
    start = 0
    for _ in range(new):
        while idx.shape[1] - start > CONTEXT:
            start += slide
        likeliest = model(idx[:, start:])[:, -1].argmax(-1, keepdim=True)
        idx = torch.cat([idx, likeliest], dim=1)
    return idx[:, -new:]


@pytest.mark.parametrize("slide", [1, 3, CONTEXT])
@pytest.mark.parametrize("T", [1, 7, CONTEXT, CONTEXT + 1, 29])
def test_cached_tokens_equal_uncached_ones(T, slide):
    """Within the context and far past it."""
    model, idx, new = random_model(SHAPE), make_idx(VOCAB, 3, T), 31
    expected = naive_greedy(model, idx, new, slide)
    assert min(len(row.unique()) for row in expected) >= 5  # no row is stuck on a few tokens
    assert torch.equal(collect(generate(model, idx, new, GREEDY, slide=slide)), expected)


@pytest.mark.parametrize("slide", [1, 3, CONTEXT])
def test_each_row_continues_as_it_does_alone(slide):
    """Prompts have different lengths, so that some rows have passed the context when others have not."""
    model = random_model(SHAPE)
    prompts = [make_idx(VOCAB, 1, T)[0].tolist() for T in (7, 1, CONTEXT, 2, 7)]
    idx, pad_lengths = left_pad(prompts)
    assert pad_lengths == [CONTEXT - 7, CONTEXT - 1, 0, CONTEXT - 2, CONTEXT - 7]
    assert [row[pad:] for row, pad in zip(idx.tolist(), pad_lengths, strict=True)] == prompts
    together = collect(generate(model, idx, 37, GREEDY, slide=slide, pad_lengths=pad_lengths))
    for row, ids in enumerate(prompts):
        assert torch.equal(together[row : row + 1], naive_greedy(model, torch.tensor([ids]), 37, slide)), row


def test_the_repetition_penalty_ignores_padding():
    model, sampling = random_model(SHAPE), SamplingParams(repetition_penalty=2.0, temperature=0.0)
    prompts = [make_idx(VOCAB, 1, 3)[0].tolist(), make_idx(VOCAB, 1, 11)[0].tolist()]
    idx, pad_lengths = left_pad(prompts)
    together = collect(generate(model, idx, 7, sampling, pad_lengths=pad_lengths))
    for row, ids in enumerate(prompts):
        assert torch.equal(together[row : row + 1], collect(generate(model, torch.tensor([ids]), 7, sampling)))


def test_a_new_token_takes_a_pass_over_one_token():
    """The prompt and each slide take a pass over several. Nothing runs before a token is requested."""
    model, passes = random_model(SHAPE), []
    model.final_norm.register_forward_hook(lambda module, inputs, output: passes.append(output.shape[1]))
    tokens = generate(model, make_idx(VOCAB, 2, 7), 13, GREEDY, slide=3)
    assert passes == []
    assert next(tokens).shape == (2,)
    assert passes == [7]
    assert len(list(tokens)) == 12
    assert passes == [7, 1, 1, 1, 1, 1, 1, 11, 1, 1, 11, 1, 1]


def test_generation_ignores_dropout():
    model = random_model(replace(SHAPE, dropout=0.5)).train()
    tokens = collect(generate(model, make_idx(VOCAB, 2, 5), 11, GREEDY))
    assert torch.equal(tokens, naive_greedy(random_model(SHAPE), make_idx(VOCAB, 2, 5), 11, slide=1))


def test_an_empty_prompt_is_refused():
    with pytest.raises(ValueError, match=r"at least one token .*end-of-text"):
        next(generate(random_model(SHAPE), make_idx(VOCAB, 1, 0), 2, GREEDY))


@pytest.mark.parametrize("slide", [0, -1, CONTEXT + 1])
def test_slide_is_at_most_the_context(slide):
    with pytest.raises(UserError, match=rf"slide={slide} .*at least 1 .*\b13\b"):
        next(generate(random_model(SHAPE), make_idx(VOCAB, 1, 2), 2, GREEDY, slide=slide))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [4, 8, 2, 1, 1]),
        ({"top_k": 2}, [4, 8, 0, 0, 0]),
        ({"top_k": 4}, [4, 8, 2, 1, 1]),  # two tokens tie for fourth: both stay
        ({"top_p": 1e-9}, [0, 8, 0, 0, 0]),
        ({"top_p": 0.5}, [0, 8, 0, 0, 0]),  # 8 of 16 is a half
        ({"top_p": 0.51}, [4, 8, 0, 0, 0]),
        ({"min_p": 0.13}, [4, 8, 2, 0, 0]),
        ({"temperature": 0.5}, [16, 64, 4, 1, 1]),
        ({"temperature": 0.5, "top_p": 0.74}, [0, 64, 0, 0, 0]),  # 64 of 86 is 0.744
        ({"top_k": 2, "top_p": 0.7}, [4, 8, 0, 0, 0]),  # top-p applies after top-k: 8 of 12 is 0.67
        ({"top_k": 3, "temperature": 0.5, "min_p": 0.2}, [16, 64, 0, 0, 0]),
    ],
)
def test_filters_by_hand(changes, expected):
    """Tokens have the weights 4, 8, 2, 1 and 1. The remaining ones keep their proportions."""
    logits = torch.tensor([[4.0, 8.0, 2.0, 1.0, 1.0]]).log()
    previous = torch.zeros(1, 0, dtype=torch.long)
    sampling = SamplingParams(**({"temperature": 1.0, "top_p": 1.0} | changes))
    result = filter_logits(logits, previous, sampling).softmax(-1)[0].tolist()
    assert result == pytest.approx([value / sum(expected) for value in expected], abs=1e-6)


@pytest.mark.parametrize(("top_p", "num_tokens"), [(0.5, 2), (0.51, 3)])
def test_top_p_keeps_the_fewest_of_equal_tokens(top_p, num_tokens):
    sampling = SamplingParams(temperature=1.0, top_p=top_p)
    result = filter_logits(torch.zeros(1, 4), torch.zeros(1, 0, dtype=torch.long), sampling).softmax(-1)[0]
    assert sorted(result.tolist()) == pytest.approx([0.0] * (4 - num_tokens) + [1 / num_tokens] * num_tokens)


def slow_filter(logits: list[float], previous: list[int], sampling: SamplingParams) -> list[float]:
    """Return probabilities after all filters, one token at a time, in the order of the fields of `SamplingParams`."""
    values = list(logits)
    for token in set(previous):
        penalty = sampling.repetition_penalty
        values[token] = values[token] / penalty if values[token] > 0 else values[token] * penalty
    weights = {token: math.exp(value / sampling.temperature) for token, value in enumerate(values)}
    if sampling.top_k:
        weights = {t: w for t, w in weights.items() if sum(v > w for v in weights.values()) < sampling.top_k}
    total, cumulative = sum(weights.values()), 0.0
    for token in sorted(weights, key=lambda token: -weights[token]):
        weight = weights[token]
        if sampling.top_p < 1.0 and cumulative >= sampling.top_p * total:
            del weights[token]
        cumulative += weight
    weights = {token: weight for token, weight in weights.items() if weight >= sampling.min_p * max(weights.values())}
    return [weights.get(token, 0.0) / sum(weights.values()) for token in range(len(logits))]


@pytest.mark.parametrize("repetition_penalty", [1.0, 1.7, 0.6])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.9])
def test_filters_equal_the_slow_reference(repetition_penalty, temperature):
    """All filters together, on five rows of 31 random logits."""
    generator = torch.Generator().manual_seed(11)
    logits = 2 * torch.randn(5, 31, generator=generator)
    previous = torch.randint(31, (5, 13), generator=generator)
    rows = list(zip(logits.tolist(), previous.tolist(), strict=True))
    for filters in itertools.product([0, 1, 7, 31], [0.2, 0.83, 1.0], [0.0, 0.07]):
        sampling = SamplingParams(repetition_penalty, temperature, *filters)
        result = filter_logits(logits, previous, sampling).softmax(-1)
        expected = torch.tensor([slow_filter(*row, sampling) for row in rows])
        assert torch.equal(result == 0, expected == 0), sampling
        torch.testing.assert_close(result, expected, atol=1e-6, rtol=1e-5)


def test_a_temperature_near_zero_is_greedy():
    logits = torch.randn(211, 31, generator=torch.Generator().manual_seed(13))
    previous = torch.zeros(211, 0, dtype=torch.long)
    greedy = next_token(logits, previous, GREEDY, None)
    assert torch.equal(greedy, logits.argmax(-1))
    generator = torch.Generator().manual_seed(13)
    assert torch.equal(next_token(logits, previous, SamplingParams(temperature=1e-6, top_p=1.0), generator), greedy)
    assert not torch.equal(next_token(logits, previous, PLAIN, generator), greedy)


def test_only_the_repetition_penalty_changes_a_greedy_token():
    logits = torch.tensor([[3.0, 2.0, 1.0]])
    previous = torch.tensor([[0, 0]])
    assert next_token(logits, previous, SamplingParams(temperature=0.0, top_k=2, min_p=0.5), None).tolist() == [0]
    assert next_token(logits, previous, SamplingParams(2.0, temperature=0.0), None).tolist() == [1]


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [(PLAIN, [8, 4, 2, 1, 1]), (SamplingParams(temperature=0.5, top_p=1.0, top_k=3), [64, 16, 4, 0, 0])],
)
def test_frequencies_follow_the_probabilities(sampling, expected):
    """A chi-squared test of 20,011 draws, at the 0.1% level of up to four degrees of freedom."""
    n = 20_011
    logits = torch.tensor([[8.0, 4.0, 2.0, 1.0, 1.0]]).log().expand(n, -1)
    drawn = next_token(logits, torch.zeros(n, 0, dtype=torch.long), sampling, torch.Generator().manual_seed(7))
    counts = drawn.bincount(minlength=5).tolist()
    means = [n * weight / sum(expected) for weight in expected]
    assert [count for count, mean in zip(counts, means, strict=True) if mean == 0] == [0] * expected.count(0)
    assert sum((count - mean) ** 2 / mean for count, mean in zip(counts, means, strict=True) if mean) < 18.47


def test_the_seed_determines_the_tokens():
    """Rows of one batch differ."""
    model, idx = random_model(SHAPE), make_idx(VOCAB, 1, 5).repeat(3, 1)
    runs = [collect(generate(model, idx, 23, PLAIN, torch.Generator().manual_seed(seed))) for seed in (3, 3, 5)]
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])
    assert len({tuple(row) for row in runs[0].tolist()}) == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"repetition_penalty": 0.0}, "repetition-penalty=0.0 .* at least 0.01 and at most 100"),
        ({"temperature": math.nan}, "temperature=nan .* at least 1e-06"),
        ({"top_k": -1}, "top-k=-1 .* at least 0"),
        ({"top_p": 0.0}, "top-p=0.0 .* at least 1e-30 and at most 1"),
        ({"min_p": -0.1}, "min-p=-0.1 .* at least 0"),
    ],
)
def test_a_value_out_of_range_is_refused(changes, message):
    assert re.match(message, refusal(SamplingParams, **changes))


def test_the_ends_of_the_ranges_are_accepted():
    for limits in [(100.0, -0.0, 0, 1.0, -0.0), (0.01, 100.0, 10**30, 1e-30, 1.0), (1.0, 1e-6, 0, 1.0, 1e-320)]:
        assert torch.isfinite(next_token(torch.randn(1, 7), torch.tensor([[3]]), SamplingParams(*limits), None)).all()
