"""What surrounds the training step costs: python benchmarks/overhead.py [--preset mini gpt2_small] [--json FILE].

Two models take the same steps, in turn within one process. One trains as in `python train.py`, with curves, a
checkpoint every 250 steps and all guards. The other runs in a bare loop of batch, forward, backward and update. The
machine may change its speed at any time, so turns are short and many. Validation is left out, because the training time
that a run reports does not include it. A second table shows which parts the overhead comes from, as fractions of the
whole step: what logs, what saves, and, as GPTModule, the gradient's norm.
"""

import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from unittest import mock

from measuring import configure, describe_machine, format_table, make_parser, synchronize, write_report

from gpt.training.batch_loader import micro_batch
from gpt.training.loop import run_training
from gpt.training.metric_logger import MetricLogger
from gpt.training.module import GPTModule
from gpt.training.optim import set_lr
from gpt.training.progress import ProgressDisplay
from gpt.training.request import Request
from gpt.training.run_directory import RunDirectory
from gpt.training.start import start_run
from gpt.training.state import RunSpec
from gpt.training.training_clock import TrainingClock

PRESETS = {  # overrides, steps in each turn, turns
    "mini": (["model=mini_128", "trainer.micro_batch_size=8"], 25, 40),
    "gpt2_small": (
        [
            "model=gpt2_small",
            "model.context_length=256",
            "tokenizer=gpt2",
            "optim=adamw",
            "trainer.micro_batch_size=4",
            "trainer.short_sequences=0",
        ],
        1,
        40,
    ),
}
WARM_UP = 2  # turns: memory is still being allocated
PARTS = (  # of the loop: their time is counted
    (MetricLogger, "begin_step"),
    (MetricLogger, "add_loss"),
    (MetricLogger, "write_point"),
    (ProgressDisplay, "end_step"),
    (TrainingClock, "end_step"),
    (RunDirectory, "save_last"),
    (RunDirectory, "save_best"),
    (GPTModule, "measure_grad_norm"),
)


class BareLoop:
    """A callback with a bare loop over its own model. The loop takes a turn after each turn of the run.

    Args:
        spec: The run.
        steps: The number of steps in each turn.
        turns: The number of turns.
    """

    def __init__(self, spec: RunSpec, steps: int, turns: int):
        self.spec, self.steps, self.turns = spec, steps, turns
        self.device = spec.config.trainer.device
        self.module = GPTModule(spec.config, spec.dataset.tokenizer, spec.schedule).to(self.device)
        self.optimizer = self.module.build_optimizer()
        self.times: list[float] = []  # seconds a step, for each turn
        self.run_times: list[float] = []  # the same of the run
        self.part_seconds: Counter[str] = Counter()  # by class, without warm-up
        self.num_steps = 0

    def timed(self, name: str, method: Callable) -> Callable:
        """Return the method, made to count its time after the warm-up and until the last turn."""

        def call(*args, **kwargs):
            start = time.perf_counter()
            result = method(*args, **kwargs)
            if WARM_UP <= len(self.times) < self.turns:
                self.part_seconds[name] += time.perf_counter() - start
            return result

        return call

    def on_train_start(self) -> None:
        self.mark = time.perf_counter()

    def on_train_step_end(self, step: int) -> None:
        if step % self.steps:
            return
        synchronize()
        self.run_times.append((time.perf_counter() - self.mark) / self.steps)
        start = time.perf_counter()
        for _ in range(self.steps):
            self.step()
        synchronize()
        self.times.append((time.perf_counter() - start) / self.steps)
        self.mark = time.perf_counter()

    def step(self) -> None:
        config = self.spec.config
        idx, targets = micro_batch(config, self.spec.dataset, self.num_steps, config.model.context_length)
        self.num_steps += 1
        set_lr(self.optimizer, 1.0)
        self.module.loss(idx.to(self.device), targets.to(self.device)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def measure(preset: str) -> dict:
    """Train for all turns; return the mean step of each loop in ms, the overhead, and the fractions of its parts."""
    overrides, steps, turns = PRESETS[preset]
    horizon = f"horizon={steps * turns + 1}steps"  # the last step also saves, so it is in no turn
    with tempfile.TemporaryDirectory() as folder, ExitStack() as patches:
        spec, run = start_run(Request(configure(f"run_dir={folder}", horizon, *overrides)))
        assert spec.config.accumulation_steps == 1  # a step of the bare loop is one micro-batch
        spec = replace(spec, schedule=replace(spec.schedule, validate_every=10**9))
        bare = BareLoop(spec, steps, turns)
        for part, name in PARTS:
            method = bare.timed(part.__name__, getattr(part, name))
            patches.enter_context(mock.patch.object(part, name, method))
        with run:
            run_training(spec, run, [bare])
    run_step, bare_step = (statistics.mean(times[WARM_UP:turns]) for times in (bare.run_times, bare.times))
    total = run_step * steps * (turns - WARM_UP)
    fractions = {name: seconds / total for name, seconds in bare.part_seconds.most_common()}
    overhead = run_step / bare_step - 1
    return {"step_ms": 1000 * run_step, "bare_ms": 1000 * bare_step, "overhead": overhead, "shares": fractions}


def main() -> None:
    arguments = make_parser(__doc__)
    arguments.add_argument("--preset", nargs="+", choices=list(PRESETS), default=["mini"])
    args = arguments.parse_args()
    print(describe_machine())
    reports = {preset: measure(preset) for preset in args.preset}
    rows = [
        [name, f"{r['step_ms']:.2f}", f"{r['bare_ms']:.2f}", f"{r['overhead']:+.1%}"] for name, r in reports.items()
    ]
    print(format_table(["", "ms a step", "bare", "overhead"], rows))
    for name, r in reports.items():
        parts = [[part, f"{fraction:.2%}"] for part, fraction in r["shares"].items() if fraction >= 0.0001]
        print(f"\n{format_table([name, 'of a step'], parts)}")
    write_report(reports, args.json)


if __name__ == "__main__":
    main()
