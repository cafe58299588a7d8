"""The training loop: every step of a run from the first, or from its newest checkpoint, to its horizon or a stop.

Lightning Fabric places the model on its devices and averages the gradients of several processes. Everything else that
happens in a training is called from `train`, in order. `run_training` calls it, again if memory runs out.
"""

import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from inspect import signature
from typing import Any

import torch
from lightning import Fabric
from lightning.fabric.plugins.environments import LightningEnvironment, TorchElasticEnvironment
from lightning.fabric.strategies import DDPStrategy
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from gpt.checkpoint import load_checkpoint
from gpt.console import print_line, print_warning
from gpt.errors import is_out_of_memory
from gpt.hardware.device import numerics
from gpt.hardware.memory import keep_freed_memory, release_memory
from gpt.hardware.threads import yield_to_other_processes
from gpt.loading import open_model
from gpt.model.transformer import GPTConfig
from gpt.training import distributed
from gpt.training.advice import suggest_shorter_horizon
from gpt.training.batch_loader import Batch, read_micro_batches, sequence_length
from gpt.training.callbacks import Callbacks, check_callbacks
from gpt.training.checkpoint_writer import CheckpointWriter
from gpt.training.config import TrainerConfig, parse_config
from gpt.training.device_check import check_device_numerics
from gpt.training.health import warn_if_diverging
from gpt.training.metric_logger import MetricLogger
from gpt.training.module import GPTModule
from gpt.training.optim import set_lr
from gpt.training.progress import ProgressDisplay
from gpt.training.report import resume_command
from gpt.training.run_directory import RunDirectory, checkpoint_errors
from gpt.training.schedule import Schedule
from gpt.training.state import Result, RunSpec, TrainState
from gpt.training.stop_signals import StopSignals
from gpt.training.training_clock import TrainingClock
from gpt.training.validation import Validator
from gpt.training.versions import record_code_version


