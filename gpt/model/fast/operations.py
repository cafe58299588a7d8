"""Twins of plain operations that compute the same numbers in less memory or time.

`split_query_attention` is `gpt.model.attention.attention`; `recast_linear` is `F.linear` with rounded weights, as in
gpt/model/linear.py; `tied_embedding` is `F.embedding(idx, weight)` and `weight` itself; `SkipInit` is building a model
without drawing its weights. tests/model/fast/test_operations.py holds them equal.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode


def prefers_fused_kernel(queries: Tensor) -> bool:
    """Whether `scaled_dot_product_attention` is the fastest route for these queries (B, H, T, D).

    It is, except for bfloat16 training on a CPU, where its backward pass is slow: writing attention out saves 7% of a
    GPT-2 124M step on 4 x 1,024 tokens, and holds 0.9 GB of weights. Longer windows would need too much memory.
    """
    bf16_training = queries.dtype == torch.bfloat16 and queries.requires_grad
    return not (queries.device.type == "cpu" and bf16_training and queries.shape[-2] <= 1024)


def split_query_attention(
    attention: Callable[..., Tensor], queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, dropout: float = 0.0
) -> Tensor:
    """Causal `attention`, computed separately for the early and the late half of the queries.

    The early half needs no key of the late one, which saves a quarter of the scores. More and smaller parts gain
    nothing, and neither does splitting 256 tokens or fewer.
    """
    T, S = mask.shape[-2:]
    if T <= 256:
        return attention(queries, keys, values, mask, dropout)
    half, seen = T // 2, S - T + T // 2
    keys_seen, values_seen = keys[..., :seen, :], values[..., :seen, :]  # (..., seen, D)
    early = attention(queries[..., :half, :], keys_seen, values_seen, mask[..., :half, :seen], dropout)
    late = attention(queries[..., half:, :], keys, values, mask[..., half:, :], dropout)
    return torch.cat([early, late], dim=-2)  # (..., T, D)


def recast_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """F.linear in the precision of x, which rounds the weights again in the backward pass instead of keeping them.

    Autograd would keep the rounded copies: 170 MB for GPT-2 124M, where rounding again takes 15 ms of a 2.5 s step.
    """
    return _LinearRoundingTwice.apply(x, weight, bias)


class _LinearRoundingTwice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        x, weight = ctx.saved_tensors
        rows, grad_rows = x.flatten(0, -2), grad.flatten(0, -2)  # (rows, in) and (rows, out)
        weight_grad = (grad_rows.T @ rows).to(weight.dtype)
        bias_grad = grad_rows.sum(0).to(weight.dtype) if ctx.has_bias else None
        return grad @ weight.to(grad.dtype), weight_grad, bias_grad


def tied_embedding(idx: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The rows of an embedding (V, C) for the tokens idx, and the whole of it for the output head.

    The two gradients are summed in the memory of the head's, where autograd would make a second tensor of that size.
    Nobody else may hold the head's gradient: `chunked_next_token_loss` gives its own away.
    """
    return _TiedLookup.apply(idx, weight)


class _TiedLookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx, idx: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(idx)
        return F.embedding(idx, weight), weight.view_as(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx, rows_grad: Tensor, head_grad: Tensor):
        (idx,) = ctx.saved_tensors
        if head_grad.device.type == "cpu":
            return None, head_grad.index_add_(0, idx.flatten(), rows_grad.flatten(0, 1))
        # On a GPU index_add_ adds in no fixed order.
        return None, head_grad.add_(torch.ops.aten.embedding_dense_backward(rows_grad, idx, len(head_grad), -1, False))


class SkipInit(TorchFunctionMode):
    """Skip the drawing of random weights; their memory is not even touched.

    The meta device does the same, but drawing there imports PyTorch's compiler, which takes longer than it saves.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func.__name__ in ("normal_", "uniform_", "kaiming_uniform_"):
            return None
        return func(*args, **(kwargs or {}))
