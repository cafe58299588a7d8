"""What a training's callbacks build on: hooks that count optimizer steps, and the clock of the training time."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from lightning import Callback, Trainer

from gpt.sampling.scoring import Score
from gpt.training.module import GPTModule


class StepCallback(Callback):
    """A callback with one hook per optimizer step, however many micro-batches it takes, and one per validation."""

    def on_train_batch_end(self, trainer: Trainer, module: GPTModule, outputs, batch, batch_idx: int) -> None:  # type: ignore[override]
        if (batch_idx + 1) % module.plan.accumulation == 0:
            self.on_step_end(trainer, module, trainer.global_step)

    def on_step_end(self, trainer: Trainer, module: GPTModule, step: int) -> None:
        """Called after optimizer step number `step`, the first being 1."""

    def on_validated(self, trainer: Trainer, module: GPTModule, step: int, score: Score) -> None:
        """Called on every rank when the validation after `step` is done, with the clock paused."""


class Clock(Callback):
    """The seconds spent on training steps: all the time in the fit loop except inside `paused`."""

    def __init__(self) -> None:
        self._before = 0.0  # from earlier sessions of the run, and from before the last pause
        self._since: float | None = None

    @property
    def seconds(self) -> float:
        return self._before + (time.perf_counter() - self._since if self._since is not None else 0.0)

    @contextmanager
    def paused(self) -> Iterator[None]:
        self._before, self._since = self.seconds, None
        try:
            yield
        finally:
            self._since = time.perf_counter()

    def on_train_start(self, trainer: Trainer, module) -> None:
        self._since = time.perf_counter()

    def on_train_end(self, trainer: Trainer, module) -> None:
        self._before, self._since = self.seconds, None

    def state_dict(self) -> dict:
        return {"seconds": self.seconds}

    def load_state_dict(self, state: dict) -> None:
        self._before = state["seconds"]