def train(spec: RunSpec, run: RunDirectory, callbacks: Sequence[Any], signals: StopSignals) -> Result:
    """Train a run to its horizon, or until a signal, a callback or `patience` stops it. Every rank calls this.

    Args:
        spec: What to train, and the checkpoint or the weights to start from.
        run: Where checkpoints and logs go.
        callbacks: Objects with hooks: see callbacks.py.
        signals: The stop signals that this process received.
    """
    config, trainer, dataset = spec.config, spec.config.trainer, spec.dataset

    # --- Set up. The state and the thread count of a checkpoint are needed before there is a model ---
    checkpoint = load_checkpoint_to_resume(spec) if spec.checkpoint else None
    state, step = restore_state(spec, checkpoint)
    schedule = state.current_schedule(spec.schedule)
    clock = TrainingClock(state, schedule.seconds)
    fabric = build_fabric(trainer, callbacks)
    module = GPTModule(config, dataset.tokenizer, schedule, clock)
    if spec.initial_weights is not None:
        module.load_state_dict(open_model(spec.initial_weights)[0].state_dict())
    model = fabric.setup_module(module)  # on its device, and wrapped for DDP if there are several processes
    optimizer: Any = fabric.setup_optimizers(module.build_optimizer())  # its state is allocated on that device
    curves = MetricLogger(spec, run, state)
    progress = ProgressDisplay(spec, state, curves)
    hooks = Callbacks(callbacks, fabric, module, curves)
    validator = Validator(spec, run, state, clock, fabric, module, hooks, curves, progress)
    checkpoints = CheckpointWriter(spec, run, state, fabric, module, optimizer, hooks, curves)
    distributed.run_on_all_ranks(lambda: check_device_numerics(module))
    distributed.set_timeout(trainer.answer_minutes)

    try:
        signals.install()

        # --- Restore the weights, the optimizer and the callbacks ---
        config_changed = False
        if checkpoint is not None and spec.checkpoint is not None:
            with checkpoint_errors(spec.checkpoint):
                module.load_state_dict(checkpoint["state_dict"])
                optimizer.load_state_dict(checkpoint["optimizer"])
                if module.loss_scale is not None:
                    module.loss_scale.load_state_dict(state.loss_scale, state.skipped_steps)
                config_changed = parse_config(checkpoint["config"]) != config
                callback_states = dict(checkpoint["callbacks"])
            hooks.load_state_dict(callback_states)
            del checkpoint, callback_states  # frees their memory, which is mapped from the file
            run.restore_last(spec.checkpoint)

        # --- Open the logs and start the clock. Only the main process writes: on other ranks `run` does nothing ---
        run.truncate_logs(state.log_offsets)
        curves.open(step)
        record_code_version(state.commits, step)
        hooks.call("on_train_start", step)
        checkpoints.start(step, config_changed)
        if config_changed:
            checkpoints.save_last(step)
        run.write_config(config, step, spec.command)
        if step and trainer.keep_every and step % trainer.keep_every == 0:  # a kill may have come before
            run.keep_checkpoint(step)
        clock.start()
        expected_steps = schedule.expected_steps(step, clock.progress)
        progress.open(run.path, step, expected_steps)
        if spec.initial_weights is not None:
            validator.evaluate_initial_weights(expected_steps)

        stop_reason = "horizon" if step >= schedule.total_steps else ""
        stop_signal = 0
        with ThreadPoolExecutor(1) as reader:  # reads the next step's batches while the model works on this one's
            next_batches = read_ahead(reader, spec, schedule, step, fabric)
            while not stop_reason:
                batches = next_batches.result()
                next_batches = read_ahead(reader, spec, schedule, step + 1, fabric)

                # --- Update the weights. From here to `end_step`, an error saves nothing ---
                curves.begin_step(module, step + 1, schedule)
                lr_multiplier = schedule.lr_multiplier(step, clock.progress, config.optim)
                loss = train_step(fabric, model, optimizer, batches, step, lr_multiplier, checkpoints.begin_update)
                step += 1
                clock.end_step(fabric.world_size)
                schedule = schedule.after_step(step, clock.progress)
                state.total_steps, state.full_length_from_step = schedule.total_steps, schedule.full_length_from_step

                # --- Log ---
                is_log_point = schedule.is_due(step, trainer.log_every)
                curves.add_loss(module, loss)
                if is_log_point:
                    curves.write_point(fabric, module, optimizer, step, loss)
                hooks.call("on_train_step_end", step, loss=loss)

                # --- Validate, and sample ---
                expected_steps = schedule.expected_steps(step, clock.progress)
                if schedule.is_due(step, schedule.validate_every) or clock.at_quarter_mark:
                    validator.validate(step, expected_steps)
                if is_log_point:
                    warn_if_diverging(spec, run, state, step)

                # --- Stop? ---
                is_late = checkpoints.seconds_since_save >= 60 * trainer.checkpoint_minutes
                flags = [int(is_late), signals.received_signal, int(hooks.stop_requested)]
                if fabric.world_size > 1:
                    # An exchange takes time, so ranks make it only where they exchange losses anyway. Flags stay set.
                    is_exchange = is_log_point or validator.last_validated_step == step
                    flags = max_over_ranks(flags) if is_exchange else [0, 0, 0]
                save_is_late, stop_signal, stop_requested = flags  # of any rank
                if step == schedule.total_steps:
                    stop_reason = "horizon"  # whatever else happened in the last step
                elif stop_signal:
                    stop_reason = "signal"
                elif schedule.is_out_of_patience(config.patience, step, state.best_step):
                    stop_reason = "patience"
                elif stop_requested:
                    stop_reason = "callback"
                    if validator.last_validated_step != step:
                        validator.validate(step, expected_steps)

                # --- Save checkpoints ---
                saves_best = state.best_step == step
                keeps_copy = trainer.keep_every > 0 and step % trainer.keep_every == 0
                is_due = schedule.is_due(step, trainer.checkpoint_every) or clock.at_quarter_mark
                saves_last = is_due or save_is_late or keeps_copy or stop_reason
                if saves_best or saves_last:
                    with clock.paused():
                        if saves_best:
                            checkpoints.save_best(step)
                        if saves_last:
                            checkpoints.save_last(step)
                        if keeps_copy:
                            run.keep_checkpoint(step)
                progress.end_step(step, expected_steps, schedule)
                checkpoints.end_step(step)
        hooks.call("on_train_end", step)
    except BaseException as error:
        curves.has_failed = True
        checkpoints.save_after(error)
        raise
    finally:
        progress.close()
        curves.close()
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
    """Make one optimizer step, and return its mean loss on this rank in nats per token, a scalar.

    Args:
        model: The GPTModule, as Fabric has wrapped it.
        optimizer: Its optimizer, as Fabric has wrapped it.
        micro_batches: Of this rank: inputs and targets, each (B, T). Their gradients are averaged.
        step: The number of steps before this one.
        lr_multiplier: The learning rate as a fraction of its peak.
        before_update: Is called when the gradient is complete, just before the weights change.

    Raises:
        NonFiniteError: The gradient is not finite, and weights and optimizer are unchanged. In fp16 this step is
            skipped instead, as long as a smaller loss scale may help. On a GPU in fp32 or bf16 the gradient is not
            read here, but at the points of the curves.
    """
    module, loss_scale, accumulation_steps = model.module, model.module.loss_scale, len(micro_batches)
    set_lr(optimizer, lr_multiplier)
    optimizer.zero_grad()
    mean_loss = torch.zeros((), device=fabric.device)
    for i, batch in enumerate(micro_batches):
        is_last_micro_batch = i + 1 == accumulation_steps
        with fabric.no_backward_sync(model, enabled=not is_last_micro_batch):  # ranks average gradients once a step
            loss = model.training_step(fabric.to_device(batch), step * accumulation_steps + i) / accumulation_steps
            fabric.backward(loss if loss_scale is None else loss_scale.scaled(loss))
        mean_loss += loss.detach()

    if loss_scale is not None:
        loss_scale.unscale(optimizer.optimizer)
    grad_norm = module.measure_grad_norm()
    is_finite = not module.checks_each_step or bool(grad_norm.isfinite())
    may_continue = is_finite if loss_scale is None else loss_scale.adapt(skipped=not is_finite)
    if not may_continue:
        raise module.non_finite_gradient(step, step + 1, mean_loss, "no update was made")
    before_update()
    if is_finite:  # otherwise fp16 skips this update
        module.clip_gradients_to(module.config.optim.clip)
        optimizer.step()
    return mean_loss


