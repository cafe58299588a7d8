"""Sampling one text with compiled blocks."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn

from gpt.errors import UserError
from gpt.hardware import require_compiler
from gpt.model import single_token
from gpt.model.attention import KVCache
from gpt.model.transformer import TransformerBlock


def require_compilable(rows: int) -> None:
    """Raise `UserError` where compiling would not help or cannot work."""
    if rows > 1:
        raise UserError(f"compiling is for a single text, and these are {rows}: sample one, or do not compile")
    require_compiler()


class CompiledBlock(nn.Module):
    """A block that handles a single token of a single text in one compiled function, and anything else as before.

    All blocks share the function, and PyTorch caches what it compiled on disk.
    """

    def __init__(self, block: TransformerBlock):
        super().__init__()
        self.block = block
        mask = block.attention.mask
        self._places = torch.arange(len(mask), device=mask.device)
        self._weights = single_token.weights_of(block)

    @property
    def attention(self) -> nn.Module:
        return self.block.attention

    @property
    def feed_forward(self) -> nn.Module:
        return self.block.feed_forward

    def forward(self, x: Tensor, cache: KVCache | None = None, blocked: Tensor | None = None) -> Tensor:
        # The compiler would treat an empty and a full cache as cases of their own.
        if cache is None or x.numel() != x.shape[-1] or not 0 < cache.length < cache.capacity - 1:
            return self.block(x, cache, blocked)
        places = self._places[: cache.length + 1]
        torch._dynamo.mark_dynamic(places, 0, min=2, max=cache.capacity - 1)
        cache.length += 1
        return _compiled(single_token.transform)(x, places, cache.keys, cache.values, *self._weights)


class CompiledHead(nn.Module):
    """The output head, with a compiled product for a single row."""

    def __init__(self, linear: nn.Module):
        super().__init__()
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        if x.numel() != x.shape[-1]:
            return self.linear(x)
        return _compiled(single_token.multiply)(x.flatten(), single_token.map_of(self.linear)).view(*x.shape[:-1], -1)


@functools.cache
def _compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    options = {
        "realize_opcount_threshold": 6,  # or else every row of a product would compute the norm before it again
        "cpp.enable_floating_point_contract_flag": "fast",
        "size_asserts": False,  # `torch.compile` has compared the sizes already, in a fraction of the time
    }
    return torch.compile(function, dynamic=False, options=options)  # type: ignore[arg-type]
