"""Warnings about overfitting and divergence. Each is printed once in a run."""

import math
from typing import Any

from gpt.console import print_warning
from gpt.sampling.scoring import Score
from gpt.training import distributed
from gpt.training.advice import OVERFIT_LOSS_RATIO, suggest_shorter_horizon
from gpt.training.optim import unused_settings
from gpt.training.run_directory import RunDirectory, repeat_command
from gpt.training.state import RunSpec, TrainState

OVERFIT_VALIDATIONS = 2  # consecutive validations before the warning
# A training loss this far above its moving average is not the noise of a batch.
DIVERGED_RATIO = 1.2
DIVERGED_NATS = 0.3
DIVERGED_POINTS = 5  # consecutive points of the curve before the warning
# A model memorizes its text if its validation loss is this many times the training loss.
MEMORIZED_RATIO = 2.0
MEMORIZED_RATIO_UNBEATEN = 1.25  # if it beats no baseline, because it has learned little else


def warn_if_overfitting(spec: RunSpec, state: TrainState, step: int, score: Score) -> None:
    """Warn, after a validation, if the last ones are worse than the best while the training loss keeps falling."""
    if state.overfit_count == OVERFIT_VALIDATIONS:
        return
    if state.best_step == step:
        state.train_loss_at_best = None
    if state.train_loss_at_best is None:  # train/loss may have no point before the first validation
        state.train_loss_at_best = state.train_loss
    train_loss = state.train_loss
    loss_at_best = state.train_loss_at_best
    is_falling = train_loss is not None and loss_at_best is not None and OVERFIT_LOSS_RATIO * train_loss < loss_at_best
    is_worse = score.nats_per_token > OVERFIT_LOSS_RATIO * state.best_loss
    state.overfit_count = state.overfit_count + 1 if is_falling and is_worse else 0
    if state.overfit_count == OVERFIT_VALIDATIONS and distributed.is_main_process():
        print_warning(
            f"validation loss was lowest at step {state.best_step} and has risen since, while training loss keeps "
            f"falling: the model overfits. best.ckpt holds step {state.best_step}; try "
            f"horizon={suggest_shorter_horizon(spec.config, spec.dataset, state.best_step)}steps"
        )


def warn_if_diverging(spec: RunSpec, run: RunDirectory, state: TrainState, step: int) -> None:
    """Warn, after a point of train/loss, if it stays far above its moving average: the learning rate is too high."""
    optim = spec.config.optim
    if state.train_loss is None or state.high_loss_count == DIVERGED_POINTS:
        return
    if state.train_loss <= DIVERGED_RATIO * state.min_loss_ema + DIVERGED_NATS:
        is_first = state.loss_ema == math.inf
        state.loss_ema = state.train_loss if is_first else 0.9 * state.loss_ema + 0.1 * state.train_loss
        state.min_loss_ema = min(state.min_loss_ema, state.loss_ema)
        state.last_healthy_step = step
        state.high_loss_count = 0
        return
    state.high_loss_count += 1
    if state.high_loss_count == DIVERGED_POINTS and distributed.is_main_process():
        names = {"lr", "matrix_lr"} - unused_settings(optim.name)
        rates = [f"optim.{name}={getattr(optim, name) / 2:g}" for name in sorted(names)]
        best_step = state.best_step
        is_best_healthy = 0 < best_step <= state.last_healthy_step
        best = f"best.ckpt of step {best_step} is from before; " if is_best_healthy else ""
        print_warning(
            f"training loss has been far above its average since step {state.last_healthy_step} "
            f"({state.train_loss:.2f}, and {state.min_loss_ema:.2f} before): {best}try a lower learning rate with "
            f"{repeat_command(run.path, *rates)}"
        )


def is_memorizing(metrics: dict[str, Any]) -> bool:
    """Return True if training loss is so far below validation loss that more steps would only memorize more text.

    `metrics` is the content of metrics.json.
    """
    if "train_loss" not in metrics:
        return False
    steps = metrics["beaten_at_step"].values()
    has_beaten_none = bool(steps) and not any(steps)
    ratio = MEMORIZED_RATIO_UNBEATEN if has_beaten_none else MEMORIZED_RATIO
    return metrics["val_loss"] > ratio * metrics["train_loss"]
