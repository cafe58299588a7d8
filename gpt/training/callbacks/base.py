"""What the callbacks build on: hooks that count optimizer steps, and the clock of the training time."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from lightning import Callback, Trainer

from gpt.sampling.scoring import Score
from gpt.training.module import GPTModule

SUSPENDED = 10  # times a usual step, and a second: a longer gap between two steps is no training


class StepCallback(Callback):
    """A callback with one hook per optimizer step, however many micro-batches it takes, and one per validation."""

    stored: tuple[str, ...] = ()  # the attributes that a checkpoint keeps

    def on_train_batch_end(self, trainer: Trainer, module: GPTModule, outputs, batch, batch_idx: int) -> None:  # type: ignore[override]
        if (batch_idx + 1) % module.schedule.accumulation == 0:
            self.on_step_end(trainer, module, trainer.global_step)

    def on_step_end(self, trainer: Trainer, module: GPTModule, step: int) -> None:
        """Called after optimizer step number `step`, the first being 1."""

    def on_validated(self, trainer: Trainer, module: GPTModule, step: int, score: Score) -> None:
        """Called on every rank when the validation after `step` is done, with the clock paused."""

    def state_dict(self) -> dict:
        return {name: getattr(self, name) for name in self.stored}

    def load_state_dict(self, state: dict) -> None:
        for name in self.stored:
            setattr(self, name, state[name])


class Clock(StepCallback):
    """The seconds spent on training steps: all the time in the fit loop except inside `paused` and while suspended."""

    stored = ("seconds",)

    def __init__(self) -> None:
        self.seconds = 0.0  # of the whole run, up to the end of the last step
        self._mark = 0.0
        self._usual = 0.0  # seconds of a step, lately

    def _lap(self) -> float:
        """Count the time since the last mark, or a usual step if the process was suspended meanwhile."""
        now = time.perf_counter()
        lap, self._mark = now - self._mark, now
        if self._usual and lap > SUSPENDED * self._usual + 1.0:
            lap = self._usual
        self.seconds += lap
        return lap

    @contextmanager
    def paused(self) -> Iterator[None]:
        self._lap()
        try:
            yield
        finally:
            self._mark = time.perf_counter()

    def on_train_start(self, trainer: Trainer, module) -> None:
        self._mark = time.perf_counter()

    def on_step_end(self, trainer: Trainer, module: GPTModule, step: int) -> None:
        lap = self._lap()
        self._usual = 0.9 * self._usual + 0.1 * lap if self._usual else lap
