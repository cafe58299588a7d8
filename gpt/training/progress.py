"""The progress of a run on screen: two lines for each validation, and below them a bar on a terminal."""

import contextlib
import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpt.console import format_duration, import_tqdm, is_notebook, print_line
from gpt.sampling.scoring import Score
from gpt.training import distributed
from gpt.training.metric_logger import MetricLogger
from gpt.training.report import fit_on_line
from gpt.training.schedule import Schedule
from gpt.training.state import RunSpec, TrainState

BAR_FORMAT = (
    "{n}/{total_fmt} {percentage:2.0f}%  {remaining} left{postfix}  {bar}"  # a narrow terminal cuts the bar first
)
MEASURED = 5.0  # seconds of training, after which a run says how long it will take


class ProgressDisplay:
    """Shows step, training and validation loss (nats per token), bits per byte and speed, and a sample of the model.

    `steps` is always how many are expected of the whole run.
    """

    def __init__(self, spec: RunSpec, state: TrainState, curves: MetricLogger):
        self._spec, self._state, self._curves = spec, state, curves
        self._validation: tuple[float, float] | None = None  # the last: nats per token, and bits per byte
        self._line: Any = None  # the bar
        self._told = False  # how long the run will take, where no line shows it all the time

    def open(self, run_dir: Path, step: int, steps: int) -> None:
        """Show the bar, on a terminal or in a notebook."""
        self._begin = step, self._state.seconds
        self._validation = _validated(run_dir, step)
        if distributed.is_main_process() and (_has_width() or is_notebook()):
            # The time left follows the speed of about the last hundred updates, so it is calm; and the line appears
            # only after the first update, when there is one to tell.
            calm = {"dynamic_ncols": True, "mininterval": 0.5, "smoothing": 0.01, "delay": 1e-9}
            facts = "  ".join(self._facts())
            self._line = import_tqdm()(
                total=steps, initial=step, **calm, bar_format=BAR_FORMAT, postfix=facts, leave=False
            )

    def end_step(self, step: int, steps: int, schedule: Schedule) -> None:
        """Move the bar; without one, say once how long the run will take."""
        if self._line is not None:
            if schedule.is_due(step, self._spec.config.trainer.log_every):
                self._line.set_postfix_str("  ".join(self._facts()), refresh=False)
            self._line.total = steps
            self._line.update()
        elif not self._told and (measured := self._state.seconds - self._begin[1]) > MEASURED:
            self._told = True
            left = (steps - step) * measured / (step - self._begin[0])
            if distributed.is_main_process() and left > MEASURED:
                print_line(f"about {format_duration(left)} to go at this machine's speed, besides validations")

    def report(self, step: int, steps: int, score: Score, samples: Sequence[str]) -> None:
        """Print the lines of a validation, with the last of the samples."""
        self._validation = score.nats_per_token, score.bits_per_byte
        if distributed.is_main_process():
            facts = f"step {step}/{steps}  {'  '.join(self._facts())}"
            width = shutil.get_terminal_size().columns - 4
            print_line(facts + "".join(f"\n    {fit_on_line(text, width)}" for text in samples[-1:]), sys.stdout)

    def _facts(self) -> list[str]:
        trained, speed = self._state.train_loss, self._curves.tokens_per_second
        loss, bits_per_byte = self._validation or (None, None)
        losses = f"train {_short(trained):>5} val {_short(loss):>5}"
        bits = f"{_short(bits_per_byte):>5} bits/byte"
        return [losses, bits, f"{import_tqdm().format_sizeof(speed) if speed else '-':>5} tok/s"]

    def close(self) -> None:
        """Clear the bar."""
        if self._line is not None:
            self._line.close()


def _has_width() -> bool:
    """Whether stderr is a terminal, and not one of no columns, as under some programs."""
    with contextlib.suppress(OSError):
        if os.get_terminal_size(sys.stderr.fileno()).columns == 0:
            return False
    return sys.stderr.isatty()


def _validated(run: Path, step: int) -> tuple[float, float] | None:
    """The result of the last validation up to `step`, from metrics.json; None if that does not have it."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        figures = json.loads((run / "metrics.json").read_bytes())
        if figures["steps"] <= step:  # or a kill came before the checkpoint
            return float(figures["val_loss"]), float(figures["val_bits_per_byte"])
    return None


def _short(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if value < 9.9995 else f"{value:.4g}"
