"""Choose the device, the precision and the kernels of a computation."""

import contextlib
import functools
import os
import re
import sys
from collections.abc import Iterator
from typing import Any

import torch

from gpt.console import print_line
from gpt.errors import UserError
from gpt.hardware.gpu_problems import find_compile_problem, find_gpu_problem, find_triton_problem

MIN_TORCH = "2.11"
NEWEST_TESTED_TORCH = "2.15"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}  # the precision of a model's products

# Dense bfloat16 peaks in FLOP/s from the vendors' data sheets. The whole name must match, except for ignored words. An
# L40 is not an L4, an RTX A1000 is not an A100. A laptop's RTX 4090 or a MIG slice of an A100 is slower than the card.
_PEAK_BF16 = {
    "B300": 2250e12, "B200": 2250e12, "GH200": 989e12, "H200": 989e12, "H200 NVL": 835e12, "H100": 989e12,
    "H100 NVL": 835e12, "H100 PCIE": 756e12, "H800": 989e12, "H20": 148e12, "A100": 312e12, "A100 PCIE": 312e12,
    "A800": 312e12, "A40": 150e12, "A10": 125e12, "L40S": 362e12, "L40": 181e12, "L4": 121e12,
    "RTX 6000 ADA GENERATION": 364e12, "RTX A6000": 155e12, "RTX 5090": 209e12, "RTX 4090": 165e12,
    "RTX 4080": 97e12, "RTX 3090": 71e12, "RTX 3080": 60e12,
}  # fmt: skip
_PEAK_FP16 = _PEAK_BF16 | {"T4": 65e12, "V100": 125e12, "V100 PCIE": 112e12}  # T4 and V100 have no bf16

_IGNORED_WORDS = re.compile(r"NVIDIA|TESLA|GEFORCE|SXM\d?|HBM\d\w?|\d+GB")  # they do not change the peak


@functools.cache
def require_torch() -> None:
    """Raise `UserError` if PyTorch is too old. Print a line, once, if it is newer than the tested versions."""
    current = _major_minor(torch.__version__)
    if current < _major_minor(MIN_TORCH):
        upgrade = f"install {MIN_TORCH} or newer (pip install --upgrade torch)"
        raise UserError(f"PyTorch {torch.__version__} is too old: {upgrade}")
    if current > _major_minor(NEWEST_TESTED_TORCH):
        print_line(f"PyTorch {torch.__version__} is newer than {NEWEST_TESTED_TORCH}, the last tested", sys.stderr)


def _major_minor(version: str) -> list[int]:
    return [int(number) for number in version.split(".")[:2]]


def choose_device(name: str = "auto") -> torch.device:
    """Return the named device. `auto` prefers CUDA, then Apple's MPS, then the CPU.

    If `auto` cannot use a GPU of this machine, a line gives the reason. "cpu" touches no GPU.
    """
    require_torch()
    if name == "cpu":
        return torch.device(name)
    problem = find_gpu_problem()
    is_available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    available = [device for device in is_available if is_available[device] and not (device == "cuda" and problem)]
    if name == "auto":
        name = available[0]
        if problem:
            _print_once(f"{problem}: the device is {name}")
    if name not in available:
        reason = f"; {problem}" if problem else ""
        raise UserError(f"device {name!r} is not on this machine: choose from auto, {', '.join(available)}{reason}")
    if name == "cuda":  # `numerics` needs it; PyTorch reads it at the first product
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    return torch.device(name)


@functools.cache
def _print_once(line: str) -> None:
    print_line(line, sys.stderr)


def device_count(device: torch.device) -> int | None:
    """Return the number of this machine's devices of one type. None for a CPU: it can run any number of processes."""
    if device.type == "cuda":
        return torch.cuda.device_count()
    return 1 if device.type == "mps" else None


