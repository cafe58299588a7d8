"""Faster routes to the same attention; `gpt.model.attention.attention` is the plain twin.

tests/model/fast/test_fast_attention.py holds the two equal.
"""

from collections.abc import Callable

import torch
from torch import Tensor


def prefers_fused_kernel(queries: Tensor) -> bool:
    """Whether `scaled_dot_product_attention` is the fastest route for these queries (B, H, T, D).

    It is, except for bfloat16 training on a CPU, where its backward pass is slow: writing attention out saves 7% of a
    GPT-2 124M step on 4 x 1,024 tokens, and holds 0.9 GB of weights. Longer windows would need too much memory.
    """
    bf16_training = queries.dtype == torch.bfloat16 and queries.requires_grad
    return not (queries.device.type == "cpu" and bf16_training and queries.shape[-2] <= 1024)


def in_halves(
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
