"""metrics.json: the figures of a run at its last validation, and the references that it has passed."""

import json
from collections.abc import Sequence
from typing import Any

from gpt.files import write_text
from gpt.hardware.memory import peak_memory_bytes
from gpt.sampling.scoring import Score
from gpt.text.analysis.references import references
from gpt.text.batches import windows_given
from gpt.training.distributed.launch import is_rank_0
from gpt.training.metrics.curves import Curves
from gpt.training.module import GPTModule
from gpt.training.run.run import Run


class Metrics:
    """Writes metrics.json after each validation, the curves of each corpus of a mixture, and those of the references.

    References are what simple predictors make of the validation text. One is passed at the first validation whose bits
    per byte are below it.
    """

    def __init__(self, run: Run, curves: Curves):
        self._run, self._curves = run, curves
        self._references: dict[str, float] = {}  # bits per byte, on rank 0 from the first validation of a process on

    def write(self, module: GPTModule, step: int, score: Score, by_corpus: Sequence[Score], steps: int) -> None:
        """Measure the run after a validation, into `run.metrics` on every rank; `steps` are expected of the whole."""
        run = self._run
        if is_rank_0():
            if not self._references:
                self._references = references(run.text.sources)
                self._curves.draw_references(self._references, steps)
            self._compare(step, score)
        run.metrics = self._measure(module, step, score)
        if len(by_corpus) > 1:
            run.metrics["mix"] = self._measure_mixture(step, by_corpus)
        if is_rank_0():
            write_text(run.directory / "metrics.json", json.dumps(run.metrics, indent=2) + "\n")

    def _compare(self, step: int, score: Score) -> None:
        """Write the curves of the references, and note which the model has passed."""
        self._curves.write({f"val_references/{name}": bits for name, bits in self._references.items()}, step)
        for name, bits in self._references.items():
            if score.bits_per_byte < bits:
                self._run.state.passed_at.setdefault(name, step)

    def _measure(self, module: GPTModule, step: int, score: Score) -> dict[str, Any]:
        """The contents of metrics.json; docs/runs.md explains each key."""
        run, state = self._run, self._run.state
        tokens = step * run.config.trainer.tokens_per_step
        known = {} if state.loss is None else {"train_loss": state.loss}
        if run.schedule.expected_bits and step == run.schedule.total_steps:
            known["expected_bits_per_byte"] = run.schedule.expected_bits
        return known | {
            "val_loss": score.nats_per_token,
            "val_nats_per_byte": score.nats_per_byte,
            "val_bits_per_byte": score.bits_per_byte,
            "best_val_loss": state.best_loss,
            "best_step": state.best_step,
            "steps": step,
            "tokens": tokens,
            "epochs": tokens / run.text.train_tokens,
            "train_seconds": state.seconds,
            "tokens_per_second": tokens / state.seconds,
            "parameters": module.model.config.num_parameters,
            "peak_memory_bytes": peak_memory_bytes(module.device),
            "git_commit": run.commit,
            "commits": run.commits,
            "references": {
                name: {"bits_per_byte": bits, "passed_at": state.passed_at.get(name)}
                for name, bits in self._references.items()
            },
        }

    def _measure_mixture(self, step: int, by_corpus: Sequence[Score]) -> dict[str, dict[str, float]]:
        """How often the text of each corpus was seen and how well it is predicted, which go into curves as well."""
        config, text = self._run.config, self._run.text
        windows = windows_given(step * config.windows_per_step, text.shares, config.order_seed)
        mixture = {}
        for i, (name, source) in enumerate(zip(text.names, text.sources, strict=True)):
            epochs, bits = windows[i] * config.model.context_length / len(source.train), by_corpus[i].bits_per_byte
            self._curves.write({f"val_corpora/{name}": bits, f"val_epochs/{name}": epochs}, step)
            mixture[name] = {"epochs": epochs, "val_bits_per_byte": bits}
        return mixture
