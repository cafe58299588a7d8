"""The clock of a training: the seconds spent on its steps, which end a run whose horizon is a time."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from gpt.training.state import TrainState

# A gap longer than this many typical steps, plus one second, means that the process was suspended.
SUSPENDED_STEPS = 10
QUARTERS = 4  # of a time horizon; a run validates and saves after each


class TrainingClock:
    """Counts the seconds of training from `start` on, except inside `paused` and while the process is suspended.

    Args:
        state: Holds the seconds so far; every step adds to it.
        horizon_seconds: The horizon if it is a time, else 0. Then rank 0's clock counts for all ranks.
    """

    def __init__(self, state: TrainState, horizon_seconds: float):
        self.state = state
        self._horizon_seconds = horizon_seconds
        self.progress = 0.0  # the fraction of a time horizon that has passed
        self.at_quarter_mark = False  # the last step completed a quarter of it
        self._wall_time = self._cpu_time = 0.0  # at the last reading
        self._typical_step = 0.0  # seconds, as a moving average

    def start(self) -> None:
        """Count from now on."""
        self._read()
        if self._horizon_seconds:
            self.progress = min(1.0, self.state.seconds / self._horizon_seconds)

    def end_step(self, world_size: int) -> None:
        """Count a step. Every rank must call this."""
        lap = self._end_lap()
        self._typical_step = 0.9 * self._typical_step + 0.1 * lap if self._typical_step else lap
        if not self._horizon_seconds:
            return
        seconds = torch.tensor(self.state.seconds, dtype=torch.float64)
        if world_size > 1:
            torch.distributed.broadcast(seconds, 0)
        last_progress = self.progress
        self.progress = min(1.0, float(seconds) / self._horizon_seconds)
        self.at_quarter_mark = int(QUARTERS * self.progress) > int(QUARTERS * last_progress)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out the time that the block takes."""
        self._end_lap()
        try:
            yield
        finally:
            self._read()

    def _end_lap(self) -> float:
        """Add the time since the last reading, and return it.

        If the process was suspended meanwhile, count a typical step instead, or the CPU time before there is one.
        """
        lap, cpu_lap = self._read()
        if lap > 1.0 + (SUSPENDED_STEPS * self._typical_step or 2 * cpu_lap):
            lap = self._typical_step or cpu_lap
        self.state.seconds += lap
        return lap

    def _read(self) -> tuple[float, float]:
        """Return the seconds since the last reading, and the CPU seconds."""
        wall_time, cpu_time = time.perf_counter(), time.process_time()
        lap, cpu_lap = wall_time - self._wall_time, cpu_time - self._cpu_time
        self._wall_time, self._cpu_time = wall_time, cpu_time
        return lap, cpu_lap