# --- what `train` calls ---


def read_ahead(
    reader: ThreadPoolExecutor, spec: RunSpec, schedule: Schedule, step: int, fabric: Fabric
) -> Future[list[Batch]]:
    """Start to read this rank's micro-batches for the step after `step` others.

    Their sequence length is that of the schedule now: `Schedule.after_step` changes it one step later.
    """
    T = sequence_length(spec.config, schedule, step)
    is_cuda = fabric.device.type == "cuda"
    return reader.submit(read_micro_batches, spec.config, spec.dataset, step, T, fabric.global_rank, pin=is_cuda)


def load_checkpoint_to_resume(spec: RunSpec) -> dict[str, Any]:
    """Return the checkpoint to resume from, its tensors mapped from the file.

    If the number of processes is unchanged, restore the thread count as well: results depend on it bit for bit.
    """
    assert spec.checkpoint is not None
    checkpoint = load_checkpoint(spec.checkpoint, mmap=True)
    with checkpoint_errors(spec.checkpoint):
        if parse_config(checkpoint["config"]).trainer.world_size == spec.config.trainer.world_size:
            torch.set_num_threads(checkpoint["threads"])
            os.environ["OMP_NUM_THREADS"] = str(checkpoint["threads"])  # otherwise Lightning changes it
    return checkpoint


def restore_state(spec: RunSpec, checkpoint: dict[str, Any] | None) -> tuple[TrainState, int]:
    """Return the state and the number of steps of a checkpoint, or of a run that begins."""
    if checkpoint is None:
        return TrainState.at_start(spec.schedule), 0
    assert spec.checkpoint is not None
    with checkpoint_errors(spec.checkpoint):
        return TrainState.from_checkpoint(checkpoint, spec.schedule), checkpoint["step"]


def build_fabric(settings: TrainerConfig, callbacks: Sequence[Any] = (), is_alone: bool = False) -> Fabric:
    """Return Fabric for the configured device, whose processes have started and met already.

    Precision stays ours: Fabric's autocast is slower, and left out of `training_step` on one device.

    Args:
        settings: Device, devices, machines and strategy.
        callbacks: Objects with hooks.
        is_alone: Use one device, whatever the settings, and exchange nothing with other processes.
    """
    world_size = 1 if is_alone else settings.world_size
    logging.getLogger("lightning.fabric").setLevel(logging.WARNING)
    strategy: str | DDPStrategy = "auto"
    if world_size > 1 or (settings.strategy == "ddp" and not is_alone):
        # The only buffers are constant: causal masks and the merge table need not be sent at every step.
        name = "forward_sync_buffers"
        if name not in signature(DistributedDataParallel).parameters:  # before torch 2.13
            name = "broadcast_buffers"
        strategy = DDPStrategy(**{name: False})  # type: ignore[arg-type]
    fabric = Fabric(
        accelerator={"cuda": "gpu"}.get(settings.device, settings.device),
        devices=(settings.devices or 1) if world_size > 1 else 1,
        num_nodes=(settings.num_nodes or 1) if world_size > 1 else 1,
        strategy=strategy,
        # Given, so that Fabric neither starts processes nor looks for a launcher.
        plugins=[TorchElasticEnvironment() if world_size > 1 else LightningEnvironment()],
        callbacks=list(callbacks),
    )
    fabric.launch()
    return fabric


