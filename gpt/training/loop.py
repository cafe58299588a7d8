"""The training loop. `train` reads from top to bottom: set up, restore, then one step after another until the horizon.

Lightning Fabric places the model on its device and averages the gradients of several processes. `run_training` calls
`train`, and calls it again with smaller micro-batches if memory runs out.
"""

import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from inspect import signature
from typing import Any

import torch
from lightning import Fabric
from lightning.fabric.plugins.environments import LightningEnvironment, TorchElasticEnvironment
from lightning.fabric.strategies import DDPStrategy
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from gpt.checkpoint import load_checkpoint
from gpt.console import print_warning
from gpt.errors import is_out_of_memory
from gpt.hardware.device import numerics
from gpt.hardware.memory import forget_compiled_models, keep_freed_memory, release_memory, reset_peak_memory
from gpt.hardware.threads import limit_threads
from gpt.loading import open_model
from gpt.training import distributed
from gpt.training.batch_loader import Batch, read_micro_batches, sequence_length
from gpt.training.callbacks import Callbacks, check_callbacks
from gpt.training.checkpoint_writer import CheckpointWriter
from gpt.training.config import TrainerConfig, parse_config
from gpt.training.device_check import check_device_numerics
from gpt.training.health import warn_if_diverging
from gpt.training.launch import unchanged_environment
from gpt.training.metric_logger import MetricLogger
from gpt.training.module import GPTModule
from gpt.training.optim import set_lr
from gpt.training.progress import ProgressDisplay, print_start, print_stop_reason
from gpt.training.run_directory import RunDirectory, checkpoint_errors
from gpt.training.schedule import Schedule
from gpt.training.state import Result, RunSpec, TrainState
from gpt.training.stop_signals import StopSignals
from gpt.training.training_clock import TrainingClock
from gpt.training.validation import Validator
from gpt.training.versions import record_code_version


