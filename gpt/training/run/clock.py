"""The time spent training, which also ends a run whose horizon is a time."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from gpt.training.run.state import TrainState

SUSPENDED = 10  # times a usual step, and a second: a longer gap between two steps is no training
QUARTERS = 4  # of a time as horizon, after each of which a run validates and saves


class Clock:
    """Counts seconds of training: all that pass from `start` on, except inside `paused` and while suspended.

    Where the horizon is a time, rank 0's clock counts for all ranks.
    """

    def __init__(self, state: TrainState, horizon: float):
        self.state = state
        self._horizon = horizon  # in seconds; 0 where it is no time
        self.share = 0.0  # of the horizon that has passed, if it is a time
        self.at_quarter = False  # whether the last step has completed a quarter of it
        self._mark = self._worked = 0.0  # of the wall clock, and of the processor's, at the last look
        self._usual = 0.0  # seconds of a step, lately

    def start(self) -> None:
        """Count from now on."""
        self._look()
        if self._horizon:
            self.share = min(1.0, self.state.seconds / self._horizon)

    def end_step(self, world_size: int) -> None:
        """Count a step, on every rank."""
        lap = self._lap()
        self._usual = 0.9 * self._usual + 0.1 * lap if self._usual else lap
        if not self._horizon:
            return
        seconds = torch.tensor(self.state.seconds, dtype=torch.float64)
        if world_size > 1:
            torch.distributed.broadcast(seconds, 0)
        before, self.share = self.share, min(1.0, float(seconds) / self._horizon)
        self.at_quarter = int(QUARTERS * self.share) > int(QUARTERS * before)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out the time that the block takes."""
        self._lap()
        try:
            yield
        finally:
            self._look()

    def _lap(self) -> float:
        """Count the time since the last look; if the process was suspended, a usual step, or what it worked for."""
        lap, worked = self._look()
        if lap > 1.0 + (SUSPENDED * self._usual or 2 * worked):
            lap = self._usual or worked
        self.state.seconds += lap
        return lap

    def _look(self) -> tuple[float, float]:
        """The seconds since the last look, and those for which the processor worked meanwhile."""
        before, self._mark, self._worked = (self._mark, self._worked), time.perf_counter(), time.process_time()
        return self._mark - before[0], self._worked - before[1]
