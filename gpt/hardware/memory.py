"""Measure free and used memory."""

import ctypes
import gc
import platform
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from gpt.hardware.control_groups import control_groups


def free_memory(device: torch.device, root: Path = Path("/")) -> float:
    """Return the free bytes of the GPU, or the bytes that the system and its containers leave to this process.

    Memory of a GPU that PyTorch caches is free. `root` holds /proc and /sys. Other systems are assumed to have 8 GB.
    """
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    if device.type == "mps":
        return max(0, torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory())
    return max(
        0, min([read_proc_bytes(root / "proc/meminfo", "MemAvailable") or 8e9, *_free_bytes_of_containers(root)])
    )


def read_proc_bytes(file: Path, key: str) -> int | None:
    """Return a value such as "MemAvailable: 7 kB" in bytes. None on other systems than Linux."""
    try:
        return 1024 * int(file.read_text("utf-8").partition(f"{key}:")[2].split()[0])
    except (OSError, IndexError, ValueError):
        return None


def _free_bytes_of_containers(root: Path) -> Iterator[int]:
    """Yield the bytes left below the memory limit of each control group of this process (cgroups v2 and v1).

    Inactive pages of files count as used, but the kernel drops them when memory runs short.
    """
    names = {
        1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        2: ("memory.max", "memory.current", "inactive_file"),
    }
    for folder, version in control_groups("memory", root):
        limit, used, cached = names[version]
        try:
            free = int((folder / limit).read_text("utf-8")) - int((folder / used).read_text("utf-8"))
            stat = dict(line.split() for line in (folder / "memory.stat").read_text("utf-8").splitlines())
        except (OSError, ValueError):  # there is no such group, or no limit: "max"
            continue
        yield free + int(stat.get(cached, 0))


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak memory: of tensors on a GPU since `reset_peak_memory`, else of the whole process.

    0 on Windows.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = read_proc_bytes(Path("/proc/self/status"), "VmHWM")
    if peak:
        return peak  # getrusage would include the program that started this one
    try:
        import resource
    except ImportError:  # Windows
        return 0
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def reset_peak_memory(device: torch.device) -> None:
    """Forget the peak memory of throwaway models on a GPU. Does nothing on other devices."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def release_memory() -> None:
    """Return all unused memory to the system."""
    gc.collect()
    torch.cuda.empty_cache()  # does nothing if CUDA is not in use
    if torch.backends.mps.is_available():
        torch.mps.empty_cache()
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def forget_compiled_models() -> None:
    """Drop all compiled graphs, and the memory of throwaway models that they hold.

    A run then compiles for its own shapes alone, whatever was measured before it.
    """
    torch.compiler.reset()
    release_memory()


def keep_freed_memory() -> None:
    """Let glibc keep freed memory for the next step instead of returning it to the system.

    Every training step frees and allocates the same hundreds of megabytes. Page faults would cost 5 to 10 ms of a 40 ms
    step in a virtual machine. Does nothing with another C library.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    m_trim_threshold, m_top_pad, m_mmap_max = -1, -2, -4  # see mallopt(3)
    libc = ctypes.CDLL(None)
    libc.mallopt(m_mmap_max, 0)
    libc.mallopt(m_trim_threshold, 2**31 - 1)
    libc.mallopt(m_top_pad, 64 << 20)
