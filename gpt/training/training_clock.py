"""The training clock: it counts the seconds spent on steps, and ends a run whose horizon is a time."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from gpt.training.state import TrainState

# A gap longer than this many typical steps, plus one second, means that the process was suspended.
MAX_STEP_RATIO = 10
NUM_QUARTERS = 4  # a time horizon is divided into quarters; a run validates and saves after each


class TrainingClock:
    """Counts seconds of training from `start` on, except inside `paused` and while the process is suspended.

    Args:
        state: Its `seconds` grow with every step.
        horizon_seconds: The horizon if it is a time, else 0. All ranks then use the clock of rank 0.
    """

    def __init__(self, state: TrainState, horizon_seconds: float):
        self.state = state
        self._horizon_seconds = horizon_seconds
        self.progress = 0.0  # fraction of a time horizon that has passed
        self.at_quarter_mark = False  # True if the last step completed a quarter of the time horizon
        self._wall_time = 0.0  # at the last reading
        self._cpu_time = 0.0
        self._typical_step = 0.0  # moving average in seconds

    def start(self) -> None:
        """Start to count."""
        self._read()
        if self._horizon_seconds:
            self.progress = min(1.0, self.state.seconds / self._horizon_seconds)

    def end_step(self, world_size: int) -> None:
        """Count the time of a step. Every rank must call this."""
        lap = self._end_lap()
        self._typical_step = 0.9 * self._typical_step + 0.1 * lap if self._typical_step else lap
        if not self._horizon_seconds:
            return
        seconds = torch.tensor(self.state.seconds, dtype=torch.float64)
        if world_size > 1:
            torch.distributed.broadcast(seconds, 0)
        last_progress = self.progress
        self.progress = min(1.0, float(seconds) / self._horizon_seconds)
        self.at_quarter_mark = int(NUM_QUARTERS * self.progress) > int(NUM_QUARTERS * last_progress)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count the time of the block."""
        self._end_lap()
        try:
            yield
        finally:
            self._read()

    def _end_lap(self) -> float:
        """Count the seconds since the last reading, and return them.

        If the process was suspended in between, count a typical step. In the first step, count the CPU time instead.
        """
        lap, cpu_lap = self._read()
        if lap > 1.0 + (MAX_STEP_RATIO * self._typical_step or 2 * cpu_lap):
            lap = self._typical_step or cpu_lap
        self.state.seconds += lap
        return lap

    def _read(self) -> tuple[float, float]:
        """Read the clocks; return the seconds and the CPU seconds since the last reading."""
        last_wall_time, last_cpu_time = self._wall_time, self._cpu_time
        self._wall_time = time.perf_counter()
        self._cpu_time = time.process_time()
        return self._wall_time - last_wall_time, self._cpu_time - last_cpu_time
