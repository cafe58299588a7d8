"""From the parts of a model in a file, which may come from anybody, to the model: every check of them is here.

Each check costs little and comes before what it protects: no memory is spent on a shape that the weights do not have.
Raises `ValueError` or `RuntimeError`, to which the callers add the name of the file.
"""

import textwrap
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from gpt.hardware import free_memory
from gpt.model.transformer import GPT, GPTConfig


def configure(shape: dict[str, Any]) -> GPTConfig:
    """Turn the shape of a model, with its vocabulary size, into a configuration whose types and ranges are right."""
    kinds = {field.name: field.type for field in fields(GPTConfig)}
    for name, value in shape.items():
        if name not in kinds:
            raise ValueError(f"its configuration has an unknown key {name!r}")
        if type(value) is not kinds[name] and (type(value), kinds[name]) != (int, float):
            raise ValueError(f"its {name} is {value!r}, of type {type(value).__name__}")
        if isinstance(value, int) and value.bit_length() > 63:
            raise ValueError(f"its {name} is a number of {value.bit_length():,} bits")
    return GPTConfig(**shape)


def assemble(config: GPTConfig, weights: dict[str, Tensor], copy: bool = False) -> GPT:
    """Build the fp32 model of a configuration in eval mode around its weights.

    Weights in fp32 are used as they are, unless they are to be copied.
    """
    _require_affordable(config, weights)
    for name, weight in weights.items():
        if not weight.is_floating_point():
            raise ValueError(f"its {name} is of type {weight.dtype}, and weights are floating-point numbers")
    if copy:
        whole = torch.contiguous_format
        weights = {name: w.to(torch.float32, copy=True, memory_format=whole) for name, w in weights.items()}
    model = GPT.from_state_dict(config, weights).eval()
    for name, parameter in model.named_parameters():
        if not is_finite(parameter):
            raise ValueError(f"its {name} is not finite")
    return model


def is_finite(tensor: Tensor) -> bool:
    """Whether a tensor has neither NaN nor infinite elements."""
    # A sum takes a twentieth of the time of `isfinite`, but may overflow.
    return bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all())


def _require_affordable(config: GPTConfig, weights: dict[str, Tensor]) -> None:
    """Raise `ValueError` where a model is larger than its weights, or its masks larger than the free memory."""
    needed, held = _parameters(config), sum(weight.numel() for weight in weights.values())
    layers = config.num_layers
    if needed > held or layers > len(weights):
        raise ValueError(
            f"its configuration describes {needed:,} weights in {layers:,} layers, and there are {held:,} in "
            f"{len(weights):,} tensors"
        )
    masks, free = (layers + 1) * config.context_length**2, free_memory(torch.device("cpu"))
    if masks > free:
        raise ValueError(
            f"the causal masks of {layers:,} layers for a context of {config.context_length:,} need {masks:,} bytes of "
            f"memory, and {free:,.0f} are free"
        )


def _parameters(config: GPTConfig) -> int:
    """Count the parameters of a model without building it: embeddings, blocks and final norm."""
    C = config.d_model
    per_block = 12 * C**2 + (10 + 3 * config.qkv_bias) * C
    return (config.vocab_size + config.context_length) * C + config.num_layers * per_block + 2 * C


def reason(error: BaseException) -> str:
    """Put what an error says into one line of bounded length."""
    return textwrap.shorten(str(error), 300, placeholder=" ...") or type(error).__name__
