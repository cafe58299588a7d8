"""Which of a training's processes this is, as torchrun or srun has numbered it."""

import os
from dataclasses import dataclass
from typing import Any

from gpt.errors import UserError

SHARED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")  # what torchrun sets

joined = False  # whether this process has met the others that a launcher started: see processes.py


@dataclass(frozen=True)
class Ranks:
    """Where this process stands among those of a training."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0  # on this machine
    devices: int = 1  # processes on each machine
    launcher: str = ""

    @property
    def num_nodes(self) -> int:
        return self.world_size // self.devices


def launched() -> Ranks | None:
    """This process as torchrun or srun has numbered it; None if it was started alone."""
    given: dict[str, str] = {}
    for launcher, names in {
        "torchrun": SHARED,
        "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_NUM_NODES"),
    }.items():
        given = {name: os.environ[name] for name in names if os.environ.get(name)}
        count = given.get(names[1], "1")
        if count == "1":
            continue
        given.setdefault(names[3], count if launcher == "torchrun" else "1")
        numbers = [int(given[name]) if given.get(name, "").isdecimal() else -1 for name in names]
        rank, world_size, local_rank, devices = numbers
        if launcher == "srun" and devices > 0:
            devices = world_size // devices
        if 0 <= rank < world_size and 0 <= local_rank < devices and world_size % devices == 0:
            return Ranks(rank, world_size, local_rank, devices, launcher)
        shown = " ".join(f"{name}={os.environ.get(name, '')}" for name in names)
        raise UserError(
            f"{shown}: not what {launcher} sets, with as many processes on every machine; start all of them with "
            f"{launcher}, or unset {names[1]}"
        )
    return None


def as_launched(devices: int | None, num_nodes: int | None, default: Any = None) -> tuple[int, int]:
    """The devices of each machine and the machines for which torchrun or srun has started processes.

    Without a launcher, they are as given, or else as in `default`. Raises `UserError` if both say something else.
    """
    ranks = launched()
    if ranks is not None and not joined:
        raise UserError(
            f"{ranks.launcher} has started {ranks.world_size} processes of a program that trains in one: have it start "
            "train.py, or use trainer.devices"
        )
    if ranks is None:
        devices, num_nodes = devices or (default and default.devices), num_nodes or (default and default.num_nodes)
        if num_nodes and num_nodes > 1:
            raise UserError(
                f"trainer.num_nodes={num_nodes}: start train.py with torchrun or srun on each of the machines, or give "
                "trainer.num_nodes=1"
            )
        return devices or 1, 1
    for name, given, there in (("devices", devices, ranks.devices), ("num_nodes", num_nodes, ranks.num_nodes)):
        if given not in (None, there):
            raise UserError(
                f"trainer.{name}={given}, but {ranks.launcher} has started {ranks.world_size} processes on "
                f"{ranks.num_nodes} machines: start as many as configured, or leave trainer.{name} out"
            )
    return ranks.devices, ranks.num_nodes
