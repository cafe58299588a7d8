"""Ends a run before its horizon: when validation has not improved for long, or a user's callback asks for it."""

from lightning import Trainer

from gpt.training.module import GPTModule
from gpt.training.plan import Plan
from gpt.training.steps import StepCallback
from gpt.training.validation import Validation


def out_of_patience(patience: int, plan: Plan, step: int, best_step: int) -> bool:
    """Whether the last `patience` validations up to `step` were all worse than that of `best_step`.

    It follows from these numbers alone, so a resumed run stops where an uninterrupted one does. A run that was extended
    starts to count again.
    """
    since = max(best_step, plan.extended_at)
    return 0 < patience <= step // plan.validate_every - since // plan.validate_every


class EarlyStop(StepCallback):
    """Stops after a step and a validation, on all ranks alike; `step` then says which, and `by_patience` why.

    `together` says that there are callbacks on every rank, of which one may want to stop alone.
    """

    def __init__(self, validation: Validation, together: bool):
        self._validation, self._together = validation, together
        self._asked = False
        self.step, self.by_patience = 0, False

    def on_train_batch_end(self, trainer: Trainer, module: GPTModule, outputs, batch, batch_idx: int) -> None:  # type: ignore[override]
        self._asked |= trainer.should_stop
        trainer.should_stop = False  # Lightning would stop between two micro-batches
        super().on_train_batch_end(trainer, module, outputs, batch, batch_idx)

    def on_step_end(self, trainer: Trainer, module: GPTModule, step: int) -> None:
        plan, settings = module.plan, module.config.trainer
        asked = self._asked
        if self._together and trainer.world_size > 1:
            agree = plan.due(step, settings.log_every) or plan.due(step, plan.validate_every)
            asked = agree and trainer.strategy.reduce_boolean_decision(asked, all=False)
        impatient = out_of_patience(module.config.patience, plan, step, self._validation.best_step)
        if (asked or impatient) and step < plan.total_steps:
            if self._validation.latest_step != step:
                self._validation.validate(trainer, module, step)
            trainer.should_stop, self.step, self.by_patience = True, step, impatient
