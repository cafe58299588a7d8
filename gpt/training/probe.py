"""How long a training step takes, measured on a throwaway model before the training itself."""

import math
import statistics
import time
from dataclasses import replace

import torch
from lightning import Trainer

from gpt.hardware import arithmetic, is_out_of_memory, release_memory
from gpt.text.shards import Corpora
from gpt.threads import giving_way
from gpt.training.config import Config
from gpt.training.fitting import Environment, build_trainer, module_for
from gpt.training.loader import GPTData, make_batch
from gpt.training.module import GPTModule
from gpt.training.plan import Plan
from gpt.training.processes import Ranks
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
    """The mean time of a training step, from as many as fit into `at_most` seconds, but 3 to 100."""
    module = GPTModule(config, replace(plan, total_steps=1000), corpora)
    device = torch.device(config.trainer.device)
    module.to(device)
    optimizer = module.configure_optimizers()
    times: list[float] = []
    begin = time.perf_counter()
    while len(times) < 3 or (time.perf_counter() - begin < at_most and len(times) < 100):
        start = time.perf_counter()
        for _ in range(plan.accumulation):
            idx, targets = make_batch(module, 0)
            module.loss(idx.to(device), targets.to(device)).backward()
        math.isfinite(module.measure_gradients())  # waits for the device, as a real step does
        optimizer.step()
        optimizer.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return _typical(times)


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


def _typical(times: list[float]) -> float:
    # The first half warms up. A median would leave out hiccups, of which a run has its share.
    return statistics.fmean(times[len(times) // 2 :])
