"""Threads that take no more than this process's share of the processors.

A container's quota limits time. All processors stay visible, and with a thread on each of them the threads would mostly
wait. So no more threads compute than fit into the quota.

libgomp's threads spin at the end of every parallel operation. That makes small steps faster on an idle machine. If
another program needs a core, a thread spins on it while another thread with work waits: training falls to a quarter of
its speed, sampling to a twentieth. libgomp spins only briefly if its threads outnumber the processors. A second, idle
team of threads therefore stops the spinning, and ending that team resumes it. The number of compute threads stays the
same, and so does every result.
"""

import contextlib
import ctypes
import math
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from gpt.hardware.control_groups import control_groups

POLL_SECONDS = 0.2
MAX_WAITING_THREADS = 0.4  # on average, without a processor: with more, sleeping is faster than spinning
SLEEP_SECONDS = 5.0  # then the threads spin again, because contention shows best while spinning
_TASKS = Path("/proc/self/task")
_PAUSE_HARD = 2  # ends the calling thread's team


def cpu_quota(root: Path = Path("/")) -> float:
    """Return how many processors' time the control groups of this process allow; infinity without a limit."""
    quotas = [math.inf]
    for folder, version in control_groups("cpu", root):
        names = ["cpu.max"] if version == 2 else ["cpu.cfs_quota_us", "cpu.cfs_period_us"]
        with contextlib.suppress(OSError, ValueError):  # there is no such group, or no limit: "max"
            quota, period = map(int, " ".join((folder / name).read_text("utf-8") for name in names).split())
            if quota > 0:  # version 1 has -1 for no limit
                quotas.append(quota / period)
    return min(quotas)


@contextlib.contextmanager
def limit_threads() -> Iterator[None]:
    """Run the block with at most `available_threads()`, which sleep at barriers while others use their processors.

    They never sleep without libgomp or Linux, with one thread, or if OMP_WAIT_POLICY or GOMP_SPINCOUNT is set.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(available_threads())
    library = _libgomp()
    done = threading.Event()
    watcher = None
    if library is not None:
        watcher = threading.Thread(target=_watch, args=(library, done), name="pace", daemon=True)
        watcher.start()
    try:
        yield
    finally:
        done.set()
        if watcher is not None:
            watcher.join()
        torch.set_num_threads(num_threads)


def available_threads() -> int:
    """Return PyTorch's number of threads, or fewer if the quota of a container is lower.

    OMP_NUM_THREADS has precedence over the quota.
    """
    num_threads = torch.get_num_threads()
    if "OMP_NUM_THREADS" in os.environ:
        return num_threads
    return min(num_threads, max(1, math.floor(min(cpu_quota(), num_threads))))


def _libgomp() -> ctypes.CDLL | None:
    """Return PyTorch's OpenMP library if it is libgomp, and has several threads to throttle."""
    if not _TASKS.exists() or {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        return None
    library = ctypes.CDLL(torch._C.__file__)  # also finds the libraries that it is linked to
    is_libgomp = hasattr(library, "GOMP_parallel") and hasattr(library, "omp_pause_resource_all")
    if not is_libgomp or hasattr(library, "kmp_set_blocktime"):  # LLVM's and Intel's libraries have all three
        return None
    return library if 1 < torch.get_num_threads() <= library.omp_get_num_procs() else None


def _watch(library: ctypes.CDLL, done: threading.Event) -> None:
    """Keep a sleeping team of threads while other programs use the processors. The team ends with this thread."""
    last_time = time.monotonic()
    last_waited = _waited_seconds()
    asleep_since: float | None = None
    while not done.wait(POLL_SECONDS):
        now = time.monotonic()
        waited = _waited_seconds()
        waiting_threads = (waited - last_waited) / (now - last_time)
        if asleep_since is None and waiting_threads > MAX_WAITING_THREADS:
            # A thread for each processor. Each calls a function without an effect, and then sleeps.
            library.GOMP_parallel(library.omp_get_thread_num, None, library.omp_get_num_procs(), 0)
            asleep_since = now
        elif asleep_since is not None and now - asleep_since > SLEEP_SECONDS:
            library.omp_pause_resource_all(_PAUSE_HARD)
            asleep_since = None
        last_time, last_waited = now, waited


def _waited_seconds() -> float:
    """Return the time that this process's threads were ready to run, but had no processor, as a sum in seconds."""
    nanoseconds = 0
    for task in _TASKS.iterdir():
        with contextlib.suppress(OSError):  # the thread has just ended
            nanoseconds += int((task / "schedstat").read_text("ascii").split()[1])
    return nanoseconds / 1e9
