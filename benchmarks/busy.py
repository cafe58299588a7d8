"""Beside a busy program: python benchmarks/busy.py [--only training sampling] [--rounds 3] [--json FILE].

Tokens a second of training the mini model and of sampling from it and from GPT-2 124M, on a quiet machine and beside a
process that keeps one core busy, in turn. `spinning` is OpenMP as it comes, `giving way` is gpt.hardware.threads.
The others are what a user can choose before the start: OMP_WAIT_POLICY=passive, or one thread.
"""

import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import islice

import torch
from measuring import Worker, finish, machine, parser, table
from train_step import PRESETS, config_of, ours

from gpt.hardware.threads import yield_to_other_processes
from gpt.model.transformer import GPT
from gpt.sampling.generation import SamplingParams, generate
from gpt.sampling.packed import pack_weights

VARIANTS = ("spinning", "giving way", "passive", "one thread")
TASKS = {  # a preset, whether it trains, and its tokens each time
    "training": ("mini", True, PRESETS["mini"][2][0] * PRESETS["mini"][2][1]),
    "sampling": ("mini", False, 20),
    "sampling, 124M": ("gpt2_small", False, 5),
}


def work(task: str, variant: str, seconds: float) -> Callable[[], dict]:
    """A step that does a task for some seconds and returns its tokens a second."""
    preset, trains, tokens = TASKS[task]
    if variant == "one thread":
        torch.set_num_threads(1)
    if trains:
        once = ours(preset, "bfloat16", "muon")
    else:
        torch.manual_seed(0)
        model = pack_weights(GPT(config_of(preset)), "bf16", 1, False)
        idx = torch.ones(1, 5, dtype=torch.int64)

        def once() -> None:
            for _ in islice(generate(model, idx, tokens, SamplingParams()), tokens):
                pass

    once()

    def step() -> dict:
        count, start = 0, time.perf_counter()
        with yield_to_other_processes() if variant == "giving way" else contextlib.nullcontext():
            while time.perf_counter() - start < seconds:
                once()
                count += tokens
            return {"tokens_per_second": count / (time.perf_counter() - start)}

    return step


@contextlib.contextmanager
def beside(load: str) -> Iterator[None]:
    """Run the block beside a process that keeps one core busy, or alone."""
    if load == "quiet":
        yield
        return
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        try:
            yield
        finally:
            process.kill()


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--only", nargs="+", choices=list(TASKS), default=list(TASKS))
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--seconds", type=float, default=3.0, help="of each turn")
    args = arguments.parse_args()
    print(machine())
    found: dict[str, dict[str, list[float]]] = {}
    for task in args.only:
        workers = {}
        for variant in VARIANTS:
            os.environ.pop("OMP_WAIT_POLICY", None)
            if variant == "passive":
                os.environ["OMP_WAIT_POLICY"] = "passive"  # which libgomp reads when it is loaded
            workers[variant] = Worker(f"{task}, {variant}", work, task=task, variant=variant, seconds=args.seconds)
        for _ in range(args.rounds):
            for load in ("quiet", "busy"):
                for variant, worker in workers.items():
                    with beside(load):
                        worker.run(1)
                    speeds = found.setdefault(f"{task}, {variant}", {"quiet": [], "busy": []})
                    speeds[load].append(worker.facts["tokens_per_second"])
        for worker in workers.values():
            worker.close()
    rows = [[name, *(f"{statistics.median(s):,.0f}" for s in speeds.values())] for name, speeds in found.items()]
    print(table(["tokens/s", "quiet", "busy"], rows))
    finish({"tokens_per_second": found}, args.json)


if __name__ == "__main__":
    main()
