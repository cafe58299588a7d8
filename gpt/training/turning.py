"""Says once when validation has turned while training goes on falling: from there on a model memorises."""

import math
import sys

from lightning import Trainer

from gpt.sampling.scoring import Score
from gpt.text.progress_bar import write_above
from gpt.training.concerns import TURNED, shorter_steps
from gpt.training.curves import Curves
from gpt.training.module import GPTModule
from gpt.training.steps import StepCallback
from gpt.training.validation import Validation

VALIDATIONS = 2  # in a row that must be so


class Turning(StepCallback):
    """Announces the first time that validations in a row are worse than the best, while the training loss is lower."""

    def __init__(self, validation: Validation, curves: Curves):
        self._validation, self._curves = validation, curves
        self._train_loss = -math.inf  # when validation was best; below everything as long as it is unknown
        self._worse = 0  # validations in a row; it stays at `VALIDATIONS` once that is announced

    def on_validated(self, trainer: Trainer, module: GPTModule, step: int, score: Score) -> None:
        best, best_step = self._validation.best_loss, self._validation.best_step
        if self._worse == VALIDATIONS:
            return
        if best_step == step:
            self._train_loss = -math.inf
        if self._train_loss == -math.inf and not math.isnan(self._curves.loss):  # its first point may come later
            self._train_loss = self._curves.loss
        turned = score.nats_per_token > TURNED * best and TURNED * self._curves.loss < self._train_loss
        self._worse = self._worse + 1 if turned else 0
        if self._worse == VALIDATIONS and trainer.is_global_zero:
            steps = shorter_steps(module.config, module.corpora, best_step)
            write_above(
                f"train.py: validation loss was lowest at step {best_step} and has risen since, while training loss "
                f"keeps falling: the model is memorising. best.ckpt holds step {best_step}; try horizon={steps}steps",
                sys.stderr,
            )

    def state_dict(self) -> dict:
        return {"train_loss": self._train_loss, "worse": self._worse}

    def load_state_dict(self, state: dict) -> None:
        self._train_loss, self._worse = state["train_loss"], state["worse"]
