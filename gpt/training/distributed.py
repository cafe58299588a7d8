"""The processes of one training: their ranks, their process group, and errors that end all of them.

torchrun, Ray Train or launch.py (for `trainer.devices=N`) starts the processes. All run the same program. Rank 0
prepares the text, writes and prints. It makes all decisions but to stop or to save early, which any rank may ask for.
torch.distributed sends them to the others.
"""

import contextlib
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from gpt.console import print_warning
from gpt.errors import NonFiniteError, UserError
from gpt.files import code_hash

TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")  # Ray Train sets the same
RENDEZVOUS_TIMEOUT_SECONDS = 60
PREPARATION_TIMEOUT_MINUTES = 24 * 60  # rank 0 may prepare a long text while the others wait
LOST_MACHINE_SECONDS = 25  # a connection without any answer is dropped after this time
END_GRACE_SECONDS = 5.0  # a launcher may end this process within this time after another has died
# Other launchers: the variable with their number of processes, and the command with which they start torchrun. The
# order matters: mpirun uses srun on a SLURM cluster, and srun may set PMI_SIZE for an MPI library.
_MEET_AT_HOST1 = "torchrun --nnodes=NODES --nproc-per-node=GPUS --rdzv-backend=c10d --rdzv-endpoint=HOST1:29500"
_MEET_AT_MASTER = "torchrun --nnodes=$WORLD_SIZE --nproc-per-node=GPUS --node-rank=$RANK --master-addr=$MASTER_ADDR"
OTHER_LAUNCHERS = (
    ("OMPI_COMM_WORLD_SIZE", f"mpirun --map-by ppr:1:node --bind-to none {_MEET_AT_HOST1}"),
    ("SLURM_STEP_NUM_TASKS", f"srun --ntasks-per-node=1 {_MEET_AT_HOST1}"),
    ("PMI_SIZE", f"mpiexec -ppn 1 {_MEET_AT_HOST1}"),
    ("WORLD_SIZE", f"{_MEET_AT_MASTER} --master-port=$MASTER_PORT"),  # Kubernetes' training operator
)
T = TypeVar("T")
_store: Any = None  # the key-value store of all ranks, if this module created the process group


def rank() -> int:
    """Return the number of this process, counted from 0 over all machines."""
    return _read_variables()[0]


def world_size() -> int:
    """Return the number of processes of the training."""
    return _read_variables()[1]


def local_rank() -> int:
    """Return the number of this process, counted from 0 on its machine."""
    return _read_variables()[2]


def local_world_size() -> int:
    """Return the number of processes on each machine."""
    return _read_variables()[3]


def num_nodes() -> int:
    """Return the number of machines."""
    return world_size() // local_world_size()


def launch_command() -> str:
    """Return the beginning of a command that starts the same number of processes."""
    if world_size() == 1:
        return "python train.py"
    return f"torchrun --nnodes={num_nodes()} --nproc-per-node={local_world_size()} train.py"


def is_main_process() -> bool:
    """Return True if this is rank 0."""
    return rank() == 0


