"""Compiled blocks, faster after a wait: those of training, and a twin of `TransformerBlock` for one token of one text.

In the twin, a multiplication and a sum reads the weights of a one-row product as fast as memory delivers them, and the
operations between two products need no calls of their own. As a function of its weights, one compiled version serves
all blocks, and PyTorch caches it on disk. tests/model/fast/test_compiled.py holds it equal to the plain block.

Letters in shapes: S tokens so far, this one included, H heads, D head_dim, C d_model.
"""

import functools
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt.model.attention import KVCache
from gpt.model.transformer import GPT, TransformerBlock

Map = tuple[Tensor, Tensor | None, Tensor | None]  # weight (out, in), scale (out,) of 8-bit weights, bias (out,)
Norm = tuple[Tensor, Tensor]  # gain (C,), bias (C,)


def compile_in_place(model: GPT, device: str) -> None:
    """Have PyTorch compile what a training step runs in the blocks; names in the state dict stay.

    On a GPU each block is compiled, and one graph serves them all. On a CPU the calls around a compiled block cost what
    compiling saves. There all blocks and the final norm are one graph, called from C++, and only for training: scores
    and samples are those of the plain model.
    """
    if device != "cpu":
        for block in model.blocks:
            block.compile()
        return
    plain = model._transform
    compiled = torch.compile(plain, dynamic=False, options={"cpp_wrapper": True})

    def transform(x: Tensor, caches: list[KVCache] | None = None, blocked: Tensor | None = None) -> Tensor:
        return compiled(x) if torch.is_grad_enabled() else plain(x, caches, blocked)

    model._transform = transform  # type: ignore[method-assign]


def compile_block(block: TransformerBlock) -> None:
    """Make a block handle a single token of a single text in one compiled function, and anything else as before."""
    plain, attention, feed_forward, mask = block.forward, block.attention, block.feed_forward, block.attention.mask
    norms = [(norm.weight, norm.bias) for norm in (block.norm1, block.norm2)]
    maps = map(_map_of, (attention.W_qkv, attention.out_proj, feed_forward.expand, feed_forward.contract))
    weights, all_places = (*norms, *maps), torch.arange(len(mask), device=mask.device)

    def forward(x: Tensor, cache: KVCache | None = None, blocked: Tensor | None = None) -> Tensor:
        # The compiler would treat an empty and a full cache as cases of their own.
        if cache is None or x.numel() != x.shape[-1] or not 0 < cache.length < cache.capacity - 1:
            return plain(x, cache, blocked)
        places = all_places[: cache.length + 1]
        torch._dynamo.mark_dynamic(places, 0, min=2, max=cache.capacity - 1)
        cache.length += 1
        return _compiled(_transform)(x, places, cache.keys, cache.values, *weights)

    block.forward = forward  # type: ignore[method-assign]


def compile_head(head: nn.Module) -> None:
    """Make the output head compute the logits of a single row in a compiled product."""
    plain, weights = head.forward, _map_of(head)

    def forward(x: Tensor) -> Tensor:
        if x.numel() != x.shape[-1]:
            return plain(x)
        return _compiled(_multiply)(x.flatten(), weights).view(*x.shape[:-1], -1)

    head.forward = forward


@functools.cache
def _compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    options = {
        "realize_opcount_threshold": 6,  # or else every row of a product would compute the norm before it again
        "cpp.enable_floating_point_contract_flag": "fast",
        "size_asserts": False,  # `torch.compile` has compared the sizes already, in a fraction of the time
    }
    return torch.compile(function, dynamic=False, options=options)  # type: ignore[arg-type]


def _map_of(linear: nn.Module) -> Map:
    return linear.weight, getattr(linear, "scale", None), linear.bias  # type: ignore[return-value]


def _multiply(x: Tensor, linear: Map) -> Tensor:
    """A linear map (out,) of one row x (in,), in fp32."""
    weight, scale, bias = linear
    half = len(weight) // 2  # two rows at once, whose sums need not wait for each other
    rows = [part for part in (weight[:half], weight[half : 2 * half], weight[2 * half :]) if len(part)]
    out = torch.cat([(part.float() * x.float()).sum(-1) for part in rows])
    out = out if scale is None else out * scale.float()
    return out if bias is None else out + bias.float()


def _transform(
    row: Tensor, places: Tensor, keys: Tensor, values: Tensor, norm1: Norm, norm2: Norm, qkv: Map, out_proj: Map,
    expand: Map, contract: Map,
) -> Tensor:  # fmt: skip
    """The block's output (1, 1, C) for one token (1, 1, C), whose place in the cache is the last of `places` (S,).

    Adds the token to the cached keys and values (1, H, capacity, D), in place.
    """
    _, H, _, D = keys.shape
    S, x = len(places), row.flatten()  # x (C,)
    query, key, value = _multiply(F.layer_norm(x, x.shape, *norm1), qkv).view(3, 1, H, 1, D).to(keys.dtype)
    keys.index_copy_(2, places[-1:], key)
    values.index_copy_(2, places[-1:], value)
    scores = (query / math.sqrt(D) * keys[:, :, :S]).sum(-1, keepdim=True)  # (1, H, S, 1)
    context = (torch.softmax(scores, dim=2) * values[:, :, :S]).sum(2)  # (1, H, D)
    x = x + _multiply(context.flatten(), out_proj)
    inner = F.gelu(_multiply(F.layer_norm(x, x.shape, *norm2), expand), approximate="tanh")  # (4C,)
    return (x + _multiply(inner, contract)).view_as(row)
