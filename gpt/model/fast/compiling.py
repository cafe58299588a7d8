"""Training with compiled blocks: the same step, faster after a wait."""

import torch
from torch import Tensor

from gpt.model.attention import KVCache
from gpt.model.transformer import GPT


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
