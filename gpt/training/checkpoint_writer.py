"""The checkpoints of a training: their content, and when a step can be saved."""

import time
from dataclasses import asdict, dataclass
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
from gpt.training.versions import current_code_version, versions


@dataclass
class CheckpointWriter:
    """Writes last.ckpt and best.ckpt on rank 0. Every rank must call `save_last` and `save_best`.

    Between `begin_update` and `end_step` the step is incomplete, so an exception saves nothing.
    """

    spec: RunSpec
    run: RunDirectory
    state: TrainState
    fabric: Fabric
    module: GPTModule
    optimizer: torch.optim.Optimizer
    callbacks: Callbacks
    logger: MetricLogger
    _step: int = 0  # the last complete step
    _is_complete: bool = False
    _is_saving: bool = False  # stays True if saving fails
    _saved_step: int = -1  # of last.ckpt
    _saved_time: float = 0.0
    _config_changed: bool = False  # True if last.ckpt has another configuration

    def start(self, step: int, config_changed: bool) -> None:
        """Begin at `step`, whose checkpoint is on disk unless it is step 0.

        Make it last.ckpt, and keep it if `keep_every` says so: a kill may have come before either. If the configuration
        has changed, save it again.
        """
        if self.spec.checkpoint is not None:
            self.run.restore_last(self.spec.checkpoint)
        self.end_step(step)
        self._saved_step = step
        self._saved_time = time.monotonic()
        self._config_changed = config_changed
        if config_changed:
            self.save_last(step)
        elif step and self.is_kept(step):
            self.run.keep_checkpoint(step)

    def begin_update(self) -> None:
        """Mark the step as incomplete, because its weights change now."""
        self._is_complete = False

    def end_step(self, step: int) -> None:
        """Mark the step as complete."""
        self._step = step
        self._is_complete = True

    def is_kept(self, step: int) -> bool:
        """Return True if `keep_every` keeps the checkpoint of this step."""
        keep_every = self.spec.config.trainer.keep_every
        return keep_every > 0 and step % keep_every == 0

    @property
    def seconds_since_save(self) -> float:
        return time.monotonic() - self._saved_time

    def save_best(self, step: int) -> None:
        """Write best.ckpt."""
        self._is_saving = True
        self.run.save_best(lambda path: self._write(path, step), step)
        self._is_saving = False

    def save_last(self, step: int) -> None:
        """Write last.ckpt, and keep it if `keep_every` says so. If the step is the best, call `save_best` first."""
        self.module.require_finite_weights(step)
        is_best = self.state.best_step == step and not self._config_changed
        self._is_saving = True
        self.run.save_last(lambda path: self._write(path, step), step, is_best)
        self._is_saving = False
        self._saved_step = step
        self._saved_time = time.monotonic()
        self._config_changed = False
        if self.is_kept(step):
            self.run.keep_checkpoint(step)

    def save_after(self, error: BaseException) -> None:
        """Save the last complete step after an exception.

        Do nothing after non-finite numbers, a second stop signal or an error while saving. Do nothing with several
        ranks either: they would wait for each other, and one of them may have ended.
        """
        can_save = not isinstance(error, NonFiniteError | SystemExit) and not self._is_saving
        if can_save and self._is_complete and self._step != self._saved_step and self.fabric.world_size == 1:
            self.save_last(self._step)

    def _write(self, path: Path, step: int) -> None:
        spec = self.spec
        state = self.state
        self.logger.update_state()
        loss_scale = self.module.loss_scale
        if loss_scale is not None:
            state.loss_scale = loss_scale.state_dict()
            state.skipped_steps = loss_scale.skipped_steps
        checkpoint = {
            "format": CHECKPOINT_FORMAT,
            "step": step,
            "state_dict": self.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "callbacks": self.callbacks.state_dict(),
            "config": asdict(spec.config),
            "schedule": asdict(spec.schedule),
            "state": asdict(state),
            "tokenizer": spec.dataset.tokenizer.to_dict(),
            "corpus": spec.dataset.key,
            "git_commit": current_code_version(state.commits),
            "versions": versions(),
            "threads": torch.get_num_threads(),
        }
        if self.fabric.is_global_zero:
            save_checkpoint(checkpoint, path)
        self.fabric.barrier()