def max_over_ranks(values: Sequence[int]) -> list[int]:
    """Return the maximum of each value over all ranks. Every rank must call this."""
    maxima = torch.tensor(values, dtype=torch.int64)
    torch.distributed.all_reduce(maxima, torch.distributed.ReduceOp.MAX)
    return maxima.tolist()


# --- a whole training ---


def run_training(spec: RunSpec, run: RunDirectory, callbacks: Sequence[Any] = ()) -> Result:
    """Train a run. If memory runs out, retry with a smaller micro-batch, where its size was chosen automatically.

    A stop signal, as from Ctrl-C, ends the training after a step and a checkpoint; `Result.stop_signal` names it.
    With several devices, every process must have the same callbacks.
    """
    check_callbacks(callbacks)
    keep_freed_memory()
    signals = StopSignals()
    try:
        while True:
            announce(spec, run)
            try:
                with (
                    distributed.unchanged_environment(),
                    numerics(spec.config.trainer.device, spec.config.trainer.deterministic),
                    yield_to_other_processes(),
                ):
                    result = train(spec, run, callbacks, signals)
                break
            except Exception as error:
                run.check_directory()  # a deleted directory explains any error
                if not is_out_of_memory(error):
                    raise
            spec = with_smaller_micro_batch(spec, run)  # here, where the error no longer holds memory
    finally:
        signals.restore()
    if distributed.is_main_process():
        explain_stop(spec, run, result)
    return result


def with_smaller_micro_batch(spec: RunSpec, run: RunDirectory) -> RunSpec:
    """Return how to continue a run with smaller micro-batches after memory has run out.

    Raises:
        UserError: There is no smaller size, or the user chose it.
    """
    config = spec.config.with_smaller_micro_batch()
    print_warning(
        f"out of memory at trainer.micro_batch_size={spec.config.micro_batch_size}: continuing with "
        f"{config.micro_batch_size} and as many tokens a step"
    )
    release_memory()
    newest = run.load_newest()  # saved on the way out, unless memory ran out within an update
    if newest is None:
        return replace(spec, config=config, checkpoint=None, command="")  # from the first step, as `spec` has it
    file, _ = newest
    return replace(spec, config=config, checkpoint=file, initial_weights=None, command="")


def announce(spec: RunSpec, run: RunDirectory) -> None:
    """Print what is trained, and where."""
    config, schedule = spec.config, spec.schedule
    shape = GPTConfig(vocab_size=spec.dataset.tokenizer.vocab_size, **asdict(config.model))
    horizon = f"{config.horizon} in steps" if schedule.seconds else f"{schedule.total_steps} steps"
    if distributed.is_main_process():
        print_line(
            f"{shape.num_parameters:,} parameters on {config.trainer.device} in {config.trainer.precision}, {horizon} "
            f"of {config.trainer.tokens_per_step:,} tokens; writing to {run.path}"
        )


def explain_stop(spec: RunSpec, run: RunDirectory, result: Result) -> None:
    """Print why a run ended before its horizon, if it did, and how to continue."""
    command = resume_command(run.path, spec.in_python)
    if result.stop_reason == "signal":
        print_line(f"stopped at step {result.step}; continue with: {command}")
    elif result.stop_reason == "patience":
        best_step = result.metrics["best_step"]
        print_line(
            f"stopped early at step {result.step}: no improvement in the last {spec.config.patience} validations "
            f"(best at step {best_step}). The learning rate was still falling: a shorter run, such as "
            f"horizon={suggest_shorter_horizon(spec.config, spec.dataset, best_step)}steps, will probably do better"
        )
    elif result.stop_reason == "callback":
        print_line(f"stopped early at step {result.step}, as a callback requested; to continue anyway: {command}")
