"""Attention equals hand-computed numbers, and every route of the module equals the formula."""

import math

import pytest
import torch
from torch import Tensor, nn

from gpt.model.attention import KVCache, MultiHeadAttention, attention, attention_weights

B, H, D, D_IN, CONTEXT = 2, 3, 5, 11, 13
C = H * D

BOTH_PATHS = pytest.mark.parametrize("fused_kernel", [True, False])


def make_module(fused_kernel: bool | None = None, dropout: float = 0.0, qkv_bias: bool = True) -> MultiHeadAttention:
    """Return a module whose weights are large, so that its attention is far from even."""
    torch.manual_seed(3)
    module = MultiHeadAttention(D_IN, C, CONTEXT, dropout, H, qkv_bias)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    module.fused_kernel = fused_kernel
    return module


def make_input(T: int) -> Tensor:
    """Return seeded input (B, T, d_in)."""
    return torch.randn(B, T, D_IN, generator=torch.Generator().manual_seed(T))


def test_hand_computed():
    """Two tokens whose scores are zero and the logarithm of three."""
    queries = torch.tensor([[9.0, 9.0, 9.0, 9.0], [2 * math.log(3), 0.0, 0.0, 0.0]])
    keys = torch.tensor([[0.0, 1.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]])
    values = torch.tensor([[4.0, 8.0], [0.0, 4.0]])
    mask = torch.tensor([[False, True], [False, False]])
    torch.testing.assert_close(attention_weights(queries, keys, mask), torch.tensor([[1.0, 0.0], [0.25, 0.75]]))
    torch.testing.assert_close(attention(queries, keys, values, mask), torch.tensor([[4.0, 8.0], [1.0, 5.0]]))
    torch.testing.assert_close(attention(queries, keys, values), torch.tensor([[2.0, 6.0], [1.0, 5.0]]))


@pytest.mark.parametrize("T", [1, 7, CONTEXT])
@pytest.mark.parametrize("qkv_bias", [True, False])
def test_paths_agree(T, qkv_bias):
    """The fused kernel equals the formula, in its output and in the gradient of the input and of every parameter."""
    results = []
    for fused_kernel in (True, False):
        module, x = make_module(fused_kernel, qkv_bias=qkv_bias), make_input(T).requires_grad_()
        output = module(x)
        assert output.shape == (B, T, C)
        (output.sin() * torch.arange(1.0, C + 1)).mean().backward()
        gradients = {name: parameter.grad for name, parameter in module.named_parameters()}
        results.append({"output": output.detach(), "x": x.grad} | gradients)
    assert all(tensor.abs().max() > 1e-3 for name, tensor in results[0].items() if T > 1 or name in ("output", "x"))
    torch.testing.assert_close(results[0], results[1], atol=1e-5, rtol=1e-5)


@BOTH_PATHS
@pytest.mark.parametrize("changed", [1, 5, CONTEXT - 1])
def test_the_future_changes_nothing(fused_kernel, changed):
    """Another token at one position changes the output there and later, never before."""
    module, x = make_module(fused_kernel), make_input(CONTEXT)
    other = x.clone()
    other[:, changed] += 1.0
    original, after = module(x), module(other)
    torch.testing.assert_close(after[:, :changed], original[:, :changed], atol=1e-6, rtol=0.0)
    assert ((after - original)[:, changed:].abs().amax(dim=-1) > 1e-3).all()


