"""The files that grow along a run as a part of its state, so that resuming leaves no gap and no doubled point."""

import os
import time
from pathlib import Path

from lightning import Callback, Trainer

from gpt.files import sync
from gpt.training.curves import Curves


class Journal(Callback):
    """Keeps samples.md and TensorBoard's event files in step with the checkpoints.

    A checkpoint records how long the files were. Resuming cuts off whatever an interrupted session added after that,
    since the same steps are about to be made again.
    """

    def __init__(self, run_dir: Path, curves: Curves):
        self._run_dir, self._curves = run_dir, curves
        self._samples = run_dir / "samples.md"
        self._sizes: dict = {"samples": 0, "events": []}  # event files in the order in which TensorBoard reads them

    def _events(self) -> list[Path]:
        return sorted(self._run_dir.glob("events.out.tfevents.*"))

    def on_fit_start(self, trainer: Trainer, module) -> None:
        if not trainer.is_global_zero:
            return
        if self._samples.exists():
            os.truncate(self._samples, min(self._sizes["samples"], self._samples.stat().st_size))
        known = len(self._sizes["events"])
        for file in self._events()[known:]:
            file.unlink()
        for file, size in zip(self._events(), self._sizes["events"], strict=False):
            os.truncate(file, min(size, file.stat().st_size))
        # TensorBoard reads event files in the order of the seconds in their names. The next file must come last, even
        # if the clock has been set back since. Renaming the oldest first keeps the order if a kill interrupts it.
        events, now = self._events(), int(time.time())
        for i, file in enumerate(events):
            seconds, rest = file.name.split(".", 4)[3:]
            latest = now - (len(events) - i)
            if int(seconds) > latest:
                file.rename(file.with_name(f"events.out.tfevents.{latest:010d}.{rest}"))

    def state_dict(self) -> dict:
        if self._curves.writer is not None:
            self._curves.writer.flush()
            grown = [file for file in [self._samples, *self._events()] if file.exists()]
            for file in grown:
                sync(file)
            sizes = {file: file.stat().st_size for file in grown}
            self._sizes = {"samples": sizes.pop(self._samples, 0), "events": list(sizes.values())}
        return self._sizes

    def load_state_dict(self, state: dict) -> None:
        self._sizes = state
