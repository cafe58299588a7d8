"""When a run validates and ends: the numbers that follow from its horizon and its text."""

from dataclasses import dataclass, replace

from gpt.errors import UserError
from gpt.training.config.horizon import Horizon, parse_horizon
from gpt.training.config.schema import Config
from gpt.training.optim import OptimConfig, lr_factor

LEAST_VALIDATIONS = 4
MOST_STEPS = 10**12
SHORT, SHORT_UNTIL = 128, 0.6  # tokens of a short window, and until which part of a run: see benchmarks/LOG.md


@dataclass(frozen=True)
class Schedule:
    """When a run validates and when it ends, by its horizon and its text. A checkpoint stores it.

    Where the horizon is a time, the rates follow the clock, and how many steps it takes is known only at its end.
    """

    total_steps: int = MOST_STEPS
    seconds: float = 0.0  # of training, where the horizon is a time, else 0
    validate_every: int = MOST_STEPS
    whole_from: int = 0  # the number of updates after which windows are whole
    extended_at: int = 0  # the step at which the run was given another horizon
    factor_then: float = 1.0  # the fraction of the peak that its rates had fallen to
    expected_bits: float = 0.0  # per byte, at the horizon, where model=auto has said so

    @classmethod
    def of(cls, config: Config, train_tokens: int, horizon: Horizon | None = None) -> "Schedule":
        """The schedule of a run on `train_tokens` tokens, which validates at least `LEAST_VALIDATIONS` times if it can.

        `horizon`, if given, takes the place of the configuration's.
        """
        horizon = horizon or parse_horizon(config.horizon)
        per_step, often = config.trainer.tokens_per_step, config.trainer.validate_every
        has_short = 0 < (config.trainer.short_window or 0) < config.model.context_length
        if horizon.unit == "seconds":
            return cls(seconds=horizon.amount, validate_every=often, whole_from=MOST_STEPS if has_short else 0)
        per_unit = {"steps": 1.0, "tokens": 1 / per_step, "epochs": train_tokens / per_step}
        steps = max(1, round(horizon.amount * per_unit[horizon.unit]))
        if steps > MOST_STEPS:
            raise UserError(f"horizon: {steps:,} steps are out of range: they must be at most {MOST_STEPS:,}")
        often = min(often, max(1, steps // LEAST_VALIDATIONS))
        return cls(steps, validate_every=often, whole_from=round(SHORT_UNTIL * steps) if has_short else 0)

    def after(self, step: int, share: float) -> "Schedule":
        """This schedule once `step` updates have been made in `share` of the time, if its horizon is one."""
        schedule = self
        if share >= SHORT_UNTIL and self.whole_from > step:
            schedule = replace(schedule, whole_from=step + 1)  # the next windows have been cut already
        return replace(schedule, total_steps=step) if share == 1.0 else schedule

    def has_short_windows(self, step: int) -> bool:
        """Whether windows are short in the update that follows `step` others, so that they are of more places.

        This is staged training (Press et al. 2021, "Shortformer", arXiv:2012.15832). The very first windows are whole,
        so that memory which does not suffice for them shows at once.
        """
        return 0 < step < self.whole_from

    @property
    def validations(self) -> int:
        """How many validations a horizon in steps has."""
        return -(-self.total_steps // self.validate_every)

    def due(self, step: int, every: int) -> bool:
        """Whether what happens every so many steps, and at the horizon, happens after this one."""
        return step % every == 0 or step == self.total_steps

    def out_of_patience(self, patience: int, step: int, best_step: int) -> bool:
        """Whether the last `patience` validations up to `step`, of any number above 0, were all worse than the best.

        It follows from these numbers alone, so a resumed run stops where an uninterrupted one does. A run that was
        extended starts to count again.
        """
        since = max(best_step, self.extended_at)
        return 0 < patience <= step // self.validate_every - since // self.validate_every

    def ended(self, patience: int, step: int, best_step: int) -> str:
        """How a run that has come to `step` has ended; empty if it has not."""
        if step == self.total_steps:
            return f"has trained all of its {step} steps"
        if self.out_of_patience(patience, step, best_step):
            return f"stopped early at step {step}, by patience={patience}"
        return ""

    def rate_factor(self, step: int, share: float, config: OptimConfig) -> float:
        """The fraction of the peak rates in the update after `step` others; `share` of the time, if any, has passed."""
        total = self.total_steps
        if self.seconds and share > 0:  # as many steps as the whole time would take at the speed so far
            total = max(step + 1, min(MOST_STEPS, int(step / share)))
        return lr_factor(step, total, config, self.extended_at, self.factor_then)

    def progress(self, step: int, share: float) -> float:
        """The part of the run that has passed after `step` updates, and `share` of the time, if it is one."""
        return share if self.seconds else step / self.total_steps

    def expected_steps(self, step: int, share: float) -> int:
        """The steps of the whole run; where its horizon is a time, as many as it takes at the speed so far."""
        if self.total_steps < MOST_STEPS:
            return self.total_steps
        return max(step, round(step / share)) if share else step + 1
