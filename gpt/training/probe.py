"""How long a training step and a validation take, measured on throwaway models before the training itself."""

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import islice

import torch
from lightning import Trainer

from gpt.hardware import arithmetic, is_out_of_memory, release_memory
from gpt.model.loss import IGNORE
from gpt.sampling.generation import Sampling, generate
from gpt.sampling.scoring import score, tokens_at_once
from gpt.text.batches import validation_batches
from gpt.text.references import references
from gpt.text.shards import Corpora
from gpt.threads import giving_way
from gpt.training.config import Config
from gpt.training.fitting import Environment, build_trainer, module_for
from gpt.training.loader import GPTData, make_batch
from gpt.training.module import GPTModule
from gpt.training.plan import Plan
from gpt.training.ranks import Ranks
from gpt.training.samples import SAMPLE_TOKENS, longest_copy
from gpt.training.steps import StepCallback


def measure(config: Config, plan: Plan, corpora: Corpora, ranks: Ranks) -> tuple[Plan, float]:
    """Seconds per step, and the plan with as small a micro-batch as memory requires, if it may choose it.

    All ranks measure together.
    """
    while True:
        try:
            with arithmetic(config.trainer.device, config.trainer.deterministic), giving_way():
                if ranks.world_size > 1:
                    return plan, seconds_together(config, plan, corpora, ranks)
                return plan, seconds_per_step(config, plan, corpora)
        except Exception as error:
            alone = plan.automatic and ranks.world_size == 1
            if not is_out_of_memory(error) or not alone or plan.micro_batch_size == 1:
                raise
        release_memory()
        plan = plan.with_smaller_micro_batch()


def seconds_per_step(config: Config, plan: Plan, corpora: Corpora, at_most: float = 5.0) -> float:
    """The mean time of a training step, from as many as fit into `at_most` seconds, but 3 to 100.

    Of the micro-batches of a step, two are timed: the first makes the gradients, and all others add to them.
    """
    module = GPTModule(config, replace(plan, total_steps=1000), corpora)
    device = torch.device(config.trainer.device)
    module.to(device)
    optimizer = module.configure_optimizers()
    times: list[float] = []
    timed = min(2, plan.accumulation)
    begin = time.perf_counter()
    while len(times) < 3 or (time.perf_counter() - begin < at_most and len(times) < 100):
        start = time.perf_counter()
        for _ in range(timed):
            idx, targets = make_batch(module, 0)
            module.loss(idx.to(device), targets.to(device)).backward()
        math.isfinite(module.measure_gradients())  # waits for the device, as a real step does
        computed = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append((computed - start) * plan.accumulation / timed + time.perf_counter() - computed)
    return _typical(times)


def seconds_validating(config: Config, plan: Plan, corpora: Corpora) -> float:
    """The time of all of a run's validations with their samples, from one batch, one sample and the references."""
    module = GPTModule(config, plan, corpora).to(config.trainer.device)
    alone = config.trainer.strategy != "fsdp"
    optimizer = module.configure_optimizers() if alone else None  # for its memory, which a run holds meanwhile
    model, T, sources = module.model, config.model.context_length, corpora.sources
    size = max(1, tokens_at_once(model, config.trainer.world_size) // T)
    batches = list(islice(validation_batches(sources[0].validation, size, T, IGNORE), 2))  # the first warms up

    def sample() -> list[int]:
        generator = torch.Generator(module.device).manual_seed(config.seed)
        idx = batches[0][0][:1, :1].to(module.device)
        with torch.compiler.set_stance("force_eager"):  # as in a run
            return [int(token) for token in generate(model, idx, SAMPLE_TOKENS, Sampling(), generator)]

    with arithmetic(config.trainer.device, deterministic=False), giving_way():
        _, scoring = (_seconds(partial(score, model, [batch], 1)) for batch in (batches[0], batches[-1]))
        sampled: list[list[int]] = []
        sampling = 0.0
        if prompts := config.data.prompts:
            sampling = len(prompts) * _seconds(lambda: sampled.append(sample()))
            sampling += _seconds(lambda: longest_copy(sampled, corpora))
    del optimizer
    windows = sum(len(source.validation) for source in sources) / T
    scoring *= windows / len(batches[-1][0]) / config.trainer.world_size
    return -(-plan.total_steps // plan.validate_every) * (scoring + sampling) + _seconds(lambda: references(sources))


def seconds_together(config: Config, plan: Plan, corpora: Corpora, ranks: Ranks, at_most: float = 5.0) -> float:
    """The mean time of a training step of all ranks, which exchange their gradients as in the training itself."""
    module, watch = module_for(config, replace(plan, total_steps=100), corpora), Stopwatch(at_most)
    trainer = build_trainer(module, [watch], [Environment(ranks)])
    trainer.fit(module, datamodule=GPTData(module))
    return _typical(watch.times)


class Stopwatch(StepCallback):
    """Times the steps, and stops all ranks after as many as fit into `at_most` seconds, but at least 3."""

    def __init__(self, at_most: float):
        self.times: list[float] = []
        self._left, self._steps = at_most, 3

    def on_train_start(self, trainer: Trainer, module) -> None:
        self._mark = time.perf_counter()

    def on_step_end(self, trainer: Trainer, module: GPTModule, step: int) -> None:
        if module.device.type == "cuda":
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.times.append(now - self._mark)
        self._mark, self._left = now, self._left - self.times[-1]
        if step == 3:
            self._steps += trainer.strategy.broadcast(int(max(0.0, self._left / self.times[-1])))
        trainer.should_stop = step >= self._steps


def _seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def _typical(times: list[float]) -> float:
    # The first half warms up. A median would leave out hiccups, of which a run has its share.
    return statistics.fmean(times[len(times) // 2 :])
