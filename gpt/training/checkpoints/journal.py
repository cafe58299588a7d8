"""Cut growing files back to their length at the checkpoint, so that a resumed run has no gaps and no duplicates."""

import os
from pathlib import Path

from lightning import Callback, Trainer

from gpt.files import sync
from gpt.training.metrics.curves import SUFFIX, TABLE, Curves


class Journal(Callback):
    """Keeps samples.md, metrics.csv and TensorBoard's event files in step with the checkpoints.

    A checkpoint records how long the files were. Resuming cuts off whatever an interrupted session added after that,
    since the same steps are about to be made again.
    """

    def __init__(self, run_dir: Path, curves: Curves):
        self._run_dir, self._curves = run_dir, curves
        self._sizes: dict[str, int] = {}  # of each file, by its name

    def _files(self) -> list[Path]:
        """The growing files of this run; event files of other programs have no such suffix and are left alone."""
        events = sorted(self._run_dir.glob(f"events.out.tfevents.*{SUFFIX}"))
        return [file for name in ("samples.md", TABLE) if (file := self._run_dir / name).exists()] + events

    def on_train_start(self, trainer: Trainer, module) -> None:
        for file in self._files() if trainer.is_global_zero else ():
            if (size := self._sizes.get(file.name)) is None:
                file.unlink()
            else:
                os.truncate(file, min(size, file.stat().st_size))

    def state_dict(self) -> dict:
        if self._curves.writing:
            if self._curves.writer is not None:
                self._curves.writer.flush()
            files = self._files()
            for file in files:
                sync(file)
            self._sizes = {file.name: file.stat().st_size for file in files}
        return self._sizes

    def load_state_dict(self, state: dict) -> None:
        self._sizes = state
