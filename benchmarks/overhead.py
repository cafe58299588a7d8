"""What surrounds the training step costs: python benchmarks/overhead.py [--preset mini gpt2_small] [--json FILE].

Two models take the same steps, in turn within one process. One trains as in `python train.py`: in Lightning's loop,
with curves, a checkpoint every 250 steps and all guards. The other runs in a bare loop of batch, forward, backward and
update. The machine may change its speed at any time, so turns are short and many. Validation is left out, because the
training time that a run reports does not include it. A second table says which parts the overhead comes from, in
shares of the whole step: what logs, what saves, and, as GPTModule, the gradient's norm and the learning rate.
"""

import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from lightning import Callback
from measuring import begin_run, finish, machine, parser, skip_validation, synchronize, table

from gpt.training.fit import fit
from gpt.training.module import GPTModule
from gpt.training.optim import set_lr
from gpt.training.run.run import Run
from gpt.training.trainer import make_batch

PRESETS = {  # overrides, steps in each turn, turns
    "mini": (["model=mini_128", "trainer.micro_batch_size=8"], 25, 40),
    "gpt2_small": (
        [
            "model=gpt2_small",
            "model.context_length=256",
            "tokenizer=gpt2",
            "optim=adamw",
            "trainer.micro_batch_size=4",
            "trainer.short_window=0",
        ],
        1,
        40,
    ),
}
WARM_UP = 2  # turns in which memory is still being allocated


class BareLoop(Callback):
    """A bare loop over a model of its own, which takes a turn of `steps` after each turn of the trainer."""

    def __init__(self, run: Run, steps: int, turns: int):
        self.run, self.steps, self.turns = run, steps, turns
        self.module = GPTModule(run.config, run.text.tokenizer, lambda step: 1.0)
        self.device = run.config.trainer.device
        self.module.to(self.device)
        self.optimizer = self.module.configure_optimizers()
        self.times: list[float] = []  # seconds a step, for each turn
        self.trainer_times: list[float] = []
        self.spent: Counter[str] = Counter()  # seconds, by callback
        self.done = 0

    def setup(self, trainer, module, stage: str) -> None:
        loop = skip_validation(trainer)
        hooks = [(loop.curves, "before_update"), (loop.curves, "add"), (loop.curves, "write_point")]
        hooks += [(loop.progress, "end_step"), (loop.clock, "end_step"), (loop.run, "save"), (loop.run, "save_best")]
        hooks += [(module, "measure_gradients"), (module, "rate_factor")]
        for part, hook in hooks:
            setattr(part, hook, self.timed(type(part).__name__, getattr(part, hook)))

    def timed(self, name: str, hook: Callable) -> Callable:
        """The hook, which adds its time to that of `name` once memory is allocated, and until the last turn."""

        def call(*args):
            start = time.perf_counter()
            result = hook(*args)
            if WARM_UP <= len(self.times) < self.turns:
                self.spent[name] += time.perf_counter() - start
            return result

        return call

    def on_train_start(self, trainer, module) -> None:
        self.mark = time.perf_counter()

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx: int) -> None:
        if (batch_idx + 1) % self.steps:
            return
        synchronize()
        self.trainer_times.append((time.perf_counter() - self.mark) / self.steps)
        start = time.perf_counter()
        for _ in range(self.steps):
            self.step()
        synchronize()
        self.times.append((time.perf_counter() - start) / self.steps)
        self.mark = time.perf_counter()

    def step(self) -> None:
        module, config = self.module, self.run.config
        idx, targets = make_batch(config, self.run.text, self.done * config.micro_batch_size)
        self.done += 1
        set_lr(self.optimizer, module.rate_factor(self.done))
        module.loss(idx.to(self.device), targets.to(self.device)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def measure(preset: str) -> dict:
    """Train for all turns; return the mean step of either loop in ms, what the trainer's takes more, and where."""
    overrides, steps, turns = PRESETS[preset]
    horizon = f"horizon={steps * turns + 1}steps"  # the last step, which also saves, is in no turn
    with tempfile.TemporaryDirectory() as folder:
        run = begin_run(Path(folder), horizon, *overrides)
        bare = BareLoop(run, steps, turns)
        with run:
            fit(run, [bare])
    whole, alone = (statistics.mean(times[WARM_UP:turns]) for times in (bare.trainer_times, bare.times))
    total = whole * steps * (turns - WARM_UP)
    shares = {name: seconds / total for name, seconds in bare.spent.most_common()}
    return {"step_ms": 1000 * whole, "bare_ms": 1000 * alone, "overhead": whole / alone - 1, "shares": shares}


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--preset", nargs="+", choices=list(PRESETS), default=["mini"])
    args = arguments.parse_args()
    print(machine())
    reports = {preset: measure(preset) for preset in args.preset}
    rows = [
        [name, f"{r['step_ms']:.2f}", f"{r['bare_ms']:.2f}", f"{r['overhead']:+.1%}"] for name, r in reports.items()
    ]
    print(table(["", "ms a step", "bare", "overhead"], rows))
    for name, r in reports.items():
        shares = [[part, f"{share:.2%}"] for part, share in r["shares"].items() if share >= 0.0001]
        print(f"\n{table([name, 'of a step'], shares)}")
    finish(reports, args.json)


if __name__ == "__main__":
    main()
