"""Causal multi-head self-attention, first as a formula and then as the module that the model trains.

Letters in shapes: B batch, T query tokens, S key tokens (S = T where there is no cache), H heads, D head_dim, C d_out.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt.model.linear import Linear


def attention_weights(queries: Tensor, keys: Tensor, mask: Tensor | None = None) -> Tensor:
    """softmax(Q K^T / sqrt(d_k)): how much each query attends to each key.

    Shapes: queries (..., T, d_k), keys (..., S, d_k), mask bool, broadcastable to (..., T, S), True where blocked.
    Returns (..., T, S); every row sums to one and blocked entries are exactly zero (a
    row that is blocked whole is nan).
    Source: Vaswani et al. 2017, "Attention Is All You Need", section 3.2.1.
    """
    # Scaling the queries is the same product as scaling the scores, on D numbers a token instead of S.
    scores = (queries / math.sqrt(queries.shape[-1])) @ keys.transpose(-2, -1)  # (..., T, S)
    if mask is not None:
        # Adding -inf where blocked: three times as fast as filling it in, and it costs the backward pass nothing.
        scores += torch.zeros_like(mask, dtype=scores.dtype).masked_fill_(mask, -torch.inf)
    return torch.softmax(scores, dim=-1)


def attention(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None = None, dropout: float = 0.0
) -> Tensor:
    """softmax(Q K^T / sqrt(d_k)) V, written out: the oracle of every faster path.

    Shapes: queries (..., T, d_k), keys (..., S, d_k), values (..., S, d_v), mask as in `attention_weights`.
    `dropout` is the probability with which a weight is set to zero, the others being scaled by 1 / (1 - dropout).
    Returns the context vectors (..., T, d_v).
    """
    weights = attention_weights(queries, keys, mask)
    if dropout:
        weights = F.dropout(weights, dropout)
    return weights @ values


def causal_attention(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, dropout: float = 0.0) -> Tensor:
    """`attention` whose mask blocks every later token, without looking at most of what it blocks.

    Long sequences are taken in two halves of the queries, of which the first needs no key of the second: a quarter of
    the square is never computed. More and smaller parts gain nothing, nor do 256 tokens or fewer.
    """
    T, S = mask.shape[-2:]
    if T <= 256:
        return attention(queries, keys, values, mask, dropout)
    half, seen = T // 2, S - T + T // 2
    keys_seen, values_seen = keys[..., :seen, :], values[..., :seen, :]
    early = attention(queries[..., :half, :], keys_seen, values_seen, mask[..., :half, :seen], dropout)
    late = attention(queries[..., half:, :], keys, values, mask[..., half:, :], dropout)
    return torch.cat([early, late], dim=-2)


def prefers_fused_kernel(queries: Tensor) -> bool:
    """Whether `scaled_dot_product_attention` is the faster path for these queries (B, H, T, D).

    It is, except when training in bfloat16 on a CPU: there its backward pass is slow. On two AVX-512 cores attention
    over 1,024 tokens in all, forward and backward, takes 26 ms with it and 13 ms written out for 12 heads of 64 and
    T = 256, 45 and 20 ms for T = 512, 56 and 41 ms for T = 1024: 7% of a step of GPT-2 124M on 4 x 1,024 tokens, for
    weights of 0.9 GB. Beyond that these weights, which grow with T squared, take too much memory.
    """
    bf16_training = queries.dtype == torch.bfloat16 and queries.requires_grad
    return not (queries.device.type == "cpu" and bf16_training and queries.shape[-2] <= 1024)


class KVCache:
    """Keys and values of the tokens that one attention layer has already seen, in memory allocated once.

    `capacity` is the greatest number of tokens it can hold: the model's context length. On a CPU they are kept in fp32,
    in which its attention kernel takes a tenth of the time: 87 and 875 us for one query of GPT-2's after 1,000 tokens.
    """

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.length = 0
        self.keys: Tensor | None = None  # (B, H, capacity, D), from the first `append` on
        self.values: Tensor | None = None

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store keys and values (B, H, T, D) of new tokens; return those of all tokens so far, (B, H, S, D)."""
        if self.keys is None or self.values is None:
            B, H, _, D = keys.shape
            dtype = torch.float32 if keys.device.type == "cpu" else keys.dtype
            self.keys = keys.new_empty(B, H, self.capacity, D, dtype=dtype)
            self.values = values.new_empty(B, H, self.capacity, D, dtype=dtype)
        start, self.length = self.length, self.length + keys.shape[-2]
        self.keys[:, :, start : self.length] = keys
        self.values[:, :, start : self.length] = values
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]


