"""The processes of one training: started by a launcher, or here, all of them run the same program.

Rank 0 alone decides, prepares the text, writes and reports; the others hear of it through torch.distributed.
"""

import contextlib
import logging
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import distributed

from gpt.console import command_line, warn
from gpt.errors import NonFiniteError, UserError
from gpt.files import code_hash
from gpt.training.distributed.launchers import TORCHRUN, Ranks, is_rank_0, meeting_point, ranks
from gpt.training.run.signals import SIGNALS

JOIN_SECONDS = 60  # that processes wait for one another
PATIENCE = timedelta(days=1)  # of ranks that wait for rank 0, which may prepare a long text
LOST_SECONDS = 25  # without a sign of life, after which a machine is lost
GRACE = 5.0  # seconds in which whatever started the processes ends this one, because another has died
Result = TypeVar("Result")
_meeting: list[Any] = []  # where all ranks leave word; empty unless the process group was made here


def as_launched(devices: int | None, num_nodes: int | None) -> tuple[int, int]:
    """The devices of each machine and the machines: as given, or as many as the launcher has started.

    Raises `UserError` if both say something else.
    """
    here = ranks()
    if here.world_size == 1:
        if num_nodes and num_nodes > 1:
            raise UserError(
                f"trainer.num_nodes={num_nodes}: start train.py with torchrun, mpirun or srun on each of the machines, "
                "or give trainer.num_nodes=1"
            )
        return devices or 1, 1
    for name, given, there in (("devices", devices, here.devices), ("num_nodes", num_nodes, here.num_nodes)):
        if given not in (None, there):
            raise UserError(
                f"trainer.{name}={given}, but {here.world_size} processes were started on {here.num_nodes} machines: "
                f"start as many as configured, or leave trainer.{name} out"
            )
    return here.devices, here.num_nodes


def require_processes(devices: int | None, world_size: int) -> None:
    """Raise `UserError` if a training would have fewer processes than its configuration says; a plan needs one."""
    if world_size > ranks().world_size:
        raise UserError(
            f"trainer.devices={devices} takes {devices} processes, and this is one: use python train.py, or start this "
            f"program with torchrun --nproc-per-node={devices}"
        )


def connect() -> None:
    """Make the process group of all ranks, if there are several, once they are there and found to be alike.

    Join one that exists, as in a worker of Ray Train.
    """
    here = ranks()
    if distributed.is_available() and distributed.is_initialized():
        _join(here)
        return
    if here.world_size == 1:
        return
    address, port = meeting_point(here)
    os.environ |= {"MASTER_ADDR": address, "MASTER_PORT": port}
    os.environ |= {name: str(number) for name, number in zip(TORCHRUN, here, strict=True)}  # which Lightning reads
    try:
        wait = timedelta(seconds=JOIN_SECONDS)
        store, _, _ = next(distributed.rendezvous("env://", here.rank, here.world_size, timeout=wait))
        store.set(f"rank {here.rank} is here", "")
        store.wait([f"rank {rank} is here" for rank in range(here.world_size)], wait)
    except (distributed.DistError, OSError, ValueError) as error:
        raise UserError(
            f"process {here.rank} of {here.world_size} did not meet the others at MASTER_ADDR={address} MASTER_PORT="
            f"{port} within {JOIN_SECONDS} s ({str(error).splitlines()[0]}): start all together on a free port, or "
            "unset WORLD_SIZE to train alone"
        ) from None
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    group = distributed.PrefixStore("group", store)
    _meeting[:] = [store]
    if torch.cuda.is_available():
        torch.cuda.set_device(here.local_rank)
    distributed.init_process_group(backend, None, PATIENCE, here.world_size, here.rank, group)
    alike: list[Any] = [None] * here.world_size
    distributed.all_gather_object(alike, (socket.gethostname(), _identity()))
    _notice_lost_machines()
    for rank, (host, identity) in enumerate(alike):
        if different := set(alike[0][1]) ^ set(identity):
            _end_together(
                f"process {rank} on {host} was not started like process 0, but differs in "
                f"{', '.join(sorted(different))}: start all with the same arguments and the same code"
            )


def _join(here: Ranks) -> None:
    """Train in the process group that somebody has made; `UserError` if it does not fit."""
    rank, world_size = distributed.get_rank(), distributed.get_world_size()
    if (rank, world_size) != (here.rank, here.world_size):
        raise UserError(
            f"this is process {rank} of {world_size} in its process group, and process {here.rank} of "
            f"{here.world_size} by its variables: set {', '.join(TORCHRUN)} as torchrun does"
        )
    if world_size == 1:
        return
    if "cpu:" not in (backend := distributed.get_backend_config()):
        raise UserError(
            f"the process group has {backend}, and nothing for what lies on the CPU: make it with cpu:gloo,cuda:nccl, "
            'as with TorchConfig(backend="cpu:gloo,cuda:nccl") of Ray Train'
        )
    if torch.cuda.is_available():
        torch.cuda.set_device(here.local_rank)
    expect_answers(PATIENCE / timedelta(minutes=1))


