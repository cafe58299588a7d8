"""Validation: the score of the whole validation text, and all that is recorded with it."""

import math

import torch
from lightning import Fabric

from gpt.data.batches import validation_batches
from gpt.data.token_dataset import TokenSource
from gpt.errors import NonFiniteError
from gpt.model.loss import IGNORE
from gpt.sampling.scoring import Score, score, sum_of, tokens_at_once
from gpt.training.callbacks import Callbacks
from gpt.training.health import warn_if_overfitting
from gpt.training.metrics.curves import Curves
from gpt.training.metrics.metrics import Metrics
from gpt.training.metrics.progress import Progress
from gpt.training.metrics.samples import Samples
from gpt.training.module import NON_FINITE_HINT, GPTModule
from gpt.training.run_directory import RunDirectory
from gpt.training.state import RunSpec, TrainState
from gpt.training.training_clock import TrainingClock


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
        curves: Curves,
        progress: Progress,
    ):
        self._spec, self._run, self._state, self._clock = spec, run, state, clock
        self._fabric, self._module, self._callbacks = fabric, module, callbacks
        self._curves, self._progress = curves, progress
        self._metrics_file = Metrics(spec, run, state, curves)
        self._samples_file = Samples(spec, run, curves)
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
            total = sum_of(scores)
            if not math.isfinite(total.nats_per_token):
                raise NonFiniteError(f"step {step}: the validation loss is {total.nats_per_token}; {NON_FINITE_HINT}")
            # Losses on short sequences are never compared with losses on full ones.
            is_first_full_length = state.best_step <= state.full_length_from_step < step
            if total.nats_per_token < state.best_loss or is_first_full_length:
                state.best_loss, state.best_step = total.nats_per_token, step
            self.last_validated_step = step
            self._curves.write({"val/loss": total.nats_per_token, "val/bits_per_byte": total.bits_per_byte}, step)
            warn_if_overfitting(self._spec, state, step, total)
            self._sample(step)
            self.metrics = self._metrics_file.write(self._module, step, total, scores)
            self._progress.report(step, expected_steps, total, self.samples)
            self._callbacks.call("on_validation_end", step, score=total)

    def evaluate_initial_weights(self, expected_steps: int) -> None:
        """Score and sample trained weights before the first step. This is no validation of the run."""
        with self._clock.paused():
            scores = [score_dataset(self._fabric, self._module, source) for source in self._spec.dataset.sources]
            total = sum_of(scores)
            self._curves.write({"val/loss": total.nats_per_token, "val/bits_per_byte": total.bits_per_byte}, 0)
            self._sample(0)
            self._progress.report(0, expected_steps, total, self.samples)

    def _sample(self, step: int) -> None:
        if self._fabric.is_global_zero:
            self.samples, self.longest_copy = self._samples_file.write(self._module, step)


def score_dataset(fabric: Fabric, module: GPTModule, source: TokenSource) -> Score:
    """Return the score of the whole validation text of one corpus, which the ranks share.

    Sequences have the length of the last training step. Every rank must call this.
    """
    T = module.sequence_length
    batch_size = max(1, tokens_at_once(module.model, fabric.world_size) // T)
    batches = validation_batches(source.validation, batch_size, T, IGNORE)
    own_batches = (batch for i, batch in enumerate(batches) if i % fabric.world_size == fabric.global_rank)
    part = score(module.model, own_batches, source.metadata["splits"]["validation"]["bytes"])
    if fabric.world_size == 1:
        return part
    totals = torch.tensor([part.nats, part.tokens], dtype=torch.float64, device=module.device)
    fabric.all_reduce(totals, reduce_op="sum")  # in place
    return Score(float(totals[0]), int(totals[1]), part.bytes)
