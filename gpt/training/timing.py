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
from gpt.hardware.memory import forget_compiled_models, keep_freed_memory, release_memory
from gpt.hardware.threads import limit_threads
from gpt.model.loss import IGNORE_INDEX
from gpt.sampling.scoring import eval_batch_tokens, score
from gpt.training.batch_loader import micro_batch
from gpt.training.config import Config, Horizon
from gpt.training.module import GPTModule
from gpt.training.samples import continue_prompt, longest_copy
from gpt.training.schedule import Schedule

MIN_TIMED_STEPS, MAX_TIMED_STEPS = 3, 100


def plan_in_steps(
    config: Config, schedule: Schedule, dataset: TokenDataset, max_seconds: float = 5.0
) -> tuple[Config, Schedule, float]:
    """Time a few steps, and estimate the number of steps of a time horizon.

    Args:
        config: A final configuration.
        schedule: Its planned schedule.
        dataset: The text.
        max_seconds: As in `measure_step`.

    Returns:
        The configuration, the schedule in steps, and the seconds per step.
    """
    config, step_seconds = measure_step(config, schedule, dataset, max_seconds)
    if schedule.seconds:
        plan_in_steps = Schedule.plan(config, dataset.train_tokens, Horizon(schedule.seconds / step_seconds, "steps"))
        schedule = replace(plan_in_steps, expected_bits=schedule.expected_bits)
    return config, schedule, step_seconds


def measure_step(
    config: Config, schedule: Schedule, dataset: TokenDataset, max_seconds: float = 5.0
) -> tuple[Config, float]:
    """Return the seconds per step, and the configuration with a smaller micro-batch if memory ran out.

    Args:
        config: A final configuration.
        schedule: Its planned schedule.
        dataset: The text.
        max_seconds: Time as many steps as fit into this.
    """
    keep_freed_memory()  # as training does
    while True:
        try:
            with numerics(config.trainer.device, config.trainer.deterministic), limit_threads():
                return config, seconds_per_step(config, schedule, dataset, max_seconds)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        finally:
            if config.trainer.compile == "true":
                forget_compiled_models()
        release_memory()
        config = config.with_smaller_micro_batch()


def seconds_per_step(config: Config, schedule: Schedule, dataset: TokenDataset, max_seconds: float = 5.0) -> float:
    """Return the mean time of a training step, with the arguments of `measure_step`."""
    times: list[float] = []
    start = time.perf_counter()
    for _, seconds in run_throwaway_steps(config, replace(schedule, total_steps=1000), dataset):
        times.append(seconds)
        if len(times) == 1 and config.trainer.compile == "true":
            start = time.perf_counter()  # the first step has compiled
        is_time_up = time.perf_counter() - start >= max_seconds
        if len(times) >= MIN_TIMED_STEPS and (is_time_up or len(times) >= MAX_TIMED_STEPS):
            break
    # The first half is warmup. A run has slow steps too, and a median would leave them out.
    return statistics.fmean(times[len(times) // 2 :])


def run_throwaway_steps(config: Config, schedule: Schedule, dataset: TokenDataset) -> Iterator[tuple[GPTModule, float]]:
    """Train a model without a run. After each step, yield the model and the seconds of the step.

    A step trains on at most two micro-batches: the first creates the gradients, and each further one adds to them.
    Their time is scaled to all micro-batches.
    """
    from gpt.training.loop import build_fabric, train_step

    fabric = build_fabric(replace(config.trainer, devices=1, num_nodes=1, strategy="auto"))
    module = GPTModule(config, dataset.tokenizer, schedule)
    model = fabric.setup_module(module)
    optimizer = fabric.setup_optimizers(module.build_optimizer())
    num_batches, T = min(2, config.accumulation_steps), config.model.context_length
    for step in range(schedule.total_steps):
        times = [time.perf_counter()]

        def mark(times: list[float] = times) -> None:
            times.append(time.perf_counter())

        batches = [micro_batch(config, dataset, step * num_batches + i, T) for i in range(num_batches)]
        lr_multiplier = schedule.lr_multiplier(step, 0.0, config.optim)
        train_step(fabric, model, optimizer, batches, step, lr_multiplier, before_update=mark)
        if fabric.device.type == "cuda":
            torch.cuda.synchronize()
        start, update_start = times
        gradient_seconds, update_seconds = update_start - start, time.perf_counter() - update_start
        yield module, gradient_seconds * config.accumulation_steps / num_batches + update_seconds


def measure_validation_seconds(config: Config, schedule: Schedule, dataset: TokenDataset) -> float:
    """Estimate the time of all validations of a run, with samples, from one batch, one sample and the baselines."""
    module = GPTModule(config, dataset.tokenizer, schedule).to(config.trainer.device)
    optimizer = module.build_optimizer()  # a run holds its memory while it validates
    T, world_size = config.model.context_length, config.trainer.world_size
    prompts = config.data.prompts or []
    batch_size = max(1, eval_batch_tokens(module.model, world_size) // T)
    batches = list(islice(validation_batches(dataset.sources[0].validation, batch_size, T, IGNORE_INDEX), 2))
    generator = torch.Generator(module.device).manual_seed(config.seed)
    with numerics(config.trainer.device, deterministic=False), limit_threads():
        _time_call(score, module.model, [batches[0]], 1)  # warmup
        batch_seconds, _ = _time_call(score, module.model, [batches[-1]], 1)
        sampling_seconds = 0.0
        if prompts:
            sample_seconds, sample = _time_call(continue_prompt, module, dataset.tokenizer, prompts[0], generator)
            copy_seconds, _ = _time_call(longest_copy, [sample.tokens], dataset)
            sampling_seconds = len(prompts) * sample_seconds + copy_seconds
    del optimizer
    num_sequences = sum(len(source.validation) for source in dataset.sources) / T
    scoring_seconds = batch_seconds * num_sequences / len(batches[-1][0]) / world_size
    baseline_seconds, _ = _time_call(measure_baselines, dataset.sources)
    return schedule.num_validations * (scoring_seconds + sampling_seconds) + baseline_seconds


def _time_call(function: Callable, *arguments: Any) -> tuple[float, Any]:
    """Call a function. Return the seconds that it took, and its result."""
    start = time.perf_counter()
    result = function(*arguments)
    return time.perf_counter() - start, result
