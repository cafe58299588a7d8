"""model=auto: the model of a family that learns most of a text in a given time, and the bits it should reach."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from gpt.console import format_duration, print_line
from gpt.data.baselines import measure_novelty
from gpt.data.token_dataset import TokenDataset
from gpt.errors import UserError
from gpt.hardware.device import numerics
from gpt.hardware.threads import yield_to_other_processes
from gpt.model.transformer import GPTConfig, ModelConfig
from gpt.sampling.scoring import strided_score, sum_scores
from gpt.training.advice import EPOCHS_WITHOUT_BPE_DROPOUT
from gpt.training.config import Config, with_values
from gpt.training.optim import MINI_MODEL
from gpt.training.scaling_law import CANDIDATE_MODELS, PROBE_MODEL, ScalingLaw
from gpt.training.schedule import Schedule
from gpt.training.timing import measure_step, run_throwaway_steps

PROBE_SHARE = 0.5  # of the time that there is, which the probe may take
PROBE_STEPS = (250, 1000)  # its least and its most: the law was fitted to probes of 1,000, and fewer on small texts
PACE = 0.94  # a run has this share of the speed of bare steps, for its batches, curves and checkpoints
SMALLER = 1.01  # the bits of a model smaller than mini count so many times: the law is usually off by twice as much
WORSE = 1.02  # once a model would need so many times the bits of the best, no larger ones are timed


@dataclass(frozen=True)
class Candidate:
    """A model of the family, final for this machine and timed on it, with the law of the text that it is to learn."""

    config: Config
    schedule: Schedule
    parameters: int
    tokens_per_second: float
    law: ScalingLaw

    def __str__(self) -> str:
        model = self.config.model
        return f"{model.num_layers} layers of {model.d_model} channels"

    def predict(self, seconds: float) -> tuple[float, float]:
        """The bits per byte to expect of a time, and how much of it to train: whole seconds, while validation falls."""
        model, most = self.config.model, seconds * self.tokens_per_second
        tokens = self.law.best_tokens(model, most)
        return self.law.bits_per_byte(model, tokens), min(seconds, math.ceil(seconds * (tokens / most)))


def pick_best(members: Sequence[Candidate], seconds: float) -> Candidate:
    """The member with the fewest bits to expect in a time; mini where a smaller one would be as good."""

    def weighed(member: Candidate) -> float:
        return member.predict(seconds)[0] * (SMALLER if member.config.model.d_model < MINI_MODEL.d_model else 1.0)

    return min(members, key=weighed)


def time_candidates(
    finalize_candidate: Callable[[ModelConfig], tuple[Config, Schedule]],
    text: TokenDataset,
    seconds: float,
    longest: float,
) -> list[Candidate]:
    """Probe a text, and time members from the smallest up, until a larger one learns less.

    `finalize_candidate` returns the final configuration for a model. Members are weighed for `seconds` of training, or
    for `longest` if that is more.
    """
    law, longest = probe_dataset(*finalize_candidate(PROBE_MODEL), text, seconds), max(seconds, longest)
    members: list[Candidate] = []
    for model in CANDIDATE_MODELS:
        config, schedule = finalize_candidate(model)
        if config.model.context_length >= text.train_tokens:
            break
        try:
            config, each = measure_step(config, schedule, text, max_seconds=1.0)
        except UserError:  # out of memory
            if members:
                break
            raise
        parameters = GPTConfig(**asdict(config.model), vocab_size=text.tokenizer.vocab_size).num_parameters
        speed = PACE * config.trainer.tokens_per_step / each
        members.append(Candidate(config, schedule, parameters, speed, law))
        if (
            members[-1].predict(longest)[0] > WORSE * pick_best(members, longest).predict(longest)[0]
            and model in CANDIDATE_MODELS[2:]
        ):
            break
    return members


def probe_dataset(config: Config, schedule: Schedule, text: TokenDataset, seconds: float) -> ScalingLaw:
    """Fit the law of a text to what a throwaway model learns of it in part of the given time."""
    if config.trainer.precision == "fp16":  # whose broken steps only training skips
        config = with_values(config, {"trainer.precision": "fp32"})
    config, each = measure_step(config, schedule, text, max_seconds=1.0)
    fresh = (
        EPOCHS_WITHOUT_BPE_DROPOUT * text.train_tokens / config.trainer.tokens_per_step
    )  # steps, after which tokens would be split
    steps = round(max(PROBE_STEPS[0], min(PROBE_STEPS[1], fresh, PROBE_SHARE * seconds / each)))
    print_line(
        f"model=auto: learning the text with a small model for about {format_duration(steps * each)}, "
        "then timing larger ones"
    )
    with numerics(config.trainer.device, config.trainer.deterministic), yield_to_other_processes():
        for module, _ in run_throwaway_steps(config, replace(schedule, total_steps=steps), text):
            model = module.model
        sizes = [source.metadata["splits"]["validation"]["bytes"] for source in text.sources]
        each_source = zip(text.sources, sizes, strict=True)
        T = config.model.context_length
        found = sum_scores(strided_score(model, source.validation, size, T) for source, size in each_source)
    law = ScalingLaw(text.train_tokens, measure_novelty(text.sources))
    return law.calibrate(config.model, steps * config.trainer.tokens_per_step, found.bits_per_byte)


def describe_choice(members: Sequence[Candidate], seconds: float, text: TokenDataset) -> str:
    """A line about the model that was chosen for a time, and what to expect of it."""
    chosen, size = (
        pick_best(members, seconds),
        sum(source.metadata["splits"]["train"]["bytes"] for source in text.sources),
    )
    bits, useful = chosen.predict(seconds)
    line = (
        f"model=auto: {chosen}, {chosen.parameters / 1e6:.1f} million parameters, for {format_duration(seconds)} at "
        f"{chosen.tokens_per_second:,.0f} tokens/s on {size / 1e6:.3g} MB: about {bits:.2f} bits per byte"
    )
    if useful < seconds:
        line += f" after {format_duration(useful)}, and more would only memorise the text"
    minis = [member for member in members if member.config.model.d_model == MINI_MODEL.d_model and member is not chosen]
    return line + "".join(f"; {mini} would reach about {mini.predict(seconds)[0]:.2f}" for mini in minis)


def list_predictions(members: Sequence[Candidate], seconds: float, others: Sequence[float]) -> list[dict[str, Any]]:
    """What to expect of each member after a time, and of the best after others."""
    pairs = [(seconds, member) for member in members] + [(time, pick_best(members, time)) for time in others]
    return [{"seconds": time, "model": str(one), "bits_per_byte": one.predict(time)[0]} for time, one in pairs]
