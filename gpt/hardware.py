"""What the machine can do, and the choices that follow from it: device, precision, compilation, memory."""

import ctypes
import gc
import platform
import resource
import shutil
import time
from pathlib import Path

import torch

from gpt.errors import UserError

# Dense bfloat16 peaks in FLOP/s from the vendors' data sheets, by a part of the device's name.
_PEAK_BF16 = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10": 125e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
}


def choose_device(name: str = "auto") -> torch.device:
    """The device by its name, or the best there is for `auto`: CUDA, then Apple's MPS, then the CPU."""
    there = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if name == "auto":
        name = next(device for device in ("cuda", "mps", "cpu") if there[device])
    if name not in there:
        raise UserError(f"device {name!r} is not known: choose from auto, {', '.join(there)}")
    if not there[name]:
        raise UserError(f"device {name!r} is not on this machine: choose auto or cpu")
    return torch.device(name)


def require_devices(device: torch.device, count: int) -> None:
    """Raise `UserError` where the machine has fewer such devices; a CPU counts as any number, for trying things out."""
    there = {"cuda": torch.cuda.device_count(), "mps": 1}.get(device.type, count)
    if count > there:
        raise UserError(f"trainer.devices={count} is more than this machine has: at most {there} of {device.type}")


def choose_precision(name: str, device: torch.device) -> str:
    """`fp32` or `bf16`; for `auto`, bf16 where the device multiplies it in hardware, at least twice as fast."""
    if name != "auto":
        return name
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
    return "bf16" if device.type == "cpu" and _cpu_multiplies_bf16() else "fp32"


def _cpu_multiplies_bf16() -> bool:
    return platform.machine() == "x86_64" and torch.cpu._is_avx512_bf16_supported()


def choose_compile(name: str, device: torch.device) -> bool:
    """Whether to compile the model; for `auto`, on CUDA where a C compiler is there for Triton.

    On a CPU it saves about 5% of the mini model's step and costs 13 to 23 s, more than a short run gives back.
    """
    if name != "auto":
        return name == "true"
    return device.type == "cuda" and shutil.which("cc") is not None


def choose_micro_batch(windows: int, context_length: int, d_model: int, num_layers: int, device: torch.device) -> int:
    """How many of a step's `windows` to take through the model at once: the most that half the free memory holds.

    A token leaves about 34 C numbers a layer behind for the backward pass (Korthikanti et al. 2022), at 2 to 4 bytes.
    On a CPU more than 4,096 tokens at once bring no speed.
    """
    per_window = context_length * num_layers * d_model * 34 * 4
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else _free_memory()
    most = max(1, int(free / 2 // per_window))
    if device.type == "cpu":
        most = min(most, max(1, 4096 // context_length))
    return max(size for size in range(1, min(most, windows) + 1) if windows % size == 0)


def _free_memory() -> float:
    info = Path("/proc/meminfo")
    if info.exists():
        fields = dict(line.split(":") for line in info.read_text().splitlines())
        return int(fields["MemAvailable"].split()[0]) * 1024
    return 8e9


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory held at once so far: on the GPU by tensors, else by the whole process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if platform.system() == "Darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory did not suffice, on whichever device."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


def peak_flops(device: torch.device, precision: str) -> float | None:
    """Matrix FLOP/s at best: from the data sheet of a known GPU in bf16, measured on a CPU, else None."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        known = next((peak for part, peak in _PEAK_BF16.items() if part in name), None)
        return known if precision == "bf16" else None
    if device.type != "cpu":
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


def release_memory() -> None:
    """Give back to the system all memory that nothing uses any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def keep_freed_memory() -> None:
    """Have glibc keep freed memory for the next step instead of returning it to the system.

    A training step frees and takes the same hundreds of megabytes each time; with every page faulted in anew this costs
    5 to 10 ms of a 40 ms step in a virtual machine. Does nothing where the C library is another.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    m_trim_threshold, m_top_pad, m_mmap_max = -1, -2, -4  # names of mallopt(3)
    libc = ctypes.CDLL(None)
    libc.mallopt(m_mmap_max, 0)
    libc.mallopt(m_trim_threshold, 2**31 - 1)
    libc.mallopt(m_top_pad, 64 << 20)
