"""Before the first run on a kind of device that was never tested, compare its numerics with the CPU's."""

import contextlib
import math
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from gpt.console import print_line
from gpt.data.dataset_cache import DEFAULT_CACHE
from gpt.errors import UserError, is_out_of_memory, summarize_error
from gpt.files import write_text
from gpt.hardware.device import DTYPES
from gpt.model.fast.chunked_loss import chunked_next_token_loss
from gpt.model.transformer import GPT
from gpt.training import distributed
from gpt.training.module import GPTModule

TESTED_DEVICES = ("cpu",)
ROUNDING_ERROR = {"fp32": 2**-11, "bf16": 2**-8, "fp16": 2**-11}  # of a factor in a product; fp32 may be TF32
MAX_ROUNDING_ERRORS = 12  # by which a gradient may differ: at most 3 were seen, and 113 with a wrong kernel
WEIGHT_SCALE = 0.7  # with GPT-2's initial weights, the loss would hardly depend on attention


def check_device_numerics(module: GPTModule) -> None:
    """Compare the gradient of a small model on the configured device in its precision with the CPU's in fp32.

    The model has two layers, and the gradient is that of one sequence. A file in the cache lists the devices that have
    passed, each with its PyTorch version, precision and compile setting.

    Raises:
        UserError: The gradients differ by more than rounding explains, or the model cannot be compiled.
    """
    config, trainer = module.model.config, module.config.trainer
    if trainer.device in TESTED_DEVICES:
        return
    setting = torch.cuda.get_device_name() if trainer.device == "cuda" else trainer.device
    setting += f" with torch {torch.__version__}, precision={trainer.precision}, compile={trainer.compile}"
    passed_file = Path(module.config.data.cache or DEFAULT_CACHE) / "devices.txt"
    passed = passed_file.read_text(encoding="utf-8") if passed_file.exists() else ""
    if setting in passed.splitlines():
        return

    with torch.random.fork_rng(devices=[]):
        model = GPT(replace(config, num_layers=min(2, config.num_layers), dropout=0.0))
        for weight in model.blocks.parameters():
            if weight.dim() == 2:
                torch.nn.init.normal_(weight, 0.0, WEIGHT_SCALE / math.sqrt(weight.shape[1]))
        idx = torch.randint(config.vocab_size, (1, min(64, config.context_length)))
    cpu_loss, cpu_gradients = _loss_and_gradients(model, idx)
    model.set_compute_dtype(DTYPES[trainer.precision]).to(trainer.device)
    if trainer.compile == "true":
        model.compile_blocks()
    loss_scale = 1024.0 if trainer.precision == "fp16" else 1.0
    try:
        loss, gradients = _loss_and_gradients(model, idx.to(trainer.device), loss_scale)
    except Exception as error:
        if trainer.compile != "true" or is_out_of_memory(error):
            raise
        raise UserError(
            f"{setting}: compiling failed ({summarize_error(error)}): install what is missing, or start a new run with "
            "trainer.compile=false"
        ) from error

    differences = [(a - b).norm() for a, b in zip(gradients, cpu_gradients, strict=True)]
    norms = [gradient.norm() for gradient in cpu_gradients]
    gradient_error = float(torch.stack(differences).norm() / torch.stack(norms).norm())
    max_error = MAX_ROUNDING_ERRORS * ROUNDING_ERROR[trainer.precision]
    if not gradient_error <= max_error:  # also if it is NaN
        raise UserError(
            f"{setting}: the loss of a sequence is {loss:.4f} and {cpu_loss:.4f} on the CPU, and the gradient is off "
            f"by {gradient_error:.1%}, of which rounding explains {max_error:.1%}: try trainer.compile=false, "
            "trainer.precision=fp32, another PyTorch or trainer.device=cpu"
        )
    if distributed.is_main_process():
        print_line(
            f"{setting}: agrees with the CPU, the loss to {abs(loss / cpu_loss - 1):.4%}, "
            f"the gradient to {gradient_error:.2%}"
        )
        with contextlib.suppress(OSError):  # the cache of somebody else: the next run checks again
            write_text(passed_file, f"{passed}{setting}\n")


def _loss_and_gradients(model: GPT, idx: Tensor, scale: float = 1.0) -> tuple[float, list[Tensor]]:
    """Return the loss of idx (1, T) and the gradients, which are on the CPU. The first token follows the last."""
    model.zero_grad()
    hidden, head_weight = model.features_and_head(idx)
    loss = chunked_next_token_loss(hidden, head_weight, idx.roll(-1), scale, model.is_compiled)
    (loss * scale).backward()
    return loss.item(), [p.grad.cpu() / scale for p in model.parameters() if p.grad is not None]
