"""The processes of one training: how they are numbered, start, meet and end together.

`launch` (for `trainer.devices=N`), torchrun or Ray Train starts them. All processes run the same program. Rank 0
decides, prepares the text, writes and prints. The others receive its decisions through torch.distributed.
"""

import contextlib
import logging
import os
import re
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from gpt.console import clean_exit, print_line, print_warning
from gpt.errors import NonFiniteError, UserError
from gpt.files import code_hash
from gpt.training.stop_signals import STOP_SIGNALS

TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")  # Ray Train sets them, too
RENDEZVOUS_TIMEOUT_SECONDS = 60
PREPARATION_TIMEOUT_MINUTES = 24 * 60  # rank 0 may prepare a long text while the others wait
LOST_MACHINE_SECONDS = 25  # a connection that is silent for so long is dropped
END_GRACE_SECONDS = 5.0  # time for a launcher to end this process after another one has died
# Other launchers, by the variable that holds their number of processes, and the command that has them start torchrun.
# The first match counts: mpirun uses srun on a SLURM cluster, and srun may set PMI_SIZE for an MPI library.
_MEET_AT_HOST1 = "torchrun --nnodes=NODES --nproc-per-node=GPUS --rdzv-backend=c10d --rdzv-endpoint=HOST1:29500"
_MEET_AT_MASTER = "torchrun --nnodes=$WORLD_SIZE --nproc-per-node=GPUS --node-rank=$RANK --master-addr=$MASTER_ADDR"
OTHER_LAUNCHERS = (
    ("OMPI_COMM_WORLD_SIZE", f"mpirun --map-by ppr:1:node --bind-to none {_MEET_AT_HOST1}"),
    ("SLURM_STEP_NUM_TASKS", f"srun --ntasks-per-node=1 {_MEET_AT_HOST1}"),
    ("PMI_SIZE", f"mpiexec -ppn 1 {_MEET_AT_HOST1}"),
    ("WORLD_SIZE", f"{_MEET_AT_MASTER} --master-port=$MASTER_PORT"),  # in a pod of Kubernetes' training operator
)
Result = TypeVar("Result")
_store: Any = None  # the key-value store of all ranks; None unless the process group was created here


def rank() -> int:
    """Return the number of this process among all processes of the training."""
    return _read_variables()[0]


def world_size() -> int:
    """Return the number of processes of the training."""
    return _read_variables()[1]


def local_rank() -> int:
    """Return the number of this process on its machine."""
    return _read_variables()[2]


def local_world_size() -> int:
    """Return the number of processes on each machine."""
    return _read_variables()[3]


def num_nodes() -> int:
    """Return the number of machines."""
    return world_size() // local_world_size()


def launch_command() -> str:
    """Return the beginning of the command that starts as many processes as there are."""
    if world_size() == 1:
        return "python train.py"
    return f"torchrun --nnodes={num_nodes()} --nproc-per-node={local_world_size()} train.py"


def is_main_process() -> bool:
    """Return True if this is rank 0."""
    return rank() == 0


def _read_variables() -> tuple[int, int, int, int]:
    """Return torchrun's four numbers; raise `UserError` if they are incomplete, wrong, or another launcher's."""
    values = {name: os.environ.get(name, "") for name in TORCHRUN_VARIABLES}
    if not all(values.values()):
        for variable, command in OTHER_LAUNCHERS:
            if os.environ.get(variable, "") not in ("", "0", "1"):
                started = {variable: os.environ[variable]} | {name: value for name, value in values.items() if value}
                raise UserError(
                    f"{_show(started)}: several processes were started, and not by torchrun: use {command} train.py "
                    f"... (see docs/many-gpus.md), or unset {variable} to train alone"
                )
        if values["WORLD_SIZE"] == "1" or not any(values.values()):
            return 0, 1, 0, 1
    elif all(map(str.isdecimal, values.values())):
        rank, world_size, local_rank, local_world_size = map(int, values.values())
        if rank < world_size and local_rank < local_world_size and world_size % local_world_size == 0:
            return rank, world_size, local_rank, local_world_size
    raise UserError(
        f"{_show(values)}: torchrun sets all four, with RANK below WORLD_SIZE, LOCAL_RANK below LOCAL_WORLD_SIZE, and "
        "as many processes on every machine: start train.py with torchrun, or unset them to train alone"
    )


