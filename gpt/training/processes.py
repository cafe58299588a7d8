"""Several processes for one training: rank 0 starts the others, hands them their job, and ends them.

See helper.py for what the others do.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.fabric.plugins.environments.lightning import find_free_network_port

from gpt.errors import NonFiniteError, UserError, write_line

GRACE = 5.0  # seconds to wait for the others: for helpers at the end, and for rank 0 when a helper has failed


class Ranks(LightningEnvironment):
    """Tells Lightning which rank this process is; it never has Lightning start processes."""

    def __init__(self, rank: int, port: int):
        super().__init__()
        self._rank, self._main_port = rank, port

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return "127.0.0.1"

    def local_rank(self) -> int:
        return self._rank

    def node_rank(self) -> int:
        return 0


@contextlib.contextmanager
def together(devices: int, job: dict[str, Any]) -> Iterator[Ranks]:
    """Run the block as rank 0 of `devices` processes, of which the others do `job`; all are gone afterwards.

    `job["threads"]` is how many threads each process computes with, or None for the usual number.
    """
    environment, threads = dict(os.environ), torch.get_num_threads()
    port = find_free_network_port() if devices > 1 else 0
    helpers: list[subprocess.Popen] = []
    done = threading.Event()
    patience = 0.0
    try:
        use_threads(job["threads"])
        for rank in range(1, devices):
            command = [sys.executable, "-m", "gpt.training.helper"]
            helper = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment, text=True)
            helpers.append(helper)
            assert helper.stdin is not None
            helper.stdin.write(json.dumps(job | {"rank": rank, "port": port}) + "\n")
            helper.stdin.flush()
        if helpers:
            threading.Thread(target=_watch, args=(helpers, done), daemon=True).start()
        yield Ranks(0, port)
        patience = GRACE
    except (UserError, NonFiniteError):
        raise
    except Exception:  # perhaps only the consequence of a helper's end
        time.sleep(1.0 if helpers else 0.0)
        if lost := _lost(helpers):
            write_line(lost, sys.stderr)
            sys.exit(1)
        raise
    finally:
        done.set()
        _end(helpers, patience)
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        # Lightning sets variables, and both set the number of threads: another training must not inherit them.
        os.environ.clear()
        os.environ.update(environment)
        torch.set_num_threads(threads)


def use_threads(count: int | None) -> None:
    """Compute with `count` threads if it is given, and keep Lightning from changing that."""
    if count:
        torch.set_num_threads(count)
        os.environ["OMP_NUM_THREADS"] = str(count)


def _end(helpers: list[subprocess.Popen], patience: float) -> None:
    """Wait for the helpers to finish, for at most `patience` seconds, then kill them."""
    deadline = time.monotonic() + patience
    for helper in helpers:
        with contextlib.suppress(subprocess.TimeoutExpired):
            helper.wait(max(0.0, deadline - time.monotonic()))
        helper.kill()
        helper.wait()
        if helper.stdin is not None:
            with contextlib.suppress(OSError):
                helper.stdin.close()


def _watch(helpers: list[subprocess.Popen], done: threading.Event) -> None:
    """End everything if a helper fails and rank 0, which may wait for it forever, does not notice."""
    while not done.wait(0.2):
        if (lost := _lost(helpers)) and not done.wait(GRACE):
            write_line(lost, sys.stderr)
            for helper in helpers:
                helper.kill()
            os._exit(1)


def _lost(helpers: list[subprocess.Popen]) -> str:
    """A line about the first helper that failed, or nothing."""
    for rank, helper in enumerate(helpers, start=1):
        if code := helper.poll():
            how = f"was killed ({signal.strsignal(-code)})" if code < 0 else f"ended with exit code {code}"
            return f"train.py: process {rank} of {len(helpers) + 1} {how}; all others were ended"
    return ""
