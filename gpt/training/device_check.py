"""A device on which nobody has tried this project checks itself, before its first run there."""

import contextlib
import math
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from gpt.console import print_line
from gpt.data.dataset_cache import DEFAULT_CACHE
from gpt.errors import UserError
from gpt.files import write_text
from gpt.hardware.device import DTYPES
from gpt.model.fast.chunked_loss import chunked_next_token_loss
from gpt.model.transformer import GPT
from gpt.training import distributed
from gpt.training.module import GPTModule

TESTED_DEVICES = ("cpu",)
ROUNDING = {"fp32": 2**-11, "bf16": 2**-8, "fp16": 2**-11}  # of one factor of a product; that of fp32 is TF32's
MOST_ROUNDINGS = 12  # by which a gradient may be off: at most 3 were seen, and 113 where a kernel was wrong
SCALE = 0.7  # of the blocks' weights, over the root of what each adds up: GPT-2's first ones hardly use attention


def check_device_numerics(module: GPTModule) -> None:
    """Hold a gradient on the configured device against the CPU's in fp32; `UserError` if rounding cannot explain it.

    It is that of one window and two layers. A file in the cache remembers the devices that agree, each with its
    PyTorch, precision and compile setting.
    """
    config, trainer = module.model.config, module.config.trainer
    if trainer.device in TESTED_DEVICES:
        return
    setting = torch.cuda.get_device_name() if trainer.device == "cuda" else trainer.device
    setting += f" with torch {torch.__version__}, precision={trainer.precision}, compile={trainer.compile}"
    known = Path(module.config.data.cache or DEFAULT_CACHE) / "devices.txt"
    if setting in (before := known.read_text(encoding="utf-8") if known.exists() else "").splitlines():
        return
    with torch.random.fork_rng(devices=[]):
        model = GPT(replace(config, num_layers=min(2, config.num_layers), dropout=0.0))
        for weight in filter(lambda weight: weight.dim() == 2, model.blocks.parameters()):
            torch.nn.init.normal_(weight, 0.0, SCALE / math.sqrt(weight.shape[1]))
        idx = torch.randint(config.vocab_size, (1, min(64, config.context_length)))
    loss, gradient = _loss_and_gradient(model, idx)
    model.set_compute_dtype(DTYPES[trainer.precision]).to(trainer.device)
    if trainer.compile == "true":
        for block in model.blocks:
            block.compile()
    their_loss, theirs = _loss_and_gradient(
        model, idx.to(trainer.device), 1024.0 if trainer.precision == "fp16" else 1.0
    )
    if trainer.compile == "true":
        torch.compiler.reset()  # the run has other shapes, and should be compiled for them alone
    distance = torch.stack([(a - b).norm() for a, b in zip(theirs, gradient, strict=True)]).norm()
    off = float(distance / torch.stack([part.norm() for part in gradient]).norm())
    limit = MOST_ROUNDINGS * ROUNDING[trainer.precision]
    if not off <= limit:  # nor if it is not a number
        raise UserError(
            f"{setting}: the loss of a window is {their_loss:.4f} where the CPU has {loss:.4f}, and the gradient is "
            f"off by {off:.1%}, of which rounding explains {limit:.1%}: try trainer.compile=false, "
            "trainer.precision=fp32, another PyTorch or trainer.device=cpu"
        )
    if distributed.is_main_process():
        print_line(
            f"{setting}: agrees with the CPU, the loss to {abs(their_loss / loss - 1):.4%}, the gradient to {off:.2%}"
        )
        with contextlib.suppress(OSError):  # of a cache that others fill: the next run looks again
            write_text(known, f"{before}{setting}\n")


def _loss_and_gradient(model: GPT, idx: Tensor, scale: float = 1.0) -> tuple[float, list[Tensor]]:
    """The loss of a window idx (1, T), whose last token is followed by its first, and the gradients, on the CPU."""
    model.zero_grad()
    loss = chunked_next_token_loss(*model.features_and_head(idx), idx.roll(-1), scale)
    (loss * scale).backward()
    return loss.item(), [p.grad.cpu() / scale for p in model.parameters() if p.grad is not None]
