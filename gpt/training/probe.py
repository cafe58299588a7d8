"""How long a training step takes, measured on a throwaway model before the training itself."""

import math
import statistics
import time
from dataclasses import replace

import torch

from gpt.hardware import is_out_of_memory, release_memory
from gpt.text.shards import Corpora
from gpt.training.config import Config
from gpt.training.loader import make_batch
from gpt.training.module import GPTModule
from gpt.training.plan import Plan


def measure(config: Config, plan: Plan, corpora: Corpora) -> tuple[Plan, float]:
    """Seconds per step, and the plan with as small a micro-batch as memory requires, if it may choose it."""
    while True:
        try:
            return plan, seconds_per_step(config, plan, corpora)
        except Exception as error:
            if not is_out_of_memory(error) or not plan.automatic or plan.micro_batch_size == 1:
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
    # The first half warms up. A median would leave out hiccups, of which a run has its share.
    return statistics.fmean(times[len(times) // 2 :])