def choose_precision(name: str, device: torch.device) -> str:
    """Return `fp32`, `bf16` or `fp16`. `auto` chooses bf16 if the device multiplies it faster than fp32.

    `auto` chooses fp16 for CUDA cards without bf16 (T4, V100, RTX 20).
    """
    if name != "auto":
        return name
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    cpu = torch.cpu.get_capabilities() if device.type == "cpu" else {}
    # Intel's cores without AMX multiply bf16 at half the speed of fp32. A virtual machine may hide AMX.
    is_fast = cpu.get("amx_bf16") or (cpu.get("avx512_bf16") and "Intel" not in cpu.get("cpu_name", ""))
    return "bf16" if is_fast else "fp32"


def choose_compile(name: str, device: torch.device) -> bool:
    """Return True if the model should be compiled. `auto` compiles on CUDA, if that works.

    Raises:
        UserError: `true` was chosen, and compiling does not work.
    """
    if name == "true" and device.type == "cpu":
        raise UserError("trainer.compile=true is for GPUs; on a CPU it would hardly be faster: leave it out")
    if name == "false" or (name == "auto" and device.type != "cuda"):
        return False
    problem = (device.type == "cuda" and find_triton_problem(device)) or find_compile_problem(device)
    if problem and name == "true":
        raise UserError(f"trainer.compile=true: {problem}; leave it out to train without compiling")
    if problem:
        _print_once(f"trainer.compile=false, which is slower: {problem}")
    return not problem


@contextlib.contextmanager
def numerics(device: str, deterministic: bool) -> Iterator[None]:
    """Compute in this block as a training on `device` does. PyTorch's settings are restored afterwards.

    On CUDA, fp32 matrices are multiplied in TF32: factors have ten bits (bf16 has seven), and sums are in fp32.
    `deterministic` chooses kernels that add in a fixed order, also for fused attention, and no autotuning. An operation
    without such a kernel raises `RuntimeError`. On a CPU, neither changes a bit.
    """
    matmul_precision = torch.get_float32_matmul_precision()
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    debugging: Any = torch.utils.deterministic
    fills_memory = debugging.fill_uninitialized_memory
    if device == "cuda":
        torch.set_float32_matmul_precision("high")
    if deterministic != was_deterministic:
        torch.use_deterministic_algorithms(deterministic)
    debugging.fill_uninitialized_memory = False  # it would take time
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(matmul_precision)
        if deterministic != was_deterministic:
            torch.use_deterministic_algorithms(was_deterministic)
        debugging.fill_uninitialized_memory = fills_memory


@contextlib.contextmanager
def without_cudnn_attention() -> Iterator[None]:
    """Let PyTorch choose no attention kernel of cuDNN in this block. The setting is restored afterwards.

    cuDNN plans each new length, for about 0.4 s, so every sampled token would wait for a plan. On a B200 it also
    corrupts sampled text (pytorch#193893). Training has fixed lengths, and cuDNN is the fastest there.
    """
    was_enabled = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(was_enabled)


@contextlib.contextmanager
def default_settings() -> Iterator[None]:
    """Run this block with PyTorch's default precision and with gradients, whatever a notebook has set.

    The settings are restored afterwards, and so is the state of the global random generators. Raises `UserError` for a
    default device other than the CPU.
    """
    device = torch.get_default_device()
    if device.type != "cpu":
        hint = "undo it with torch.set_default_device(None), and choose one with trainer={'device': ...}"
        raise UserError(f"PyTorch's default device is {str(device)!r}, and tensors on the CPU are needed: {hint}")
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
    try:
        with (
            torch.random.fork_rng(gpus),
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.autocast("cpu", enabled=False),
            torch.autocast("cuda", enabled=False),
        ):
            yield
    finally:
        torch.set_default_dtype(dtype)


def peak_flops(device: torch.device, precision: str) -> float | None:
    """Return a known GPU's peak FLOP/s in bf16 or fp16, from its data sheet. None for other devices."""
    if device.type != "cuda":
        return None
    words = re.split(r"[\s-]+", torch.cuda.get_device_name(device).upper().strip())
    card = " ".join(word for word in words if not _IGNORED_WORDS.fullmatch(word))
    return {"bf16": _PEAK_BF16, "fp16": _PEAK_FP16}.get(precision, {}).get(card)
