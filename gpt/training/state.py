"""The three values of a training: what it is to do, how far it has come, and how it ended."""

import math
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from gpt.data.token_dataset import TokenDataset
from gpt.training.config import Config
from gpt.training.schedule import Schedule


@dataclass(frozen=True)
class RunSpec:
    """What a run does, complete before its loop starts. It holds no tensors.

    Args:
        config: Every setting; no value is `auto` any more.
        schedule: The planned schedule. What the clock decides later is in `TrainState`.
        dataset: The token ids to train and to validate on.
        checkpoint: The run's own checkpoint to resume from; None at the first step.
        initial_weights: The model whose weights a new run starts from; None for random weights.
        command: The command that resumes the run, for command.txt; empty for a new run.
    """

    config: Config
    schedule: Schedule
    dataset: TokenDataset
    checkpoint: Path | None = None
    initial_weights: Path | None = None
    command: str = ""


@dataclass
class TrainState:
    """What follows from the steps so far, beside weights and optimizer, as plain types that a checkpoint stores."""

    # Decided by the clock if the horizon is a time; otherwise as planned.
    total_steps: int = 0
    full_length_from_step: int = 0

    seconds: float = 0.0  # of training, up to the end of the last step
    best_loss: float = math.inf  # validation loss in nats per token
    best_step: int = -1
    beaten_at_step: dict[str, int] = field(default_factory=dict)  # baseline -> step of the validation that beat it
    commits: dict[str, str] = field(default_factory=dict)  # step -> the code version that trained from there on
    log_offsets: dict[str, int] = field(default_factory=dict)  # file -> bytes that belong to this checkpoint

    train_loss: float | None = None  # the last point of train/loss
    loss_sums: list[float] = field(default_factory=lambda: [0.0])  # of each rank since that point
    num_loss_steps: int = 0  # steps in these sums

    # For the warning about overfitting.
    train_loss_at_best: float | None = None  # train/loss when validation was best
    overfit_count: int = 0  # validations in a row that looked overfit

    # For the warning about divergence.
    loss_ema: float = math.inf  # moving average of train/loss
    min_loss_ema: float = math.inf
    last_healthy_step: int = 0
    high_loss_count: int = 0  # points of train/loss in a row that were far above the average

    # For fp16.
    loss_scale: dict[str, Any] = field(default_factory=dict)
    skipped_steps: int = 0

    @classmethod
    def at_start(cls, schedule: Schedule) -> "TrainState":
        """Return the state before the first step."""
        return cls(total_steps=schedule.total_steps, full_length_from_step=schedule.full_length_from_step)

    @classmethod
    def from_checkpoint(cls, checkpoint: dict[str, Any], schedule: Schedule) -> "TrainState":
        """Return the state that a checkpoint stores.

        If `schedule` is not the checkpoint's, the run was extended: what the clock decided for the old horizon is void.

        Raises:
            KeyError, TypeError, ValueError: The checkpoint holds something else.
        """
        stored = checkpoint["state"]
        for f in fields(cls):
            value, default = stored[f.name], getattr(cls(), f.name)
            allowed = (float, type(None)) if default is None else (type(default),)
            if not isinstance(value, allowed):
                raise ValueError(f"its {f.name} is {value!r}")
        state = cls(**stored)
        if Schedule(**checkpoint["schedule"]) != schedule:
            state.total_steps = schedule.total_steps
            state.full_length_from_step = schedule.full_length_from_step
        return state

    def current_schedule(self, planned: Schedule) -> Schedule:
        """Return the planned schedule with what the clock has decided."""
        return replace(planned, total_steps=self.total_steps, full_length_from_step=self.full_length_from_step)


@dataclass(frozen=True)
class Result:
    """How a training ended.

    Args:
        step: The last complete step.
        schedule: As the clock has decided it.
        stop_reason: `horizon`, `signal`, `patience` or `callback`.
        stop_signal: The signal that ended the run before its horizon, or 0.
        metrics: As in metrics.json, of the last validation; empty if this process made none.
        samples: The texts sampled at that validation.
        longest_copy: Characters of the longest passage in them that occurs in the training text.
    """

    step: int
    schedule: Schedule
    stop_reason: str
    stop_signal: int
    metrics: dict[str, Any]
    samples: list[str]
    longest_copy: int
