"""How long a run trains, and in which steps: its horizon, and the numbers that follow from it."""

import re
from dataclasses import dataclass, replace

from gpt.errors import UserError
from gpt.training.optim import OptimConfig, lr_factor

LEAST_VALIDATIONS = 4
MOST_STEPS = 10**12
_FACTORS = {None: 1, "k": 10**3, "M": 10**6, "B": 10**9, "s": 1, "min": 60, "h": 3600}
_HORIZON = re.compile(r"(\d+(?:\.\d+)?)\s*(?:(k|M|B)?\s*(step|token)s?|(epoch)s?|(s|min|h))")


@dataclass(frozen=True)
class Horizon:
    """How long a run trains: an amount of `steps`, `tokens`, `epochs` or `seconds`."""

    amount: float
    unit: str


def parse_horizon(text: str) -> Horizon:
    """Read a horizon such as `2000steps`, `100Mtokens`, `3epochs`, `90s`, `3min` or `2h`; else raise `UserError`."""
    match = _HORIZON.fullmatch(text.strip())
    if not match or not 0 < float(match[1]) < 1e15:
        raise UserError(
            f"horizon={text!r} is not a horizon: give auto, or a number above 0 and a unit, such as "
            "2000steps, 100Mtokens, 3epochs, 90s, 3min or 2h"
        )
    amount = float(match[1]) * _FACTORS[match[2] or match[5]]
    return Horizon(amount, f"{match[3] or match[4] or 'second'}s")


@dataclass(frozen=True)
class Schedule:
    """The numbers that a run needs once everything automatic is decided. A checkpoint stores them.

    Where the horizon is a time, the rates follow the clock, and how many steps it takes is known only at its end.
    """

    windows_per_step: int  # over all devices
    micro_batch_size: int  # windows on each device
    accumulation: int  # micro-batches per step, on each device
    automatic: bool = False  # whether the micro-batch may shrink when memory runs out, as a single process may do alone
    total_steps: int = MOST_STEPS
    seconds: float = 0.0  # of training, where the horizon is a time, else 0
    validate_every: int = MOST_STEPS
    extended_at: int = 0  # the step at which the run was given another horizon
    factor_then: float = 1.0  # the fraction of the peak that its rates had fallen to
    expected_bits: float = 0.0  # per byte, at the horizon, where model=auto has said so

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

    def rate_factor(self, step: int, share: float, config: OptimConfig) -> float:
        """The fraction of the peak rates in the update after `step` others; `share` of the time, if any, has passed."""
        total = self.total_steps
        if self.seconds and share > 0:  # as many steps as the whole time would take at the speed so far
            total = max(step + 1, min(MOST_STEPS, int(step / share)))
        return lr_factor(step, total, config, self.extended_at, self.factor_then)

    def until(self, horizon: Horizon, tokens_per_step: int, train_tokens: int, validate_every: int) -> "Schedule":
        """This schedule for a run until `horizon`, which validates at least `LEAST_VALIDATIONS` times if it can."""
        if horizon.unit == "seconds":
            return replace(self, total_steps=MOST_STEPS, seconds=horizon.amount, validate_every=validate_every)
        per_unit = {"steps": 1.0, "tokens": 1 / tokens_per_step, "epochs": train_tokens / tokens_per_step}
        steps = max(1, round(horizon.amount * per_unit[horizon.unit]))
        if steps > MOST_STEPS:
            raise UserError(f"horizon: {steps:,} steps are out of range: they must be at most {MOST_STEPS:,}")
        often = min(validate_every, max(1, steps // LEAST_VALIDATIONS))
        return replace(self, total_steps=steps, seconds=0.0, validate_every=often)

    def with_smaller_micro_batch(self) -> "Schedule":
        """The same steps in micro-batches of half the size, or of the next smaller size that divides a step.

        Raises `UserError`, about memory that has run out, if the size is 1 or not ours to choose.
        """
        size, windows = self.micro_batch_size, self.micro_batch_size * self.accumulation
        if size == 1:
            raise UserError("out of memory at trainer.micro_batch_size=1, the least: choose a smaller model")
        smaller = next(size for size in range(size // 2, 0, -1) if windows % size == 0)
        if not self.automatic:
            raise UserError(f"out of memory at trainer.micro_batch_size={size}: try trainer.micro_batch_size={smaller}")
        return replace(self, micro_batch_size=smaller, accumulation=windows // smaller)
