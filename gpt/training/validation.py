"""Validation: the score of the whole validation text, and all that is recorded with it."""

import json
import math
from collections.abc import Sequence
from typing import Any

import torch
from lightning import Fabric

from gpt.data.baselines import measure_baselines
from gpt.data.batches import count_sequences, validation_batches
from gpt.data.token_dataset import TokenSource
from gpt.errors import NonFiniteError
from gpt.files import write_text
from gpt.hardware.memory import peak_memory_bytes
from gpt.model.loss import IGNORE_INDEX
from gpt.sampling.scoring import Score, eval_batch_tokens, score, sum_scores
from gpt.training.callbacks import Callbacks
from gpt.training.health import warn_if_overfitting
from gpt.training.metric_logger import MetricLogger
from gpt.training.module import NON_FINITE_HINT, GPTModule
from gpt.training.progress import ProgressDisplay
from gpt.training.run_directory import RunDirectory
from gpt.training.samples import SampleWriter
from gpt.training.state import RunSpec, TrainState
from gpt.training.training_clock import TrainingClock
from gpt.training.versions import current_commit


class Validator:
    """Validates a run. The clock of the training stands still meanwhile. Every rank must call its methods."""

    def __init__(
        self,
        spec: RunSpec,
        run: RunDirectory,
        state: TrainState,
        clock: TrainingClock,
        fabric: Fabric,
        module: GPTModule,
        callbacks: Callbacks,
        curves: MetricLogger,
        progress: ProgressDisplay,
    ):
        self._spec, self._run, self._state, self._clock = spec, run, state, clock
        self._fabric, self._module, self._callbacks = fabric, module, callbacks
        self._curves, self._progress = curves, progress
        self._baselines: dict[str, float] = {}  # bits per byte, on rank 0 from this process's first validation on
        self._samples_file = SampleWriter(spec, run, curves)
        self.last_validated_step = -1
        self.metrics: dict = {}  # as in metrics.json
        self.samples: list[str] = []
        self.longest_copy = 0  # characters of the longest passage in the samples that occurs in the training text

    def validate(self, step: int, expected_steps: int) -> None:
        """Score the validation text after `step`; update the best step, curves, samples, metrics.json and the screen.

        Raises:
            NonFiniteError: The weights or the loss are not finite. The best step then stays what it was.
        """
        state = self._state
        self._module.require_finite_weights(step)
        with self._clock.paused():
            scores = [score_dataset(self._fabric, self._module, source) for source in self._spec.dataset.sources]
            total = sum_scores(scores)
            if not math.isfinite(total.nats_per_token):
                raise NonFiniteError(f"step {step}: the validation loss is {total.nats_per_token}; {NON_FINITE_HINT}")
            # Losses on short sequences are never compared with losses on full ones.
            is_first_full_length = state.best_step <= state.full_length_from_step < step
            if total.nats_per_token < state.best_loss or is_first_full_length:
                state.best_loss, state.best_step = total.nats_per_token, step
            self.last_validated_step = step
            metrics = self._score_metrics(step, total, scores)
            self._curves.record(metrics, step)
            warn_if_overfitting(self._spec, state, step, total)
            self._sample(step)
            self.metrics = metrics | self._training_metrics(step)
            if self._fabric.is_global_zero:
                write_text(self._run.path / "metrics.json", json.dumps(self.metrics, indent=2) + "\n")
            self._progress.report(step, expected_steps, total, self.samples)
            self._callbacks.call("on_validation_end", step, score=total)

    def evaluate_initial_weights(self, expected_steps: int) -> None:
        """Score and sample trained weights before the first step. This is no validation of the run."""
        with self._clock.paused():
            scores = [score_dataset(self._fabric, self._module, source) for source in self._spec.dataset.sources]
            total = sum_scores(scores)
            self._curves.record({"val_loss": total.nats_per_token, "val_bits_per_byte": total.bits_per_byte}, 0)
            self._sample(0)
            self._progress.report(0, expected_steps, total, self.samples)

    def _score_metrics(self, step: int, total: Score, by_corpus: Sequence[Score]) -> dict[str, Any]:
        """Return the metrics that depend on the scores. Baselines are compared on rank 0 only."""
        metrics: dict[str, Any] = {
            "val_loss": total.nats_per_token,
            "val_nats_per_byte": total.nats_per_byte,
            "val_bits_per_byte": total.bits_per_byte,
        }
        config, dataset = self._spec.config, self._spec.dataset
        if len(by_corpus) > 1:
            sequences = count_sequences(step * config.sequences_per_step, dataset.weights, config.order_seed)
            tokens = [count * config.model.context_length for count in sequences]
            epochs = [seen / len(source.train) for seen, source in zip(tokens, dataset.sources, strict=True)]
            bits = [corpus.bits_per_byte for corpus in by_corpus]
            metrics["corpus_bits_per_byte"] = dict(zip(dataset.names, bits, strict=True))
            metrics["corpus_epochs"] = dict(zip(dataset.names, epochs, strict=True))
        if self._fabric.is_global_zero:
            self._baselines = self._baselines or measure_baselines(dataset.sources)
            metrics["baselines"] = self._baselines
            metrics["beaten_at_step"] = record_beaten_baselines(self._state, self._baselines, total.bits_per_byte, step)
        return metrics

    def _training_metrics(self, step: int) -> dict[str, Any]:
        """Return the metrics of the training so far. They have curves of their own, or none."""
        spec, state = self._spec, self._state
        tokens = step * spec.config.trainer.tokens_per_step
        metrics: dict[str, Any] = {
            "best_val_loss": state.best_loss,
            "best_step": state.best_step,
            "steps": step,
            "tokens": tokens,
            "epochs": tokens / spec.dataset.train_tokens,
            "train_seconds": state.seconds,
            "tokens_per_second": tokens / state.seconds,
            "parameters": self._module.model.config.num_parameters,
            "peak_memory_bytes": peak_memory_bytes(self._module.device),
            "git_commit": current_commit(state.commits),
            "commits": state.commits,
        }
        if state.train_loss is not None:
            metrics["train_loss"] = state.train_loss
        if spec.schedule.expected_bits and step == state.total_steps:
            metrics["expected_bits_per_byte"] = spec.schedule.expected_bits
        return metrics

    def _sample(self, step: int) -> None:
        if self._fabric.is_global_zero:
            self.samples, self.longest_copy = self._samples_file.write(self._module, step)


