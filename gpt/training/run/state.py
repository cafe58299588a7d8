"""The state of a run beside its weights and its optimizer, which a checkpoint stores whole."""

import math
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass
class TrainState:
    """The parts of a training that follow from the steps before, as plain types, which a checkpoint stores."""

    seconds: float = 0.0  # of training, up to the end of the last step
    best_loss: float = math.inf  # of all validations, in nats per token
    best_step: int = -1
    loss: float | None = None  # the last point of train/loss
    losses: list[float] = field(default_factory=lambda: [0.0])  # each rank's sum over the steps since that point
    num_losses: int = 0  # how many steps these are
    passed_at: dict[str, int] = field(default_factory=dict)  # the step at whose validation a reference was passed
    # For the warning that the run memorises: train/loss when validation was best, and validations in a row since.
    loss_at_best: float | None = None
    worse: int = 0
    # For the warning that the loss explodes: a running mean of train/loss, its least, the last step near it, and the
    # points in a row that were not.
    course: float = math.inf
    lowest: float = math.inf
    near: int = 0
    high: int = 0
    logged: dict[str, list] = field(default_factory=dict)  # what users' callbacks have logged since: step and value
    sizes: dict[str, int] = field(default_factory=dict)  # of the files that grow, in bytes
    loss_scale: dict[str, Any] = field(default_factory=dict)  # of fp16
    skipped_steps: int = 0  # by fp16

    @classmethod
    def restored(cls, stored: dict[str, Any]) -> "TrainState":
        """Restore the state from a checkpoint; `KeyError`, `TypeError` or `ValueError` if it is something else."""
        for one in fields(cls):
            value, default = stored[one.name], getattr(cls(), one.name)
            allowed = (float, type(None)) if default is None else (type(default),)
            if not isinstance(value, allowed):
                raise ValueError(f"its {one.name} is {value!r}")
        return cls(**stored)
