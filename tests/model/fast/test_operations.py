"""Operations that save memory or time equal their plain twins."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from gpt.model.attention import attention
from gpt.model.fast.operations import SkipInit, prefers_fused_kernel, split_query_attention, tied_embedding

V, C, D = 11, 6, 5


def test_tied_embedding():
    """The rows, the embedding and the sum of both gradients are the same, also for repeated tokens."""
    torch.manual_seed(5)
    idx = torch.tensor([[3, 3, 0], [10, 3, 7]])
    mixer, embedding = torch.randn(C), torch.randn(V, C)
    results = []
    for plain in (False, True):
        weight = embedding.clone().requires_grad_()
        rows, head = (F.embedding(idx, weight), weight) if plain else tied_embedding(idx, weight)
        loss = (rows * mixer).sin().sum() + head.exp().sum()
        results.append((rows, head, *torch.autograd.grad(loss, weight)))
    torch.testing.assert_close(results[0], results[1])


def test_skip_init():
    """Nothing is drawn inside it, so the generator's state stays. Outside, drawing is unchanged."""
    torch.manual_seed(7)
    state = torch.get_rng_state()
    with SkipInit():
        module = torch.nn.Sequential(torch.nn.Linear(C, V), torch.nn.Embedding(V, C))
        module[1].weight.normal_(0.0, 0.02)
    assert torch.equal(torch.get_rng_state(), state)
    drawn = torch.nn.Linear(C, V)
    torch.manual_seed(7)
    assert torch.equal(drawn.weight, torch.nn.Linear(C, V).weight)
    assert not torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(("T", "S"), [(1, 1), (256, 256), (257, 257), (300, 400)])
def test_split_queries_equal_the_formula(T, S):
    """Output and gradients are the same, with or without earlier keys."""
    torch.manual_seed(5)
    inputs = [torch.randn(2, length, D, dtype=torch.float64, requires_grad=True) for length in (T, S, S)]
    mask = torch.ones(S, S, dtype=torch.bool).triu(1)[S - T :]
    results = []
    for function in (attention, partial(split_query_attention, attention)):
        output = function(*inputs, mask)
        results.append([output, *torch.autograd.grad(output.sin().sum(), inputs)])
    torch.testing.assert_close(results[0], results[1])
    every = split_query_attention(attention, *inputs, mask[None].expand(2, -1, -1))  # one mask per row
    torch.testing.assert_close(every, results[0][0])


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_only_long_sequences_are_split(dropout):
    """Up to 256 queries need one call. More need two calls, and the first uses no late key."""
    calls = []

    def recording(queries, keys, values, mask, dropout):
        calls.append((len(queries), len(keys), len(values), tuple(mask.shape), dropout))
        return attention(queries, keys, values, mask)

    mask = torch.ones(301, 301, dtype=torch.bool).triu(1)
    for T in (256, 257):
        split_query_attention(
            recording, torch.zeros(T, D), torch.zeros(301, D), torch.zeros(301, D), mask[301 - T :], dropout
        )
    assert calls == [
        (256, 301, 301, (256, 301), dropout),
        (128, 172, 172, (128, 172), dropout),
        (129, 301, 301, (129, 301), dropout),
    ]


@pytest.mark.parametrize(
    ("dtype", "is_training", "T", "expected"),
    [
        (torch.float32, True, 7, True),
        (torch.bfloat16, False, 7, True),
        (torch.bfloat16, True, 1025, True),
        (torch.bfloat16, True, 1024, False),
    ],
)
def test_preferred_path(dtype, is_training, T, expected):
    """The fused kernel is preferred, except for bfloat16 training on a CPU on at most 1,024 tokens."""
    assert prefers_fused_kernel("cpu", dtype, T, is_training) is expected
    assert prefers_fused_kernel("cuda", dtype, T, is_training)
