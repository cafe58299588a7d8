"""A horizon in seconds is met: its steps are corrected by the speed of the run itself."""

import sys
from collections import deque
from dataclasses import replace
from pathlib import Path

from lightning import Trainer

from gpt.files import write_text
from gpt.text.progress_bar import write_above
from gpt.training.config import parse_horizon, to_yaml
from gpt.training.module import GPTModule
from gpt.training.steps import Clock, StepCallback

# After these shares of a run its steps are corrected: where the rates begin to fall by default, so that no rate has
# depended on the number of steps yet; and where even a machine that halves its speed ends at most 3% late.
FIRST, LAST = 0.3, 0.97


class Deadline(StepCallback):
    """Corrects the steps of a run whose horizon is a time.

    Machines drift, so the last tenth of the run, or ten steps if they take longer, says how fast the rest will be. Each
    correction is saved at once (see `Plan.due`), and after the last the configuration gives the horizon in steps:
    however often the run is resumed from then on, it trains as many.
    """

    def __init__(self, run_dir: Path, clock: Clock):
        self._run_dir, self._clock = run_dir, clock
        self._asked: float | None = None  # seconds, until the last correction
        self._mark: tuple[int, float] | None = None  # step and seconds, a tenth of the run before a correction
        self._recent: deque[tuple[int, float]] = deque(maxlen=11)  # the same after each of the last steps

    def on_train_start(self, trainer: Trainer, module: GPTModule) -> None:  # type: ignore[override]
        horizon = parse_horizon(module.config.horizon)
        self._asked = horizon.amount if horizon.unit == "seconds" else None

    def on_step_end(self, trainer: Trainer, module: GPTModule, step: int) -> None:
        if self._asked is None:
            return
        plan, seconds = module.plan, self._clock.seconds
        if trainer.world_size > 1:  # all ranks must decide alike, and agreeing takes time
            if not plan.due(step, module.config.trainer.log_every):
                return
            seconds = trainer.strategy.broadcast(seconds)
        self._recent.append((step, seconds))
        share = LAST if plan.extended_at else FIRST
        done = max(step / plan.total_steps, seconds / self._asked)
        if self._mark is None and done >= share - 0.1:
            self._mark = step, seconds
        if done < share:
            return
        assert self._mark is not None
        first, then = min(self._mark, self._recent[0])
        if first == step:  # the first of this session
            first, then = 0, 0.0
        self._correct(trainer, module, step, self._asked - seconds, (seconds - then) / (step - first))
        self._mark = None

    def _correct(self, trainer: Trainer, module: GPTModule, step: int, left: float, per_step: float) -> None:
        """Have the run train for the seconds that are `left`, at so many `per_step`."""
        assert self._asked is not None
        horizon, before = module.config.horizon, module.plan.total_steps
        total = step + max(0, round(left / per_step))
        module.plan = plan = module.plan.from_step(step, total, module.config)
        earlier = [*module.config.earlier_horizons, f"{horizon} ({before} steps) until step {step}"]
        module.config = replace(module.config, earlier_horizons=earlier)
        if total == step or left <= 2 * (1 - LAST) * self._asked:
            module.config.horizon, self._asked = f"{total}steps", None
        loop = trainer.fit_loop
        fetcher = loop._data_fetcher
        assert fetcher is not None
        loop.epoch_loop.max_steps = total
        loop.max_batches = fetcher.length = total * plan.accumulation
        fetcher.done = loop.epoch_loop.batch_progress.is_last_batch = step == total
        if trainer.is_global_zero:
            write_text(self._run_dir / "config.yaml", to_yaml(module.config))
        if trainer.is_global_zero and total != before:
            changed = f"{total} steps instead of {before}, at {per_step * 1000:.1f} ms each so far"
            write_above(f"horizon={horizon}: {changed}", sys.stdout)
