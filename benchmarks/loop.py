"""What everything around the step costs: python benchmarks/loop.py [--preset mini gpt2_small] [--json FILE].

The same steps twice, in turn within one process: as `python train.py` takes them, through Hydra's configuration,
Lightning's loop, curves, a checkpoint every 250 steps and all guards; and bare, a loop over batches that runs forward,
backward and update and nothing else. Turns are short and many, since the machine may change its speed meanwhile, and
what is compared is their sums. Validation, which is no part of the time a training reports, is left out.
"""

import statistics
import tempfile
import time
from pathlib import Path

import torch
from lightning import Callback
from measuring import ROOT, finish, machine, parser, synchronize, table
from omegaconf import OmegaConf

import gpt.training.callbacks as parts
from gpt import hardware
from gpt.text.prepare import prepare
from gpt.text.shards import Corpora
from gpt.training import module as lit
from gpt.training.config import Config, validate

PRESETS = {  # the choice of each group, what differs from it, how many steps in each turn, and turns
    "mini": (
        {"model": "mini", "tokenizer": "bpe", "optim": "muon"},
        {"trainer": {"tokens_per_step": 1024, "micro_batch_size": "8"}},
        25,
        60,
    ),
    "gpt2_small": (
        {"model": "gpt2_small", "tokenizer": "gpt2", "optim": "adamw"},
        {"trainer": {"tokens_per_step": 1024, "micro_batch_size": "4"}, "model": {"context_length": 256}},
        1,
        40,
    ),
}


def configure(preset: str) -> Config:
    """The configuration that Hydra would put together."""
    groups, changes, steps, turns = PRESETS[preset]
    plain = {"horizon": f"{steps * turns + 1}steps", "seed": 1}  # what is done at the end is in no turn
    for group, name in (groups | {"data": "python_docs", "trainer": "default"}).items():
        chosen = OmegaConf.to_container(OmegaConf.load(ROOT / f"configs/{group}/{name}.yaml"))
        plain[group] = chosen | changes.get(group, {})
    device = hardware.choose_device()
    plain["trainer"] |= {
        "device": device.type,
        "precision": hardware.choose_precision("auto", device),
        "compile": str(hardware.choose_compile("auto", device)).lower(),
        "validate_every": 10**9,
    }
    return validate(plain)


class Bare(Callback):
    """After every so many steps of the trainer, as many of the bare loop, on a model of its own."""

    def __init__(self, config: Config, plan: lit.Plan, corpora: Corpora, steps: int):
        self.module, self.corpora, self.steps = lit.GPTModule(config, plan, corpora), corpora, steps
        self.module.to(config.trainer.device)
        self.optimizer = self.module.configure_optimizers()
        self.times: list[float] = []  # seconds a step, one figure for each turn
        self.of_trainer: list[float] = []
        self.done = 0

    def on_train_start(self, trainer, module) -> None:
        self.mark = time.perf_counter()

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx: int) -> None:
        if (batch_idx + 1) % self.steps:
            return
        synchronize()
        self.of_trainer.append((time.perf_counter() - self.mark) / self.steps)
        start = time.perf_counter()
        for _ in range(self.steps):
            self.step()
        synchronize()
        self.times.append((time.perf_counter() - start) / self.steps)
        self.mark = time.perf_counter()

    def step(self) -> None:
        module, plan = self.module, self.module.plan
        idx, targets = lit.train_batch(
            self.corpora, module.config, self.done * plan.micro_batch_size, plan.micro_batch_size
        )
        self.done += 1
        lit.set_lr(self.optimizer, lit.lr_factor(self.done, plan.total_steps, module.config.optim))
        device = module.config.trainer.device
        module.training_loss(idx.to(device), targets.to(device)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def measure(preset: str) -> dict:
    """The mean of both kinds of step, over the turns but for the first two, in which memory is taken."""
    _, _, steps, turns = PRESETS[preset]
    config = configure(preset)
    corpora = prepare(config.data, config.tokenizer, config.model.context_length, ROOT / "data/cache")
    config, plan = lit.make_plan(config, corpora, False, print)
    module, bare = lit.GPTModule(config, plan, corpora), Bare(config, plan, corpora, steps)
    with tempfile.TemporaryDirectory() as folder:
        run_dir, clock = Path(folder), parts.Clock()
        curves = parts.Curves(run_dir, clock, hardware.peak_flops(torch.device(config.trainer.device), "bf16"))
        validation = parts.Validation(run_dir, clock, curves)
        validation.on_step_end = lambda *_: None  # type: ignore[method-assign]
        last = parts.LastCheckpoint(run_dir, clock, validation)
        callbacks = [
            clock,
            curves,
            parts.Journal(run_dir, curves),
            validation,
            last,
            parts.Progress(validation, curves),
        ]
        trainer = lit.build_trainer(config, plan, [*callbacks, bare], parts.CheckpointFiles())
        trainer.fit(module, datamodule=lit.GPTData(module))
        last.close()
        curves.close()
    whole, alone = statistics.mean(bare.of_trainer[2:turns]), statistics.mean(bare.times[2:turns])
    return {"step_ms": 1000 * whole, "bare_ms": 1000 * alone, "overhead": whole / alone - 1}


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--preset", nargs="+", choices=list(PRESETS), default=list(PRESETS))
    args = arguments.parse_args()
    print(machine())
    hardware.keep_freed_memory()
    reports = {preset: measure(preset) for preset in args.preset}
    rows = [
        [name, f"{r['step_ms']:.2f}", f"{r['bare_ms']:.2f}", f"{r['overhead']:+.1%}"] for name, r in reports.items()
    ]
    print(table(["", "ms a step", "bare", "overhead"], rows))
    finish(reports, args.json)


if __name__ == "__main__":
    main()
