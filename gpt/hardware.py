"""What the machine offers, and what follows from it: device, precision, compilation, memory."""

import contextlib
import ctypes
import gc
import os
import platform
import re
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from gpt.errors import UserError

DAMAGED = "the model's logits are not finite, so it is damaged: use another checkpoint"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}  # of a model's products

# Dense bfloat16 peaks in FLOP/s from the vendors' data sheets. A name must match in full, apart from the words below:
# an L40 is no L4, an RTX A1000 no A100, and a laptop's RTX 4090 or a MIG slice of an A100 is slower than the card.
_PEAK_BF16 = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100": 989e12,
    "H100 PCIE": 756e12,
    "A100": 312e12,
    "A100 PCIE": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10": 125e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
}
_PEAK_FP16 = _PEAK_BF16 | {"T4": 65e12, "V100": 125e12, "V100 PCIE": 112e12}  # the last three have no bf16
_IGNORED_WORDS = re.compile(r"NVIDIA|TESLA|GEFORCE|SXM\d?|HBM\d\w?|\d+GB")  # which do not change the peak

_OUT_OF_MEMORY = (
    "can't allocate memory",  # PyTorch's CPU allocator
    "not enough memory: you tried to allocate",  # the same on Windows
    "CUDA out of memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "MPS backend out of memory",
)


def choose_device(name: str = "auto") -> torch.device:
    """Return the named device; `auto` prefers CUDA, then Apple's MPS, then the CPU."""
    available = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if name == "auto":
        name = next(device for device in ("cuda", "mps", "cpu") if available[device])
    if name not in available:
        raise UserError(f"device {name!r} is not known: choose from auto, {', '.join(available)}")
    if not available[name]:
        raise UserError(f"device {name!r} is not on this machine: choose auto or cpu")
    if name == "cuda":  # for `arithmetic`: PyTorch looks once, at the first product
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    return torch.device(name)


def device_count(device: torch.device) -> int | None:
    """Count this machine's devices of a kind; None for a CPU, which can play any number of devices."""
    if device.type == "cuda":
        return torch.cuda.device_count()
    return 1 if device.type == "mps" else None


def choose_precision(name: str, device: torch.device) -> str:
    """Return `fp32`, `bf16` or `fp16`; `auto` takes bf16 where the device multiplies it in hardware, twice as fast.

    CUDA cards without bf16 (T4, V100, RTX 20) get fp16. `UserError` if the device cannot multiply in fp16.
    """
    if name == "fp16":
        try:
            torch.ones(2, 2, dtype=torch.float16, device=device) @ torch.ones(2, 2, dtype=torch.float16, device=device)
        except (RuntimeError, TypeError):
            raise UserError(f"trainer.precision=fp16 is not available on {device.type}: choose fp32, or auto") from None
    if name != "auto":
        return name
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    return "bf16" if device.type == "cpu" and _cpu_multiplies_bf16() else "fp32"


def _cpu_multiplies_bf16() -> bool:
    return platform.machine() == "x86_64" and torch.cpu._is_avx512_bf16_supported()


def choose_compile(name: str, device: torch.device) -> bool:
    """Decide whether to compile the model; `auto` compiles on CUDA if Triton finds a C compiler.

    On a CPU, compiling saves about 8% of the mini model's step and costs 35 s, more than a short run gets back.
    `UserError` if it is asked for there without a C++ compiler.
    """
    if name == "true" and device.type == "cpu":
        require_compiler()
    if name != "auto":
        return name == "true"
    return device.type == "cuda" and shutil.which("cc") is not None


def require_compiler() -> None:
    """Raise `UserError` if there is no C++ compiler, which compiling for a CPU needs."""
    if not any(map(shutil.which, ("c++", "g++", "clang++", "cl"))):
        raise UserError("compiling needs a C++ compiler, such as g++: install one, or do not compile")


