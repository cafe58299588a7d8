"""The ties to Lightning: a trainer that does not print or save, batches, counters and files.

All that is set in Lightning's private state is set here; pyproject.toml pins its version for this reason.
"""

import logging
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from inspect import signature
from pathlib import Path

from lightning import Callback, Trainer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins.environments import LightningEnvironment, TorchElasticEnvironment
from lightning.pytorch.plugins.io import CheckpointIO
from lightning.pytorch.strategies import DDPStrategy, ParallelStrategy
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from gpt.errors import UserError
from gpt.exchange.checkpoint import load, require_storable, save
from gpt.text.batches import training_batch
from gpt.text.prepared import Corpora
from gpt.training.config.schedule import Schedule
from gpt.training.config.schema import Config, TrainerConfig
from gpt.training.module import GPTModule
from gpt.training.run.run import Run


def build_trainer(
    settings: TrainerConfig, schedule: Schedule, callbacks: list[Callback], loggers: Sequence[Logger]
) -> Trainer:
    """Build a Lightning trainer that leaves printing, logging and saving to the run."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", ".*LeafSpec.*", FutureWarning)  # raised by Lightning itself
    strategy: str | ParallelStrategy = "auto"
    if settings.world_size > 1 or settings.strategy == "ddp":
        # The only buffers are the causal masks, which never change: they need not be sent around at every step.
        known = signature(DistributedDataParallel).parameters
        sync = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"  # before torch 2.13
        strategy = DDPStrategy(**{sync: False})  # type: ignore[arg-type]
    # Given, so that Lightning neither starts processes nor looks for a launcher.
    environment = TorchElasticEnvironment() if settings.world_size > 1 else LightningEnvironment()
    return Trainer(
        accelerator={"cuda": "gpu"}.get(settings.device, settings.device),
        devices=settings.devices or 1,
        num_nodes=settings.num_nodes or 1,
        strategy=strategy,
        max_steps=schedule.total_steps,
        callbacks=callbacks,
        plugins=[environment, Files()],
        logger=loggers,
        log_every_n_steps=min(settings.log_every, schedule.total_steps),  # it warns of more
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        check_val_every_n_epoch=None,  # with the next line, has callbacks expect validations within the epoch
        val_check_interval=schedule.validate_every,
    )


class TrainBatches:
    """The micro-batches of each step of a run, from the current step on: lists of (inputs, targets), each (B, T).

    A thread makes those of the next step while the model works on the current one.
    """

    def __init__(self, run: Run, module: GPTModule):
        self._run, self._module = run, module

    def __len__(self) -> int:
        return self._run.schedule.total_steps

    def __iter__(self) -> Iterator[list[tuple[Tensor, Tensor]]]:
        step = self._module.global_step
        with ThreadPoolExecutor(1) as reader:
            following = reader.submit(self._of, step)
            while step < len(self):
                batch, step = following.result(), step + 1
                following = reader.submit(self._of, step)
                yield batch

    def _of(self, step: int) -> list[tuple[Tensor, Tensor]]:
        """This rank's share of a step."""
        run, module = self._run, self._module
        count, size = run.config.accumulation, run.config.micro_batch_size
        ranks, rank = run.config.trainer.world_size, module.global_rank
        firsts = [((step * count + i) * ranks + rank) * size for i in range(count)]
        window = run.config.trainer.short_window if run.schedule.has_short_windows(step) else None
        batches = [make_batch(run.config, run.text, first, window) for first in firsts]
        # From other memory, a copy to the GPU would wait for all that the GPU has still to do.
        pinned = module.device.type == "cuda"
        return [(idx.pin_memory(), targets.pin_memory()) for idx, targets in batches] if pinned else batches

    def state_dict(self) -> dict:
        """Nothing: the position is the trainer's step. Lightning treats a loader with these methods as resumable."""
        return {}

    def load_state_dict(self, state: dict) -> None:
        """Do nothing, as there is no state."""


def make_batch(config: Config, text: Corpora, first: int, window: int | None = None) -> tuple[Tensor, Tensor]:
    """Make inputs and targets, each (B, T), of one micro-batch: the windows of the run from number `first` on.

    `first` and the size of a micro-batch count windows of the whole context; shorter ones, of `window` tokens, are so
    many more, and B with them.
    """
    T = window or config.model.context_length
    each = config.model.context_length // T
    tokens = [source.train for source in text.sources]
    return training_batch(tokens, text.shares, config.order_seed, first * each, config.micro_batch_size * each, T)


def restore_module(trainer: Trainer, module: GPTModule, run: Run) -> None:
    """Restore the weights and the users' callbacks when Lightning does: before the model is moved."""
    payload = run.payload or {}
    with run.restoring():
        module.load_state_dict(payload["state_dict"])
        if module.loss_scale is not None:
            module.loss_scale.load_state_dict(run.state.loss_scale, run.state.skipped_steps)
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        callback.on_load_checkpoint(trainer, module, payload)
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if (state := payload.get("callbacks", {}).get(callback.state_key)) is not None:
            callback.load_state_dict(deepcopy(state))


def restore_counters(trainer: Trainer, run: Run) -> None:
    """Restore the optimizer, now that there is one, and set Lightning's counters to the run's step.

    Each step is one batch of Lightning's only epoch.
    """
    payload = run.payload or {}
    with run.restoring():
        (state,), step = payload["optimizer_states"], payload["step"]
        trainer.optimizers[0].load_state_dict(state)
    _set_step(trainer, step)


def _set_step(trainer: Trainer, step: int) -> None:
    state = trainer.fit_loop.state_dict()
    for progress in (state["epoch_loop.batch_progress"], state["epoch_loop.manual_optimization.optim_step_progress"]):
        for kind in ("total", "current"):
            progress[kind] = dict.fromkeys(progress[kind], step)
    for kind in ("total", "current"):
        state["epoch_progress"][kind] |= {"ready": 1, "started": 1}
    state["epoch_loop.state_dict"]["_batches_that_stepped"] = step
    trainer.fit_loop.load_state_dict(state)


def leave_signals(trainer: Trainer) -> None:
    """Clear a SIGTERM that arrived before our handlers were installed; they decide about it."""
    trainer._signal_connector.received_sigterm = False


class Files(CheckpointIO):
    """Makes Lightning write checkpoints with gpt.exchange.checkpoint: whole or not at all."""

    def save_checkpoint(self, checkpoint: dict, path, storage_options=None) -> None:
        for name, state in checkpoint.get("callbacks", {}).items():
            try:
                require_storable(state)
            except ValueError as error:
                raise UserError(
                    f"callback {name}: its state cannot be stored ({error}): change its state_dict"
                ) from None
        save(checkpoint, Path(path))

    def load_checkpoint(self, path, map_location=None, weights_only=None) -> dict:
        return load(Path(path))

    def remove_checkpoint(self, path) -> None:
        Path(path).unlink(missing_ok=True)
