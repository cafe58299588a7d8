"""Steps, windows per step and micro-batches for a configuration on this machine and text."""

from dataclasses import dataclass, replace

from gpt.errors import UserError
from gpt.training.config import Config, Horizon, parse_horizon
from gpt.training.optim import lr_factor

LEAST_VALIDATIONS = 4
MOST_STEPS = 10**12


@dataclass(frozen=True)
class Plan:
    """The numbers that a run needs once everything automatic is decided. A checkpoint stores them."""

    total_steps: int
    windows_per_step: int  # over all devices
    micro_batch_size: int  # windows on each device
    accumulation: int  # micro-batches per step, on each device
    automatic: bool = False  # whether the micro-batch may shrink when memory runs out
    validate_every: int = 10**9
    extended_at: int = 0  # the step at which the run was given other steps to train: a new horizon, or a corrected time
    factor_then: float = 1.0  # the fraction of the peak that its rates had fallen to

    def due(self, step: int, every: int) -> bool:
        """Whether what happens every so many steps, at the horizon and where it was changed, happens after this one."""
        return step % every == 0 or step in (self.total_steps, self.extended_at)

    def for_steps(self, total_steps: int, validate_every: int) -> "Plan":
        """This plan for a run of `total_steps`, which validates at least `LEAST_VALIDATIONS` times if it can."""
        if total_steps > MOST_STEPS:
            raise UserError(f"horizon: {total_steps:,} steps are out of range: they must be at most {MOST_STEPS:,}")
        often = max(1, total_steps // LEAST_VALIDATIONS)
        return replace(self, total_steps=total_steps, validate_every=min(validate_every, often))

    def from_step(self, step: int, total_steps: int, config: Config) -> "Plan":
        """This plan with a new horizon from `step` on; the rates move from where they are to the schedule for it."""
        factor = lr_factor(step, self.total_steps, config.optim, self.extended_at, self.factor_then)
        plan = self.for_steps(total_steps, config.trainer.validate_every)
        return replace(plan, extended_at=step, factor_then=factor)

    def with_smaller_micro_batch(self) -> "Plan":
        """The same steps in micro-batches of half the size, or of the next smaller size that divides a step."""
        windows = self.micro_batch_size * self.accumulation
        size = next(size for size in range(max(1, self.micro_batch_size // 2), 0, -1) if windows % size == 0)
        return replace(self, micro_batch_size=size, accumulation=windows // size)


def make_plan(config: Config, train_tokens: int, automatic: bool) -> Plan:
    """The plan of a run on `train_tokens` tokens; for one in seconds, `total_steps` is 1 until a step is measured."""
    windows = config.trainer.tokens_per_step // config.model.context_length
    micro_batch = int(config.trainer.micro_batch_size)
    plan = Plan(1, windows, micro_batch, windows // (micro_batch * config.trainer.world_size), automatic)
    horizon = parse_horizon(config.horizon)
    steps = 1 if horizon.unit == "seconds" else steps_of(horizon, config.trainer.tokens_per_step, train_tokens)
    return plan.for_steps(steps, config.trainer.validate_every)


def steps_of(horizon: Horizon, tokens_per_step: int, train_tokens: int) -> int:
    """The number of steps of a horizon in steps, tokens or epochs."""
    per_unit = {"steps": 1.0, "tokens": 1 / tokens_per_step, "epochs": train_tokens / tokens_per_step}[horizon.unit]
    return max(1, round(horizon.amount * per_unit))
