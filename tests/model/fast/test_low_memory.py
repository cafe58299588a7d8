"""Operations that save memory or time, against their plain twins."""

import torch
import torch.nn.functional as F

from gpt.model.fast.low_memory import SkipInit, tied_lookup

V, C = 11, 6


def test_tied_lookup():
    """The rows, the whole, and the sum of the gradients of both uses, repeated tokens included."""
    torch.manual_seed(5)
    idx = torch.tensor([[3, 3, 0], [10, 3, 7]])
    mixer, given = torch.randn(C), torch.randn(V, C)
    results = []
    for plain in (False, True):
        weight = given.clone().requires_grad_()
        rows, head = (F.embedding(idx, weight), weight) if plain else tied_lookup(idx, weight)
        loss = (rows * mixer).sin().sum() + head.exp().sum()
        results.append((rows, head, *torch.autograd.grad(loss, weight)))
    torch.testing.assert_close(results[0], results[1])


def test_skip_init():
    """Nothing is drawn inside it, so the generator stays where it was; outside, drawing is as ever."""
    torch.manual_seed(7)
    before = torch.get_rng_state()
    with SkipInit():
        module = torch.nn.Sequential(torch.nn.Linear(C, V), torch.nn.Embedding(V, C))
        module[1].weight.normal_(0.0, 0.02)
    assert torch.equal(torch.get_rng_state(), before)
    drawn = torch.nn.Linear(C, V)
    torch.manual_seed(7)
    assert torch.equal(drawn.weight, torch.nn.Linear(C, V).weight)
    assert not torch.equal(torch.get_rng_state(), before)
