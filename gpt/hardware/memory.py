"""Memory: how much is free, and how much was used."""

import ctypes
import gc
import platform
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import torch


def free_memory(device: torch.device, root: Path = Path("/")) -> float:
    """Return the bytes still free: the GPU's, or else what the system and its containers leave to this process.

    `root` is where /proc and /sys are; 8 GB is the guess for systems that have neither.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type == "mps":
        return max(0, torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory())
    return max(0, min([read_proc_bytes(root / "proc/meminfo", "MemAvailable") or 8e9, *_left_by_containers(root)]))


def read_proc_bytes(file: Path, key: str) -> int | None:
    """Read a figure such as "MemAvailable: 7 kB", in bytes; None on other systems than Linux."""
    try:
        return 1024 * int(file.read_text("utf-8").partition(f"{key}:")[2].split()[0])
    except (OSError, IndexError, ValueError):
        return None


def _left_by_containers(root: Path) -> Iterator[int]:
    """Yield what the memory limit of each control group around this process leaves (cgroups v2 and v1).

    Pages of files that nobody has read lately count as used, but the kernel drops them when memory runs short.
    """
    try:
        groups = [line.split(":", 2) for line in (root / "proc/self/cgroup").read_text("utf-8", "replace").splitlines()]
    except OSError:
        return
    for _, controllers, path in groups:
        mount, limit, used, cached = "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"
        if "memory" in controllers.split(","):  # of version 1
            mount, limit, used = "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            cached = "total_inactive_file"
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
    if peak := read_proc_bytes(Path("/proc/self/status"), "VmHWM"):
        return peak  # of this program alone: getrusage counts on from the one that started it
    try:
        import resource
    except ImportError:  # on Windows
        return 0
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def release_memory() -> None:
    """Return all unused memory to the system."""
    gc.collect()
    torch.cuda.empty_cache()  # which does nothing where CUDA is not in use
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
