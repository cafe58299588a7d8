"""What a training does (RunSpec), how far it has come (TrainState), and how it ended (Result)."""

import math
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from gpt.data.token_dataset import TokenDataset
from gpt.training.config import Config
from gpt.training.schedule import Schedule


@dataclass(frozen=True)
class RunSpec:
    """Everything that determines a run. It is complete before the loop starts, and holds no tensors.

    Args:
        config: The final configuration, in which only `trainer.strategy` may be `auto`.
        schedule: The planned schedule. If the horizon is a time, `TrainState` stores what the clock decides.
        dataset: The token ids to train and to validate on.
        checkpoint: The checkpoint to resume from; None for a new run.
        initial_weights: The model to start from, by `init_from`; None for random weights.
        command: The command that resumed the run, for command.txt; empty for a new run.
    """

    config: Config
    schedule: Schedule
    dataset: TokenDataset
    checkpoint: Path | None = None
    initial_weights: Path | None = None
    command: str = ""


@dataclass
class TrainState:
    """What a checkpoint stores beside weights and optimizer, as plain types."""

    # As planned, or decided by the clock if the horizon is a time.
    total_steps: int = 0
    full_length_from_step: int = 0

    seconds: float = 0.0  # training time
    best_loss: float = math.inf  # validation loss in nats per token
    best_step: int = -1
    beaten_at_step: dict[str, int] = field(default_factory=dict)  # baseline -> first validation with a better score
    commits: dict[str, str] = field(default_factory=dict)  # step -> code version from this step on
    log_offsets: dict[str, int] = field(default_factory=dict)  # file -> its size in bytes at this checkpoint

    train_loss: float | None = None  # last point of train/loss
    loss_sums: list[float] = field(default_factory=lambda: [0.0])  # for each rank, the losses since that point
    num_loss_steps: int = 0  # number of losses in each sum

    # For the warning about overfitting.
    train_loss_at_best: float | None = None  # train/loss when validation was best
    overfit_count: int = 0  # consecutive validations that looked overfit

    # For the warning about divergence.
    loss_ema: float = math.inf  # moving average of train/loss
    min_loss_ema: float = math.inf
    last_healthy_step: int = 0
    high_loss_count: int = 0  # consecutive points of train/loss far above the average

    # For fp16.
    loss_scale: dict[str, Any] = field(default_factory=dict)
    skipped_steps: int = 0

    @classmethod
    def at_start(cls, schedule: Schedule) -> "TrainState":
        """Return the state before the first step."""
        state = cls()
        state.set_schedule(schedule)
        return state

    @classmethod
    def from_checkpoint(cls, checkpoint: dict[str, Any], schedule: Schedule) -> "TrainState":
        """Return the state in a checkpoint.

        If the checkpoint has another schedule, the run was extended, and `schedule` replaces what the clock decided.

        Raises:
            KeyError, TypeError, ValueError: A value is missing or has the wrong type.
        """
        stored = checkpoint["state"]
        for f in fields(cls):
            value = stored[f.name]
            default = getattr(cls(), f.name)
            allowed = (float, type(None)) if default is None else (type(default),)
            if not isinstance(value, allowed):
                raise ValueError(f"its {f.name} is {value!r}")
        state = cls(**stored)
        if Schedule(**checkpoint["schedule"]) != schedule:
            state.set_schedule(schedule)
        return state

    def set_schedule(self, schedule: Schedule) -> None:
        """Store the part of a schedule that the clock may change."""
        self.total_steps = schedule.total_steps
        self.full_length_from_step = schedule.full_length_from_step

    def current_schedule(self, planned: Schedule) -> Schedule:
        """Return the planned schedule, changed as the clock has decided."""
        return replace(planned, total_steps=self.total_steps, full_length_from_step=self.full_length_from_step)


@dataclass(frozen=True)
class Result:
    """How a training ended.

    Args:
        step: The last complete step.
        schedule: The schedule at the end, with what the clock decided.
        stop_reason: `horizon`, `signal`, `patience` or `callback`.
        stop_signal: The signal that ended the run before its horizon, or 0.
        metrics: The content of metrics.json at the last validation; empty if this process made none.
        samples: The texts sampled at the last validation.
        longest_copy: Length in characters of the longest passage in the samples that occurs in the training text.
    """

    step: int
    schedule: Schedule
    stop_reason: str
    stop_signal: int
    metrics: dict[str, Any]
    samples: list[str]
    longest_copy: int
