"""Speed beside a busy program: python benchmarks/busy.py [--only training sampling] [--rounds 3] [--json FILE].

Measures tokens a second of training the mini model, and of sampling from it and from GPT-2 124M. The machine is quiet,
or a process keeps one core busy, in turn. `spinning` is OpenMP as it comes, `giving way` is gpt.hardware.threads.
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
from measuring import Worker, describe_machine, format_table, make_parser, write_report
from train_step import PRESETS, make_config, ours

from gpt.hardware.threads import limit_threads
from gpt.model.transformer import GPT
from gpt.sampling.generation import SamplingParams, generate
from gpt.sampling.packed import pack_weights

VARIANTS = ("spinning", "giving way", "passive", "one thread")
TASKS = {  # a preset, True for training, and the tokens of one call
    "training": ("mini", True, PRESETS["mini"][2][0] * PRESETS["mini"][2][1]),
    "sampling": ("mini", False, 20),
    "sampling, 124M": ("gpt2_small", False, 5),
}


def work(task: str, variant: str, seconds: float) -> Callable[[], dict]:
    """Return a step that does a task for some seconds and returns its tokens a second."""
    preset, is_training, tokens = TASKS[task]
    if variant == "one thread":
        torch.set_num_threads(1)
    if is_training:
        do_task = ours(preset, "bfloat16", "muon")
    else:
        torch.manual_seed(0)
        model = pack_weights(GPT(make_config(preset)), "bf16", 1, False)
        idx = torch.ones(1, 5, dtype=torch.int64)

        def do_task() -> None:
            for _ in islice(generate(model, idx, tokens, SamplingParams()), tokens):
                pass

    do_task()

    def step() -> dict:
        count, start = 0, time.perf_counter()
        with limit_threads() if variant == "giving way" else contextlib.nullcontext():
            while time.perf_counter() - start < seconds:
                do_task()
                count += tokens
            return {"tokens_per_second": count / (time.perf_counter() - start)}

    return step


@contextlib.contextmanager
def load_one_core(load: str) -> Iterator[None]:
    """Run the block beside a process that keeps one core busy, or alone if `load` is quiet."""
    if load == "quiet":
        yield
        return
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        try:
            yield
        finally:
            process.kill()


def main() -> None:
    arguments = make_parser(__doc__)
    arguments.add_argument("--only", nargs="+", choices=list(TASKS), default=list(TASKS))
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--seconds", type=float, default=3.0, help="of each turn")
    args = arguments.parse_args()
    print(describe_machine())
    all_speeds: dict[str, dict[str, list[float]]] = {}
    for task in args.only:
        workers = {}
        for variant in VARIANTS:
            os.environ.pop("OMP_WAIT_POLICY", None)
            if variant == "passive":
                os.environ["OMP_WAIT_POLICY"] = "passive"  # libgomp reads it when it is loaded
            workers[variant] = Worker(f"{task}, {variant}", work, task=task, variant=variant, seconds=args.seconds)
        for _ in range(args.rounds):
            for load in ("quiet", "busy"):
                for variant, worker in workers.items():
                    with load_one_core(load):
                        worker.run(1)
                    speeds = all_speeds.setdefault(f"{task}, {variant}", {"quiet": [], "busy": []})
                    speeds[load].append(worker.facts["tokens_per_second"])
        for worker in workers.values():
            worker.close()
    medians = {name: [statistics.median(s) for s in speeds.values()] for name, speeds in all_speeds.items()}
    rows = [[name, *(f"{speed:,.0f}" for speed in speeds)] for name, speeds in medians.items()]
    print(format_table(["tokens/s", "quiet", "busy"], rows))
    write_report({"tokens_per_second": all_speeds}, args.json)


if __name__ == "__main__":
    main()
