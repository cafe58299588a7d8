"""How long a training step and a validation take, measured on throwaway models."""

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import torch

from gpt.data.baselines import measure_baselines
from gpt.data.batches import validation_batches
from gpt.data.token_dataset import TokenDataset
from gpt.errors import is_out_of_memory
from gpt.hardware.device import numerics
from gpt.hardware.memory import keep_freed_memory, release_memory
from gpt.hardware.threads import yield_to_other_processes
from gpt.model.loss import IGNORE_INDEX
from gpt.sampling.scoring import eval_batch_tokens, score
from gpt.training.batch_loader import micro_batch
from gpt.training.config import Config, Horizon
from gpt.training.module import GPTModule
from gpt.training.samples import continue_prompt, longest_copy
from gpt.training.schedule import Schedule


def plan_in_steps(
    config: Config, schedule: Schedule, text: TokenDataset, max_seconds: float = 5.0
) -> tuple[Config, Schedule, float]:
    """Measure, and return between the two results the schedule in steps, even where the horizon is a time."""
    config, seconds = measure_step(config, schedule, text, max_seconds)
    if schedule.seconds:
        same = Schedule.plan(config, text.train_tokens, Horizon(schedule.seconds / seconds, "steps"))
        schedule = replace(same, expected_bits=schedule.expected_bits)
    return config, schedule, seconds


def measure_step(
    config: Config, schedule: Schedule, text: TokenDataset, max_seconds: float = 5.0
) -> tuple[Config, float]:
    """Return the configuration, with a smaller micro-batch if memory requires and allows it, and seconds per step."""
    keep_freed_memory()  # as training does
    while True:
        try:
            with numerics(config.trainer.device, config.trainer.deterministic), yield_to_other_processes():
                return config, seconds_per_step(config, schedule, text, max_seconds)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        release_memory()
        config = config.with_smaller_micro_batch()


def seconds_per_step(config: Config, schedule: Schedule, text: TokenDataset, max_seconds: float = 5.0) -> float:
    """The mean time of a training step, from as many as fit into `max_seconds` seconds, but 3 to 100."""
    times: list[float] = []
    begin = time.perf_counter()
    for _, seconds in run_throwaway_steps(config, replace(schedule, total_steps=1000), text):
        times.append(seconds)
        if len(times) >= 3 and (time.perf_counter() - begin >= max_seconds or len(times) >= 100):
            break
    # The first half warms up. A median would leave out hiccups, of which a run has its share.
    return statistics.fmean(times[len(times) // 2 :])


def run_throwaway_steps(config: Config, schedule: Schedule, text: TokenDataset) -> Iterator[tuple[GPTModule, float]]:
    """Train a model without a run: yield it after each step, and the seconds that the step takes.

    The step is that of a training, with at most two of its micro-batches: the first makes the gradients, and all others
    add to them. Their time is scaled to all micro-batches.
    """
    from gpt.training.loop import build_fabric, train_step

    fabric = build_fabric(replace(config.trainer, devices=1, num_nodes=1, strategy="auto"))
    module = build_throwaway_module(config, schedule, text)
    model = fabric.setup_module(module)
    optimizer = fabric.setup_optimizers(module.build_optimizer())
    num_batches, T = min(2, config.accumulation_steps), config.model.context_length
    for step in range(schedule.total_steps):
        times = [time.perf_counter()]

        def mark(times: list[float] = times) -> None:
            times.append(time.perf_counter())

        batches = [micro_batch(config, text, step * num_batches + i, T) for i in range(num_batches)]
        lr_multiplier = schedule.lr_multiplier(step, 0.0, config.optim)
        train_step(fabric, model, optimizer, batches, step, lr_multiplier, before_update=mark)
        if fabric.device.type == "cuda":
            torch.cuda.synchronize()
        start, update_start = times
        gradient_seconds, update_seconds = update_start - start, time.perf_counter() - update_start
        yield module, gradient_seconds * config.accumulation_steps / num_batches + update_seconds


def build_throwaway_module(config: Config, schedule: Schedule, text: TokenDataset) -> GPTModule:
    """A model that belongs to no run."""
    return GPTModule(config, text.tokenizer, schedule)


def measure_validation_seconds(config: Config, schedule: Schedule, text: TokenDataset) -> float:
    """The time of all of a run's validations with their samples, from one batch, one sample and the baselines."""
    module = build_throwaway_module(config, schedule, text).to(config.trainer.device)
    # For its memory, which a run holds meanwhile.
    optimizer = module.build_optimizer()
    T, sources, prompts = config.model.context_length, text.sources, config.data.prompts or []
    size = max(1, eval_batch_tokens(module.model, config.trainer.world_size) // T)
    batches = list(islice(validation_batches(sources[0].validation, size, T, IGNORE_INDEX), 2))  # the first warms up
    generator = torch.Generator(module.device).manual_seed(config.seed)
    with numerics(config.trainer.device, deterministic=False), yield_to_other_processes():
        _, scoring = (_timed(score, module.model, [batch], 1)[0] for batch in (batches[0], batches[-1]))
        sampling = 0.0
        if prompts:
            sampling, sample = _timed(continue_prompt, module, text.tokenizer, prompts[0], generator)
            sampling = len(prompts) * sampling + _timed(longest_copy, [sample.tokens], text)[0]
    del optimizer
    windows = sum(len(source.validation) for source in sources) / T
    scoring *= windows / len(batches[-1][0]) / config.trainer.world_size
    return schedule.num_validations * (scoring + sampling) + _timed(measure_baselines, sources)[0]


def _timed(function: Callable, *arguments: Any) -> tuple[float, Any]:
    """Call a function; return the seconds that it took, and its result."""
    start = time.perf_counter()
    result = function(*arguments)
    return time.perf_counter() - start, result
