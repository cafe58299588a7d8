"""metrics.json: the figures of a run at its last validation."""

import json
from pathlib import Path

from lightning import Trainer

from gpt.files import write_text
from gpt.hardware import peak_memory_bytes
from gpt.sampling.scoring import Score
from gpt.training.curves import Curves
from gpt.training.module import GPTModule
from gpt.training.steps import Clock, StepCallback
from gpt.training.validation import Validation


class Metrics(StepCallback):
    """Writes metrics.json after each validation, and the curves of each corpus of a mixture."""

    def __init__(self, run_dir: Path, clock: Clock, validation: Validation, curves: Curves):
        self._file = run_dir / "metrics.json"
        self._clock, self._validation, self._curves = clock, validation, curves
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
        figures = {
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
        }
        mixture = self._validation.mixture(module, step)
        return figures | ({"mix": mixture} if mixture else {})
