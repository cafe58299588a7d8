"""Which device, precision and kernels a computation takes."""

import contextlib
import functools
import os
import re
import shutil
import sys
from collections.abc import Iterator
from typing import Any

import torch

from gpt.console import print_line
from gpt.errors import UserError

OLDEST, NEWEST = "2.11", "2.15"  # PyTorch: what is needed at least, and the newest with which this was tried
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}  # of a model's products

# Dense bfloat16 peaks in FLOP/s from the vendors' data sheets. A name must match in full, apart from the words below:
# an L40 is no L4, an RTX A1000 no A100, and a laptop's RTX 4090 or a MIG slice of an A100 is slower than the card.
_PEAK_BF16 = {
    "B200": 2250e12, "H200": 989e12, "H100": 989e12, "H100 PCIE": 756e12, "A100": 312e12, "A100 PCIE": 312e12,
    "L40S": 362e12, "L4": 121e12, "A10": 125e12, "RTX 4090": 165e12, "RTX 3090": 71e12,
}  # fmt: skip
_PEAK_FP16 = _PEAK_BF16 | {"T4": 65e12, "V100": 125e12, "V100 PCIE": 112e12}  # the last three have no bf16

_IGNORED_WORDS = re.compile(r"NVIDIA|TESLA|GEFORCE|SXM\d?|HBM\d\w?|\d+GB")  # which do not change the peak


@functools.cache
def require_torch() -> None:
    """Raise `UserError` if PyTorch is too old; say so, once, if it is newer than any that was tried."""
    oldest, found, newest = ([int(n) for n in v.split(".")[:2]] for v in (OLDEST, torch.__version__, NEWEST))
    if found < oldest:
        raise UserError(f"PyTorch {torch.__version__} is too old: take {OLDEST} or newer (pip install --upgrade torch)")
    if found > newest:
        print_line(f"PyTorch {torch.__version__} is newer than {NEWEST}, the last that was tried", sys.stderr)


def choose_device(name: str = "auto") -> torch.device:
    """Return the named device; `auto` prefers CUDA, then Apple's MPS, then the CPU."""
    require_torch()
    found = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    available = [device for device in found if found[device]]
    if name == "auto":
        name = available[0]
    if name not in available:
        raise UserError(f"device {name!r} is not on this machine: choose from auto, {', '.join(available)}")
    if name == "cuda":  # for `numerics`: PyTorch looks once, at the first product
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    return torch.device(name)


def device_count(device: torch.device) -> int | None:
    """Count this machine's devices of a kind; None for a CPU, which can play any number of devices."""
    if device.type == "cuda":
        return torch.cuda.device_count()
    return 1 if device.type == "mps" else None


def choose_precision(name: str, device: torch.device) -> str:
    """Return `fp32`, `bf16` or `fp16`; `auto` takes bf16 where the device multiplies it faster than fp32.

    CUDA cards without bf16 (T4, V100, RTX 20) get fp16.
    """
    if name != "auto":
        return name
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    has = torch.cpu.get_capabilities() if device.type == "cpu" else {}
    # Without AMX, which a virtual machine may hide, Intel's cores multiply bf16 at half the speed of fp32.
    is_fast = has.get("amx_bf16") or (has.get("avx512_bf16") and "Intel" not in has.get("cpu_name", ""))
    return "bf16" if is_fast else "fp32"


def choose_compile(name: str, device: torch.device) -> bool:
    """Decide whether to compile the model; `auto` compiles on CUDA if Triton finds a C compiler."""
    if name == "true" and device.type == "cpu":
        raise UserError("trainer.compile=true is for GPUs; on a CPU it would hardly be faster: leave it out")
    if name != "auto":
        return name == "true"
    return device.type == "cuda" and shutil.which("cc") is not None


@contextlib.contextmanager
def numerics(device: str, deterministic: bool) -> Iterator[None]:
    """Compute in this block as a training on `device` does; PyTorch's settings are restored afterwards.

    On CUDA, fp32 matrices are multiplied in TF32: factors of ten bits where bf16 has seven, and sums in fp32.
    `deterministic` chooses kernels that add up in a fixed order (fused attention too, and no autotuning); an operation
    without one raises `RuntimeError`. On a CPU, neither changes a bit.
    """
    precision, fixed = torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()
    memory: Any = torch.utils.deterministic
    filling = memory.fill_uninitialized_memory
    if device == "cuda":
        torch.set_float32_matmul_precision("high")
    if deterministic != fixed:
        torch.use_deterministic_algorithms(deterministic)
    memory.fill_uninitialized_memory = False  # a debugging aid, which would take time
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)
        if deterministic != fixed:
            torch.use_deterministic_algorithms(fixed)
        memory.fill_uninitialized_memory = filling


def peak_flops(device: torch.device, precision: str) -> float | None:
    """Return a known GPU's peak matrix FLOP/s in bf16 or fp16, from its data sheet; None for anything else."""
    if device.type != "cuda":
        return None
    words = re.split(r"[\s-]+", torch.cuda.get_device_name(device).upper().strip())
    card = " ".join(word for word in words if not _IGNORED_WORDS.fullmatch(word))
    return {"bf16": _PEAK_BF16, "fp16": _PEAK_FP16}.get(precision, {}).get(card)