def _read_variables() -> tuple[int, int, int, int]:
    """Return torchrun's four numbers.

    Raises:
        UserError: The variables are incomplete or contradictory, or another launcher started the process.
    """
    values = {name: os.environ.get(name, "") for name in TORCHRUN_VARIABLES}
    if not all(values.values()):
        for variable, command in OTHER_LAUNCHERS:
            if os.environ.get(variable, "") not in ("", "0", "1"):
                variables = {variable: os.environ[variable]} | {k: value for k, value in values.items() if value}
                raise UserError(
                    f"{_show(variables)}: several processes were started, and not by torchrun: use {command} train.py "
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
    """Return the number of devices of each machine, and the number of machines.

    Args:
        devices: `trainer.devices`; by default, the number of processes that were started on each machine.
        nodes: `trainer.num_nodes`; by default, the number of machines on which processes were started.

    Raises:
        UserError: The configuration contradicts the processes that were started.
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
    """Raise `UserError` if fewer than `num_processes` were started. `plan=true` needs only one."""
    if num_processes > world_size():
        raise UserError(
            f"trainer.devices={devices} takes {devices} processes, and this is one: use python train.py, or start this "
            f"program with torchrun --nproc-per-node={devices}"
        )


def init_process_group(device: str) -> None:
    """Create the process group of all ranks, or use the existing one, as in a worker of Ray Train.

    `device` is the requested one. For "cpu", GPUs of the machine are not touched.

    Raises:
        UserError: A rank is late, or has other arguments or other code; or the existing group does not fit.
    """
    global _store
    if dist.is_available() and dist.is_initialized():
        _join_process_group()
        return
    if world_size() == 1:
        return
    _store = _meet()
    backend = "cpu:gloo,cuda:nccl" if device != "cpu" and torch.cuda.is_available() else "gloo"
    timeout = timedelta(minutes=PREPARATION_TIMEOUT_MINUTES)
    dist.init_process_group(backend, None, timeout, world_size(), rank(), dist.PrefixStore("group", _store))
    identities: list[Any] = [None] * world_size()
    dist.all_gather_object(identities, (socket.gethostname(), _program_identity()))
    _drop_silent_connections()
    _, identity_of_rank_0 = identities[0]
    for other_rank, (host, identity) in enumerate(identities):
        differences = set(identity_of_rank_0) ^ set(identity)
        if differences:
            _end_together(
                f"process {other_rank} on {host} was not started like process 0, but differs in "
                f"{', '.join(sorted(differences))}: start all with the same arguments and the same code"
            )


def _meet() -> Any:
    """Wait until all ranks have connected to MASTER_ADDR and MASTER_PORT, and return the store that they share."""
    timeout = timedelta(seconds=RENDEZVOUS_TIMEOUT_SECONDS)
    try:
        store, _, _ = next(dist.rendezvous("env://", rank(), world_size(), timeout=timeout))
        store.set(f"rank {rank()} is here", "")
        store.wait([f"rank {other} is here" for other in range(world_size())], timeout)
    except (dist.DistError, OSError, ValueError) as error:
        address = " ".join(f"{name}={os.environ.get(name, '')}" for name in ("MASTER_ADDR", "MASTER_PORT"))
        raise UserError(
            f"process {rank()} of {world_size()} did not meet the others at {address} within "
            f"{RENDEZVOUS_TIMEOUT_SECONDS} s ({str(error).splitlines()[0]}): start all together with torchrun, on a "
            f"free port, or unset {', '.join(TORCHRUN_VARIABLES)} to train alone"
        ) from None
    return store


def _join_process_group() -> None:
    """Check the existing process group. Raise `UserError` if it does not fit."""
    group_rank = dist.get_rank()
    group_size = dist.get_world_size()
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
            f"the process group has {backend}, and no backend for tensors on the CPU: create it with "
            'cpu:gloo,cuda:nccl, as with TorchConfig(backend="cpu:gloo,cuda:nccl") of Ray Train'
        )
    set_timeout(PREPARATION_TIMEOUT_MINUTES)


def _program_identity() -> list[str]:
    """Return what must be equal in all processes."""
    return [*sys.argv[1:], f"torch {torch.__version__}", f"gpt/ of hash {code_hash()}"]


def _drop_silent_connections() -> None:
    """Let Linux drop connections to a machine that has lost its power or its network."""
    if sys.platform != "linux":
        return
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
                connection.setsockopt(socket.IPPROTO_TCP, option, LOST_MACHINE_SECONDS // 5)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * LOST_MACHINE_SECONDS)


def set_timeout(minutes: float) -> None:
    """From now on, end all ranks if a rank does not answer within this time, for example because it was suspended."""
    if world_size() > 1:
        # The function is public from torch 2.15 on.
        set_group_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
        set_group_timeout(timedelta(minutes=minutes), dist.group.WORLD)


def broadcast(value: Any) -> Any:
    """Return the value of rank 0 on every rank. Every rank must call this."""
    if world_size() == 1:
        return value
    values = [value]
    dist.broadcast_object_list(values, 0)
    return values[0]


def max_over_ranks(values: Sequence[int]) -> list[int]:
    """Return the maximum of each value over all ranks. Every rank must call this."""
    maxima = torch.tensor(values, dtype=torch.int64)
    dist.all_reduce(maxima, dist.ReduceOp.MAX)
    return maxima.tolist()


def run_on_all_ranks(function: Callable[[], T]) -> T:
    """Call `function` on every rank and return its result. If it raises `UserError` on any rank, all ranks end."""
    if world_size() == 1:
        return function()
    result = None
    problem = None
    try:
        result = function()
    except UserError as error:
        problem = str(error)
    problems: list[str | None] = [None] * world_size()
    dist.all_gather_object(problems, problem)
    for other_rank, message in enumerate(problems):
        if message is not None:
            _end_together(f"process {other_rank}: {message}" if other_rank else message)
    return result  # type: ignore[return-value]


def _end_together(problem: str) -> None:
    """End all ranks because of a user's mistake. Every rank must call this; rank 0 prints the problem."""
    if is_main_process():
        raise UserError(problem)
    sys.exit(2)


@contextlib.contextmanager
def distributed_errors() -> Iterator[None]:
    """In this block, an error on one rank ends all ranks, and is printed once."""
    global _store
    this_rank = rank()
    try:
        yield
    except NonFiniteError:
        if this_rank > 0:  # all ranks have the same gradient, and rank 0 prints the error
            sys.exit(3)
        raise
    except UserError as error:
        raise UserError(f"process {this_rank}: {error}" if this_rank else str(error)) from None
    except Exception as error:
        if world_size() == 1 or not (isinstance(error, dist.DistError) or re.search("gloo|pair closure", str(error))):
            raise
        _report_missing_ranks(error)  # this rank has only lost its connection to another rank
        sys.exit(1)
    finally:
        if _store is not None and dist.is_initialized():
            _store = None
            dist.destroy_process_group()


def _report_missing_ranks(error: Exception) -> None:
    """Print which ranks have ended or do not answer, unless a launcher prints it. Only one rank prints the line."""
    keys = [f"rank {number} has lost a connection" for number in range(world_size())]
    missing_ranks = [0]  # the store is in rank 0 or in a launcher: if it does not answer, rank 0 is missing

    def find_missing() -> None:
        with contextlib.suppress(RuntimeError, AttributeError):  # AttributeError: there is no store
            _store.set(keys[rank()], "")
            time.sleep(END_GRACE_SECONDS)
            missing_ranks[:] = [number for number, key in enumerate(keys) if not _store.check([key])]

    threading.Thread(target=find_missing, daemon=True).start()
    time.sleep(END_GRACE_SECONDS + 1.0)
    is_timeout = re.search("imed out|timeout", str(error))  # a launcher does not notice a suspended process
    is_reported = dist.is_torchelastic_launched() and not is_timeout
    if rank() == min({*range(world_size())} - {*missing_ranks}) and not is_reported:
        names = " and ".join(map(str, missing_ranks)) or "another"
        print_warning(f"process {names} of this training has died or does not answer, and so all end")
