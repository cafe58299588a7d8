"""When checkpoints are saved, what they say about their run, and how Lightning writes and reads them."""

import time
from dataclasses import asdict
from pathlib import Path

import torch
from lightning import Callback, Trainer
from lightning.pytorch.plugins.io import CheckpointIO

from gpt.errors import NonFiniteError, UserError
from gpt.exchange.checkpoint import FORMAT, load, require_storable, save
from gpt.training import loop
from gpt.training.callbacks.base import Clock, StepCallback, Validation
from gpt.training.checkpoints.signals import StopSignals
from gpt.training.metrics.curves import Curves
from gpt.training.module import GPTModule
from gpt.training.run.code import versions
from gpt.training.run.run import Run


class Checkpoints(StepCallback):
    """Saves last.ckpt at intervals, at the end, on a stop signal, and when something fails between two updates.

    A checkpoint needs no other file. The one before it stays as previous.ckpt, that of the best validation as
    best.ckpt, and those of every `keep_every` steps under names of their own. A run that continues with another
    configuration than its checkpoint's, `amended`, is saved before its first step.
    """

    def __init__(self, run: Run, clock: Clock, validation: Validation, amended: bool = False):
        self._run, self._clock, self._validation, self._amended = run, clock, validation, amended
        self._signals = StopSignals()
        self._saved_step, self._saved_at = -1, 0.0
        self._saving = False  # or it has failed
        self.began = False  # whether everything is restored, and the training has begun
        self.stopped_by = 0  # the signal that ended the run early

    def setup(self, trainer: Trainer, module, stage: str) -> None:
        self._signals.install()

    def on_train_start(self, trainer: Trainer, module: GPTModule) -> None:  # type: ignore[override]
        step, settings = trainer.global_step, module.config.trainer
        self.began = True
        self._run.note_code(step)
        self._saved_at = time.monotonic()
        self._saved_step = step or -1  # a run that was resumed has this step on disk
        loop.leave_signals(trainer)
        self._signals.install()  # again, since Lightning has put its own handlers in place
        if self._amended:
            self._save(trainer, module, step)
        if trainer.is_global_zero:
            self._run.amend(module.config)  # which may have a kill behind it that came between the two files
            if settings.keep_every and step and step % settings.keep_every == 0:
                self._run.keep(step)  # a kill may have come before it

    def on_save_checkpoint(self, trainer: Trainer, module: GPTModule, checkpoint: dict) -> None:  # type: ignore[override]
        checkpoint |= {
            "format": FORMAT,
            "step": module.global_step,
            "config": asdict(module.config),
            "schedule": asdict(module.schedule),
            "tokenizer": module.corpora.tokenizer.to_dict(),
            "corpus": module.corpora.key,
            "git_commit": list(self._run.commits.values())[-1],
            "commits": self._run.commits,
            "versions": versions(),
            "threads": torch.get_num_threads(),
        }

    def on_load_checkpoint(self, trainer: Trainer, module: GPTModule, checkpoint: dict) -> None:  # type: ignore[override]
        if len(checkpoint["optimizer_states"]) != 1:  # Lightning would take none for a new one
            raise ValueError(f"it has the states of {len(checkpoint['optimizer_states'])} optimizers, not of one")
        checkpoint["loops"] = loop.state_at(trainer, checkpoint["step"], module.schedule.accumulation)

    def on_step_end(self, trainer: Trainer, module: GPTModule, step: int) -> None:
        if self._validation.best_step == step:
            with self._clock.paused():
                self._saving = True
                self._run.save_best(trainer.save_checkpoint, step)
                self._saving = False
        settings, schedule = module.config.trainer, module.schedule
        late = int(time.monotonic() - self._saved_at >= 60 * settings.checkpoint_minutes)
        received = self._signals.received
        if trainer.world_size > 1:  # all ranks must do the same, and agreeing takes time
            greatest = torch.tensor([late, received])
            if agrees := schedule.due(step, settings.log_every):
                torch.distributed.all_reduce(greatest, torch.distributed.ReduceOp.MAX)
            late, received = greatest.tolist() if agrees else (0, 0)
        if received and step < schedule.total_steps:
            self.stopped_by = received
        if self.stopped_by or step == schedule.total_steps:
            trainer.should_stop = True
        keep = settings.keep_every and step % settings.keep_every == 0
        due = schedule.due(step, settings.checkpoint_every) or module.at_milestone
        if late or keep or due or trainer.should_stop:
            with self._clock.paused():
                self._save(trainer, module, step)
                if keep and trainer.is_global_zero:
                    self._run.keep(step)

    def on_exception(self, trainer: Trainer, module: GPTModule, exception: BaseException) -> None:  # type: ignore[override]
        at_once = isinstance(exception, NonFiniteError | SystemExit)
        alone = trainer.world_size == 1  # several ranks would wait for each other, and one of them may be gone
        done = self._saving or self._saved_step == trainer.global_step
        if module.between_updates and alone and not at_once and not done:
            self._save(trainer, module, trainer.global_step)

    def _save(self, trainer: Trainer, module: GPTModule, step: int) -> None:
        module.require_finite_weights()
        like_best = self._validation.best_step == step and not self._amended  # which was saved a moment ago
        self._saving = True
        self._run.save(trainer.save_checkpoint, step, like_best)
        self._saving, self._saved_step, self._saved_at, self._amended = False, step, time.monotonic(), False

    def close(self) -> None:
        """Restore the signal handlers. Lightning has no hook that always runs at the end."""
        self._signals.restore()


class Journal(Callback):
    """Keeps samples.md, metrics.csv and TensorBoard's event files in step with the checkpoints.

    A checkpoint records how long the files were. Resuming cuts off whatever an interrupted session added after that,
    since the same steps are about to be made again.
    """

    def __init__(self, run: Run, curves: Curves):
        self._run, self._curves = run, curves
        self._sizes: dict[str, int] = {}  # of each file, by its name

    def on_train_start(self, trainer: Trainer, module) -> None:
        if trainer.is_global_zero:
            self._run.cut_back(self._sizes)

    def state_dict(self) -> dict:
        if self._curves.writing:
            if self._curves.writer is not None:
                self._curves.writer.flush()
            self._sizes = self._run.sizes()
        return self._sizes

    def load_state_dict(self, state: dict) -> None:
        self._sizes = state


class CheckpointFiles(CheckpointIO):
    """Has Lightning write and read checkpoints as gpt.exchange.checkpoint does: whole or not at all, and verified."""

    def __init__(self, loaded: dict | None = None):
        self.loaded = loaded  # what has been read already; it is dropped after the first load

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
        payload, self.loaded = self.loaded, None
        return load(Path(path)) if payload is None else payload

    def remove_checkpoint(self, path) -> None:
        Path(path).unlink(missing_ok=True)
