"""Progress output: a bar on a terminal, elsewhere a line per validation."""

import math
import sys

from lightning import Trainer
from tqdm import tqdm

from gpt.errors import write_line
from gpt.training.curves import Curves
from gpt.training.module import GPTModule
from gpt.training.steps import StepCallback
from gpt.training.validation import Validation


class Progress(StepCallback):
    """Shows step, training and validation loss (nats per token), bits per byte and speed."""

    def __init__(self, validation: Validation, curves: Curves):
        self._validation, self._curves = validation, curves
        self._bar: tqdm | None = None

    def on_train_start(self, trainer: Trainer, module: GPTModule) -> None:  # type: ignore[override]
        if trainer.is_global_zero and sys.stderr.isatty():
            self._bar = tqdm(
                total=module.plan.total_steps,
                initial=trainer.global_step,
                bar_format="{percentage:3.0f}% {bar:20} step {n_fmt}/{total_fmt}  {elapsed} < {remaining}  {desc}",
                mininterval=0.5,
            )

    def on_step_end(self, trainer: Trainer, module: GPTModule, step: int) -> None:
        if not trainer.is_global_zero:
            return
        if self._bar is not None:
            if module.plan.due(step, module.config.trainer.log_every):
                self._bar.set_description_str(self._facts(), refresh=False)
                self._bar.total = module.plan.total_steps  # which a deadline changes
            self._bar.update()
        elif module.plan.due(step, module.plan.validate_every):
            write_line(f"step {step}/{module.plan.total_steps}  {self._facts()}", sys.stdout)

    def _facts(self) -> str:
        known = not math.isnan(self._curves.loss)  # from the first point of the curve on
        facts = [f"loss {self._curves.loss:.3f}"] if known else []
        if latest := self._validation.latest:
            facts.append(f"val {latest.nats_per_token:.3f} ({latest.bits_per_byte:.3f} bits/byte)")
        if known:
            facts.append(f"{self._curves.tokens_per_second:,.0f} tokens/s")
        return "  ".join(facts)

    def teardown(self, trainer: Trainer, module, stage: str) -> None:
        if self._bar is not None:
            self._bar.close()
