"""What it costs to lose nothing, and to log: python benchmarks/guards.py [--steps 1200] [--json FILE].

The quick start's model trains with its guards off in every other block of ten steps: no norm of the gradient, by which
the guards know that it is finite, and no callback that watches for signals and saves. The medians of both kinds
of step give the price of the guards. Saves are timed on their own and spread over the default interval between them,
and so are the callbacks that log, with the loggers of the quick start.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from lightning import Callback
from measuring import finish, machine, parser
from training import begin, configure, skip_validation

from gpt.training.curves import Curves
from gpt.training.early_stop import EarlyStop
from gpt.training.loggers import UserValues
from gpt.training.optim import lr_factor, set_lr
from gpt.training.saving import LastCheckpoint

BLOCK = 10  # steps with the guards, then as many without


class Stopwatch(Callback):
    """Switches the guards off and on in turn, and times steps of either kind, and saves."""

    def __init__(self) -> None:
        self.times: dict[bool, list[float]] = {True: [], False: []}  # of steps without a save, with guards or without
        self.saves: list[float] = []
        self.logs: list[float] = []  # the seconds that each step spent on logging

    def setup(self, trainer, module, stage: str) -> None:
        skip_validation(trainer)
        last = next(callback for callback in trainer.callbacks if isinstance(callback, LastCheckpoint))
        self._module, self._last = module, last
        self._check, self._save_if_due = module.on_before_optimizer_step, last.on_step_end
        self._save, last._save = last._save, self._timed_save
        for callback in trainer.callbacks:
            if isinstance(callback, Curves | UserValues | EarlyStop):
                callback.on_train_batch_end = self._timed_log(callback.on_train_batch_end)

    def on_train_batch_start(self, trainer, module, batch, batch_idx: int) -> None:
        if batch_idx % BLOCK == 0:
            self._guarded = batch_idx // BLOCK % 2 == 0
            self._module.on_before_optimizer_step = self._check if self._guarded else self._only_set_lr
            self._last.on_step_end = self._save_if_due if self._guarded else lambda *_: None
        self.logs.append(0.0)
        self._start, self._saves_before = time.perf_counter(), len(self.saves)

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx: int) -> None:
        if batch_idx >= 2 * BLOCK and len(self.saves) == self._saves_before:
            self.times[self._guarded].append(time.perf_counter() - self._start)

    def _only_set_lr(self, optimizer: torch.optim.Optimizer) -> None:
        module = self._module
        set_lr(optimizer, lr_factor(module.global_step, module.plan.total_steps, module.config.optim))

    def _timed_save(self, *args) -> None:
        start = time.perf_counter()
        self._save(*args)
        self.saves.append(time.perf_counter() - start)

    def _timed_log(self, hook: Callable) -> Callable:
        def timed(*args) -> None:
            start = time.perf_counter()
            hook(*args)
            self.logs[-1] += time.perf_counter() - start

        return timed


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--steps", type=int, default=1200)
    args = arguments.parse_args()
    print(machine())
    interval, log_every = configure().trainer.checkpoint_every, configure().trainer.log_every
    overrides = ["trainer.compile=false", "trainer.micro_batch_size=8"]
    overrides += [
        f"horizon={args.steps}steps",
        f"trainer.checkpoint_every={7 * BLOCK}",
    ]  # half of them in guarded blocks
    watch = Stopwatch()
    with tempfile.TemporaryDirectory() as folder:
        begin(Path(folder), *overrides).fit([watch])
    guarded, bare = (statistics.median(watch.times[on]) for on in (True, False))
    save = statistics.median(watch.saves)
    logs = watch.logs[2 * BLOCK :]
    points, between = logs[log_every - 1 :: log_every], logs[: log_every - 1]
    logging = statistics.median(points) / log_every + statistics.median(between)
    report = {
        "steps_of_each_kind": [len(watch.times[True]), len(watch.times[False])],
        "step_ms_with_guards": 1000 * guarded,
        "step_ms_without": 1000 * bare,
        "guards_share": guarded / bare - 1,
        "save_ms": 1000 * save,
        "saves": len(watch.saves),
        "saving_share_at_default_interval": save / (interval * bare),
        "log_point_ms": 1000 * statistics.median(points),
        "logging_share": logging / bare,
        "all_together": guarded / bare - 1 + save / (interval * bare),
    }
    print(f"step with guards {1000 * guarded:7.2f} ms, without {1000 * bare:7.2f} ms: {report['guards_share']:+.2%}")
    print(f"save             {1000 * save:7.2f} ms, every {interval} steps: {save / (interval * bare):+.2%}")
    print(
        f"log point        {1000 * statistics.median(points):7.2f} ms, every {log_every} steps: {logging / bare:+.2%}"
    )
    print(f"together         {report['all_together']:+.2%}")
    finish(report, args.json)


if __name__ == "__main__":
    main()