def record_beaten_baselines(
    state: TrainState, baselines: dict[str, float], bits_per_byte: float, step: int
) -> dict[str, int | None]:
    """Return the first validation that beat each baseline, or None, after this validation at `step`."""
    for name, baseline in baselines.items():
        if bits_per_byte < baseline:
            state.beaten_at_step.setdefault(name, step)
    return {name: state.beaten_at_step.get(name) for name in baselines}


def score_dataset(fabric: Fabric, module: GPTModule, source: TokenSource) -> Score:
    """Return the score of the whole validation text of one corpus, which the ranks share.

    Sequences have the length of the last training step. Every rank must call this.
    """
    T = module.sequence_length
    batch_size = max(1, eval_batch_tokens(module.model, fabric.world_size) // T)
    batches = validation_batches(source.validation, batch_size, T, IGNORE_INDEX)
    own_batches = (batch for i, batch in enumerate(batches) if i % fabric.world_size == fabric.global_rank)
    part = score(module.model, own_batches, source.metadata["splits"]["validation"]["bytes"])
    if fabric.world_size == 1:
        return part
    totals = torch.tensor([part.nats, part.tokens], dtype=torch.float64, device=module.device)
    fabric.all_reduce(totals, reduce_op="sum")  # in place
    return Score(float(totals[0]), int(totals[1]), part.bytes)
