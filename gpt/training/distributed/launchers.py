"""How launchers number the processes of a training: the variables of each, and where its processes meet."""

import os
import re
from typing import NamedTuple
from zlib import crc32

from gpt.errors import UserError

# Under which names a launcher gives the rank, the number of ranks, the rank on this machine, and the ranks of each
# machine. The first whose names are all set counts: mpirun starts its helpers with srun on SLURM's machines, and srun
# sets PMI_RANK and PMI_SIZE for some MPI.
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")  # and Ray Train
OPEN_MPI = tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
PMI = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")  # of MPICH and Intel MPI
SRUN = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_NUM_NODES")  # machines, not ranks of each
KUBERNETES = ("RANK", "WORLD_SIZE")  # of its training operator, which starts one process on each machine
LAUNCHERS = (TORCHRUN, OPEN_MPI, PMI, SRUN, KUBERNETES)


class Ranks(NamedTuple):
    """Where this process stands among those of a training."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0  # on this machine
    devices: int = 1  # processes on each machine

    @property
    def num_nodes(self) -> int:
        return self.world_size // self.devices


def ranks() -> Ranks:
    """This process as its launcher has numbered it; rank 0 of 1 if it was started alone."""
    if not (names := _launcher()):
        return Ranks()
    given = [os.environ.get(name, "") for name in names]
    if all(map(str.isdecimal, given)):
        rank, world_size, local_rank, devices = (*map(int, given), 0, 1)[:4]
        if names is SRUN:
            devices = world_size // max(1, devices)
        if rank < world_size and local_rank < devices and world_size % devices == 0:
            return Ranks(rank, world_size, local_rank, devices)
    shown = " ".join(f"{name}={value}" for name, value in zip(names, given, strict=True))
    raise UserError(
        f"{shown}: not what torchrun, mpirun or srun sets, with as many processes on every machine; start all of them "
        f"with one of these, or unset {names[1]}"
    )


def _launcher() -> tuple[str, ...]:
    """The names under which several processes are numbered here; empty if this one was started alone."""
    several = [names for names in LAUNCHERS if os.environ.get(names[1], "") not in ("", "1")]
    if "LOCAL_RANK" in os.environ or "LOCAL_WORLD_SIZE" in os.environ:
        several = [names for names in several if names is not KUBERNETES]
    complete = [names for names in several if all(map(os.environ.get, names))]
    return next(iter(complete or several), ())


def is_rank_0() -> bool:
    return ranks().rank == 0


def meeting_point(here: Ranks) -> tuple[str, str]:
    """The host and the port of rank 0: as MASTER_ADDR and MASTER_PORT say, or as they follow from the job."""
    given = {name: os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT")}
    address, port = given.values()
    # What all ranks of a job share, and no other job on the same machine.
    job: int | None = None
    if _launcher() is SRUN:
        job = sum(int(os.environ.get(f"SLURM_{name}", 0)) for name in ("JOB_ID", "STEP_ID"))
        nodes = os.environ.get("SLURM_STEP_NODELIST", "")
        address = address or re.sub(r"\[(\w+)[^\]]*\]", r"\1", nodes).split(",")[0]  # a01 of a[01-04,07],b[1-3]
    elif name := os.environ.get("PMIX_NAMESPACE"):  # Open MPI's
        job = crc32(name.encode())
    elif here.num_nodes == 1:
        job = os.getppid()  # MPICH does not name its jobs
    if here.num_nodes == 1:
        address = address or "127.0.0.1"
    if job is not None:
        port = port or str(15_000 + job % 10_000)
    if not address or not port:
        shown = " ".join(f"{name}={value}" for name, value in given.items())
        raise UserError(
            f"{shown}: {here.world_size} processes on {here.num_nodes} machines do not know where to meet; give all of "
            "them the name of the machine of process 0 and a free port of it, as with mpirun -x MASTER_ADDR=HOST1 -x "
            "MASTER_PORT=29500"
        )
    return address, port
