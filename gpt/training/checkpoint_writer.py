"""Checkpoints of a training: what is in them, and when the last complete step can be saved."""

import time
from dataclasses import asdict
from pathlib import Path

import torch
from lightning import Fabric

from gpt.checkpoint import CHECKPOINT_FORMAT, save_checkpoint
from gpt.errors import NonFiniteError
from gpt.training.callbacks import Callbacks
from gpt.training.metric_logger import MetricLogger
from gpt.training.module import GPTModule
from gpt.training.run_directory import RunDirectory
from gpt.training.state import RunSpec, TrainState
from gpt.training.versions import current_commit, versions


class CheckpointWriter:
    """Writes last.ckpt and best.ckpt. Every rank must call `save_last` and `save_best`; rank 0 writes.

    Between `begin_update` and `end_step` the weights are those of no complete step, so that after an exception nothing
    can be saved.
    """

    def __init__(
        self,
        spec: RunSpec,
        run: RunDirectory,
        state: TrainState,
        fabric: Fabric,
        module: GPTModule,
        optimizer: torch.optim.Optimizer,
        callbacks: Callbacks,
        curves: MetricLogger,
    ):
        self._spec, self._run, self._state = spec, run, state
        self._fabric, self._module, self._optimizer = fabric, module, optimizer
        self._callbacks, self._curves = callbacks, curves
        self._step = 0  # the last complete step
        self._is_complete = False
        self._is_saving = False  # stays True if saving fails
        self._saved_step = -1  # of last.ckpt
        self._saved_at = 0.0  # when that was written
        self._config_changed = False  # since last.ckpt

    def start(self, step: int, config_changed: bool) -> None:
        """Begin at `step`. It is on disk already, or it is 0 and needs no checkpoint."""
        self._step, self._is_complete = step, True
        self._saved_step, self._saved_at = step, time.monotonic()
        self._config_changed = config_changed

    def begin_update(self) -> None:
        """The weights change now."""
        self._is_complete = False

    def end_step(self, step: int) -> None:
        """All that belongs to `step` is done."""
        self._step, self._is_complete = step, True

    @property
    def seconds_since_save(self) -> float:
        return time.monotonic() - self._saved_at

    def save_best(self, step: int) -> None:
        """Write best.ckpt."""
        self._is_saving = True
        self._run.save_best(lambda path: self._write(path, step), step)
        self._is_saving = False

    def save_last(self, step: int) -> None:
        """Write last.ckpt; `save_best` must come first if the step is the best."""
        self._module.require_finite_weights(step)
        is_best = self._state.best_step == step and not self._config_changed
        self._is_saving = True
        self._run.save_last(lambda path: self._write(path, step), step, is_best)
        self._is_saving = False
        self._saved_step, self._saved_at, self._config_changed = step, time.monotonic(), False

    def save_after(self, error: BaseException) -> None:
        """Save the last complete step after an exception.

        Not if numbers are broken, if the stop is to be immediate, or if saving itself has failed; nor with several
        ranks, which would wait for each other while one of them may be gone.
        """
        may_save = not isinstance(error, NonFiniteError | SystemExit) and not self._is_saving
        if may_save and self._is_complete and self._step != self._saved_step and self._fabric.world_size == 1:
            self.save_last(self._step)

    def _write(self, path: Path, step: int) -> None:
        """Write a checkpoint of `step`. Every rank must call this."""
        spec, state, loss_scale = self._spec, self._state, self._module.loss_scale
        self._curves.update_state()
        if loss_scale is not None:
            state.loss_scale, state.skipped_steps = loss_scale.state_dict(), loss_scale.skipped_steps
        checkpoint = {
            "format": CHECKPOINT_FORMAT,
            "step": step,
            "state_dict": self._module.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "callbacks": self._callbacks.state_dict(),
            "config": asdict(spec.config),
            "schedule": asdict(spec.schedule),
            "state": asdict(state),
            "tokenizer": spec.dataset.tokenizer.to_dict(),
            "corpus": spec.dataset.key,
            "git_commit": current_commit(state.commits),
            "versions": versions(),
            "threads": torch.get_num_threads(),
        }
        if self._fabric.is_global_zero:
            save_checkpoint(checkpoint, path)
        self._fabric.barrier()
