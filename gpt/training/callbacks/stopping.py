"""What ends a run early: validation has not improved for long, or a callback asks; and warnings before."""

import math
from pathlib import Path

from lightning import Trainer

from gpt.console import quote, warn
from gpt.sampling.scoring import Score
from gpt.training.callbacks.base import StepCallback, Validation
from gpt.training.config.advice import TURNED, shorter_steps
from gpt.training.metrics.curves import Curves
from gpt.training.module import GPTModule
from gpt.training.optim import unread_settings

WORSE = 2  # validations in a row, after which a run is told that it memorises
EXPLODED = 1.2, 0.3  # a training loss above so many times its course, and so many nats, is not the luck of a batch
POINTS = 5  # of the curve in a row, after which it is no hiccup either


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

    stored = ("train_loss", "worse")

    def __init__(self, validation: Validation, curves: Curves):
        self._validation, self._curves = validation, curves
        self.train_loss = -math.inf  # when validation was best; below everything as long as it is unknown
        self.worse = 0  # validations in a row; it stays at `WORSE` once that is said

    def on_validated(self, trainer: Trainer, module: GPTModule, step: int, score: Score) -> None:
        best, best_step = self._validation.best_loss, self._validation.best_step
        if self.worse == WORSE:
            return
        if best_step == step:
            self.train_loss = -math.inf
        if self.train_loss == -math.inf and not math.isnan(self._curves.loss):  # its first point may come later
            self.train_loss = self._curves.loss
        turned = score.nats_per_token > TURNED * best and TURNED * self._curves.loss < self.train_loss
        self.worse = self.worse + 1 if turned else 0
        if self.worse == WORSE and trainer.is_global_zero:
            steps = shorter_steps(module.config, module.corpora, best_step)
            warn(
                f"validation loss was lowest at step {best_step} and has risen since, while training loss "
                f"keeps falling: the model is memorising. best.ckpt holds step {best_step}; try horizon={steps}steps"
            )


class ExplosionWarning(StepCallback):
    """Says once that the training loss stays far above its own course: finite numbers, but rates that are too high."""

    stored = ("course", "lowest", "good", "high")

    def __init__(self, run_dir: Path, validation: Validation, curves: Curves):
        self._run_dir, self._validation, self._curves = run_dir, validation, curves
        self.course = self.lowest = math.inf  # a running mean of the curve, and the least that it was
        self.good, self.high = 0, 0  # the step of the last point on course, and the points in a row since

    def on_step_end(self, trainer: Trainer, module: GPTModule, step: int) -> None:
        loss, (times, nats), optim = self._curves.loss, EXPLODED, module.config.optim
        if not module.schedule.due(step, module.config.trainer.log_every) or math.isnan(loss) or self.high == POINTS:
            return
        if loss <= times * self.lowest + nats:
            self.course = loss if self.course == math.inf else 0.9 * self.course + 0.1 * loss
            self.lowest, self.good, self.high = min(self.lowest, self.course), step, 0
            return
        self.high += 1
        if self.high == POINTS and trainer.is_global_zero:
            rates = {"lr", "matrix_lr"} - unread_settings(optim.name)
            words = [f"rerun={self._run_dir}"]
            words += [f"optim.{name}={getattr(optim, name) / 2:g}" for name in sorted(rates)]
            best = self._validation.best_step
            kept = f"best.ckpt of step {best} is from before; " if 0 < best <= self.good else ""
            warn(
                f"training loss has been far above its course since step {self.good} ({loss:.2f}, and "
                f"{self.lowest:.2f} before): {kept}try lower rates with {' '.join(map(quote, words))}"
            )
