"""Fit a run: Lightning's trainer with the user's callbacks and our loop, again in smaller pieces if memory runs out."""

import os
from collections.abc import Sequence
from dataclasses import replace

import torch
from lightning import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from gpt.console import say, warn
from gpt.errors import UserError, is_out_of_memory, reason
from gpt.exchange.checkpoint import load
from gpt.exchange.loading import open_model
from gpt.hardware.device import arithmetic
from gpt.hardware.memory import keep_freed_memory, release_memory
from gpt.hardware.threads import giving_way
from gpt.training.config.advice import shorter_steps
from gpt.training.config.loading import validate
from gpt.training.distributed.launch import expect_answers, is_rank_0, on_all_ranks, unchanged_environment
from gpt.training.estimate.agreement import require_agreement
from gpt.training.loop import Loop
from gpt.training.metrics.curves import Curves
from gpt.training.metrics.loggers import UserCurves, close_loggers, open_loggers
from gpt.training.metrics.report import resuming
from gpt.training.module import GPTModule
from gpt.training.run.clock import Clock
from gpt.training.run.run import Run
from gpt.training.run.signals import StopSignals
from gpt.training.run.state import TrainState
from gpt.training.trainer import TrainBatches, build_trainer


def fit(run: Run, callbacks: Sequence[Callback] = ()) -> None:
    """Train to the horizon, with smaller micro-batches if memory runs out and they may be chosen.

    `callbacks` are Lightning's; with several devices, every process must have the same. A stop signal, as from Ctrl-C,
    ends the training after a step and a checkpoint; `run.stopped_by` then is its number.
    """
    keep_freed_memory()
    signals, schedule = StopSignals(), run.schedule
    try:
        while True:
            try:
                with unchanged_environment():
                    loop = _fit_once(run, callbacks, signals)
                break
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
            run.schedule = replace(run.schedule, total_steps=schedule.total_steps)  # of a time that is not up yet
            _shrink(run)  # when the error is gone, and what it holds of memory
    finally:
        signals.restore()
    run.stopped_by = loop.stopped_by
    if is_rank_0():
        _say_why_it_stopped(run, loop)


def _fit_once(run: Run, callbacks: Sequence[Callback], signals: StopSignals) -> Loop:
    """Train a run from its checkpoint, or from `run.weights`, or from its first step, until its horizon or a stop."""
    config, config_changed = run.config, _restore_state(run)
    clock = Clock(run.state, run.schedule.seconds)
    module = GPTModule(
        config,
        run.text.tokenizer,
        lambda step: run.schedule.rate_factor(step, clock.share, config.optim),
        lambda step: run.schedule.progress(step, clock.share),
    )
    _announce(run, module.model.config.num_parameters)
    if run.weights is not None:
        module.load_state_dict(run.weights)
        run.weights = None  # nothing large stays referenced while training
    others = open_loggers(config, run.directory) if is_rank_0() else []
    curves = Curves(run, others)
    user_curves = UserCurves(curves, run.state.logged)
    loop = Loop(run, clock, curves, user_curves, signals, config_changed)
    try:
        loggers = [user_curves, *others] if config.logger else []
        trainer = build_trainer(config.trainer, run.schedule, [*callbacks, loop], loggers)
        with arithmetic(config.trainer.device, config.trainer.deterministic), giving_way():
            on_all_ranks(lambda: require_agreement(module))
            expect_answers(config.trainer.answer_minutes)
            trainer.fit(module, TrainBatches(run, module))
    except Exception as error:
        run.require_here()  # which tells more than what came of it
        # A callback that needs a logger where there is none, or a curve that nobody writes, or that is named twice.
        at_fault = "conditioned on metric" in str(error) or "more than one stateful callback" in str(error)
        if at_fault or isinstance(error, MisconfigurationException):
            raise UserError(reason(error)) from error
        raise
    finally:
        loop.close()
        close_loggers(others)
    return loop


def _restore_state(run: Run) -> bool:
    """Restore the state from the checkpoint; returns whether the configuration has changed since.

    With as many processes as before it is trained with as many threads, too, on which every bit depends.
    """
    run.state = TrainState()
    if run.file is None:
        return False
    if run.payload is None:  # on ranks above 0, each of which reads it itself
        run.payload = load(run.file, mmap=True)
    with run.restoring():
        run.state, stored = TrainState.restored(run.payload["state"]), validate(run.payload["config"])
        if stored.trainer.world_size == run.config.trainer.world_size:
            torch.set_num_threads(run.payload["threads"])
            os.environ["OMP_NUM_THREADS"] = str(run.payload["threads"])  # or else Lightning changes it
    return stored != run.config


def _shrink(run: Run) -> None:
    """Prepare a run to continue with smaller micro-batches after memory has run out."""
    size, before = run.config.micro_batch_size, run.config
    run.config = run.config.with_smaller_micro_batch()
    smaller = run.config.micro_batch_size
    warn(f"out of memory at trainer.micro_batch_size={size}: going on with {smaller} and as many tokens a step")
    release_memory()
    run.read_newest()  # saved on the way out, unless it failed within an update
    if run.payload is not None and run.payload["step"]:
        run.config = run.config.amending(before, run.payload["step"])
    elif run.payload is None and run.config.init_from:
        run.weights = open_model(run.config.init_from)[0].state_dict()


def _announce(run: Run, num_parameters: int) -> None:
    trainer, schedule = run.config.trainer, run.schedule
    horizon = f"{run.config.horizon} in steps" if schedule.seconds else f"{schedule.total_steps} steps"
    if is_rank_0():
        say(
            f"{num_parameters:,} parameters on {trainer.device} in {trainer.precision}, {horizon} of "
            f"{trainer.tokens_per_step:,} tokens; writing to {run.directory}"
        )


def _say_why_it_stopped(run: Run, loop: Loop) -> None:
    """Say why a run has ended before its horizon, if it has."""
    again = resuming(run.directory, run.in_python)
    if loop.stopped_by:
        say(f"stopped at step {loop.step}; continue with: {again}")
    if loop.by_patience and loop.stopped_at:
        best = run.state.best_step
        say(
            f"stopped early at step {loop.stopped_at}: no improvement in the last {run.config.patience} validations "
            f"(best at step {best}). The learning rates were still falling: a shorter run, such as "
            f"horizon={shorter_steps(run.config, run.text, best)}steps, will probably do better"
        )
    elif loop.stopped_at:
        say(f"stopped early at step {loop.stopped_at}, as a callback asked; to go on regardless: {again}")
