"""Failing jobs of a sweep: each is reported, the others go on, and the sweep as a whole fails at its end."""

import math
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from gpt.errors import NonFiniteError, UserError, write_line
from gpt.training.ranks import launched

NOTES = "MINI_GPT_FAILED_JOBS"  # the environment variable that names the file in which jobs note why they failed


@contextmanager
def failing_at_the_end() -> Iterator[str]:
    """Yield the override that lets the jobs of a sweep use `note_failure`; `UserError` after the sweep if one did."""
    if ranks := launched():
        raise UserError(
            f"{ranks.launcher} has started {ranks.world_size} processes, and a sweep is one: use python train.py -m, "
            "with trainer.devices for several devices"
        )
    with TemporaryDirectory() as folder:
        file = Path(folder) / "failed"
        yield f"++hydra.job.env_set.{NOTES}={file.as_posix()}"
        lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    if lines:
        raise UserError(f"{len(lines)} of the sweep's jobs failed; the first was {lines[0]}")


def note_failure(job: str, error: Exception) -> float:
    """Report why a job failed; returns infinity, so that the sweeper can continue."""
    if not isinstance(error, UserError | NonFiniteError | OSError):
        traceback.print_exception(error)
    line = " ".join(f"{job}: {error}".split())
    write_line(f"train.py: {line}", sys.stderr)
    try:
        with open(os.environ[NOTES], "a", encoding="utf-8") as file:
            print(line, file=file)
    except (OSError, KeyError):  # on a machine that does not share the folder; Hydra carries the error back
        raise UserError(line) from None
    return math.inf