@BOTH_PATHS
@pytest.mark.parametrize(
    "pieces",
    [[CONTEXT], [5] + [1] * 8, [1] * CONTEXT, [2, 3, 7, 1], [7, 6]],
    ids=["whole", "prefill-then-single", "single", "pieces", "halves"],
)
@torch.no_grad()
def test_cache_equals_uncached(fused_kernel, pieces):
    """Cached outputs equal one uncached pass, for any split of the tokens."""
    module, x = make_module(fused_kernel), make_input(CONTEXT)
    cache = KVCache(CONTEXT)
    outputs = [module(piece, cache) for piece in x.split(pieces, dim=1)]
    assert cache.length == sum(pieces) == CONTEXT
    torch.testing.assert_close(torch.cat(outputs, dim=1), module(x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("qkv_bias", [True, False])
@pytest.mark.parametrize("with_mask", [True, False])
def test_notes_state_dict_loads(qkv_bias, with_mask):
    """Separate projections load unchanged, also inside another module. A saved mask is ignored."""
    torch.manual_seed(5)
    state = {"out_proj.weight": torch.randn(C, C), "out_proj.bias": torch.randn(C)}
    for name in ("W_query", "W_key", "W_value"):
        state |= {f"{name}.weight": torch.randn(C, D_IN)} | ({f"{name}.bias": torch.randn(C)} if qkv_bias else {})
    if with_mask:
        state["mask"] = torch.ones(CONTEXT, CONTEXT).triu(diagonal=1)  # the notes save floats
    names = set(state)
    outer = nn.ModuleList(MultiHeadAttention(D_IN, C, CONTEXT, 0.0, H, qkv_bias) for _ in range(2))
    outer.load_state_dict({f"{i}.{name}": tensor + i for i in range(2) for name, tensor in state.items()})
    assert torch.equal(outer[1].W_qkv.weight, outer[0].W_qkv.weight + 1)
    module = MultiHeadAttention(D_IN, C, CONTEXT, 0.0, H, qkv_bias)
    module.load_state_dict(state)
    assert torch.equal(outer[0].W_qkv.weight, module.W_qkv.weight)
    assert set(state) == names

    x = make_input(7)
    projected = [
        nn.functional.linear(x, state[f"{name}.weight"], state.get(f"{name}.bias")).view(B, 7, H, D).transpose(1, 2)
        for name in ("W_query", "W_key", "W_value")
    ]
    mask = torch.ones(7, 7, dtype=torch.bool).triu(diagonal=1)
    context = attention(*projected, mask).transpose(1, 2).reshape(B, 7, C)
    expected = nn.functional.linear(context, state["out_proj.weight"], state["out_proj.bias"])
    torch.testing.assert_close(module(x), expected, atol=1e-5, rtol=1e-5)


def test_mask_buffer():
    """The mask is a bool buffer that follows the module and keeps its type. test_notes.py compares its values."""
    module = make_module()
    assert dict(module.named_buffers()).keys() == {"mask"}
    assert module.to(torch.bfloat16).mask.dtype == torch.bool
    assert module.to("meta").mask.device.type == "meta"


def test_indivisible_width_is_refused():
    """The error names both numbers."""
    with pytest.raises(ValueError, match=r"d_out=11 .*num_heads=3"):
        MultiHeadAttention(7, 11, 13, 0.0, num_heads=3)


@BOTH_PATHS
@pytest.mark.parametrize("tokens", [53, 300])
def test_dropout_drops_and_scales(fused_kernel, tokens):
    """Training drops the given fraction of the weights and scales the others. Evaluation drops none."""
    dropout = 0.3
    torch.manual_seed(11)
    module = MultiHeadAttention(tokens, tokens, tokens, dropout, num_heads=1)
    module.fused_kernel = fused_kernel
    x = torch.eye(tokens)[None]
    with torch.no_grad():  # one-hot values make the output show the weights after dropout
        module.W_qkv.weight.copy_(torch.cat([torch.randn(2 * tokens, tokens), torch.eye(tokens)]))
        module.out_proj.weight.copy_(torch.eye(tokens))
        module.out_proj.bias.zero_()
        after, weights = module(x)[0], module.weights(x)[0, 0]
    survivors, allowed = after != 0, ~module.mask
    assert not survivors[~allowed].any()
    assert 1 - survivors[allowed].float().mean().item() == pytest.approx(dropout, abs=0.06)  # five standard deviations
    torch.testing.assert_close(after[survivors], weights[survivors] / (1 - dropout))
    torch.testing.assert_close(module.eval()(x)[0], weights)


@BOTH_PATHS
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16])
def test_bfloat16(fused_kernel, given):
    """With bfloat16 matrices and any input, both paths run forward and backward, near the exact output."""
    exact = make_module(fused_kernel=False)(make_input(7)).detach()
    module, x = make_module(fused_kernel).bfloat16(), make_input(7).to(given)
    output = module(x)
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output.float(), exact, atol=0.03 * exact.abs().max().item(), rtol=0.0)
    output.float().square().mean().backward()
    assert all(p.grad.isfinite().all() and p.grad.abs().max() > 0 for p in module.parameters())


@pytest.mark.parametrize(
    ("fused_kernel", "dtype", "expected"),
    [
        (None, torch.float32, True),
        (None, torch.bfloat16, False),
        (True, torch.bfloat16, True),
        (False, torch.float32, False),
    ],
)
def test_path_taken(fused_kernel, dtype, expected):
    """The module takes the preferred or the chosen route, as its autograd graph shows."""
    nodes = [make_module(fused_kernel).to(dtype)(make_input(7).to(dtype)).grad_fn]
    names = set()
    while nodes:
        node = nodes.pop()
        names.add(node.name())
        nodes.extend(parent for parent, _ in node.next_functions if parent is not None)
    assert any("ScaledDotProduct" in name for name in names) is expected
    assert any("Softmax" in name for name in names) is not expected
