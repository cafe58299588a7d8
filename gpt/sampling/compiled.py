"""Sampling one text with compiled blocks."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn

from gpt.model.attention import KVCache
from gpt.model.fast import single_token
from gpt.model.transformer import TransformerBlock


def compile_block(block: TransformerBlock) -> None:
    """Make a block handle a single token of a single text in one compiled function, and anything else as before.

    All blocks share the function, and PyTorch caches what it compiled on disk.
    """
    plain, weights, mask = block.forward, single_token.weights_of(block), block.attention.mask
    all_places = torch.arange(len(mask), device=mask.device)

    def forward(x: Tensor, cache: KVCache | None = None, blocked: Tensor | None = None) -> Tensor:
        # The compiler would treat an empty and a full cache as cases of their own.
        if cache is None or x.numel() != x.shape[-1] or not 0 < cache.length < cache.capacity - 1:
            return plain(x, cache, blocked)
        places = all_places[: cache.length + 1]
        torch._dynamo.mark_dynamic(places, 0, min=2, max=cache.capacity - 1)
        cache.length += 1
        return _compiled(single_token.transform)(x, places, cache.keys, cache.values, *weights)

    block.forward = forward  # type: ignore[method-assign]


def compile_head(head: nn.Module) -> None:
    """Make the output head compute the logits of a single row in a compiled product."""
    plain, weights = head.forward, single_token.map_of(head)

    def forward(x: Tensor) -> Tensor:
        if x.numel() != x.shape[-1]:
            return plain(x)
        return _compiled(single_token.multiply)(x.flatten(), weights).view(*x.shape[:-1], -1)

    head.forward = forward


@functools.cache
def _compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    options = {
        "realize_opcount_threshold": 6,  # or else every row of a product would compute the norm before it again
        "cpp.enable_floating_point_contract_flag": "fast",
        "size_asserts": False,  # `torch.compile` has compared the sizes already, in a fraction of the time
    }
    return torch.compile(function, dynamic=False, options=options)  # type: ignore[arg-type]
