"""A model with packed weights predicts as before, as nearly as its precision allows."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gpt.model.fast.operations import SkipInit
from gpt.model.linear import Linear
from gpt.model.transformer import GPT, GPTConfig
from gpt.sampling import packed
from gpt.sampling.packed import Int8Linear, PackedLinear, choose_sampling_precision, choose_threads, pack_weights
from models import make_idx, random_model

SHAPE = GPTConfig(context_length=23, d_model=48, num_layers=2, num_heads=3, vocab_size=101)


def make_linear(inputs: int, outputs: int, bias: bool = True) -> Linear:
    torch.manual_seed(7)
    return Linear(inputs, outputs, bias=bias)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (3, 1), (5, 11)])
@pytest.mark.parametrize(("inputs", "outputs"), [(13, 17), (64, 96), (97, 7)])
def test_packed_products_equal_plain_bf16(inputs, outputs, shape, bias):
    linear = make_linear(inputs, outputs, bias)
    x = torch.randn(*shape, inputs)
    expected = F.linear(x.bfloat16(), linear.weight.bfloat16(), None if not bias else linear.bias.bfloat16())
    result = PackedLinear(linear.weight, linear.bias)(x)
    assert (result.dtype, result.shape) == (torch.bfloat16, (*shape, outputs))
    torch.testing.assert_close(result, expected, atol=0.02, rtol=0.02)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (5, 1)])
def test_int8_rounds_to_the_nearest_integer(shape, rows, bias):
    """Every way to multiply uses the same integers. They are off by at most half a step of their row's scale."""
    linear = make_linear(64, 32, bias)
    with torch.no_grad():
        linear.weight[3] = 0.0
        linear.weight[5] *= 1000.0
    int8 = Int8Linear(linear.weight, linear.bias)
    scale = int8.scale.float()[:, None]
    restored = int8.weight.float() * scale
    assert int8.weight.dtype == torch.int8
    assert int8.weight[5].abs().max() == 127
    assert not restored[3].any()
    assert ((restored - linear.weight).abs() <= 0.51 * scale).all()

    x = torch.randn(*shape, 64)
    expected = F.linear(x.bfloat16().float(), restored, linear.bias)
    result = Int8Linear(linear.weight, linear.bias, rows)(x)
    assert (result.dtype, result.shape) == (torch.bfloat16, (*shape, 32))
    torch.testing.assert_close(result.float(), expected, atol=0.02, rtol=0.02)


def test_int8_reads_nothing_past_its_weights():
    """PyTorch's kernel for a single row reads past the end of rows of some widths. Those take another way."""
    for inputs in [*range(1, 70), 96, 100, 768]:
        linear = make_linear(inputs, 257)
        x = torch.randn(1, inputs)
        expected = linear(x.bfloat16().float())
        for _ in range(5):
            result = Int8Linear(linear.weight, linear.bias)(x).float()
            torch.testing.assert_close(result, expected, atol=0.05, rtol=0.02)


@pytest.mark.parametrize(("precision", "bound"), [("bf16", 0.01), ("fp16", 0.001), ("int8", 0.02)])
@pytest.mark.parametrize("rows", [1, 3])
def test_a_packed_model_is_near_fp32(precision, bound, rows):
    """Its logits are, in one pass and token by token with the cache. So is its loss."""
    exact = random_model(SHAPE, std=0.1)
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


def test_every_matrix_is_replaced():
    """No linear map of a block stays in fp32. The head gets a matrix of its own."""
    model = pack_weights(random_model(SHAPE, std=0.1), "int8")
    linears = [type(module) for module in model.blocks.modules() if isinstance(module, nn.Linear | Int8Linear)]
    assert linears == [Int8Linear] * 8
    assert isinstance(model.output, Int8Linear)
    assert (model.dtype, model.token_embedding.weight.dtype) == (torch.bfloat16, torch.bfloat16)


def test_defaults_depend_on_the_size_of_the_model():
    """On a CPU a small model is sampled in fp32, by one thread if it is a single text, and a large one in bf16."""
    small = random_model(SHAPE)
    with SkipInit():
        large = GPT(GPTConfig(64, 512, 4, 4))
    assert [choose_sampling_precision("auto", model) for model in (small, large)] == ["fp32", "bf16"]
    assert choose_sampling_precision("int8", small) == "int8"
    previous = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert [choose_threads(small, rows=1, compiled=False), choose_threads(small, 2, False)] == [1, 3]
        assert [choose_threads(small, rows=1, compiled=True), choose_threads(large, 1, False)] == [3, 3]
    finally:
        torch.set_num_threads(previous)


@pytest.mark.parametrize("rows", [1, 7, 8, 31])
@pytest.mark.parametrize("linear_class", [PackedLinear, Int8Linear])
def test_a_cpu_without_bf16_products_is_as_exact(rows, linear_class, monkeypatch):
    """It multiplies many rows in fp32."""
    linear = make_linear(96, 53)
    x, errors = torch.randn(rows, 96), []
    for has_kernels in dict.fromkeys([packed.has_bf16_kernels(), False]):  # a CPU that lacks them cannot be compared
        monkeypatch.setattr(packed, "has_bf16_kernels", lambda has_kernels=has_kernels: has_kernels)
        out = linear_class(linear.weight, linear.bias)(x)
        assert out.dtype == torch.bfloat16
        errors.append((out.float() - linear(x)).abs().mean().item())
    assert max(errors) < 0.01
    assert errors[-1] <= errors[0] * 1.05
