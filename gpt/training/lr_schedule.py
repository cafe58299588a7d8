"""The learning-rate schedule: warmup, plateau, and a decay whose shape has a name.

A new schedule is a function with an entry in `SCHEDULES`: `optim.schedule=NAME` then chooses it.
"""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpt.training.optim import OptimConfig


# The shape of the decay. Each function takes the step, the step at which the decay starts, and the length of the run.
# It returns how far the learning rate has fallen, from 0 at its peak to 1 at `final_lr`. Every function but `constant`
# returns 1 at the end, so a textbook inverse square root must be scaled.


def linear(step: int, decay_start: float, total_steps: int) -> float:
    return (step - decay_start) / max(1.0, total_steps - decay_start)


def cosine(step: int, decay_start: float, total_steps: int) -> float:
    return (1.0 - math.cos(math.pi * linear(step, decay_start, total_steps))) / 2.0


def constant(step: int, decay_start: float, total_steps: int) -> float:
    return 0.0


SCHEDULES: dict[str, Callable[[int, float, int], float]] = {"linear": linear, "cosine": cosine, "constant": constant}


def lr_multiplier(
    step: int, total_steps: int, config: "OptimConfig", restart_step: int = 0, restart_lr_multiplier: float = 1.0
) -> float:
    """Return the learning rate as a fraction of its peak.

    It rises during the warmup (at most half the run), stays at 1, decays from `decay_from` on, and would reach
    `final_lr` one step after the last. With `constant` it does not decay.

    Args:
        step: The number of steps before this one.
        total_steps: The length of the run.
        config: Warmup, shape and end of the schedule.
        restart_step: The step at which the run was extended. From there, the learning rate returns to the schedule of
            the new horizon, as fast as in a warmup: Ibrahim et al. 2024, "Simple and Scalable Strategies to Continually
            Pre-train Large Language Models".
        restart_lr_multiplier: The value at `restart_step`, by the schedule of the old horizon.
    """
    warmup_steps = min(config.warmup_steps, total_steps // 2)
    decay_start = max(warmup_steps, config.decay_from * total_steps)
    if step < warmup_steps:
        multiplier = (step + 1) / warmup_steps
    elif step < decay_start:
        multiplier = 1.0
    else:
        multiplier = 1.0 - (1.0 - config.final_lr) * SCHEDULES[config.schedule](step, decay_start, total_steps)
    rewarmed = restart_lr_multiplier + (step + 1 - restart_step) / max(1, config.warmup_steps)
    return min(rewarmed, multiplier)
