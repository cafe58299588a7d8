"""A transformer block for one token of one text, as a function of its weights: the fast twin of `TransformerBlock`.

Compiled, a multiplication and a sum reads the weights of a one-row product as fast as memory delivers them, and the
operations between two products need no calls of their own. As a function, one compiled version serves all blocks.
tests/model/fast/test_single_token.py holds it equal to the plain block with a `KVCache`.

Letters in shapes: S tokens so far, this one included, H heads, D head_dim, C d_model.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt.model.transformer import TransformerBlock

Map = tuple[Tensor, Tensor | None, Tensor | None]  # weight (out, in), scale (out,) of 8-bit weights, bias (out,)
Norm = tuple[Tensor, Tensor]  # gain (C,), bias (C,)
Weights = tuple[Norm, Norm, Map, Map, Map, Map]


def weights_of(block: TransformerBlock) -> Weights:
    """The weights of a block, in the order in which `transform` takes them."""
    attention, feed_forward = block.attention, block.feed_forward
    norms = [(norm.weight, norm.bias) for norm in (block.norm1, block.norm2)]
    linears = (attention.W_qkv, attention.out_proj, feed_forward.expand, feed_forward.contract)
    return (*norms, *map(map_of, linears))  # type: ignore[return-value]


def map_of(linear: nn.Module) -> Map:
    """The weights of a linear map."""
    return linear.weight, getattr(linear, "scale", None), linear.bias  # type: ignore[return-value]


def multiply(x: Tensor, linear: Map) -> Tensor:
    """A linear map (out,) of one row x (in,), in fp32."""
    weight, scale, bias = linear
    half = len(weight) // 2  # two rows at once, whose sums need not wait for each other
    rows = [part for part in (weight[:half], weight[half : 2 * half], weight[2 * half :]) if len(part)]
    out = torch.cat([(part.float() * x.float()).sum(-1) for part in rows])
    out = out if scale is None else out * scale.float()
    return out if bias is None else out + bias.float()


def transform(
    row: Tensor, places: Tensor, keys: Tensor, values: Tensor, norm1: Norm, norm2: Norm, qkv: Map, out_proj: Map,
    expand: Map, contract: Map,
) -> Tensor:  # fmt: skip
    """The block's output (1, 1, C) for one token (1, 1, C), whose place in the cache is the last of `places` (S,).

    Adds the token to the cached keys and values (1, H, capacity, D), in place.
    """
    _, H, _, D = keys.shape
    S, x = len(places), row.flatten()  # x (C,)
    query, key, value = multiply(F.layer_norm(x, x.shape, *norm1), qkv).view(3, 1, H, 1, D).to(keys.dtype)
    keys.index_copy_(2, places[-1:], key)
    values.index_copy_(2, places[-1:], value)
    scores = (query / math.sqrt(D) * keys[:, :, :S]).sum(-1, keepdim=True)  # (1, H, S, 1)
    context = (torch.softmax(scores, dim=2) * values[:, :, :S]).sum(2)  # (1, H, D)
    x = x + multiply(context.flatten(), out_proj)
    inner = F.gelu(multiply(F.layer_norm(x, x.shape, *norm2), expand), approximate="tanh")  # (4C,)
    return (x + multiply(inner, contract)).view_as(row)