def _show(variables: dict[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in variables.items())


def resolve_devices(devices: int | None, nodes: int | None) -> tuple[int, int]:
    """Return the devices of each machine and the number of machines, as configured or else as started.

    Args:
        devices: `trainer.devices`; None takes the number of processes that were started on each machine.
        nodes: `trainer.num_nodes`; None takes the number of machines that were started.

    Raises:
        UserError: the configuration contradicts the processes that were started.
    """
    if world_size() == 1:
        if nodes and nodes > 1:
            raise UserError(
                f"trainer.num_nodes={nodes}: start train.py with torchrun on each of the {nodes} machines (see "
                "docs/many-gpus.md), or set trainer.num_nodes=1"
            )
        return devices or 1, 1
    for name, value, started in (("devices", devices, local_world_size()), ("num_nodes", nodes, num_nodes())):
        if value not in (None, started):
            raise UserError(
                f"trainer.{name}={value}, but {world_size()} processes were started on {num_nodes()} machines: start "
                f"as many as configured, or leave trainer.{name} out"
            )
    return local_world_size(), num_nodes()


def require_processes(devices: int | None, num_processes: int) -> None:
    """Raise `UserError` if fewer than `num_processes` were started. A plan needs only one, so it does not call this."""
    if num_processes > world_size():
        raise UserError(
            f"trainer.devices={devices} takes {devices} processes, and this is one: use python train.py, or start this "
            f"program with torchrun --nproc-per-node={devices}"
        )


def init_process_group() -> None:
    """Create the process group of all ranks, or join the one that exists, as in a worker of Ray Train.

    Raises:
        UserError: a rank did not come in time, has other arguments or other code, or the existing group does not fit.
    """
    global _store
    if dist.is_available() and dist.is_initialized():
        _join_process_group()
        return
    if world_size() == 1:
        return
    _store = _meet()
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank())
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    timeout = timedelta(minutes=PREPARATION_TIMEOUT_MINUTES)
    dist.init_process_group(backend, None, timeout, world_size(), rank(), dist.PrefixStore("group", _store))
    identities: list[Any] = [None] * world_size()
    dist.all_gather_object(identities, (socket.gethostname(), _program_identity()))
    _drop_silent_connections()
    _, identity_of_rank_0 = identities[0]
    for other, (host, identity) in enumerate(identities):
        if different := set(identity_of_rank_0) ^ set(identity):
            _end_together(
                f"process {other} on {host} was not started like process 0, but differs in "
                f"{', '.join(sorted(different))}: start all with the same arguments and the same code"
            )


def _meet() -> Any:
    """Wait at MASTER_ADDR and MASTER_PORT until every rank has come, and return the store that they share."""
    timeout = timedelta(seconds=RENDEZVOUS_TIMEOUT_SECONDS)
    try:
        store, _, _ = next(dist.rendezvous("env://", rank(), world_size(), timeout=timeout))
        store.set(f"rank {rank()} has come", "")
        store.wait([f"rank {other} has come" for other in range(world_size())], timeout)
    except (dist.DistError, OSError, ValueError) as error:
        address = " ".join(f"{name}={os.environ.get(name, '')}" for name in ("MASTER_ADDR", "MASTER_PORT"))
        raise UserError(
            f"process {rank()} of {world_size()} did not meet the others at {address} within "
            f"{RENDEZVOUS_TIMEOUT_SECONDS} s ({str(error).splitlines()[0]}): start all together with torchrun, on a "
            f"free port, or unset {', '.join(TORCHRUN_VARIABLES)} to train alone"
        ) from None
    return store


def _join_process_group() -> None:
    """Use the existing process group; raise `UserError` if it does not fit."""
    group_rank, group_size = dist.get_rank(), dist.get_world_size()
    if (group_rank, group_size) != (rank(), world_size()):
        raise UserError(
            f"this is process {group_rank} of {group_size} in its process group, and process {rank()} of "
            f"{world_size()} by its variables: set {', '.join(TORCHRUN_VARIABLES)} as torchrun does"
        )
    if group_size == 1:
        return
    backend = dist.get_backend_config()
    if "cpu:" not in backend:
        raise UserError(
            f"the process group has {backend}, and nothing for tensors on the CPU: create it with cpu:gloo,cuda:nccl, "
            'as with TorchConfig(backend="cpu:gloo,cuda:nccl") of Ray Train'
        )
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank())
    set_timeout(PREPARATION_TIMEOUT_MINUTES)


def _program_identity() -> list[str]:
    """Return everything that must be equal in all processes."""
    return [*sys.argv[1:], f"torch {torch.__version__}", f"gpt/ of hash {code_hash()}"]


