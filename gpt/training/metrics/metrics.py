"""metrics.json: the figures of a run at its last validation, and the references that it has passed."""

import json
import math

from lightning import Trainer

from gpt.files import write_text
from gpt.hardware.memory import peak_memory_bytes
from gpt.sampling.scoring import Score
from gpt.text.analysis.references import references
from gpt.text.batches import windows_given
from gpt.training.callbacks.base import Clock, StepCallback, Validation
from gpt.training.metrics.curves import Curves
from gpt.training.module import GPTModule
from gpt.training.run.run import Run


class Metrics(StepCallback):
    """Writes metrics.json after each validation, the curves of each corpus of a mixture, and those of the references.

    References are what simple predictors make of the validation text. One is passed at the first validation whose bits
    per byte are below it.
    """

    def __init__(self, run: Run, clock: Clock, validation: Validation, curves: Curves):
        self._run, self._file = run, run.directory / "metrics.json"
        self._clock, self._validation, self._curves = clock, validation, curves
        self._references: dict[str, float] = {}  # bits per byte, on rank 0 from the first validation of a session on
        self._passed_at: dict[str, int] = {}
        self.latest: dict = {}

    def on_validated(self, trainer: Trainer, module: GPTModule, step: int, score: Score) -> None:
        if trainer.is_global_zero:
            if not self._references:
                self._references = references(module.corpora.sources)
                self._curves.draw_references(self._references, module.expected_steps())
            self._compare(step, score)
        self.latest = self._measure(module, step, score)
        if len(module.corpora.sources) > 1:
            self.latest["mix"] = self._measure_mixture(module, step)
        if trainer.is_global_zero:
            write_text(self._file, json.dumps(self.latest, indent=2) + "\n")

    def _compare(self, step: int, score: Score) -> None:
        """Write the curves of the references, and note which the model has passed."""
        self._curves.write({f"val_references/{name}": bits for name, bits in self._references.items()}, step)
        for name, bits in self._references.items():
            if score.bits_per_byte < bits:
                self._passed_at.setdefault(name, step)

    def _measure(self, module: GPTModule, step: int, score: Score) -> dict:
        """The contents of metrics.json; docs/runs.md explains each key."""
        tokens, seconds = step * module.config.trainer.tokens_per_step, self._clock.seconds
        trained = {} if math.isnan(self._curves.loss) else {"train_loss": self._curves.loss}
        if module.schedule.expected_bits and step == module.schedule.total_steps:
            trained["expected_bits_per_byte"] = module.schedule.expected_bits
        return trained | {
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
            "parameters": module.model.config.num_parameters,
            "peak_memory_bytes": peak_memory_bytes(module.device),
            "git_commit": list(self._run.commits.values())[-1],
            "commits": self._run.commits,
            "references": {
                name: {"bits_per_byte": bits, "passed_at": self._passed_at.get(name)}
                for name, bits in self._references.items()
            },
        }

    def _measure_mixture(self, module: GPTModule, step: int) -> dict[str, dict[str, float]]:
        """How often the text of each corpus was seen and how well it is predicted, which go into curves as well."""
        corpora, T = module.corpora, module.config.model.context_length
        windows = windows_given(step * module.schedule.windows_per_step, corpora.shares, module.config.order_seed)
        mixture = {}
        for i, (name, source) in enumerate(zip(corpora.names, corpora.sources, strict=True)):
            epochs, bits = windows[i] * T / len(source.train), self._validation.by_corpus[i].bits_per_byte
            self._curves.write({f"val_corpora/{name}": bits, f"val_epochs/{name}": epochs}, step)
            mixture[name] = {"epochs": epochs, "val_bits_per_byte": bits}
        return mixture

    def state_dict(self) -> dict:
        return self._passed_at

    def load_state_dict(self, state: dict) -> None:
        self._passed_at = dict(state)