def _notice_lost_machines() -> None:
    """Make Linux drop connections whose other side, without power or cable, is silent for `LOST_SECONDS`."""
    if sys.platform != "linux":
        return
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
                connection.setsockopt(socket.IPPROTO_TCP, option, LOST_SECONDS // 5)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * LOST_SECONDS)


def expect_answers(minutes: float) -> None:
    """End all ranks from now on when one does not answer for so long, as where its process is stopped."""
    if ranks().world_size > 1:  # the name is that before torch 2.15
        set_timeout = getattr(distributed, "set_timeout", None) or distributed.distributed_c10d._set_pg_timeout
        set_timeout(timedelta(minutes=minutes), distributed.group.WORLD)


def _identity() -> list[str]:
    """Everything that all processes must have in common to train together."""
    return [*sys.argv[1:], f"torch {torch.__version__}", f"gpt/ of hash {code_hash()}"]


def _end_together(problem: str) -> None:
    """End all ranks, which have come here together, because of a mistake that rank 0 reports."""
    if is_rank_0():
        raise UserError(problem)
    sys.exit(2)


def on_all_ranks(make: Callable[[], Result]) -> Result:
    """Call `make` on every rank; a `UserError` on any of them ends all."""
    if ranks().world_size == 1:
        return make()
    made, problem = None, None
    try:
        made = make()
    except UserError as error:
        problem = str(error)
    problems: list[str | None] = [None] * ranks().world_size
    distributed.all_gather_object(problems, problem)
    for rank, one in enumerate(problems):
        if one is not None:
            _end_together(f"process {rank}: {one}" if rank else one)
    return made  # type: ignore[return-value]


@contextlib.contextmanager
def as_one_of_many() -> Iterator[None]:
    """Run a rank so that all ranks end when one does, and that the reason is printed once."""
    rank, world_size, *_ = ranks()
    try:
        yield
    except NonFiniteError:
        if rank:  # every rank sees the same gradient, and rank 0 reports it
            sys.exit(3)
        raise
    except UserError as error:
        raise UserError(f"process {rank}: {error}" if rank else str(error)) from None
    except Exception as error:
        if world_size == 1 or not (
            re.search("gloo|pair closure", str(error)) or isinstance(error, distributed.DistError)
        ):
            raise
        silent, late = _silent(rank, world_size), re.search("imed out|timeout", str(error))
        told = distributed.is_torchelastic_launched() and not late  # by whoever has started them
        if rank == min({*range(world_size)} - {*silent}) and not told:
            which = " and ".join(map(str, silent)) or "another"
            warn(f"process {which} of this training has died or does not answer, and so all end")
        sys.exit(1)
    finally:
        if _meeting and distributed.is_initialized():
            _meeting.clear()
            distributed.destroy_process_group()


def _silent(rank: int, world_size: int) -> list[int]:
    """The ranks that do not report within `GRACE` seconds that they, like this one, have noticed a missing rank."""
    everyone = [f"rank {one} has noticed" for one in range(world_size)]
    silent = [0]  # which keeps the store: if it is the one, nobody gets an answer

    def ask() -> None:
        with contextlib.suppress(RuntimeError):
            _meeting[0].set(everyone[rank], "")
            time.sleep(GRACE)
            silent[:] = [one for one in range(world_size) if not _meeting[0].check([everyone[one]])]

    threading.Thread(target=ask, daemon=True).start()
    time.sleep(GRACE + 1.0)
    return silent


def launch(function: Callable[[Any], Result], request: Any, processes: int) -> Result:
    """Call `function(request)` in so many processes on this machine, and return what rank 0 returns.

    Ends with the exit code of the first process that fails. If this process is killed, Linux asks the others to stop.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.disable(logging.CRITICAL)  # of what this process does from now on, which is to wait
    here = "127.0.0.1"  # or else they look for the machine by its name, which not every machine finds
    meeting = {"rdzv_backend": "c10d", "rdzv_endpoint": f"{here}:0", "local_addr": here}
    meeting["signals_to_handle"] = ",".join(
        signal.Signals(one).name
        for one in SIGNALS
        if signal.getsignal(one) is not signal.SIG_IGN or one == signal.SIGINT
    )
    config = LaunchConfig(1, 1, processes, run_id="mini-gpt", max_restarts=0, **meeting)  # type: ignore[arg-type]
    try:
        with unchanged_environment():
            os.environ.setdefault("PYTHONWARNINGS", "ignore::UserWarning:multiprocessing.resource_tracker")
            os.environ.setdefault("OMP_NUM_THREADS", str(max(1, torch.get_num_threads() // processes)))
            if sys.platform == "linux":
                os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            return elastic_launch(config, _work)(function, request)[0]
    except ChildFailedError as failed:
        rank, failure = failed.get_first_failure()
        if failure.exitcode < 0:
            warn(f"process {rank} of {processes} died; all others were ended")
        sys.exit(failure.exitcode if failure.exitcode > 0 else 1)
    except SignalException as stopped:
        sys.exit(128 + stopped.sigval)
    finally:
        logging.disable(logging.NOTSET)


def _work(function: Callable[[Any], Result], request: Any) -> Result:
    """Run one of the launched processes."""
    with command_line("train.py"), as_one_of_many():
        return function(request)


@contextlib.contextmanager
def unchanged_environment() -> Iterator[None]:
    """Restore environment variables and thread counts after the block, so that the next training starts clean."""
    environment, threads = dict(os.environ), torch.get_num_threads()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(environment)
        torch.set_num_threads(threads)
