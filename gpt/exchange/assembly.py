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


def configure(shape: dict[str, Any], weights: dict[str, Tensor]) -> GPTConfig:
    """Check the shape of a model, with its vocabulary size, against the weights of its file; return it as a config.

    The weights may be more than the model's, as in Hugging Face's files.
    """
    kinds = {field.name: field.type for field in fields(GPTConfig)}
    for name, value in shape.items():
        if name not in kinds:
            raise ValueError(f"its configuration has an unknown key {name!r}")
        if type(value) is not kinds[name] and (type(value), kinds[name]) != (int, float):
            raise ValueError(f"its {name} is {value!r}, of type {type(value).__name__}")
    config = GPTConfig(**shape)
    described, held = _parameters(config), sum(weight.numel() for weight in weights.values())
    if described > held or config.num_layers > len(weights):
        raise ValueError(
            f"its configuration describes {described:,} weights in {config.num_layers:,} layers, and there are "
            f"{held:,} in {len(weights):,} tensors"
        )
    masks, free = (config.num_layers + 1) * config.context_length**2, free_memory(torch.device("cpu"))
    if masks > free:
        raise ValueError(
            f"the causal masks of {config.num_layers:,} layers for a context of {config.context_length:,} need "
            f"{masks:,} bytes of memory, and {free:,.0f} are free"
        )
    return config


def _parameters(config: GPTConfig) -> int:
    """Count the parameters of a model without building it: embeddings, blocks and final norm."""
    C = config.d_model
    per_block = 12 * C**2 + (10 + 3 * config.qkv_bias) * C
    return (config.vocab_size + config.context_length) * C + config.num_layers * per_block + 2 * C


def assemble(config: GPTConfig, weights: dict[str, Tensor], copy: bool = False) -> GPT:
    """Build the fp32 model of a configuration that `configure` has checked, in eval mode, around its weights.

    Weights in fp32 are used as they are, unless they are to be copied.
    """
    for name, weight in weights.items():
        if not weight.is_floating_point():
            raise ValueError(f"its {name} is of type {weight.dtype}, and weights are floating-point numbers")
    if copy:
        whole = torch.contiguous_format
        weights = {name: w.to(torch.float32, copy=True, memory_format=whole) for name, w in weights.items()}
    model = GPT.from_state_dict(config, weights).eval()
    for name, parameter in model.named_parameters():
        if not torch.stack(torch.aminmax(parameter.detach())).isfinite().all():  # a tenth of the time of `isfinite`
            raise ValueError(f"its {name} is not finite")
    return model


def reason(error: BaseException) -> str:
    """Put what an error says into one line of bounded length."""
    return textwrap.shorten(str(error), 300, placeholder=" ...") or type(error).__name__