def choose_micro_batch(windows: int, context_length: int, d_model: int, num_layers: int, device: torch.device) -> int:
    """Choose how many of a step's `windows` go through the model at once: as many as fit into half the free memory.

    A token leaves about 34 C numbers per layer for the backward pass (Korthikanti et al. 2022), each of 2 to 4 bytes.
    On a CPU, more than 4,096 tokens at once are no faster.
    """
    per_window = context_length * num_layers * d_model * 34 * 4
    most = max(1, int(free_memory(device) / 2 // per_window))
    if device.type == "cpu":
        most = min(most, max(1, 4096 // context_length))
    return max(size for size in range(1, min(most, windows) + 1) if windows % size == 0)


def free_memory(device: torch.device, root: Path = Path("/")) -> float:
    """Return the bytes still free: the GPU's, or else what the system and its containers leave to this process.

    `root` is where /proc and /sys are; 8 GB is the guess for systems that have neither.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type == "mps":
        return max(0, torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory())
    free = 8e9
    try:
        fields = dict(line.split(":", 1) for line in (root / "proc/meminfo").read_text("utf-8").splitlines())
        free = int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        pass
    return max(0, min([free, *_left_by_containers(root)]))


def _left_by_containers(root: Path) -> Iterator[int]:
    """Yield what the memory limit of each control group around this process leaves (cgroups v2 and v1).

    Pages of files that nobody has read lately count as used, but the kernel drops them when memory runs short.
    """
    try:
        groups = [line.split(":", 2) for line in (root / "proc/self/cgroup").read_text("utf-8", "replace").splitlines()]
    except OSError:
        return
    for _, controllers, path in groups:
        if controllers == "":
            mount, limit, used, cached = "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            mount, limit, used = "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            cached = "total_inactive_file"
        else:
            continue
        group = PurePosixPath(path.lstrip("/"))
        for part in (group, *group.parents):
            folder = root / mount / part
            try:
                left = int((folder / limit).read_text("utf-8")) - int((folder / used).read_text("utf-8"))
                stat = dict(line.split() for line in (folder / "memory.stat").read_text("utf-8").splitlines())
            except (OSError, ValueError):  # no such group here, or no limit: "max"
                continue
            yield left + int(stat.get(cached, 0))


def peak_memory_bytes(device: torch.device) -> int:
    """Return the most memory held at once so far: by tensors on a GPU, else by the whole process; 0 on Windows."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:  # of this program alone: getrusage counts on from the one that started it
        status = Path("/proc/self/status").read_text("utf-8")
        return 1024 * int(status.partition("VmHWM:")[2].split()[0])
    except (OSError, IndexError, ValueError):
        pass
    try:
        import resource
    except ImportError:  # on Windows
        return 0
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


@contextlib.contextmanager
def arithmetic(device: str, deterministic: bool) -> Iterator[None]:
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


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an error means that memory ran out, on any device."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(message in str(error) for message in _OUT_OF_MEMORY)


@contextlib.contextmanager
def explained(remedy: str) -> Iterator[None]:
    """Turn running out of memory, which `remedy` answers, and logits that are not finite into `UserError`."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise UserError(f"memory has run out: {remedy}, or close other programs") from None
        if "probability tensor contains" in str(error):
            raise UserError(DAMAGED) from None
        raise


def peak_flops(device: torch.device, precision: str) -> float | None:
    """Return the peak matrix FLOP/s: a known GPU's data sheet for bf16 and fp16, a measurement on a CPU, else None."""
    if device.type == "cuda":
        peaks = {"bf16": _PEAK_BF16, "fp16": _PEAK_FP16}.get(precision, {})
        return peaks.get(_card(torch.cuda.get_device_name(device)))
    if device.type != "cpu" or precision == "fp16":  # few CPUs multiply fp16 in hardware; others take a minute
        return None
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    n = 1024
    a = torch.ones(n, n, dtype=dtype)
    a @ a
    times = []
    for _ in range(7):
        start = time.perf_counter()
        a @ a
        times.append(time.perf_counter() - start)
    return 2 * n**3 / min(times)


def _card(name: str) -> str:
    """A card's name as in the tables of peaks."""
    words = re.split(r"[\s-]+", name.upper().strip())
    return " ".join(word for word in words if not _IGNORED_WORDS.fullmatch(word))


def release_memory() -> None:
    """Return all unused memory to the system."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if torch.backends.mps.is_available():
        torch.mps.empty_cache()
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def keep_freed_memory() -> None:
    """Make glibc keep freed memory for the next step instead of returning it to the system.

    Every training step frees and allocates the same hundreds of megabytes; faulting their pages in again costs 5 to
    10 ms of a 40 ms step in a virtual machine. Does nothing with another C library.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    m_trim_threshold, m_top_pad, m_mmap_max = -1, -2, -4  # as mallopt(3) names them
    libc = ctypes.CDLL(None)
    libc.mallopt(m_mmap_max, 0)
    libc.mallopt(m_trim_threshold, 2**31 - 1)
    libc.mallopt(m_top_pad, 64 << 20)