def train(spec: RunSpec, run: RunDirectory, callbacks: Sequence[Any], signals: StopSignals) -> Result:
    """Train a run until its horizon, or until a signal, a callback or `patience` stops it. Every rank calls this.

    Args:
        spec: What to train, and the checkpoint or the weights to start from.
        run: The directory for checkpoints and logs. On ranks above 0 its methods do nothing.
        callbacks: Objects with hooks: see callbacks.py.
        signals: Records the stop signals that this process receives.
    """
    config = spec.config
    trainer = config.trainer

    # --- Set up ---
    checkpoint, state, step = load_state(spec)
    schedule = state.current_schedule(spec.schedule)
    clock = TrainingClock(state, schedule.seconds)
    fabric = build_fabric(trainer, callbacks)
    module = GPTModule(config, spec.dataset.tokenizer, schedule, clock)
    if spec.initial_weights is not None:
        module.load_state_dict(open_model(spec.initial_weights, quiet=True)[0].state_dict())
    model = fabric.setup_module(module)  # moved to its device, and wrapped in DDP if there are several processes
    optimizer: Any = fabric.setup_optimizers(module.build_optimizer())
    logger = MetricLogger(spec, run, state)
    progress = ProgressDisplay(spec, state, logger)
    hooks = Callbacks(callbacks, fabric, module, logger)
    validator = Validator(spec, run, state, clock, fabric, module, hooks, logger, progress)
    checkpoints = CheckpointWriter(spec, run, state, fabric, module, optimizer, hooks, logger)
    distributed.run_on_all_ranks(lambda: check_device_numerics(module))
    distributed.set_timeout(trainer.answer_minutes)

    try:
        # --- Restore the checkpoint, open the logs, start the clock ---
        signals.install()
        config_changed = False
        if checkpoint is not None:
            config_changed = restore_checkpoint(checkpoint, spec, state, module, optimizer, hooks)
            del checkpoint  # frees the memory that is mapped from the file
        logger.open(step)
        record_code_version(state.commits, step)
        hooks.call("on_train_start", step)
        checkpoints.start(step, config_changed)
        run.write_config(config, step, spec.command)
        if trainer.compile == "true":
            forget_compiled_models()  # those of `check_device_numerics` and of measured candidates
            compile_all_lengths(fabric, model, spec, schedule)
        reset_peak_memory(fabric.device)
        clock.start()
        progress.open(run.path, step, schedule.expected_steps(step, clock.progress))
        if spec.initial_weights is not None:
            validator.evaluate_initial_weights()

        stop_reason = "horizon" if step >= schedule.total_steps else ""
        stop_signal = 0
        with ThreadPoolExecutor(1) as reader:  # reads the batches of the next step during this one
            next_batches = read_ahead(reader, spec, schedule, step, fabric)
            while not stop_reason:
                batches = next_batches.result()
                next_batches = read_ahead(reader, spec, schedule, step + 1, fabric)

                # --- Update the weights. After an error between here and `end_step`, nothing is saved ---
                logger.begin_step(module, step + 1, schedule)
                lr_multiplier = schedule.lr_multiplier(step, clock.progress, config.optim)
                loss = train_step(fabric, model, optimizer, batches, step, lr_multiplier, checkpoints.begin_update)
                step += 1
                clock.end_step(fabric.world_size)
                schedule = schedule.after_step(step, clock.progress)
                state.set_schedule(schedule)
                progress.num_steps = schedule.expected_steps(step, clock.progress)

                # --- Log ---
                is_log_point = schedule.is_due(step, trainer.log_every)
                logger.add_loss(module, loss)
                if is_log_point:
                    logger.write_point(fabric, module, optimizer, step, loss)
                hooks.call("on_train_step_end", step, loss=loss)

                # --- Validate and sample ---
                if schedule.is_due(step, schedule.validate_every) or clock.at_quarter_mark:
                    validator.validate(step)
                if is_log_point:
                    warn_if_diverging(spec, run, state, step)

                # --- Stop? ---
                is_late = checkpoints.seconds_since_save >= 60 * trainer.checkpoint_minutes
                flags = [int(is_late), signals.received_signal, int(hooks.stop_requested)]
                if fabric.world_size > 1:
                    # An exchange takes time, so ranks make it only where they exchange losses anyway. Flags stay set.
                    is_exchange = is_log_point or validator.last_validated_step == step
                    flags = distributed.max_over_ranks(flags) if is_exchange else [0, 0, 0]
                save_is_late, stop_signal, stop_requested = flags  # of any rank
                if step == schedule.total_steps:
                    stop_reason = "horizon"  # even if a signal arrived in the last step
                elif stop_signal:
                    stop_reason = "signal"
                elif schedule.is_out_of_patience(config.patience, step, state.best_step):
                    stop_reason = "patience"
                elif stop_requested:
                    stop_reason = "callback"
                    if validator.last_validated_step != step:
                        validator.validate(step)

                # --- Save checkpoints ---
                saves_best = state.best_step == step
                is_due = schedule.is_due(step, trainer.checkpoint_every) or clock.at_quarter_mark
                saves_last = is_due or checkpoints.is_kept(step) or save_is_late or stop_reason
                if saves_best or saves_last:
                    with clock.paused():
                        if saves_best:
                            checkpoints.save_best(step)
                        if saves_last:
                            checkpoints.save_last(step)
                progress.end_step(step, is_log_point)
                checkpoints.end_step(step)
        hooks.call("on_train_end", step)
    except BaseException as error:
        logger.has_failed = True
        checkpoints.save_after(error)
        raise
    finally:
        progress.close()
        logger.close()
    return Result(
        step=step,
        schedule=schedule,
        stop_reason=stop_reason,
        stop_signal=stop_signal if stop_reason == "signal" else 0,
        metrics=validator.metrics,
        samples=validator.samples,
        longest_copy=validator.longest_copy,
    )