def _drop_silent_connections() -> None:
    """Make Linux drop a connection to a machine that has lost its power or its network."""
    if sys.platform != "linux":
        return
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
                connection.setsockopt(socket.IPPROTO_TCP, option, LOST_MACHINE_SECONDS // 5)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * LOST_MACHINE_SECONDS)


def set_timeout(minutes: float) -> None:
    """End all ranks from now on if one does not answer for this time, for example because it was stopped."""
    if world_size() > 1:
        # torch 2.15 gives the function its public name.
        set_group_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
        set_group_timeout(timedelta(minutes=minutes), dist.group.WORLD)


def broadcast(value: Any) -> Any:
    """Return the value of rank 0 on every rank."""
    if world_size() == 1:
        return value
    values = [value]
    dist.broadcast_object_list(values, 0)
    return values[0]


def run_on_all_ranks(function: Callable[[], Result]) -> Result:
    """Call `function` on every rank and return its result. If any rank raises `UserError`, all ranks end."""
    if world_size() == 1:
        return function()
    result, problem = None, None
    try:
        result = function()
    except UserError as error:
        problem = str(error)
    problems: list[str | None] = [None] * world_size()
    dist.all_gather_object(problems, problem)
    for other, message in enumerate(problems):
        if message is not None:
            _end_together(f"process {other}: {message}" if other else message)
    return result  # type: ignore[return-value]


def _end_together(problem: str) -> None:
    """End this rank because of a user's mistake. All ranks call this; rank 0 reports it."""
    if is_main_process():
        raise UserError(problem)
    sys.exit(2)


@contextlib.contextmanager
def distributed_errors() -> Iterator[None]:
    """Run one rank so that all ranks end if one ends, and the reason is printed once."""
    global _store
    number, num_ranks = rank(), world_size()
    try:
        yield
    except NonFiniteError:
        if number:  # every rank sees the same gradient, and rank 0 prints the error
            sys.exit(3)
        raise
    except UserError as error:
        raise UserError(f"process {number}: {error}" if number else str(error)) from None
    except Exception as error:
        if num_ranks == 1 or not (isinstance(error, dist.DistError) or re.search("gloo|pair closure", str(error))):
            raise
        _report_missing_ranks(error)  # this rank has only lost its connection to another one
        sys.exit(1)
    finally:
        if _store is not None and dist.is_initialized():
            _store = None
            dist.destroy_process_group()


def _report_missing_ranks(error: Exception) -> None:
    """Print which ranks have ended or do not answer. One rank prints the line, and none if a launcher does."""
    keys = [f"rank {other} has lost a connection" for other in range(world_size())]
    missing = [0]  # if no launcher holds the store, rank 0 does: without it there is no answer

    def find_missing() -> None:
        with contextlib.suppress(RuntimeError, AttributeError):  # AttributeError: there is no store
            _store.set(keys[rank()], "")
            time.sleep(END_GRACE_SECONDS)
            missing[:] = [other for other, key in enumerate(keys) if not _store.check([key])]

    threading.Thread(target=find_missing, daemon=True).start()
    time.sleep(END_GRACE_SECONDS + 1.0)
    is_timeout = re.search("imed out|timeout", str(error))  # a launcher does not notice a process that was stopped
    is_reported = dist.is_torchelastic_launched() and not is_timeout
    if rank() == min({*range(world_size())} - {*missing}) and not is_reported:
        which = " and ".join(map(str, missing)) or "another"
        print_warning(f"process {which} of this training has died or does not answer, and so all end")


def launch(function: Callable[[Any], Result], request: Any, num_processes: int) -> Result:
    """Call `function(request)` in new processes on this machine, and return the result of rank 0.

    Exit with the code of the first process that fails. If this process is killed, Linux asks the others to stop.
    """
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.disable(logging.CRITICAL)  # from now on this process only waits, and prints a failure itself
    signals_to_handle = [
        signal.Signals(number).name
        for number in STOP_SIGNALS
        if signal.getsignal(number) is not signal.SIG_IGN or number == signal.SIGINT
    ]
    try:
        with unchanged_environment(), tempfile.TemporaryDirectory(prefix="mini-gpt-") as error_files:
            os.environ.setdefault("PYTHONWARNINGS", "ignore::UserWarning:multiprocessing.resource_tracker")
            os.environ.setdefault("OMP_NUM_THREADS", str(max(1, torch.get_num_threads() // num_processes)))
            if sys.platform == "linux":
                os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            config = LaunchConfig(
                min_nodes=1,
                max_nodes=1,
                nproc_per_node=num_processes,
                run_id="mini-gpt",
                max_restarts=0,
                rdzv_backend="c10d",
                rdzv_endpoint="127.0.0.1:0",
                local_addr="127.0.0.1",  # the name of the machine need not resolve to an address
                logs_specs=DefaultLogsSpecs(log_dir=error_files),
                signals_to_handle=",".join(signals_to_handle),
            )
            return elastic_launch(config, _run_worker)(function, request)[0]
    except ChildFailedError as error:
        failed_rank, failure = error.get_first_failure()
        if isinstance(failure.message, dict):  # the rank has written its exception into a file, and printed nothing
            print_line(failure.message["extraInfo"]["py_callstack"].rstrip(), sys.stderr)
            print_warning(
                f"process {failed_rank} of {num_processes} failed with the error above; all others were ended"
            )
        elif failure.exitcode < 0:
            print_warning(f"process {failed_rank} of {num_processes} died; all others were ended")
        sys.exit(failure.exitcode if failure.exitcode > 0 else 1)
    except SignalException as error:
        sys.exit(128 + error.sigval)
    finally:
        logging.disable(logging.NOTSET)


def _run_worker(function: Callable[[Any], Result], request: Any) -> Result:
    """Run one of the processes that `launch` starts."""
    with clean_exit("train.py"), distributed_errors():
        return function(request)


@contextlib.contextmanager
def unchanged_environment() -> Iterator[None]:
    """Restore environment variables and thread counts after the block, so that the next training starts clean."""
    environment, num_threads = dict(os.environ), torch.get_num_threads()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(environment)
        torch.set_num_threads(num_threads)