class MultiHeadAttention(nn.Module):
    """Causal self-attention over `num_heads` heads, with one fused projection for queries, keys and values.

    Args:
        d_in: width of the input. d_out: width of the output, divided evenly among the heads.
        context_length: the greatest number of tokens; the size of the causal mask.
        dropout: probability of dropping an attention weight while training.
        qkv_bias: whether the projection of queries, keys and values has a bias.

    Maps (B, T, d_in) to (B, T, d_out). The mask is a buffer: it moves with `.to()` and is never saved. State dicts with
    separate `W_query`, `W_key` and `W_value` load as they are.
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
        self.fused_kernel: bool | None = None  # None: whichever is faster; True or False: that path, for tests
        blocked = torch.ones(context_length, context_length, dtype=torch.bool).triu(diagonal=1)
        self.register_buffer("mask", blocked, persistent=False)
        self.register_load_state_dict_pre_hook(_fuse_separate_projections)

    def forward(self, x: Tensor, cache: KVCache | None = None, blocked: Tensor | None = None) -> Tensor:
        """Attend from every token of x (B, T, d_in) to itself and to earlier ones, those in the cache included.

        `blocked` (B, 1, T, S), where given, says what each row may not attend to, in place of the causal mask.
        """
        seen, T = 0 if cache is None else cache.length, x.shape[1]
        if seen + T > len(self.mask):
            raise ValueError(f"{seen + T} tokens do not fit a context of {len(self.mask)}: pass the last ones only")
        queries, keys, values = self._project(x)  # each (B, H, T, D)
        if cache is not None:
            keys, values = cache.append(keys, values)
            queries = queries.to(keys.dtype)
        context = self._attend(queries, keys, values, seen, blocked)  # (B, H, T, D)
        return self.out_proj(context.transpose(1, 2).flatten(2))  # (B, T, C)

    def weights(self, x: Tensor) -> Tensor:
        """The attention weights (B, H, T, T) that `forward` would use on x (B, T, d_in), before dropout."""
        queries, keys, _ = self._project(x)
        T = x.shape[1]
        return attention_weights(queries, keys, self.mask[:T, :T])

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        B, T, _ = x.shape
        qkv = self.W_qkv(x)  # (B, T, 3C)
        qkv = qkv.view(B, T, 3, self.num_heads, -1)  # (B, T, 3, H, D)
        queries, keys, values = qkv.permute(2, 0, 3, 1, 4).unbind()  # each (B, H, T, D)
        return queries, keys, values

    def _attend(self, queries: Tensor, keys: Tensor, values: Tensor, seen: int, blocked: Tensor | None) -> Tensor:
        T = queries.shape[-2]
        dropout = self.dropout.p if self.training else 0.0
        fused = prefers_fused_kernel(queries) if self.fused_kernel is None else self.fused_kernel
        if not fused:
            mask = self.mask[seen : seen + T, : seen + T] if blocked is None else blocked
            return causal_attention(queries, keys, values, mask, dropout)
        if blocked is not None:
            return F.scaled_dot_product_attention(queries, keys, values, attn_mask=~blocked, dropout_p=dropout)
        if seen == 0:
            return F.scaled_dot_product_attention(queries, keys, values, dropout_p=dropout, is_causal=True)
        # After a cache `is_causal` would be wrong: it aligns the first query with the first key. PyTorch's boolean
        # mask is True where attended, the opposite of ours; a single query attends to everything and needs none.
        allowed = None if T == 1 else ~self.mask[seen : seen + T, : seen + T]
        return F.scaled_dot_product_attention(queries, keys, values, attn_mask=allowed, dropout_p=dropout)


def _fuse_separate_projections(module: nn.Module, state_dict: dict, prefix: str, *_) -> None:
    """Turn `W_query`, `W_key`, `W_value` (and a saved mask) of a state dict into the fused `W_qkv`, in place."""
    for kind in ("weight", "bias"):
        names = [f"{prefix}{name}.{kind}" for name in ("W_query", "W_key", "W_value")]
        if all(name in state_dict for name in names):
            state_dict[f"{prefix}W_qkv.{kind}"] = torch.cat([state_dict.pop(name) for name in names])
    state_dict.pop(f"{prefix}mask", None)
