"""Warnings about a run that goes wrong although its numbers are finite. Each is said once."""

import math

from gpt.console import quote, warn
from gpt.sampling.scoring import Score
from gpt.training.config.advice import TURNED, shorter_steps
from gpt.training.distributed.launch import is_rank_0
from gpt.training.optim import unread_settings
from gpt.training.run.run import Run

WORSE = 2  # validations in a row, after which a run is told that it memorises
EXPLODED = 1.2, 0.3  # a training loss above so many times its course, and so many nats, is not the luck of a batch
POINTS = 5  # of the curve in a row, after which it is no hiccup either


def look_for_memorising(run: Run, step: int, score: Score) -> None:
    """Warn, at a validation, if the last ones are worse than the best while the training loss goes on falling."""
    state = run.state
    if state.worse == WORSE:
        return
    if state.best_step == step:
        state.loss_at_best = None
    if state.loss_at_best is None:  # its first point may come later
        state.loss_at_best = state.loss
    falls = state.loss is not None and state.loss_at_best is not None and TURNED * state.loss < state.loss_at_best
    state.worse = state.worse + 1 if falls and score.nats_per_token > TURNED * state.best_loss else 0
    if state.worse == WORSE and is_rank_0():
        warn(
            f"validation loss was lowest at step {state.best_step} and has risen since, while training loss "
            f"keeps falling: the model is memorising. best.ckpt holds step {state.best_step}; try "
            f"horizon={shorter_steps(run.config, run.text, state.best_step)}steps"
        )


def look_for_explosion(run: Run, step: int) -> None:
    """Warn, at a point of train/loss, if it stays far above its own course: the rates are too high."""
    state, (times, nats), optim = run.state, EXPLODED, run.config.optim
    if state.loss is None or state.high == POINTS:
        return
    if state.loss <= times * state.lowest + nats:
        state.course = state.loss if state.course == math.inf else 0.9 * state.course + 0.1 * state.loss
        state.lowest, state.near, state.high = min(state.lowest, state.course), step, 0
        return
    state.high += 1
    if state.high == POINTS and is_rank_0():
        rates = {"lr", "matrix_lr"} - unread_settings(optim.name)
        words = [f"rerun={run.directory}"]
        words += [f"optim.{name}={getattr(optim, name) / 2:g}" for name in sorted(rates)]
        best = state.best_step
        kept = f"best.ckpt of step {best} is from before; " if 0 < best <= state.near else ""
        warn(
            f"training loss has been far above its course since step {state.near} ({state.loss:.2f}, and "
            f"{state.lowest:.2f} before): {kept}try lower rates with {' '.join(map(quote, words))}"
        )
