"""Start the processes of a training on this machine, for `trainer.devices=N`."""

import contextlib
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from gpt.console import clean_exit, print_line, print_warning
from gpt.hardware.threads import available_threads
from gpt.training.distributed import distributed_errors
from gpt.training.stop_signals import STOP_SIGNALS, is_handled

T = TypeVar("T")


def launch(function: Callable[[Any], T], request: Any, num_processes: int) -> T:
    """Call `function(request)` in new processes on this machine, and return the result of rank 0.

    If a process fails, exit with its code. If this process is killed, Linux sends the others a stop signal.
    """
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.disable(logging.CRITICAL)  # this process only waits from now on, and prints errors below
    try:
        with unchanged_environment(), tempfile.TemporaryDirectory(prefix="mini-gpt-") as error_files:
            os.environ.setdefault("PYTHONWARNINGS", "ignore::UserWarning:multiprocessing.resource_tracker")
            os.environ.setdefault("OMP_NUM_THREADS", str(max(1, available_threads() // num_processes)))
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
                local_addr="127.0.0.1",  # a machine's name may have no address
                logs_specs=DefaultLogsSpecs(log_dir=error_files),
                signals_to_handle=",".join(signal.Signals(number).name for number in filter(is_handled, STOP_SIGNALS)),
            )
            return elastic_launch(config, _run_worker)(function, request)[0]
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if isinstance(failure.message, dict):  # the process wrote its exception to a file and printed nothing
            print_line(failure.message["extraInfo"]["py_callstack"].rstrip(), sys.stderr)
            print_warning(f"process {rank} of {num_processes} failed with the error above; all others were ended")
        elif failure.exitcode < 0:
            print_warning(f"process {rank} of {num_processes} died; all others were ended")
        sys.exit(failure.exitcode if failure.exitcode > 0 else 1)
    except SignalException as error:
        sys.exit(128 + error.sigval)
    finally:
        logging.disable(logging.NOTSET)


def _run_worker(function: Callable[[Any], T], request: Any) -> T:
    """Run one of the processes that `launch` starts."""
    with clean_exit("train.py"), distributed_errors():
        return function(request)


@contextlib.contextmanager
def unchanged_environment() -> Iterator[None]:
    """Restore environment variables and thread count after the block, so that another training can follow."""
    environment = dict(os.environ)
    num_threads = torch.get_num_threads()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(environment)
        torch.set_num_threads(num_threads)
