"""Operations that save memory or time, against their plain twins."""

import pytest
import torch
import torch.nn.functional as F

from gpt.model import frugal

V, C = 11, 6


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear(bias, dtype):
    """Bit for bit the result and gradients of `F.linear` with rounded weights."""
    torch.manual_seed(3)
    results = []
    given = [torch.randn(2, 5, C).to(dtype), torch.randn(V, C), torch.randn(V)]
    for plain in (False, True):
        x, w, b = (tensor.clone().requires_grad_() for tensor in given)
        if plain:
            out = F.linear(x, w.to(dtype), b.to(dtype) if bias else None)
        else:
            out = frugal.linear(x, w, b if bias else None)
        results.append((out, *torch.autograd.grad(out.float().sin().sum(), [x, w, b] if bias else [x, w])))
    assert all(torch.equal(*pair) and pair[0].dtype == pair[1].dtype for pair in zip(*results, strict=True))


def test_tied_lookup():
    """The rows, the whole, and the sum of the gradients of both uses, repeated tokens included."""
    torch.manual_seed(5)
    idx = torch.tensor([[3, 3, 0], [10, 3, 7]])
    mixer, given = torch.randn(C), torch.randn(V, C)
    results = []
    for plain in (False, True):
        weight = given.clone().requires_grad_()
        rows, head = (F.embedding(idx, weight), weight) if plain else frugal.tied_lookup(idx, weight)
        loss = (rows * mixer).sin().sum() + head.exp().sum()
        results.append((rows, head, *torch.autograd.grad(loss, weight)))
    torch.testing.assert_close(results[0], results[1])


def test_skip_init():
    """Nothing is drawn inside it, so the generator stays where it was; outside, drawing is as ever."""
    torch.manual_seed(7)
    before = torch.get_rng_state()
    with frugal.SkipInit():
        module = torch.nn.Sequential(torch.nn.Linear(C, V), torch.nn.Embedding(V, C))
        module[1].weight.normal_(0.0, 0.02)
    assert torch.equal(torch.get_rng_state(), before)
    drawn = torch.nn.Linear(C, V)
    torch.manual_seed(7)
    assert torch.equal(drawn.weight, torch.nn.Linear(C, V).weight)
    assert not torch.equal(torch.get_rng_state(), before)
