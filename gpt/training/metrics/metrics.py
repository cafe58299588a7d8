"""metrics.json: the figures of a run at its last validation, and the baselines that it has beaten."""

import json
from collections.abc import Sequence
from typing import Any

from gpt.data.baselines import measure_baselines
from gpt.data.batches import count_sequences
from gpt.files import write_text
from gpt.hardware.memory import peak_memory_bytes
from gpt.sampling.scoring import Score
from gpt.training import distributed
from gpt.training.metrics.curves import Curves
from gpt.training.module import GPTModule
from gpt.training.run_directory import RunDirectory
from gpt.training.state import RunSpec, TrainState
from gpt.training.versions import current_commit


class Metrics:
    """Writes metrics.json after each validation, the curves of each corpus of a mixture, and those of the baselines.

    Baselines are what simple predictors make of the validation text. One is beaten at the first validation whose bits
    per byte are below it.
    """

    def __init__(self, spec: RunSpec, run: RunDirectory, state: TrainState, curves: Curves):
        self._spec, self._run, self._state, self._curves = spec, run, state, curves
        self._baselines: dict[str, float] = {}  # bits per byte, on rank 0 from the first validation of a process on

    def write(self, module: GPTModule, step: int, score: Score, by_corpus: Sequence[Score]) -> dict[str, Any]:
        """Return the figures of a validation, on every rank, and write them to metrics.json.

        Args:
            score: Of the whole validation text.
            by_corpus: Of each corpus.
        """
        if distributed.is_main_process():
            if not self._baselines:
                self._baselines = measure_baselines(self._spec.dataset.sources)
            self._compare(step, score)
        figures = self._measure(module, step, score)
        if len(by_corpus) > 1:
            figures["mix"] = self._measure_mixture(step, by_corpus)
        if distributed.is_main_process():
            write_text(self._run.path / "metrics.json", json.dumps(figures, indent=2) + "\n")
        return figures

    def _compare(self, step: int, score: Score) -> None:
        """Write the curves of the baselines, and note which the model has beaten."""
        self._curves.write({f"val_baselines/{name}": bits for name, bits in self._baselines.items()}, step)
        for name, bits in self._baselines.items():
            if score.bits_per_byte < bits:
                self._state.beaten_at_step.setdefault(name, step)

    def _measure(self, module: GPTModule, step: int, score: Score) -> dict[str, Any]:
        """The contents of metrics.json; docs/runs.md explains each key."""
        spec, state = self._spec, self._state
        tokens = step * spec.config.trainer.tokens_per_step
        known = {} if state.train_loss is None else {"train_loss": state.train_loss}
        if spec.schedule.expected_bits and step == state.total_steps:
            known["expected_bits_per_byte"] = spec.schedule.expected_bits
        return known | {
            "val_loss": score.nats_per_token,
            "val_nats_per_byte": score.nats_per_byte,
            "val_bits_per_byte": score.bits_per_byte,
            "best_val_loss": state.best_loss,
            "best_step": state.best_step,
            "steps": step,
            "tokens": tokens,
            "epochs": tokens / spec.dataset.train_tokens,
            "train_seconds": state.seconds,
            "tokens_per_second": tokens / state.seconds,
            "parameters": module.model.config.num_parameters,
            "peak_memory_bytes": peak_memory_bytes(module.device),
            "git_commit": current_commit(state.commits),
            "commits": state.commits,
            "baselines": {
                name: {"bits_per_byte": bits, "beaten_at_step": state.beaten_at_step.get(name)}
                for name, bits in self._baselines.items()
            },
        }

    def _measure_mixture(self, step: int, by_corpus: Sequence[Score]) -> dict[str, dict[str, float]]:
        """How often the text of each corpus was seen and how well it is predicted, which go into curves as well."""
        config, text = self._spec.config, self._spec.dataset
        windows = count_sequences(step * config.windows_per_step, text.weights, config.order_seed)
        mixture = {}
        for i, (name, source) in enumerate(zip(text.names, text.sources, strict=True)):
            epochs, bits = windows[i] * config.model.context_length / len(source.train), by_corpus[i].bits_per_byte
            self._curves.write({f"val_corpora/{name}": bits, f"val_epochs/{name}": epochs}, step)
            mixture[name] = {"epochs": epochs, "val_bits_per_byte": bits}
        return mixture
