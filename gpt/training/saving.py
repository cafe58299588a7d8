"""When checkpoints are saved, and how Lightning writes and reads them."""

import time
from pathlib import Path

import torch
from lightning import Trainer
from lightning.pytorch.plugins.io import CheckpointIO

from gpt.errors import NonFiniteError, UserError
from gpt.exchange.checkpoint import load, require_storable, save
from gpt.files import link
from gpt.training.module import GPTModule
from gpt.training.runs import require_present
from gpt.training.signals import StopSignals
from gpt.training.steps import Clock, StepCallback
from gpt.training.validation import Validation


class BestCheckpoint(StepCallback):
    """Saves best.ckpt after each step whose validation is the best so far."""

    def __init__(self, run_dir: Path, clock: Clock, validation: Validation):
        self._file, self._clock, self._validation = run_dir / "checkpoints/best.ckpt", clock, validation

    def on_step_end(self, trainer: Trainer, module: GPTModule, step: int) -> None:
        if self._validation.best_step == step:
            with self._clock.paused():
                trainer.save_checkpoint(self._file)


class LastCheckpoint(StepCallback):
    """Saves last.ckpt at intervals, at the end, on a stop signal, and when something fails between two updates.

    The checkpoint before it stays as previous.ckpt, and those of every `keep_every` steps under names of their own.
    """

    def __init__(self, run_dir: Path, clock: Clock, validation: Validation):
        self._run_dir, self._clock, self._validation = run_dir, clock, validation
        self._signals = StopSignals()
        self._saved_step, self._saved_at = -1, 0.0
        self.stopped_by = 0  # the signal that ended the run early

    def setup(self, trainer: Trainer, module, stage: str) -> None:
        self._signals.install()

    def on_train_start(self, trainer: Trainer, module) -> None:
        self._saved_at = time.monotonic()
        self._saved_step = trainer.global_step or -1  # a run that was resumed has this step on disk
        self._signals.install()  # again, since Lightning has put its own handlers in place
        trainer._signal_connector.received_sigterm = False  # ours decides, also about one that came in between

    def on_step_end(self, trainer: Trainer, module: GPTModule, step: int) -> None:
        settings = module.config.trainer
        late = int(time.monotonic() - self._saved_at >= 60 * settings.checkpoint_minutes)
        received = self._signals.received
        if trainer.world_size > 1:  # all ranks must do the same, and agreeing takes time
            asks = module.plan.due(step, settings.log_every)
            late, received = _greatest(late, received) if asks else (0, 0)
        if received and step < module.plan.total_steps:
            self.stopped_by = received
            trainer.should_stop = True
        keep = settings.keep_every and step % settings.keep_every == 0
        if late or keep or trainer.should_stop or module.plan.due(step, settings.checkpoint_every):
            with self._clock.paused():
                self._save(trainer, module, step)
                if keep and trainer.is_global_zero:
                    link(self._run_dir / "checkpoints/last.ckpt", self._run_dir / f"checkpoints/step-{step:08d}.ckpt")

    def on_exception(self, trainer: Trainer, module: GPTModule, exception: BaseException) -> None:  # type: ignore[override]
        ours = isinstance(exception, UserError | NonFiniteError | SystemExit)
        alone = trainer.world_size == 1  # several ranks would wait for each other, and one of them may be gone
        if module.between_updates and alone and not ours and self._saved_step != trainer.global_step:
            self._save(trainer, module, trainer.global_step)

    def _save(self, trainer: Trainer, module: GPTModule, step: int) -> None:
        last, previous, best = (self._run_dir / f"checkpoints/{name}.ckpt" for name in ("last", "previous", "best"))
        require_present(self._run_dir)
        module.require_finite_weights()
        if trainer.is_global_zero and last.exists():
            link(last, previous)
        if self._validation.best_step != step:
            trainer.save_checkpoint(last)
        elif trainer.is_global_zero:
            link(best, last)  # saved a moment ago with the same contents
        self._saved_step, self._saved_at = step, time.monotonic()

    def close(self) -> None:
        """Restore the signal handlers. Lightning has no hook that always runs at the end."""
        self._signals.restore()


def _greatest(*values: int) -> list[int]:
    """The greatest of each value over all ranks."""
    tensor = torch.tensor(values)
    torch.distributed.all_reduce(tensor, torch.distributed.ReduceOp.MAX)
    return tensor.tolist()


class CheckpointFiles(CheckpointIO):
    """Has Lightning write and read checkpoints as gpt.exchange.checkpoint does: whole or not at all, and verified.

    A checkpoint that has already been read may be passed as `loaded`; it is dropped after the first load.
    """

    def __init__(self, loaded: dict | None = None):
        self.loaded = loaded

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
