"""The schedule of a run, computed from its horizon: when it validates and ends, and when sequences are short."""

from dataclasses import dataclass, replace

from gpt.errors import UserError
from gpt.training.config import Config, Horizon, parse_horizon
from gpt.training.lr_schedule import lr_multiplier
from gpt.training.optim import OptimConfig

MIN_VALIDATIONS = 4
MAX_STEPS = 10**12
SHORT_SEQUENCE_TOKENS = 128  # see benchmarks/LOG.md
SHORT_SEQUENCES_FRACTION = 0.6  # of a run


@dataclass(frozen=True)
class Schedule:
    """The schedule of a run. Checkpoints store it.

    If the horizon is a time, the learning rate follows the clock, and the number of steps is known only at the end.
    Methods therefore take `progress`, the fraction of the time that has passed. Other horizons ignore it.

    Args:
        total_steps: The last step; `MAX_STEPS` until a time horizon is over.
        seconds: The horizon if it is a time, else 0.
        validate_every: Steps between validations.
        full_length_from_step: Sequences have the whole context after this many steps.
        restart_step: The step at which the run was extended to another horizon.
        restart_lr_multiplier: The learning rate at that step, as a fraction of its peak.
        expected_bits: The bits per byte that model=auto predicts for the horizon, else 0.
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
        """Return the schedule of a run, with at least `MIN_VALIDATIONS` validations if it has enough steps.

        Args:
            config: The configuration of the run.
            train_tokens: The number of tokens in the training text.
            horizon: Replaces the horizon of the configuration.
        """
        horizon = horizon or parse_horizon(config.horizon)
        tokens_per_step = config.trainer.tokens_per_step
        validate_every = config.trainer.validate_every
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
            full_length_from_step=round(SHORT_SEQUENCES_FRACTION * steps) if has_short_sequences else 0,
        )

    def after_step(self, step: int, progress: float) -> "Schedule":
        """Return the schedule with what the clock decides after `step`: the end, and the switch to full length."""
        schedule = self
        if progress >= SHORT_SEQUENCES_FRACTION and self.full_length_from_step > step:
            schedule = replace(schedule, full_length_from_step=step + 1)  # the next batch is already read
        if progress == 1.0:
            schedule = replace(schedule, total_steps=step)
        return schedule

    def uses_short_sequences(self, step: int) -> bool:
        """Return True if the step after `step` others trains on shorter sequences, and more of them.

        This is staged training (Press et al. 2021, "Shortformer", arXiv:2012.15832). The first step has full length, so
        that a run which needs too much memory fails at once.
        """
        return 0 < step < self.full_length_from_step

    @property
    def num_validations(self) -> int:
        """The number of validations, if the horizon is not a time."""
        return -(-self.total_steps // self.validate_every)

    def is_due(self, step: int, every: int) -> bool:
        """Return True every `every` steps, and at the last step."""
        return step % every == 0 or step == self.total_steps

    def is_out_of_patience(self, patience: int, step: int, best_step: int) -> bool:
        """Return True if none of the last `patience` validations improved on the best. With patience 0, return False.

        The result depends on step numbers only, so a resumed run stops where an uninterrupted one does. Extending a run
        restarts the count.
        """
        since_step = max(best_step, self.restart_step)
        return 0 < patience <= step // self.validate_every - since_step // self.validate_every

    def describe_end(self, patience: int, step: int, best_step: int) -> str:
        """Return how a run has ended after `step` steps, or an empty string if it continues."""
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
        """Return the fraction of the run that is complete after `step` steps."""
        return progress if self.seconds else step / self.total_steps

    def expected_steps(self, step: int, progress: float) -> int:
        """Return the number of steps in the whole run. For a time horizon, extrapolate the speed so far."""
        if self.total_steps < MAX_STEPS:
            return self.total_steps
        return max(step, round(step / progress)) if progress else step + 1
