"""model=auto: pick the candidate that learns most of a text in the given time, and predict its loss."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from gpt.console import format_duration, print_line
from gpt.data.baselines import measure_novelty
from gpt.data.token_dataset import TokenDataset
from gpt.errors import UserError
from gpt.hardware.device import numerics
from gpt.hardware.threads import limit_threads
from gpt.model.transformer import GPTConfig, ModelConfig
from gpt.sampling.scoring import strided_score, sum_scores
from gpt.training.advice import EPOCHS_WITHOUT_BPE_DROPOUT
from gpt.training.config import Config, with_values
from gpt.training.optim import MINI_MODEL
from gpt.training.scaling_law import CANDIDATE_MODELS, PROBE_MODEL, ScalingLaw
from gpt.training.schedule import Schedule
from gpt.training.timing import measure_step, run_throwaway_steps

MAX_PROBE_FRACTION = 0.5  # of the training time
MIN_PROBE_STEPS, MAX_PROBE_STEPS = 250, 1000  # the law was fitted to probes of 1,000 steps, and fewer on small texts
RUN_SPEED = 0.94  # of bare steps: a run also prepares batches, logs and saves
# The law is less certain about models smaller than mini, so their predicted loss is multiplied by this.
SMALL_MODEL_PENALTY = 1.01
# If the predicted loss of a candidate is this many times that of the best, no larger candidate is timed.
MAX_LOSS_RATIO = 1.02


@dataclass(frozen=True)
class Candidate:
    """A model that model=auto may choose, with its speed on this machine and the scaling law of the text."""

    config: Config  # final, with this model
    schedule: Schedule
    parameters: int
    tokens_per_second: float
    law: ScalingLaw

    def __str__(self) -> str:
        model = self.config.model
        return f"{model.num_layers} layers of {model.d_model} channels"

    def predict(self, seconds: float) -> tuple[float, float]:
        """Return the bits per byte to expect within a time, and how many seconds to train before the model overfits."""
        model, max_tokens = self.config.model, seconds * self.tokens_per_second
        tokens = self.law.best_tokens(model, max_tokens)
        useful_seconds = min(seconds, math.ceil(seconds * (tokens / max_tokens)))
        return self.law.bits_per_byte(model, tokens), useful_seconds


def pick_best(candidates: Sequence[Candidate], seconds: float) -> Candidate:
    """Return the candidate with the lowest predicted loss after a time. Mini wins over a smaller one as good."""

    def weighted_loss(candidate: Candidate) -> float:
        is_small = candidate.config.model.d_model < MINI_MODEL.d_model
        return candidate.predict(seconds)[0] * (SMALL_MODEL_PENALTY if is_small else 1.0)

    return min(candidates, key=weighted_loss)


def time_candidates(
    finalize_candidate: Callable[[ModelConfig], tuple[Config, Schedule]],
    dataset: TokenDataset,
    seconds: float,
    max_seconds: float,
) -> list[Candidate]:
    """Probe a text, and time candidates from the smallest up, until a larger one learns less.

    Args:
        finalize_candidate: Returns the final configuration and the schedule for a model.
        dataset: The text.
        seconds: The training time.
        max_seconds: Time enough candidates to pick the best for this time too.
    """
    law = probe_dataset(*finalize_candidate(PROBE_MODEL), dataset, seconds)
    max_seconds = max(seconds, max_seconds)
    candidates: list[Candidate] = []
    for model in CANDIDATE_MODELS:
        config, schedule = finalize_candidate(model)
        if config.model.context_length >= dataset.train_tokens:
            break
        try:
            config, step_seconds = measure_step(config, schedule, dataset, max_seconds=1.0)
        except UserError:  # out of memory
            if candidates:
                break
            raise
        parameters = GPTConfig(**asdict(config.model), vocab_size=dataset.tokenizer.vocab_size).num_parameters
        tokens_per_second = RUN_SPEED * config.trainer.tokens_per_step / step_seconds
        candidate = Candidate(config, schedule, parameters, tokens_per_second, law)
        candidates.append(candidate)
        loss, best_loss = candidate.predict(max_seconds)[0], pick_best(candidates, max_seconds).predict(max_seconds)[0]
        if loss > MAX_LOSS_RATIO * best_loss and model in CANDIDATE_MODELS[2:]:
            break
    return candidates


def probe_dataset(config: Config, schedule: Schedule, dataset: TokenDataset, seconds: float) -> ScalingLaw:
    """Train a throwaway model on a text for part of the given time, and calibrate the scaling law with its loss."""
    if config.trainer.precision == "fp16":  # its broken steps are skipped only in a real training
        config = with_values(config, {"trainer.precision": "fp32"})
    config, step_seconds = measure_step(config, schedule, dataset, max_seconds=1.0)
    steps_without_bpe_dropout = EPOCHS_WITHOUT_BPE_DROPOUT * dataset.train_tokens / config.trainer.tokens_per_step
    max_steps = min(MAX_PROBE_STEPS, steps_without_bpe_dropout, MAX_PROBE_FRACTION * seconds / step_seconds)
    steps = round(max(MIN_PROBE_STEPS, max_steps))
    probe_time = format_duration(steps * step_seconds)
    print_line(f"model=auto: learning the text with a small model for about {probe_time}, then timing larger ones")
    with numerics(config.trainer.device, config.trainer.deterministic), limit_threads():
        for module, _ in run_throwaway_steps(config, replace(schedule, total_steps=steps), dataset):
            model = module.model
        T = config.model.context_length
        scores = (
            strided_score(model, source.validation, source.metadata["splits"]["validation"]["bytes"], T)
            for source in dataset.sources
        )
        score = sum_scores(scores)
    law = ScalingLaw(dataset.train_tokens, measure_novelty(dataset.sources))
    return law.calibrate(config.model, steps * config.trainer.tokens_per_step, score.bits_per_byte)


def describe_choice(candidates: Sequence[Candidate], seconds: float, dataset: TokenDataset) -> str:
    """Return a line about the candidate that was chosen for a time, and the loss to expect."""
    candidate = pick_best(candidates, seconds)
    train_bytes = sum(source.metadata["splits"]["train"]["bytes"] for source in dataset.sources)
    bits_per_byte, useful_seconds = candidate.predict(seconds)
    line = (
        f"model=auto: {candidate}, {candidate.parameters / 1e6:.1f} million parameters, for "
        f"{format_duration(seconds)} at {candidate.tokens_per_second:,.0f} tokens/s on {train_bytes / 1e6:.3g} MB: "
        f"about {bits_per_byte:.2f} bits per byte"
    )
    if useful_seconds < seconds:
        line += f" after {format_duration(useful_seconds)}; training longer would only memorize the text"
    minis = [mini for mini in candidates if mini.config.model.d_model == MINI_MODEL.d_model and mini is not candidate]
    return line + "".join(f"; {mini} would reach about {mini.predict(seconds)[0]:.2f}" for mini in minis)


def list_predictions(
    candidates: Sequence[Candidate], seconds: float, other_seconds: Sequence[float]
) -> list[dict[str, Any]]:
    """Return the predicted loss of each candidate after a time, and of the best candidate after other times."""
    pairs = [(seconds, candidate) for candidate in candidates]
    pairs += [(time, pick_best(candidates, time)) for time in other_seconds]
    return [
        {"seconds": time, "model": str(candidate), "bits_per_byte": candidate.predict(time)[0]}
        for time, candidate in pairs
    ]
