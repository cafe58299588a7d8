"""metrics.json: the figures of a run at its last validation, and the references that it has passed."""

import json
import math
from pathlib import Path

from lightning import Trainer

from gpt.files import write_text
from gpt.hardware import peak_memory_bytes
from gpt.sampling.scoring import Score
from gpt.text.references import references
from gpt.training.curves import Curves
from gpt.training.module import GPTModule
from gpt.training.steps import Clock, StepCallback
from gpt.training.validation import Validation


class References(StepCallback):
    """Draws what simple predictors make of the validation text beside the model's curve, and notes when it passed each.

    A reference is passed at the first validation whose bits per byte are below it.
    """

    def __init__(self, curves: Curves):
        self._curves = curves
        self._bits: dict[str, float] = {}  # per byte, on rank 0 from the first validation of a session on
        self._passed_at: dict[str, int] = {}

    @property
    def figures(self) -> dict[str, dict]:
        """The bits per byte of each reference, and the step at which it was passed, or None."""
        return {
            name: {"bits_per_byte": bits, "passed_at": self._passed_at.get(name)} for name, bits in self._bits.items()
        }

    def on_validated(self, trainer: Trainer, module: GPTModule, step: int, score: Score) -> None:
        if not trainer.is_global_zero:
            return
        self._bits = self._bits or references(module.corpora.sources)
        self._curves.write({f"reference/{name}": bits for name, bits in self._bits.items()}, step)
        passed = [n for n, bits in self._bits.items() if n not in self._passed_at and score.bits_per_byte < bits]
        self._passed_at |= dict.fromkeys(passed, step)
        if passed and self._curves.writer is not None:
            rows = [f"| {n} | {f['bits_per_byte']:.4f} | {f['passed_at'] or ''} |" for n, f in self.figures.items()]
            table = ["| reference | bits per byte | passed at step |", "| --- | --- | --- |", *rows]
            self._curves.writer.add_text("references", "\n".join(table), step)

    def state_dict(self) -> dict:
        return {"passed_at": self._passed_at}

    def load_state_dict(self, state: dict) -> None:
        self._passed_at = dict(state["passed_at"])


class Metrics(StepCallback):
    """Writes metrics.json after each validation, and the curves of each corpus of a mixture."""

    def __init__(self, run_dir: Path, clock: Clock, validation: Validation, curves: Curves, references: References):
        self._file = run_dir / "metrics.json"
        self._clock, self._validation, self._curves = clock, validation, curves
        self._references = references
        self.latest: dict = {}

    def on_validated(self, trainer: Trainer, module: GPTModule, step: int, score: Score) -> None:
        self.latest = self.measure(module, step, score)
        for name, figures in self.latest.get("mix", {}).items():
            self._curves.write({f"{figure}/{name}": value for figure, value in figures.items()}, step)
        if trainer.is_global_zero:
            write_text(self._file, json.dumps(self.latest, indent=2) + "\n")

    def measure(self, module: GPTModule, step: int, score: Score) -> dict:
        """The contents of metrics.json; the README explains each key."""
        tokens, seconds = step * module.config.trainer.tokens_per_step, self._clock.seconds
        trained = {} if math.isnan(self._curves.loss) else {"train_loss": self._curves.loss}
        figures = trained | {
            "val_loss": score.nats_per_token,
            "val_nats_per_byte": score.nats_per_byte,
            "val_bits_per_byte": score.bits_per_byte,
            "best_val_loss": self._validation.best_loss,
            "best_step": self._validation.best_step,
            "steps": step,
            "tokens": tokens,
            "epochs": tokens / module.corpora.train_tokens,
            "train_seconds": seconds,
            "tokens_per_second": tokens / seconds,
            "parameters": module.model.num_parameters(),
            "peak_memory_bytes": peak_memory_bytes(module.device),
            "references": self._references.figures,
        }
        mixture = self._validation.mixture(module, step)
        return figures | ({"mix": mixture} if mixture else {})
