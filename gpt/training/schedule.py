"""When a run validates and ends, and on which sequence lengths it trains: all that follows from its horizon."""

from dataclasses import dataclass, replace

from gpt.errors import UserError
from gpt.training.config import Config, Horizon, parse_horizon
from gpt.training.optim import OptimConfig, lr_multiplier

MIN_VALIDATIONS = 4
MAX_STEPS = 10**12
SHORT_SEQUENCE_TOKENS = 128  # see benchmarks/LOG.md
SHORT_SEQUENCES_UNTIL = 0.6  # fraction of a run


@dataclass(frozen=True)
class Schedule:
    """When a run validates and when it ends. A checkpoint stores it.

    If the horizon is a time, the learning rate follows the clock, and the number of steps is known only at the end.
    Then methods need `progress`: the fraction of that time that has passed.

    Args:
        total_steps: The last step; `MAX_STEPS` while a time horizon lasts.
        seconds: Of training, if the horizon is a time, else 0.
        validate_every: Steps between validations.
        full_length_from_step: Sequences have the whole context after this many steps.
        restart_step: The step at which the run was extended to another horizon.
        restart_lr_multiplier: The fraction of the peak learning rate at that step.
        expected_bits: Bits per byte that model=auto predicts for the horizon, else 0.
    """

    total_steps: int = MAX_STEPS
    seconds: float = 0.0
    validate_every: int = MAX_STEPS
    full_length_from_step: int = 0
    restart_step: int = 0
    restart_lr_multiplier: float = 1.0
    expected_bits: float = 0.0

    @classmethod
    def plan(cls, config: Config, train_tokens: int, horizon: Horizon | None = None) -> "Schedule":
        """Return the schedule of a run on `train_tokens` tokens, with `MIN_VALIDATIONS` validations if steps allow.

        `horizon` replaces that of the configuration.
        """
        horizon = horizon or parse_horizon(config.horizon)
        tokens_per_step, validate_every = config.trainer.tokens_per_step, config.trainer.validate_every
        has_short_sequences = 0 < (config.trainer.short_sequences or 0) < config.model.context_length
        if horizon.unit == "seconds":
            full_length_from_step = MAX_STEPS if has_short_sequences else 0
            return cls(
                seconds=horizon.amount, validate_every=validate_every, full_length_from_step=full_length_from_step
            )
        steps_per_unit = {"steps": 1.0, "tokens": 1 / tokens_per_step, "epochs": train_tokens / tokens_per_step}
        steps = max(1, round(horizon.amount * steps_per_unit[horizon.unit]))
        if steps > MAX_STEPS:
            raise UserError(f"horizon: {steps:,} steps are out of range: they must be at most {MAX_STEPS:,}")
        return cls(
            steps,
            validate_every=min(validate_every, max(1, steps // MIN_VALIDATIONS)),
            full_length_from_step=round(SHORT_SEQUENCES_UNTIL * steps) if has_short_sequences else 0,
        )

    def after_step(self, step: int, progress: float) -> "Schedule":
        """Return the schedule with what the clock decides after `step`: the end, and the change to full length."""
        schedule = self
        if progress >= SHORT_SEQUENCES_UNTIL and self.full_length_from_step > step:
            schedule = replace(schedule, full_length_from_step=step + 1)  # the next sequences are read already
        if progress == 1.0:
            schedule = replace(schedule, total_steps=step)
        return schedule

    def uses_short_sequences(self, step: int) -> bool:
        """Return True if the step after `step` others trains on shorter sequences, and more of them.

        This is staged training (Press et al. 2021, "Shortformer", arXiv:2012.15832). The very first step has full
        length, so that a lack of memory shows at once.
        """
        return 0 < step < self.full_length_from_step

    @property
    def num_validations(self) -> int:
        """The validations of a horizon in steps."""
        return -(-self.total_steps // self.validate_every)

    def is_due(self, step: int, every: int) -> bool:
        """Return True every `every` steps, and at the last step."""
        return step % every == 0 or step == self.total_steps

    def is_out_of_patience(self, patience: int, step: int, best_step: int) -> bool:
        """Return True if the last `patience` validations (0 turns this off) were all worse than the best.

        It follows from step numbers alone, so a resumed run stops where an uninterrupted one does. An extended run
        starts to count again.
        """
        since_step = max(best_step, self.restart_step)
        return 0 < patience <= step // self.validate_every - since_step // self.validate_every

    def describe_end(self, patience: int, step: int, best_step: int) -> str:
        """Return how a run that has trained `step` steps has ended, or an empty string if it has not."""
        if step == self.total_steps:
            return f"has trained all of its {step} steps"
        if self.is_out_of_patience(patience, step, best_step):
            return f"stopped early at step {step}, by patience={patience}"
        return ""

    def lr_multiplier(self, step: int, progress: float, config: OptimConfig) -> float:
        """Return the learning rate of the step after `step` others, as a fraction of its peak."""
        total_steps = self.total_steps
        if self.seconds and progress > 0:  # at the speed so far
            total_steps = max(step + 1, min(MAX_STEPS, int(step / progress)))
        return lr_multiplier(step, total_steps, config, self.restart_step, self.restart_lr_multiplier)

    def progress(self, step: int, progress: float) -> float:
        """Return the fraction of the run that has passed after `step` steps."""
        return progress if self.seconds else step / self.total_steps

    def expected_steps(self, step: int, progress: float) -> int:
        """Return the steps of the whole run; for a time horizon, as many as it takes at the speed so far."""
        if self.total_steps < MAX_STEPS:
            return self.total_steps
        return max(step, round(step / progress)) if progress else step + 1
