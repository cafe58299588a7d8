"""Fast twins of plain operations: the same numbers in less memory or time.

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


def prefers_fused_kernel(device: str, dtype: torch.dtype, num_queries: int, is_training: bool) -> bool:
    """Return True if `scaled_dot_product_attention` is the fastest route.

    It is, except for bfloat16 training on a CPU, where its backward pass is slow. Writing attention out saves 7% of a
    GPT-2 124M step on 4 x 1,024 tokens, and holds 0.9 GB of weights. Longer sequences would need too much memory.
    """
    return not (device == "cpu" and dtype == torch.bfloat16 and is_training and num_queries <= 1024)


def split_query_attention(
    attention: Callable[..., Tensor], queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, dropout: float = 0.0
) -> Tensor:
    """Return causal `attention`, computed separately for the early and the late half of the queries.

    The early half needs no key of the late half. That saves a quarter of the scores. More parts gain nothing, and
    neither does splitting 256 tokens or fewer.

    Args:
        attention: Computes the context vectors of a part.
        queries: (..., T, D).
        keys: (..., S, D).
        values: (..., S, D).
        mask: Broadcastable to (..., T, S), True where blocked.
        dropout: The probability of dropping a weight.
    """
    T, S = mask.shape[-2:]
    if T <= 256:
        return attention(queries, keys, values, mask, dropout)
    half = T // 2
    end = S - T + half  # of the keys that the early half may attend to
    early = attention(queries[..., :half, :], keys[..., :end, :], values[..., :end, :], mask[..., :half, :end], dropout)
    late = attention(queries[..., half:, :], keys, values, mask[..., half:, :], dropout)
    return torch.cat([early, late], dim=-2)  # (..., T, D)


def recast_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return F.linear in the precision of x. The backward pass rounds the weights again instead of keeping a copy.

    Autograd would keep the rounded copies, 170 MB for GPT-2 124M. Rounding again takes 15 ms of a 2.5 s step.
    """
    return _RecastLinear.apply(x, weight, bias)


class _RecastLinear(torch.autograd.Function):
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
    """Return the rows of an embedding (V, C) for the tokens idx, and the embedding itself for the output head.

    Both gradients are summed in the memory of the head's gradient. Autograd would allocate a second tensor of that
    size. Nothing else may use the head's gradient: `chunked_next_token_loss` gives its own away.
    """
    return _TiedEmbedding.apply(idx, weight)


class _TiedEmbedding(torch.autograd.Function):
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
    """Build modules without drawing their weights. The memory of the weights is not even touched.

    On the meta device, PyTorch would import its compiler to compute the causal mask, which takes seconds. A tensor
    without numbers needs no computation, so that is skipped too.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func.__name__ in ("normal_", "uniform_", "kaiming_uniform_"):
            return None
        if func.__name__ == "triu" and args[0].is_meta:
            return args[0]
        return func(*args, **(kwargs or {}))
