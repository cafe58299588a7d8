"""Behind bfloat16 matrices stand fp32 weights, which are what learns and what is saved."""

import pytest
import torch
from torch import Tensor

from gpt.loss import next_token_loss
from gpt.masters import MasterWeights
from gpt.model import GPT, GPTConfig

CONFIG = GPTConfig(context_length=7, d_model=6, num_layers=2, num_heads=3, vocab_size=11)


def make_model() -> GPT:
    torch.manual_seed(5)
    return GPT(CONFIG)


def backward(model: GPT, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    idx, targets = torch.randint(11, (2, 5, 7), generator=generator)
    next_token_loss(model.hidden(idx), model.token_embedding.weight, targets).backward()


def gradients(weights: MasterWeights) -> dict[str, Tensor]:
    return {name: weight.grad.clone() for name, weight in weights.trained.items()}


def relative_error(value: Tensor, exact: Tensor) -> float:
    return ((value - exact).norm() / exact.norm().clamp(min=1e-12)).item()


def test_single_precision_has_no_copies():
    """In fp32 the model's own parameters are what is trained, and nothing else happens."""
    model = make_model()
    weights = MasterWeights(model, torch.float32)
    assert list(weights.trained) == [name for name, _ in model.named_parameters()]
    assert all(weights.trained[name] is parameter for name, parameter in model.named_parameters())
    assert list(weights.parameters()) == []
    backward(model)
    before = gradients(weights)
    weights.collect_gradients()
    weights.publish()
    assert all(torch.equal(before[name], weight.grad) for name, weight in weights.trained.items())


def test_what_is_copied():
    """The linear maps of the blocks, matrices and biases; embeddings and norms stay as they are."""
    exact, model = make_model(), make_model()
    weights = MasterWeights(model, torch.bfloat16)
    low = {name for name, parameter in model.named_parameters() if parameter.dtype == torch.bfloat16}
    linear = ("W_qkv", "out_proj", "expand", "contract")
    assert low == {f"blocks.{i}.{part}" for i in range(2) for part in (
        *(f"attention.{name}.{kind}" for name in linear[:2] for kind in ("weight", "bias")),
        *(f"feed_forward.{name}.{kind}" for name in linear[2:] for kind in ("weight", "bias")),
    )}  # fmt: skip
    assert list(weights.trained) == [name for name, _ in exact.named_parameters()]
    for name, parameter in exact.named_parameters():
        assert weights.trained[name].dtype == torch.float32
        assert torch.equal(weights.trained[name], parameter)
        rounded = parameter.bfloat16().float() if name in low else parameter
        assert torch.equal(model.get_parameter(name).float(), rounded)


def test_gradients():
    """Those of several micro-batches add up in fp32, and are near those of an fp32 model."""
    exact, model = make_model(), make_model()
    weights = MasterWeights(model, torch.bfloat16)
    total: dict[str, Tensor] = {}
    for seed in range(3):
        backward(exact, seed)
        backward(model, seed)
        for name, parameter in model.named_parameters():
            if parameter.dtype == torch.bfloat16:
                total[name] = total.get(name, torch.zeros(parameter.shape)) + parameter.grad.float()
        weights.collect_gradients()
        assert all(p.grad is None for p in model.parameters() if p.dtype == torch.bfloat16)
    for name, parameter in exact.named_parameters():
        collected = weights.trained[name].grad
        assert collected.dtype == torch.float32
        if name in total:
            assert torch.equal(collected, total[name])
        if "W_qkv.bias" not in name:  # a third of it, the keys', has no gradient but rounding
            assert relative_error(collected, parameter.grad) < 0.03, name


def test_small_updates_are_not_lost():
    """A thousand updates that bfloat16 cannot tell from none arrive all the same."""
    model = make_model()
    weights = MasterWeights(model, torch.bfloat16)
    name = "blocks.1.feed_forward.expand.weight"
    with torch.no_grad():
        weights.trained[name].fill_(1.0)
        weights.publish()
        for _ in range(1000):
            weights.trained[name].add_(1e-4)
            weights.publish()
    assert model.get_parameter(name).float().unique().tolist() == pytest.approx([1.1], abs=0.004)


def test_load():
    """Weights by name reach the fp32 weights whole and the copies rounded."""
    torch.manual_seed(7)
    stored = GPT(CONFIG).state_dict()
    model = make_model()
    weights = MasterWeights(model, torch.bfloat16)
    weights.load(stored)
    for name, value in stored.items():
        assert torch.equal(weights.trained[name], value)
        assert torch.equal(model.get_parameter(name), value.to(model.get_parameter(name).dtype))


def test_average_gradients():
    """What several processes have collected is averaged by a given function, for the weights behind copies alone."""
    model = make_model()
    weights = MasterWeights(model, torch.bfloat16)
    backward(model)
    weights.collect_gradients()
    before = gradients(weights)
    weights.average_gradients(lambda gradient: gradient / 2)
    for name, parameter in model.named_parameters():
        share = 2 if parameter.dtype == torch.bfloat16 else 1
        assert torch.equal(weights.trained[name].grad, before[name] / share)
