"""What the callbacks build on: hooks that count optimizer steps, the clock of the training time, and validation."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from lightning import Callback, Trainer
from torch import Tensor

from gpt.errors import NonFiniteError
from gpt.model.loss import IGNORE
from gpt.sampling.scoring import Score, score, sum_of, tokens_at_once
from gpt.text.batches import validation_batches
from gpt.text.prepared import PreparedText
from gpt.training.module import REMEDY, GPTModule

SUSPENDED = 10  # times a usual step, and a second: a longer gap between two steps is no training
MILESTONES = 4  # validations and checkpoints of a run whose horizon is a time, besides those that its steps are due


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
    """The seconds spent on training steps: all the time in the fit loop except inside `paused` and while suspended.

    Where the horizon is a time, rank 0's clock sets the rates of all ranks, and ends the run when that time is up.
    """

    stored = ("seconds",)

    def __init__(self) -> None:
        self.seconds = 0.0  # of the whole run, up to the end of the last step
        self._mark = self._worked = 0.0  # of the wall clock, and of the processor's, at the last look
        self._usual = 0.0  # seconds of a step, lately

    def _look(self) -> tuple[float, float]:
        """The seconds since the last look, and those for which the processor worked meanwhile."""
        before, self._mark, self._worked = (self._mark, self._worked), time.perf_counter(), time.process_time()
        return self._mark - before[0], self._worked - before[1]

    def _lap(self) -> float:
        """Count the time since the last look; if the process was suspended, a usual step, or what it worked for."""
        lap, worked = self._look()
        if lap > 1.0 + (SUSPENDED * self._usual or 2 * worked):
            lap = self._usual or worked
        self.seconds += lap
        return lap

    @contextmanager
    def paused(self) -> Iterator[None]:
        self._lap()
        try:
            yield
        finally:
            self._look()

    def on_train_start(self, trainer: Trainer, module: GPTModule) -> None:  # type: ignore[override]
        self._look()
        if module.schedule.seconds:
            module.share = min(1.0, self.seconds / module.schedule.seconds)

    def on_step_end(self, trainer: Trainer, module: GPTModule, step: int) -> None:
        lap = self._lap()
        self._usual = 0.9 * self._usual + 0.1 * lap if self._usual else lap
        if not module.schedule.seconds:
            return
        seconds = torch.tensor(self.seconds, dtype=torch.float64)
        if trainer.world_size > 1:
            torch.distributed.broadcast(seconds, 0)
        before, module.share = module.share, min(1.0, float(seconds) / module.schedule.seconds)
        module.at_milestone = int(MILESTONES * module.share) > int(MILESTONES * before)
        if module.share == 1.0:
            module.schedule = replace(module.schedule, total_steps=step)


class Validation(StepCallback):
    """Scores the whole validation text at intervals, shared out among the ranks, and remembers the best score so far.

    Every `StepCallback` of the trainer then gets `on_validated`, and others Lightning's `on_validation_end`, for which
    `trainer.callback_metrics` has `val/loss`.
    """

    stored = ("best_loss", "best_step")

    def __init__(self, clock: Clock):
        self._clock = clock
        self.best_loss, self.best_step = math.inf, -1
        self.latest: Score | None = None
        self.latest_step = -1
        self.by_corpus: list[Score] = []  # in the order of `Corpora.sources`

    def on_step_end(self, trainer: Trainer, module: GPTModule, step: int) -> None:
        if module.schedule.due(step, module.schedule.validate_every) or module.at_milestone:
            self.validate(trainer, module, step)

    def validate(self, trainer: Trainer, module: GPTModule, step: int) -> None:
        """Score the model after `step`, and tell the other callbacks."""
        module.require_finite_weights()
        with self._clock.paused():
            self.by_corpus = [self._score(trainer, module, source) for source in module.corpora.sources]
            self.latest, self.latest_step = sum_of(self.by_corpus), step
            if not math.isfinite(self.latest.nats_per_token):
                raise NonFiniteError(f"step {step}: the validation loss is {self.latest.nats_per_token}; {REMEDY}")
            if self.latest.nats_per_token < self.best_loss:
                self.best_loss, self.best_step = self.latest.nats_per_token, step
            trainer.callback_metrics["val/loss"] = torch.tensor(self.latest.nats_per_token)
            for callback in trainer.callbacks:  # type: ignore[attr-defined]
                if isinstance(callback, StepCallback):
                    callback.on_validated(trainer, module, step, self.latest)
            for callback in trainer.callbacks:  # type: ignore[attr-defined]
                callback.on_validation_epoch_end(trainer, module)
                callback.on_validation_end(trainer, module)

    def _score(self, trainer: Trainer, module: GPTModule, source: PreparedText) -> Score:
        T = module.config.model.context_length
        size = max(1, tokens_at_once(module.model, trainer.world_size) // T)
        batches = validation_batches(source.validation, size, T, IGNORE)
        mine = (batch for i, batch in enumerate(batches) if i % trainer.world_size == trainer.global_rank)
        part = score(module.model, mine, source.manifest["splits"]["validation"]["bytes"])
        if trainer.world_size == 1:
            return part
        totals = torch.tensor([part.nats, part.tokens], dtype=torch.float64, device=module.device)
        totals = trainer.strategy.reduce(totals, reduce_op="sum")
        assert isinstance(totals, Tensor)
        return Score(float(totals[0]), int(totals[1]), part.bytes)
