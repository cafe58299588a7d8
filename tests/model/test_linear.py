"""Matrices multiply in bfloat16, while the trained and saved weights stay in fp32."""

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from gpt.model import linear as module
from gpt.model.fast.chunked_loss import chunked_next_token_loss
from gpt.model.linear import Linear
from gpt.model.transformer import GPT, GPTConfig

CONFIG = GPTConfig(context_length=7, d_model=6, num_layers=2, num_heads=3, vocab_size=11)


def make_model(dtype: torch.dtype = torch.float32) -> GPT:
    torch.manual_seed(5)
    return GPT(CONFIG).set_compute_dtype(dtype)


def backward(model: GPT, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    idx, targets = torch.randint(11, (2, 5, 7), generator=generator)
    chunked_next_token_loss(*model.features_and_head(idx), targets).backward()


def relative_error(value: Tensor, exact: Tensor) -> float:
    return ((value - exact).norm() / exact.norm().clamp(min=1e-12)).item()


def make_linear(bias: bool = True) -> tuple[Linear, Tensor, Tensor]:
    """Return a map of 6 to 4, an input (2, 3, 6) that needs gradients, and a gradient (2, 3, 4), all as bfloat16."""
    torch.manual_seed(7)
    linear = Linear(6, 4, bias=bias)
    x = torch.randn(2, 3, 6).bfloat16()
    return linear, x.float().requires_grad_(), torch.randn(2, 3, 4).bfloat16()


def test_a_plain_linear_has_the_precision_of_its_weights():
    """It equals `nn.Linear`, but accepts any precision."""
    linear, x, _ = make_linear()
    plain = torch.nn.Linear(6, 4)
    plain.load_state_dict(linear.state_dict())
    assert linear.dtype == torch.float32
    assert torch.equal(linear(x), plain(x))
    assert torch.equal(linear(x.bfloat16()), plain(x))  # bfloat16 represents x exactly
    assert linear.to(torch.bfloat16).dtype == linear(x).dtype == torch.bfloat16


@pytest.fixture(params=[False, True], ids=["small", "large"])
def large(request, monkeypatch) -> bool:
    """Return True if the matrices of a test count as large."""
    if request.param:
        monkeypatch.setattr(module, "MIN_RECAST_ELEMENTS", 0)
    return request.param


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("into", [torch.float32, torch.bfloat16])
def test_weights_are_rounded(into, bias, large):
    """Result and gradients equal weights rounded to bfloat16. Each gradient has the precision of its tensor."""
    linear, x, grad = make_linear(bias)
    x = x.detach().to(into).requires_grad_()
    rounded = torch.nn.Linear(6, 4, bias=bias, dtype=torch.bfloat16)
    rounded.load_state_dict(linear.state_dict())
    same = x.detach().bfloat16().requires_grad_()
    linear.compute_dtype = torch.bfloat16
    out, expected = linear(x), rounded(same)
    assert linear.dtype == out.dtype == torch.bfloat16
    assert torch.equal(out, expected)
    out.backward(grad)
    expected.backward(grad)
    assert (x.grad.dtype, linear.weight.grad.dtype) == (into, torch.float32)
    assert torch.equal(x.grad.bfloat16(), same.grad)
    assert torch.equal(linear.weight.grad.bfloat16(), rounded.weight.grad)
    if bias:
        assert linear.bias.grad.dtype == torch.float32
        assert torch.equal(linear.bias.grad.bfloat16(), rounded.bias.grad)


def test_large_matrices_keep_no_rounded_copy(large):
    """The backward pass keeps a rounded copy of a small matrix, but not of a large one."""
    linear, x, _ = make_linear()
    linear.compute_dtype = torch.bfloat16
    saved_tensors = []
    with saved_tensors_hooks(lambda tensor: saved_tensors.append(tensor) or tensor, lambda tensor: tensor):
        linear(x).sum()
    weights = {
        (tensor.dtype, tensor is linear.weight) for tensor in saved_tensors if tensor.numel() == linear.weight.numel()
    }
    assert weights == ({(torch.float32, True)} if large else {(torch.bfloat16, False)})


def test_only_linear_maps_of_blocks_are_rounded():
    """They multiply in bfloat16. Weights and everything else stay in fp32."""
    exact, model = make_model(), make_model(torch.bfloat16)
    assert (exact.dtype, model.dtype) == (torch.float32, torch.bfloat16)
    assert {name for name, module in model.named_modules() if isinstance(module, Linear)} == {
        f"blocks.{i}.{part}"
        for i in range(2)
        for part in ("attention.W_qkv", "attention.out_proj", "feed_forward.expand", "feed_forward.contract")
    }
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, exact.get_parameter(name))
    names: dict[torch.dtype, set[str]] = {torch.float32: set(), torch.bfloat16: set()}
    for part in model.modules():
        part.register_forward_hook(lambda part, _, out: names[out.dtype].add(type(part).__name__))
    model.forward_features(torch.arange(7)[None])
    assert names[torch.float32] == {"Embedding", "LayerNorm", "TransformerBlock", "Dropout"}
    assert names[torch.bfloat16] == {"Linear", "MultiHeadAttention", "FeedForward", "Dropout"}


def test_gradients_accumulate_in_fp32(large):
    """Gradients of several micro-batches are close to the gradients of an fp32 model."""
    exact, model = make_model(), make_model(torch.bfloat16)
    total: dict[str, Tensor] = {}
    for seed in range(3):
        backward(exact, seed)
        alone = make_model(torch.bfloat16)
        backward(alone, seed)
        backward(model, seed)
        for name, parameter in alone.named_parameters():
            total[name] = total.get(name, torch.zeros(())) + parameter.grad
    for name, parameter in exact.named_parameters():
        collected = model.get_parameter(name).grad
        assert collected.dtype == torch.float32
        assert torch.equal(collected, total[name])
        if "W_qkv.bias" not in name:  # the keys' third has only a rounding error as gradient
            assert relative_error(collected, parameter.grad) < 0.03, name