def train_step(
    fabric: Fabric,
    model: Any,
    optimizer: Any,
    micro_batches: Sequence[Batch],
    step: int,
    lr_multiplier: float,
    before_update: Callable[[], object],
) -> Tensor:
    """Make one optimizer step. Return its mean loss on this rank in nats per token, a scalar.

    Args:
        fabric: Has set up `model` and `optimizer`.
        model: The GPTModule, wrapped by Fabric.
        optimizer: Its optimizer, wrapped by Fabric.
        micro_batches: The inputs and targets of this rank, each (B, T). Their gradients are averaged.
        step: The number of steps before this one.
        lr_multiplier: The learning rate as a fraction of its peak.
        before_update: Called when the gradient is complete, before the weights change.

    Raises:
        NonFiniteError: The gradient is not finite. Weights and optimizer are unchanged. In fp16 the step is skipped
            instead, if a smaller loss scale may help. On a GPU in fp32 or bf16 the gradient is checked only when a
            point of the curves is written.
    """
    module = model.module
    loss_scale = module.loss_scale
    set_lr(optimizer, lr_multiplier)
    optimizer.zero_grad()
    mean_loss = torch.zeros((), device=fabric.device)
    for i, batch in enumerate(micro_batches):
        is_last = i + 1 == len(micro_batches)
        with fabric.no_backward_sync(model, enabled=not is_last):  # ranks average gradients once a step
            number = step * len(micro_batches) + i
            loss = model.training_step(fabric.to_device(batch), number) / len(micro_batches)
            fabric.backward(loss if loss_scale is None else loss_scale.scale_loss(loss))
        mean_loss += loss.detach()

    if loss_scale is not None:
        loss_scale.unscale(optimizer.optimizer)
    grad_norm = module.measure_grad_norm()
    is_finite = not module.checks_each_step or bool(grad_norm.isfinite())
    can_continue = is_finite if loss_scale is None else loss_scale.update(skipped=not is_finite)
    if not can_continue:
        raise module.non_finite_gradient(step, step + 1, mean_loss, "no update was made")
    before_update()
    if is_finite:  # otherwise fp16 skips this update
        module.clip_gradients_to(module.config.optim.clip)
        optimizer.step()
    return mean_loss


# --- the parts of `train` ---


def load_state(spec: RunSpec) -> tuple[dict[str, Any] | None, TrainState, int]:
    """Return the checkpoint to resume from, its state and its step. A new run has no checkpoint.

    The tensors of the checkpoint are mapped from the file. If the number of processes is unchanged, restore the thread
    count as well: results depend on it bit for bit.
    """
    if spec.checkpoint is None:
        return None, TrainState.at_start(spec.schedule), 0
    checkpoint = load_checkpoint(spec.checkpoint, mmap=True)
    with checkpoint_errors(spec.checkpoint):
        if parse_config(checkpoint["config"]).trainer.world_size == spec.config.trainer.world_size:
            torch.set_num_threads(checkpoint["threads"])
            os.environ["OMP_NUM_THREADS"] = str(checkpoint["threads"])  # otherwise Lightning changes it
        return checkpoint, TrainState.from_checkpoint(checkpoint, spec.schedule), checkpoint["step"]


