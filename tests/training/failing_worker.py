"""Start two processes, and raise an error on some ranks: python failing_worker.py ERROR RANK ..."""

import builtins
import sys

import torch

from gpt.training.distributed import init_process_group, rank
from gpt.training.launch import launch


def fail(request: tuple[str, list[int]]) -> None:
    """Raise the error on the failing ranks. The others wait for them."""
    error, failing_ranks = request
    init_process_group()
    if rank() in failing_ranks:
        raise getattr(builtins, error)("the callback is broken")
    torch.distributed.barrier()


if __name__ == "__main__":
    launch(fail, (sys.argv[1], [int(number) for number in sys.argv[2:]]), 2)
