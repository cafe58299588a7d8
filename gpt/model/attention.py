"""Causal multi-head self-attention: first the formula, then the module that the model trains.

Letters in shapes: B batch, T query tokens, S key tokens (S = T without a cache), H heads, D head_dim, C d_out.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt.model.fast.operations import prefers_fused_kernel, split_query_attention
from gpt.model.linear import Linear


def attention_weights(queries: Tensor, keys: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return softmax(Q K^T / sqrt(d_k)): how much each query attends to each key.

    Shapes: queries (..., T, d_k), keys (..., S, d_k), mask bool, broadcastable to (..., T, S), True where blocked.
    Returns (..., T, S). Each row sums to one, and blocked entries are exactly zero. A fully blocked row is nan.
    Source: Vaswani et al. 2017, "Attention Is All You Need", section 3.2.1.
    """
    # Scaling the queries gives the same scores, and touches D numbers per token instead of S.
    scores = (queries / math.sqrt(queries.shape[-1])) @ keys.transpose(-2, -1)  # (..., T, S)
    if mask is not None:
        # Adding -inf is three times as fast as filling the scores with it, and free in the backward pass.
        scores += torch.zeros_like(mask, dtype=scores.dtype).masked_fill_(mask, -torch.inf)
    return torch.softmax(scores, dim=-1)


def attention(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None = None, dropout: float = 0.0
) -> Tensor:
    """Return softmax(Q K^T / sqrt(d_k)) V, written out: the oracle for every faster route.

    Shapes: queries (..., T, d_k), keys (..., S, d_k), values (..., S, d_v), mask as in `attention_weights`.
    Each weight is dropped with probability `dropout`. The others are scaled by 1 / (1 - dropout).
    Returns the context vectors (..., T, d_v).
    """
    weights = attention_weights(queries, keys, mask)
    if dropout:
        weights = F.dropout(weights, dropout)
    return weights @ values


class KVCache:
    """The keys and values of all earlier tokens in one attention layer, in memory allocated once.

    It holds at most `capacity` tokens, the model's context length. On a CPU they are stored in fp32, because the
    attention kernel is ten times as fast there: one GPT-2 query after 1,000 tokens takes 87 us instead of 875.
    """

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.length = 0
        self.keys: Tensor | None = None  # (B, H, capacity, D), allocated by the first `append`
        self.values: Tensor | None = None

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store keys and values (B, H, T, D) of new tokens. Return the keys and values (B, H, S, D) of all tokens."""
        if self.keys is None or self.values is None:
            B, H, _, D = keys.shape
            dtype = torch.float32 if keys.device.type == "cpu" else keys.dtype
            self.keys = keys.new_empty(B, H, self.capacity, D, dtype=dtype)
            self.values = values.new_empty(B, H, self.capacity, D, dtype=dtype)
        start = self.length
        self.length += keys.shape[-2]
        self.keys[:, :, start : self.length] = keys
        self.values[:, :, start : self.length] = values
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]


class MultiHeadAttention(nn.Module):
    """Causal self-attention over `num_heads` heads, with one fused projection for queries, keys and values.

    Args:
        d_in: The width of the input.
        d_out: The width of the output, divided evenly among the heads.
        context_length: The maximum number of tokens, and the size of the causal mask.
        dropout: The probability of dropping an attention weight in training.
        num_heads: H.
        qkv_bias: Whether the projection of queries, keys and values has a bias.

    Maps (B, T, d_in) to (B, T, d_out). The mask is a buffer: it moves with `.to()`, and is never saved. State dicts
    with separate `W_query`, `W_key` and `W_value` load unchanged.
    """

    mask: Tensor

    def __init__(
        self, d_in: int, d_out: int, context_length: int, dropout: float, num_heads: int, qkv_bias: bool = False
    ):
        super().__init__()
        if d_out % num_heads != 0:
            raise ValueError(f"d_out={d_out} is not divisible by num_heads={num_heads}: choose a multiple of it")
        self.num_heads = num_heads
        self.W_qkv = Linear(d_in, 3 * d_out, bias=qkv_bias)  # rows: all queries, then all keys, then all values
        self.out_proj = Linear(d_out, d_out)
        self.dropout = nn.Dropout(dropout)
        self.fused_kernel: bool | None = None  # None picks the faster route. Tests set it.
        mask = torch.ones(context_length, context_length, dtype=torch.bool).triu(diagonal=1)  # True where blocked
        self.register_buffer("mask", mask, persistent=False)
        self.register_load_state_dict_pre_hook(_fuse_separate_projections)

    def forward(self, x: Tensor, cache: KVCache | None = None, mask: Tensor | None = None) -> Tensor:
        """Let each token of x (B, T, d_in) attend to itself and all earlier tokens, including tokens in the cache.

        `mask` (B, 1, T, S), True where blocked, replaces the causal mask. It has its own rows for each text.
        """
        past_length = 0 if cache is None else cache.length
        length = past_length + x.shape[1]
        if length > len(self.mask):
            raise ValueError(f"{length} tokens do not fit a context of {len(self.mask)}: pass the last ones only")
        queries, keys, values = self._project(x)  # each (B, H, T, D)
        if cache is not None:
            keys, values = cache.append(keys, values)  # each (B, H, S, D)
            queries = queries.to(keys.dtype)
        context = self._attend(queries, keys, values, mask)  # (B, H, T, D)
        return self.out_proj(context.transpose(1, 2).flatten(2))  # (B, T, C)

    def weights(self, x: Tensor) -> Tensor:
        """Return the attention weights (B, H, T, T) of `forward` on x (B, T, d_in), before dropout."""
        queries, keys, _ = self._project(x)
        T = x.shape[1]
        return attention_weights(queries, keys, self.mask[:T, :T])

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        B, T, _ = x.shape
        qkv = self.W_qkv(x)  # (B, T, 3C)
        qkv = qkv.view(B, T, 3, self.num_heads, -1)  # (B, T, 3, H, D)
        queries, keys, values = qkv.permute(2, 0, 3, 1, 4).unbind()  # each (B, H, T, D)
        return queries, keys, values

    def _attend(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        T, S = queries.shape[-2], keys.shape[-2]
        dropout = self.dropout.p if self.training else 0.0
        fused = self.fused_kernel
        if fused is None:
            fused = prefers_fused_kernel(queries.device.type, queries.dtype, T, is_training=queries.requires_grad)
        if not fused:
            mask = self.mask[S - T : S, :S] if mask is None else mask
            return split_query_attention(attention, queries, keys, values, mask, dropout)
        if mask is None and S == T:
            return F.scaled_dot_product_attention(queries, keys, values, dropout_p=dropout, is_causal=True)
        # `is_causal` would align the first query with the first key, which is wrong after cached tokens. A single query
        # attends to everything, and needs no mask.
        if mask is None and T > 1:
            mask = self.mask[S - T : S, :S]
        allowed = None if mask is None else ~mask  # PyTorch's mask is True where attended
        return F.scaled_dot_product_attention(queries, keys, values, attn_mask=allowed, dropout_p=dropout)


def _fuse_separate_projections(module: nn.Module, state_dict: dict, prefix: str, *_) -> None:
    """Fuse `W_query`, `W_key` and `W_value` of a state dict into `W_qkv`, in place. Drop a saved mask."""
    for suffix in ("weight", "bias"):
        names = [f"{prefix}{name}.{suffix}" for name in ("W_query", "W_key", "W_value")]
        if all(name in state_dict for name in names):
            state_dict[f"{prefix}W_qkv.{suffix}"] = torch.cat([state_dict.pop(name) for name in names])
    state_dict.pop(f"{prefix}mask", None)
