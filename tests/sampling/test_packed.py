"""A model with packed weights says what it said before, as nearly as its precision allows."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gpt.model.fast.operations import SkipInit
from gpt.model.linear import Linear
from gpt.model.transformer import GPT, GPTConfig
from gpt.sampling import packed
from gpt.sampling.packed import (
    BF16_FROM,
    Int8Linear,
    PackedLinear,
    choose_sampling_precision,
    choose_threads,
    pack_weights,
)
from small_models import make_idx, make_initial_model

SHAPE = GPTConfig(context_length=23, d_model=48, num_layers=2, num_heads=3, vocab_size=101)


def make_linear(inputs: int, outputs: int, bias: bool) -> Linear:
    torch.manual_seed(7)
    return Linear(inputs, outputs, bias=bias)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (3, 1), (5, 11)])
@pytest.mark.parametrize(("inputs", "outputs"), [(13, 17), (64, 96), (97, 7)])
def test_packed(inputs, outputs, shape, bias):
    """The packed product equals that of plain bfloat16 weights, for any number of rows."""
    linear = make_linear(inputs, outputs, bias)
    x = torch.randn(*shape, inputs)
    expected = F.linear(x.bfloat16(), linear.weight.bfloat16(), None if not bias else linear.bias.bfloat16())
    result = PackedLinear(linear.weight, linear.bias)(x)
    assert (result.dtype, result.shape) == (torch.bfloat16, (*shape, outputs))
    torch.testing.assert_close(result, expected, atol=0.02, rtol=0.02)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (5, 1)])
def test_int8(shape, rows, bias):
    """Every route multiplies the same integers, which are off by at most half a step of their row's scale."""
    linear = make_linear(64, 32, bias)
    with torch.no_grad():
        linear.weight[3] = 0.0
        linear.weight[5] *= 1000.0
    whole = Int8Linear(linear.weight, linear.bias)
    restored = whole.weight.float() * whole.scale.float()[:, None]
    assert whole.weight.dtype == torch.int8
    assert whole.weight[5].abs().max() == 127
    assert not restored[3].any()
    assert ((restored - linear.weight).abs() <= 0.51 * whole.scale.float()[:, None]).all()

    x = torch.randn(*shape, 64)
    expected = F.linear(x.bfloat16().float(), restored, linear.bias)
    result = Int8Linear(linear.weight, linear.bias, rows)(x)
    assert (result.dtype, result.shape) == (torch.bfloat16, (*shape, 32))
    torch.testing.assert_close(result.float(), expected, atol=0.02, rtol=0.02)


@pytest.mark.parametrize("inputs", [*range(1, 70), 96, 100, 768])
def test_int8_of_any_width(inputs):
    """PyTorch's single-row kernel reads past the end of rows of some widths, so it must not get those."""
    linear = make_linear(inputs, 257, bias=True)
    x = torch.randn(1, inputs)
    expected = linear(x.bfloat16().float())
    for _ in range(5):
        result = Int8Linear(linear.weight, linear.bias)(x).float()
        torch.testing.assert_close(result, expected, atol=0.05, rtol=0.02)


@pytest.mark.parametrize(("precision", "bound"), [("bf16", 0.01), ("fp16", 0.001), ("int8", 0.02)])
@pytest.mark.parametrize("rows", [1, 3])
def test_near_the_model(precision, bound, rows):
    """Logits and loss are close to fp32, in one pass and token by token with the cache."""
    exact = make_initial_model(SHAPE, scale=5.0)
    model = pack_weights(copy.deepcopy(exact), precision, rows)
    idx = make_idx(101, rows, 23)
    with torch.no_grad():
        expected, result = exact(idx), model(idx).float()
        caches = model.init_kv_caches()
        steps = torch.cat([model(idx[:, t : t + 1], caches).float() for t in range(23)], dim=1)
    deviation = expected.std().item()
    assert 0 < (result - expected).abs().mean().item() < bound * deviation
    assert 0 < (steps - expected).abs().mean().item() < bound * deviation
    targets = make_idx(101, rows, 24)[:, 1:]
    losses = [F.cross_entropy(logits.flatten(0, 1), targets.flatten()).item() for logits in (expected, result)]
    assert losses[1] == pytest.approx(losses[0], rel=0.01)


def test_matrices_are_replaced():
    """No linear map of a block stays in fp32, and the head gets one of its own."""
    model = pack_weights(make_initial_model(SHAPE, scale=5.0), "int8")
    kinds = [type(module) for module in model.blocks.modules() if isinstance(module, nn.Linear | Int8Linear)]
    assert kinds == [Int8Linear] * 8
    assert isinstance(model.output, Int8Linear)
    assert (model.dtype, model.token_embedding.weight.dtype) == (torch.bfloat16, torch.bfloat16)


def test_choice():
    """`auto` is fp32 for a small model on a CPU, and bf16 for a large one on any; other names are kept."""
    small = make_initial_model(SHAPE, scale=5.0)
    with SkipInit():
        large = GPT(GPTConfig(64, 512, 4, 4))
    assert large.config.num_parameters > BF16_FROM
    assert choose_sampling_precision("auto", small) == "fp32"
    assert choose_sampling_precision("auto", large) == "bf16"
    assert choose_sampling_precision("int8", small) == "int8"


def test_threads():
    """One thread samples a single text of a small model."""
    small, before = make_initial_model(SHAPE), torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert [choose_threads(small, rows, False) for rows in (1, 2)] == [1, 3]
        assert choose_threads(small, 1, True) == 3
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("rows", [1, 7, 8, 31])
@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_without_products_in_bf16(rows, precision, monkeypatch):
    """A CPU that lacks them multiplies many rows in fp32, which is at least as exact."""
    linear = make_linear(96, 53, bias=True)
    x, exact = torch.randn(rows, 96), []
    for products in (True, False) if packed._multiplies_bf16() else (False,):  # what is not there cannot be compared
        monkeypatch.setattr(packed, "_multiplies_bf16", lambda products=products: products)
        kind = (PackedLinear if precision == "bf16" else Int8Linear)(linear.weight, linear.bias)
        assert (precision == "int8") or kind._packed == products
        out = kind(x)
        assert out.dtype == torch.bfloat16
        exact.append((out.float() - linear(x)).abs().mean().item())
    assert exact[-1] < 0.01
    assert exact[-1] <= exact[0] * 1.05
