"""Cut growing files back to their length at the checkpoint, so that a resumed run has no gaps and no duplicates."""

import os
import re
import time
from pathlib import Path

from lightning import Callback, Trainer

from gpt.files import sync
from gpt.training.curves import SUFFIX, TABLE, Curves

EVENTS = re.compile(r"events\.out\.tfevents\.(\d{10})\.(.+)")  # seconds, then the writer's suffix


class Journal(Callback):
    """Keeps samples.md, metrics.csv and TensorBoard's event files in step with the checkpoints.

    A checkpoint records how long the files were. Resuming cuts off whatever an interrupted session added after that,
    since the same steps are about to be made again.
    """

    def __init__(self, run_dir: Path, curves: Curves):
        self._run_dir, self._curves = run_dir, curves
        self._files = {"samples": run_dir / "samples.md", "table": run_dir / TABLE}
        self._sizes: dict = {"samples": 0, "table": 0, "events": []}  # [name, size] of each event file

    def _events(self) -> list[Path]:
        """The event files of this run in the order in which TensorBoard reads them; those of others are left alone."""
        known = {entry[0] for entry in self._sizes["events"] if isinstance(entry, list)}
        older = bool(self._sizes["events"]) and not known  # an older version recorded no names, and gave no suffix
        files = sorted(file for file in self._run_dir.glob("events.*") if EVENTS.fullmatch(file.name))
        return [file for file in files if older or file.name.endswith(SUFFIX) or file.name in known]

    def on_fit_start(self, trainer: Trainer, module) -> None:
        if not trainer.is_global_zero:
            return
        for name, file in self._files.items():
            if file.exists():
                os.truncate(file, min(self._sizes.get(name, 0), file.stat().st_size))
        sizes = self._match()
        for file in self._events():
            if file in sizes:
                os.truncate(file, min(sizes[file], file.stat().st_size))
            else:
                file.unlink()
        self._put_first()

    def _match(self) -> dict[Path, int]:
        """The recorded size of each event file: found by name, or by the part of it that renaming leaves."""
        found = {file.name: file for file in self._events()}
        entries = self._sizes["events"]
        if entries and isinstance(entries[0], int):  # an older version recorded sizes alone, in order
            return dict(zip(self._events(), entries, strict=False))
        sizes = {found.pop(name): size for name, size in entries if name in found}
        for name, size in entries:
            rest = EVENTS.fullmatch(name)
            same = [other for other in sorted(found) if rest and EVENTS.fullmatch(other)[2] == rest[2]]  # type: ignore[index]
            if same and self._run_dir / name not in sizes:
                sizes[found.pop(same[0])] = size
        return sizes

    def _put_first(self) -> None:
        """Rename event files from the future, so that the next one comes last even if the clock was set back.

        TensorBoard reads them in the order of the seconds in their names. Renaming the oldest first keeps the order if
        a kill interrupts it.
        """
        events, now = self._events(), int(time.time())
        for i, file in enumerate(events):
            match = EVENTS.fullmatch(file.name)
            assert match is not None
            latest = now - (len(events) - i)
            if int(match[1]) > latest:
                file.rename(file.with_name(f"events.out.tfevents.{latest:010d}.{match[2]}"))

    def state_dict(self) -> dict:
        if self._curves.writing:
            if self._curves.writer is not None:
                self._curves.writer.flush()
            events = self._events()
            for file in [*self._files.values(), *events]:
                if file.exists():
                    sync(file)
            self._sizes = {name: file.stat().st_size if file.exists() else 0 for name, file in self._files.items()}
            self._sizes["events"] = [[file.name, file.stat().st_size] for file in events]
        return self._sizes

    def load_state_dict(self, state: dict) -> None:
        self._sizes = state

    @staticmethod
    def describes(events: object) -> bool:
        """Whether something is what a checkpoint records of event files: their names and sizes, or sizes alone."""
        entries = events if isinstance(events, list) else [None]
        pairs = [["events.out.tfevents.0000000000.", entry] if isinstance(entry, int) else entry for entry in entries]
        return all(
            isinstance(pair, list)
            and len(pair) == 2
            and isinstance(pair[0], str)
            and pair[0].startswith("events.out.tfevents.")
            and "/" not in pair[0]
            and type(pair[1]) is int
            and pair[1] >= 0
            for pair in pairs
        )
