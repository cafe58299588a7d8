"""What it costs that nothing is ever lost: python benchmarks/guards.py [--steps 1200] [--json].

The quick start's model trains as always, but every other ten steps go without the guards: no check of the gradient, no
callback that watches for signals and saves. Medians of the two kinds of step give the price of a step; the saves
themselves are timed on their own, and put against the interval at which they happen.
"""

import argparse
import json
import math
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from lightning import Callback
from omegaconf import OmegaConf

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from gpt import hardware  # noqa: E402
from gpt.text.prepare import prepare  # noqa: E402
from gpt.training import callbacks
from gpt.training import module as lit
from gpt.training.config import validate  # noqa: E402

BLOCK = 10  # steps with, then as many without


class Switched(callbacks.LastCheckpoint):
    """The callback that saves, which can be told to do nothing; it keeps how long each save took."""

    on = True

    def on_step_end(self, trainer, module, step: int) -> None:
        if self.on:
            super().on_step_end(trainer, module, step)

    def _save(self, trainer, module, step: int) -> None:
        start = time.perf_counter()
        super()._save(trainer, module, step)
        SAVES.append(time.perf_counter() - start)


class Unguarded(lit.GPTModule):
    """The module, which can be told not to look at its gradient but where the curves need its norm."""

    on = True

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.on:
            super().on_before_optimizer_step(optimizer)
        else:
            lit.set_lr(optimizer, lit.lr_factor(self.global_step, self.plan.total_steps, self.config.optim))


class Stopwatch(Callback):
    """Switches the guards every BLOCK steps and keeps the time of each step of either kind."""

    def __init__(self, module: Unguarded, last: Switched):
        self.module, self.last = module, last
        self.times: dict[bool, list[float]] = {True: [], False: []}

    def on_train_batch_start(self, trainer, module, batch, batch_idx: int) -> None:
        if batch_idx % BLOCK == 0:
            self.module.on = self.last.on = batch_idx // BLOCK % 2 == 0
        self.start = time.perf_counter()
        self.saves = len(SAVES)

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx: int) -> None:
        if batch_idx >= 2 * BLOCK and len(SAVES) == self.saves:
            self.times[self.module.on].append(time.perf_counter() - self.start)


SAVES: list[float] = []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    values = OmegaConf.load(ROOT / "configs/train.yaml")
    plain = {"horizon": f"{args.steps}steps", "seed": values.seed}
    groups = {"model": "mini", "data": "python_docs", "tokenizer": "bpe", "optim": "muon", "trainer": "default"}
    for group, name in groups.items():
        plain[group] = OmegaConf.to_container(OmegaConf.load(ROOT / f"configs/{group}/{name}.yaml"))
    interval = plain["trainer"]["checkpoint_every"]
    device = hardware.choose_device()
    plain["trainer"] |= {
        "device": device.type,
        "precision": hardware.choose_precision("auto", device),
        "compile": "false",
        "micro_batch_size": "8",
        "validate_every": args.steps,
        "checkpoint_every": 7 * BLOCK,  # every other time in a block with guards
    }
    config = validate(plain)
    hardware.keep_freed_memory()
    corpora = prepare(config.data, config.tokenizer, config.model.context_length, ROOT / "data/cache")
    config, plan = lit.make_plan(config, corpora, False, print)
    module = Unguarded(config, plan, corpora)
    with tempfile.TemporaryDirectory() as folder:
        run_dir, clock = Path(folder), callbacks.Clock()
        curves = callbacks.Curves(run_dir, clock, None)
        validation = callbacks.Validation(run_dir, clock, curves)
        last = Switched(run_dir, clock, validation)
        watch = Stopwatch(module, last)
        parts = [clock, curves, callbacks.Journal(run_dir, curves), validation, last, watch]
        trainer = lit.build_trainer(config, plan, parts, callbacks.CheckpointFiles())
        trainer.fit(module, datamodule=lit.GPTData(module))
        last.close()
        curves.close()
    guarded, bare = (statistics.median(watch.times[on]) for on in (True, False))
    save = statistics.median(SAVES)
    report = {
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}",
        "steps_of_each_kind": [len(watch.times[True]), len(watch.times[False])],
        "step_ms_with_guards": 1000 * guarded,
        "step_ms_without": 1000 * bare,
        "guards_share": guarded / bare - 1,
        "save_ms": 1000 * save,
        "saves": len(SAVES),
        "saving_share_at_default_interval": save / (interval * bare),
        "all_together": guarded / bare - 1 + save / (interval * bare),
    }
    assert all(math.isfinite(value) for value in report.values() if isinstance(value, float))
    if args.json:
        print(json.dumps(report, indent=2))
        return
    print(report["machine"])
    print(f"step with guards {1000 * guarded:7.2f} ms, without {1000 * bare:7.2f} ms: {guarded / bare - 1:+.2%}")
    print(f"save             {1000 * save:7.2f} ms, every {interval} steps: {save / (interval * bare):+.2%}")
    print(f"together         {report['all_together']:+.2%}")


if __name__ == "__main__":
    main()
