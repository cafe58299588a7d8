"""Validation: score the whole validation text, and write metrics and samples."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
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
from gpt.training.samples import write_samples
from gpt.training.state import RunSpec, TrainState
from gpt.training.training_clock import TrainingClock
from gpt.training.versions import current_code_version


@dataclass
class Validator:
    """Validates a run, while its clock is paused. Every rank must call the methods."""

    spec: RunSpec
    run: RunDirectory
    state: TrainState
    clock: TrainingClock
    fabric: Fabric
    module: GPTModule
    callbacks: Callbacks
    logger: MetricLogger
    progress: ProgressDisplay
    last_validated_step: int = -1
    metrics: dict[str, Any] = field(default_factory=dict)  # the content of metrics.json
    samples: list[str] = field(default_factory=list)
    longest_copy: int = 0  # length in characters of the longest passage that the samples copy
    baselines: dict[str, float] = field(default_factory=dict)  # bits per byte; on rank 0, from the first validation on

    def validate(self, step: int) -> None:
        """Score the validation text after `step`, then update the best step, curves, samples and metrics.json.

        Raises:
            NonFiniteError: The weights or the loss are not finite. The best step is unchanged.
        """
        state = self.state
        self.module.require_finite_weights(step)
        with self.clock.paused():
            scores = self._score_sources()
            total = sum_scores(scores)
            if not math.isfinite(total.nats_per_token):
                raise NonFiniteError(f"step {step}: the validation loss is {total.nats_per_token}; {NON_FINITE_HINT}")
            # Losses on short sequences are not compared with losses at full length.
            is_first_full_length = state.best_step <= state.full_length_from_step < step
            if total.nats_per_token < state.best_loss or is_first_full_length:
                state.best_loss = total.nats_per_token
                state.best_step = step
            self.last_validated_step = step
            metrics = self._score_metrics(step, total, scores)
            self.logger.write_metrics(metrics, step)
            warn_if_overfitting(self.spec, state, step, total)
            self._sample(step)
            self.metrics = metrics | self._training_metrics(step)
            if self.fabric.is_global_zero:
                write_text(self.run.path / "metrics.json", json.dumps(self.metrics, indent=2) + "\n")
            self.progress.print_validation(step, total, self.samples)
            self.callbacks.call("on_validation_end", step, score=total)

    def evaluate_initial_weights(self) -> None:
        """Score and sample trained weights before the first step. It cannot be the best step."""
        with self.clock.paused():
            total = sum_scores(self._score_sources())
            self.logger.write_metrics({"val_loss": total.nats_per_token, "val_bits_per_byte": total.bits_per_byte}, 0)
            self._sample(0)
            self.progress.print_validation(0, total, self.samples)

    def _score_sources(self) -> list[Score]:
        return [score_source(self.fabric, self.module, source) for source in self.spec.dataset.sources]

    def _score_metrics(self, step: int, total: Score, scores: Sequence[Score]) -> dict[str, Any]:
        """Return the metrics that get a point of a curve at each validation. Only rank 0 has baselines."""
        metrics: dict[str, Any] = {
            "val_loss": total.nats_per_token,
            "val_nats_per_byte": total.nats_per_byte,
            "val_bits_per_byte": total.bits_per_byte,
        }
        config = self.spec.config
        dataset = self.spec.dataset
        if len(scores) > 1:
            counts = count_sequences(step * config.sequences_per_step, dataset.weights, config.order_seed)
            T = config.model.context_length
            epochs = [count * T / len(source.train) for count, source in zip(counts, dataset.sources, strict=True)]
            bits = [score.bits_per_byte for score in scores]
            metrics["corpus_bits_per_byte"] = dict(zip(dataset.names, bits, strict=True))
            metrics["corpus_epochs"] = dict(zip(dataset.names, epochs, strict=True))
        if self.fabric.is_global_zero:
            self.baselines = self.baselines or measure_baselines(dataset.sources)
            metrics["baselines"] = self.baselines
            metrics["beaten_at_step"] = record_beaten_baselines(self.state, self.baselines, total.bits_per_byte, step)
        return metrics

    def _training_metrics(self, step: int) -> dict[str, Any]:
        """Return the other metrics in metrics.json. If they have a curve, metric_logger.py writes its points."""
        spec = self.spec
        state = self.state
        tokens = step * spec.config.trainer.tokens_per_step
        metrics: dict[str, Any] = {
            "best_val_loss": state.best_loss,
            "best_step": state.best_step,
            "steps": step,
            "tokens": tokens,
            "epochs": tokens / spec.dataset.train_tokens,
            "train_seconds": state.seconds,
            "tokens_per_second": tokens / state.seconds,
            "parameters": self.module.model.config.num_parameters,
            "peak_memory_bytes": peak_memory_bytes(self.module.device),
            "git_commit": current_code_version(state.commits),
            "commits": state.commits,
        }
        if state.train_loss is not None:
            metrics["train_loss"] = state.train_loss
        if spec.schedule.expected_bits and step == state.total_steps:
            metrics["expected_bits_per_byte"] = spec.schedule.expected_bits
        return metrics

    def _sample(self, step: int) -> None:
        if self.fabric.is_global_zero:
            self.samples, self.longest_copy = write_samples(self.spec, self.run, self.module, self.logger, step)


def record_beaten_baselines(
    state: TrainState, baselines: dict[str, float], bits_per_byte: float, step: int
) -> dict[str, int | None]:
    """Compare a validation with the baselines. Return the step of the first that beat each of them, or None."""
    for name, baseline in baselines.items():
        if bits_per_byte < baseline:
            state.beaten_at_step.setdefault(name, step)
    return {name: state.beaten_at_step.get(name) for name in baselines}


def score_source(fabric: Fabric, module: GPTModule, source: TokenSource) -> Score:
    """Return the score of the whole validation text of one corpus. Every rank scores a part of it.

    Sequences have the length of the last training step. Every rank must call this.
    """
    T = module.sequence_length
    batch_size = max(1, eval_batch_tokens(module.model, fabric.world_size) // T)
    batches = validation_batches(source.validation, batch_size, T, IGNORE_INDEX)
    rank_batches = (batch for i, batch in enumerate(batches) if i % fabric.world_size == fabric.global_rank)
    part = score(module.model, rank_batches, source.metadata["splits"]["validation"]["bytes"])
    if fabric.world_size == 1:
        return part
    totals = torch.tensor([part.nats, part.tokens], dtype=torch.float64, device=module.device)
    fabric.all_reduce(totals, reduce_op="sum")  # in place
    return Score(float(totals[0]), int(totals[1]), part.bytes)
