"""What ends a run: its time is up, validation has not improved for long, or a callback asks; and a warning before."""

import math
import sys
from dataclasses import replace

import torch
from lightning import Trainer

from gpt.console import say
from gpt.sampling.scoring import Score
from gpt.training.callbacks.base import Clock, StepCallback
from gpt.training.callbacks.validation import Validation
from gpt.training.config.advice import TURNED, shorter_steps
from gpt.training.metrics.curves import Curves
from gpt.training.module import GPTModule

WORSE = 2  # validations in a row, after which a run is told that it memorises
MILESTONES = 4  # validations and checkpoints of a run whose horizon is a time, besides those that its steps are due


class Deadline(StepCallback):
    """Ends a run whose horizon is a time when it is up by rank 0's clock, which the rates follow."""

    def __init__(self, clock: Clock):
        self._clock = clock

    def on_train_start(self, trainer: Trainer, module: GPTModule) -> None:  # type: ignore[override]
        if module.schedule.seconds:
            module.share = min(1.0, self._clock.seconds / module.schedule.seconds)

    def on_step_end(self, trainer: Trainer, module: GPTModule, step: int) -> None:
        if not module.schedule.seconds:
            return
        seconds = torch.tensor(self._clock.seconds, dtype=torch.float64)
        if trainer.world_size > 1:
            torch.distributed.broadcast(seconds, 0)
        before, module.share = module.share, min(1.0, float(seconds) / module.schedule.seconds)
        module.at_milestone = int(MILESTONES * module.share) > int(MILESTONES * before)
        if module.share == 1.0:
            module.schedule = replace(module.schedule, total_steps=step)


class EarlyStop(StepCallback):
    """Stops after a step and a validation, on all ranks alike; `step` then says which, and `by_patience` why."""

    def __init__(self, validation: Validation):
        self._validation = validation
        self._asked = False  # by a callback, perhaps on this rank alone
        self.step, self.by_patience = 0, False

    def on_train_batch_end(self, trainer: Trainer, module: GPTModule, outputs, batch, batch_idx: int) -> None:  # type: ignore[override]
        self._asked |= trainer.should_stop
        trainer.should_stop = False  # Lightning would stop between two micro-batches
        super().on_train_batch_end(trainer, module, outputs, batch, batch_idx)

    def on_step_end(self, trainer: Trainer, module: GPTModule, step: int) -> None:
        schedule, settings = module.schedule, module.config.trainer
        asked = self._asked
        if trainer.world_size > 1:
            agree = schedule.due(step, settings.log_every) or schedule.due(step, schedule.validate_every)
            asked = agree and trainer.strategy.reduce_boolean_decision(asked, all=False)
        impatient = schedule.out_of_patience(module.config.patience, step, self._validation.best_step)
        if (asked or impatient) and step < schedule.total_steps:
            if self._validation.latest_step != step:
                self._validation.validate(trainer, module, step)
            trainer.should_stop, self.step, self.by_patience = True, step, impatient


class MemorisingWarning(StepCallback):
    """Says once that validations in a row are worse than the best while the training loss goes on falling."""

    def __init__(self, validation: Validation, curves: Curves):
        self._validation, self._curves = validation, curves
        self._train_loss = -math.inf  # when validation was best; below everything as long as it is unknown
        self._worse = 0  # validations in a row; it stays at `WORSE` once that is said

    def on_validated(self, trainer: Trainer, module: GPTModule, step: int, score: Score) -> None:
        best, best_step = self._validation.best_loss, self._validation.best_step
        if self._worse == WORSE:
            return
        if best_step == step:
            self._train_loss = -math.inf
        if self._train_loss == -math.inf and not math.isnan(self._curves.loss):  # its first point may come later
            self._train_loss = self._curves.loss
        turned = score.nats_per_token > TURNED * best and TURNED * self._curves.loss < self._train_loss
        self._worse = self._worse + 1 if turned else 0
        if self._worse == WORSE and trainer.is_global_zero:
            steps = shorter_steps(module.config, module.corpora, best_step)
            say(
                f"train.py: validation loss was lowest at step {best_step} and has risen since, while training loss "
                f"keeps falling: the model is memorising. best.ckpt holds step {best_step}; try horizon={steps}steps",
                sys.stderr,
            )

    def state_dict(self) -> dict:
        return {"train_loss": self._train_loss, "worse": self._worse}

    def load_state_dict(self, state: dict) -> None:
        self._train_loss, self._worse = state["train_loss"], state["worse"]
