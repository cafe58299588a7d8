"""From the parts of a model in a file, which may come from anybody, to the model.

Raises `ValueError` or `RuntimeError`, to which the callers add the name of the file.
"""

import textwrap
from dataclasses import fields
from typing import Any

from torch import Tensor

from gpt.model.transformer import GPT, GPTConfig


def build_config(shape: dict[str, Any]) -> GPTConfig:
    """Turn the shape of a model, with its vocabulary size, into a configuration whose types and ranges are right."""
    kinds = {field.name: field.type for field in fields(GPTConfig)}
    for name, value in shape.items():
        if name not in kinds:
            raise ValueError(f"its configuration has an unknown key {name!r}")
        kind = kinds[name]
        if isinstance(kind, type) and type(value) is not kind and (type(value), kind) != (int, float):
            raise ValueError(f"its {name} is {value!r}, of type {type(value).__name__}")
    return GPTConfig(**shape)


def build_model(config: GPTConfig, weights: dict[str, Tensor]) -> GPT:
    """Build the fp32 model of a configuration in eval mode around its weights, uncopied where they are in fp32."""
    needed, held = config.num_parameters, sum(weight.numel() for weight in weights.values())
    if needed > held:
        raise ValueError(f"its configuration describes {needed:,} weights, and there are {held:,}")
    for name, weight in weights.items():
        if not weight.is_floating_point():
            raise ValueError(f"its {name} is of type {weight.dtype}, and weights are floating-point numbers")
    model = GPT.from_state_dict(config, weights).eval()
    for name, parameter in model.named_parameters():
        if not is_finite(parameter):
            raise ValueError(f"its {name} is not finite")
    return model


def is_finite(tensor: Tensor) -> bool:
    """Whether a tensor has neither NaN nor infinite elements."""
    # A sum takes a twentieth of the time of `isfinite`, but may overflow.
    return bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all())


def reason(error: BaseException) -> str:
    """Put what an error says into one line of bounded length."""
    return textwrap.shorten(str(error), 300, placeholder=" ...") or type(error).__name__
