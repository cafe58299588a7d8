"""What a run shows while it trains: two lines for each validation, and below them a bar on a terminal."""

import shutil
import sys
from typing import Any

from gpt.console import bars, duration, in_notebook, say
from gpt.sampling.scoring import Score
from gpt.training.distributed.launch import is_rank_0
from gpt.training.metrics.curves import Curves
from gpt.training.metrics.report import one_line
from gpt.training.run.run import Run

LINE = "{n}/{total_fmt} {percentage:2.0f}%  {remaining} left{postfix}  {bar}"  # a narrow terminal cuts the bar first
MEASURED = 5.0  # seconds of training, after which a run says how long it will take


class Progress:
    """Shows step, training and validation loss (nats per token), bits per byte and speed, and a sample of the model.

    `steps` is always how many are expected of the whole run.
    """

    def __init__(self, run: Run, curves: Curves):
        self._run, self._curves = run, curves
        self._score: Score | None = None  # of the last validation
        self._line: Any = None  # the bar
        self._told = False  # how long the run will take, where no line shows it all the time

    def open(self, step: int, steps: int) -> None:
        """Show the bar, on a terminal or in a notebook."""
        self._begin = step, self._run.state.seconds
        if is_rank_0() and (sys.stderr.isatty() or in_notebook()):
            # The time left follows the speed of about the last hundred updates, so it is calm.
            calm = {"dynamic_ncols": True, "mininterval": 0.5, "smoothing": 0.01}
            facts = "  ".join(self._facts())
            self._line = bars()(total=steps, initial=step, **calm, bar_format=LINE, postfix=facts, leave=False)

    def end_step(self, step: int, steps: int) -> None:
        """Move the bar; without one, say once how long the run will take."""
        if self._line is not None:
            if self._run.schedule.due(step, self._run.config.trainer.log_every):
                self._line.set_postfix_str("  ".join(self._facts()), refresh=False)
                self._line.total = steps
            self._line.update()
        elif not self._told and (measured := self._run.state.seconds - self._begin[1]) > MEASURED:
            self._told = True
            left = (steps - step) * measured / (step - self._begin[0])
            if is_rank_0() and left > MEASURED:
                say(f"about {duration(left)} to go at this machine's speed, besides validations")

    def report(self, step: int, steps: int, score: Score) -> None:
        """Print the lines of a validation."""
        self._score = score
        if is_rank_0():
            facts = f"step {step}/{steps}  {'  '.join(self._facts())}"
            width = shutil.get_terminal_size().columns - 4
            say(facts + "".join(f"\n    {one_line(text, width)}" for text in self._run.samples[-1:]), sys.stdout)

    def _facts(self) -> list[str]:
        trained, score, speed = self._run.state.loss, self._score, self._curves.tokens_per_second
        losses = f"train {_short(trained):>5} val {_short(score.nats_per_token if score else None):>5}"
        bits = f"{_short(score.bits_per_byte if score else None):>5} bits/byte"
        return [losses, bits, f"{bars().format_sizeof(speed) if speed else '-':>5} tok/s"]

    def close(self) -> None:
        """Clear the bar."""
        if self._line is not None:
            self._line.close()


def _short(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if value < 9.9995 else f"{value:.4g}"