def restore_checkpoint(
    checkpoint: dict[str, Any],
    spec: RunSpec,
    state: TrainState,
    module: GPTModule,
    optimizer: torch.optim.Optimizer,
    hooks: Callbacks,
) -> bool:
    """Restore weights, optimizer, loss scale and callbacks. Return True if the checkpoint has another configuration."""
    assert spec.checkpoint is not None
    with checkpoint_errors(spec.checkpoint):
        module.load_state_dict(checkpoint["state_dict"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        if module.loss_scale is not None:
            module.loss_scale.load_state_dict(state.loss_scale, state.skipped_steps)
        config_changed = parse_config(checkpoint["config"]) != spec.config
        callback_states = dict(checkpoint["callbacks"])
    hooks.load_state_dict(callback_states)
    return config_changed


def read_ahead(
    reader: ThreadPoolExecutor, spec: RunSpec, schedule: Schedule, step: int, fabric: Fabric
) -> Future[list[Batch]]:
    """Start to read this rank's micro-batches for the step after `step` others.

    The schedule decides on their length now. So `Schedule.after_step` changes the length one step later.
    """
    T = sequence_length(spec.config, schedule, step)
    is_cuda = fabric.device.type == "cuda"
    return reader.submit(read_micro_batches, spec.config, spec.dataset, step, T, fabric.global_rank, pin=is_cuda)


def compile_all_lengths(fabric: Fabric, model: Any, spec: RunSpec, schedule: Schedule) -> None:
    """Compute gradients of zeros for each sequence length of a run, so that no training step has to compile.

    Otherwise the clock would count this time as training, and a horizon in time would lose its warmup. The gradients
    are discarded, and the global random state is as before.
    """
    config = spec.config
    T = config.model.context_length
    lengths = [config.trainer.short_sequences or T, T] if schedule.full_length_from_step > 0 else [T]
    gpus = [fabric.device] if fabric.device.type == "cuda" else []
    with torch.random.fork_rng(gpus), fabric.no_backward_sync(model):
        for length in lengths:
            batch = torch.zeros(
                config.micro_batch_size * (T // length), length, dtype=torch.int64, device=fabric.device
            )
            fabric.backward(model.training_step((batch, batch), 0))
    model.zero_grad()


def build_fabric(settings: TrainerConfig, callbacks: Sequence[Any] = ()) -> Fabric:
    """Return Fabric for the configured device. The processes have started and met already.

    Each layer casts its own inputs: Fabric's autocast is slower, and does not reach `training_step` on one device.
    """
    logging.getLogger("lightning.fabric").setLevel(logging.WARNING)
    strategy: str | DDPStrategy = "auto"
    if settings.world_size > 1 or settings.strategy == "ddp":
        # All buffers are constant (causal masks and the merge table), so no step needs to send them.
        name = "forward_sync_buffers"
        if name not in signature(DistributedDataParallel).parameters:  # before torch 2.13
            name = "broadcast_buffers"
        strategy = DDPStrategy(**{name: False})  # type: ignore[arg-type]
    fabric = Fabric(
        accelerator={"cuda": "gpu"}.get(settings.device, settings.device),
        devices=settings.devices or 1,
        num_nodes=settings.num_nodes or 1,
        strategy=strategy,
        # With an explicit environment, Fabric neither starts processes nor looks for a launcher.
        plugins=[TorchElasticEnvironment() if settings.world_size > 1 else LightningEnvironment()],
        callbacks=list(callbacks),
    )
    fabric.launch()
    return fabric


# --- a whole training ---


def run_training(spec: RunSpec, run: RunDirectory, callbacks: Sequence[Any] = ()) -> Result:
    """Train a run. If memory runs out, retry with a smaller micro-batch, unless the user chose its size.

    A stop signal, as from Ctrl-C, ends the training after a step and a checkpoint: see `Result.stop_signal`. With
    several devices, every process must have the same callbacks.
    """
    check_callbacks(callbacks)
    keep_freed_memory()
    signals = StopSignals()
    try:
        while True:
            print_start(spec, run)
            try:
                with (
                    unchanged_environment(),
                    numerics(spec.config.trainer.device, spec.config.trainer.deterministic),
                    limit_threads(),
                ):
                    result = train(spec, run, callbacks, signals)
                break
            except Exception as error:
                run.check_directory()  # if the directory was deleted, that explains any error
                if not is_out_of_memory(error):
                    raise
            spec = with_smaller_micro_batch(spec, run)  # after `except`, when the error no longer holds memory
    finally:
        signals.restore()
    print_stop_reason(spec, run, result)
    return result


def with_smaller_micro_batch(spec: RunSpec, run: RunDirectory) -> RunSpec:
    """Return the same run with smaller micro-batches, to continue from its newest checkpoint.

    Raises:
        UserError: There is no smaller size, or the user chose the size.
    """
    config = spec.config.with_smaller_micro_batch()
    print_warning(
        f"out of memory at trainer.micro_batch_size={spec.config.micro_batch_size}: continuing with "
        f"{config.micro_batch_size} and as many tokens a step"
    )
    release_memory()
    newest = run.load_newest()
    if newest is None:  # memory ran out in the first update
        return replace(spec, config=config, checkpoint=None, command="")
    file, _ = newest
    return replace(spec, config=config, checkpoint=file, initial_weights=None, command="")
