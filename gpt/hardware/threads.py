"""OpenMP's threads, which give way to other programs: they spin at barriers only while they have their cores.

libgomp's threads spin at the end of every parallel operation, which makes small steps faster on a quiet machine.
Where another program wants a core, they spin on it while a thread that has work waits: training falls to a quarter,
sampling to a twentieth. libgomp spins only briefly while its threads outnumber the processors. So a second team of
threads, asleep, is enough to end the spinning, and ending that team brings it back. No number of threads that compute
changes, and no bit.
"""

import contextlib
import ctypes
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import torch

TICK = 0.2  # seconds between two looks
CONTENDED = 0.4  # threads that wait for a processor, on average: where spinning and sleeping are about equally fast
ASLEEP = 5.0  # seconds, after which spinning is tried again: contention shows best while spinning
_TASKS = Path("/proc/self/task")
_PAUSE_HARD = 2  # omp_pause_hard: end the calling thread's team


@contextlib.contextmanager
def yield_to_other_processes() -> Iterator[None]:
    """Run the block with threads that sleep at barriers while other programs want their processors.

    Does nothing without libgomp or Linux, with one thread, or where OMP_WAIT_POLICY or GOMP_SPINCOUNT is set.
    """
    library = _libgomp()
    if library is None:
        yield
        return
    done = threading.Event()
    watcher = threading.Thread(target=_watch, args=(library, done), name="pace", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()


def _libgomp() -> ctypes.CDLL | None:
    """The OpenMP library that PyTorch computes with, if it is one that can be throttled, and if that is of use."""
    if not _TASKS.exists() or {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        return None
    library = ctypes.CDLL(torch._C.__file__)  # also finds what PyTorch's own libraries link to
    named = [hasattr(library, name) for name in ("GOMP_parallel", "omp_pause_resource_all", "kmp_set_blocktime")]
    if named != [True, True, False]:  # the last belongs to LLVM's and Intel's libraries
        return None
    return library if 1 < torch.get_num_threads() <= library.omp_get_num_procs() else None


def _watch(library: ctypes.CDLL, done: threading.Event) -> None:
    """Keep a sleeping team of this thread's own while others want the processors; it ends with this thread."""
    then, before, asleep = time.monotonic(), _waited(), None
    while not done.wait(TICK):
        now, waited = time.monotonic(), _waited()
        if asleep is None and (waited - before) / (now - then) > CONTENDED:
            # A thread for each processor, which calls a function that does nothing.
            library.GOMP_parallel(library.omp_get_thread_num, None, library.omp_get_num_procs(), 0)
            asleep = now
        elif asleep is not None and now - asleep > ASLEEP:
            library.omp_pause_resource_all(_PAUSE_HARD)
            asleep = None
        then, before = now, waited


def _waited() -> float:
    """Seconds that this process's threads have been ready to run, in sum, without a processor to run on."""
    total = 0
    for task in _TASKS.iterdir():
        with contextlib.suppress(OSError):  # it has just ended
            total += int((task / "schedstat").read_text("ascii").split()[1])
    return total / 1e9
