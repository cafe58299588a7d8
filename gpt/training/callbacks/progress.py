"""What a run shows while it trains: two lines for each validation, and below them a bar on a terminal."""

import math
import shutil
import sys
from typing import Any

from lightning import Trainer

from gpt.console import bars, duration, in_notebook, say
from gpt.sampling.scoring import Score
from gpt.training.callbacks.base import Clock, StepCallback, Validation
from gpt.training.callbacks.samples import Samples
from gpt.training.metrics.curves import Curves
from gpt.training.metrics.report import one_line
from gpt.training.module import GPTModule

LINE = "{n}/{total_fmt} {percentage:2.0f}%  {remaining} left{postfix}  {bar}"  # a narrow terminal cuts the bar first
MEASURED = 5.0  # seconds of training, after which a run says how long it will take


class Progress(StepCallback):
    """Shows step, training and validation loss (nats per token), bits per byte and speed, and a sample of the model."""

    def __init__(self, clock: Clock, validation: Validation, curves: Curves, samples: Samples):
        self._clock, self._validation, self._curves, self._samples = clock, validation, curves, samples
        self._line: Any = None  # the bar
        self._told = False  # how long the run will take, where no line shows it all the time

    def on_train_start(self, trainer: Trainer, module: GPTModule) -> None:  # type: ignore[override]
        self._begin = trainer.global_step, self._clock.seconds
        if trainer.is_global_zero and (sys.stderr.isatty() or in_notebook()):
            steps = {"total": module.expected_steps(), "initial": trainer.global_step}
            # The time left follows the speed of about the last hundred updates, so it is calm.
            calm = {"dynamic_ncols": True, "mininterval": 0.5, "smoothing": 0.01}
            self._line = bars()(**steps, **calm, bar_format=LINE, postfix="  ".join(self._facts()), leave=False)

    def on_step_end(self, trainer: Trainer, module: GPTModule, step: int) -> None:
        if self._line is not None:
            if module.schedule.due(step, module.config.trainer.log_every):
                self._line.set_postfix_str("  ".join(self._facts()), refresh=False)
                self._line.total = module.expected_steps()
            self._line.update()
        elif not self._told and (measured := self._clock.seconds - self._begin[1]) > MEASURED:
            self._told = True
            left = (module.expected_steps() - step) * measured / (step - self._begin[0])
            if trainer.is_global_zero and left > MEASURED:
                say(f"about {duration(left)} to go at this machine's speed, besides validations")

    def on_validated(self, trainer: Trainer, module: GPTModule, step: int, score: Score) -> None:
        if not trainer.is_global_zero:
            return
        facts = f"step {step}/{module.expected_steps()}  {'  '.join(self._facts())}"
        width = shutil.get_terminal_size().columns - 4
        say(facts + "".join(f"\n    {one_line(sample, width)}" for sample in self._samples.latest[-1:]), sys.stdout)

    def _facts(self) -> list[str]:
        curves, latest = self._curves, self._validation.latest
        trained = "-" if math.isnan(curves.loss) else _short(curves.loss)  # until the first point of the curve
        losses = f"train {trained:>5} val {_short(latest.nats_per_token) if latest else '-':>5}"
        bits = f"{_short(latest.bits_per_byte) if latest else '-':>5} bits/byte"
        speed = bars().format_sizeof(curves.tokens_per_second) if curves.tokens_per_second else "-"
        return [losses, bits, f"{speed:>5} tok/s"]

    def close(self) -> None:
        """Clear the line. Lightning has no hook that always runs at the end."""
        if self._line is not None:
            self._line.close()


def _short(value: float) -> str:
    return f"{value:.3f}" if value < 9.9995 else f"{value:.4g}"
