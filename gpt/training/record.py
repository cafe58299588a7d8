"""What a checkpoint says about its run besides weights, optimizer and callbacks."""

import platform
import subprocess
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

import torch
from lightning import Callback, Trainer

from gpt.exchange.checkpoint import FORMAT
from gpt.training.config import to_plain
from gpt.training.module import GPTModule

SOURCE = Path(__file__).resolve().parent


class Record(Callback):
    """Adds everything to a checkpoint that resuming and sampling need, so that it needs no other file."""

    def __init__(self) -> None:
        self._commit = git_commit(SOURCE)

    def on_save_checkpoint(self, trainer: Trainer, module: GPTModule, checkpoint: dict) -> None:  # type: ignore[override]
        checkpoint |= {
            "format": FORMAT,
            "step": module.global_step,
            "config": to_plain(module.config),
            "plan": asdict(module.plan),
            "tokenizer": module.corpora.tokenizer.to_dict(),
            "corpus": module.corpora.key,
            "git_commit": self._commit,
            "versions": versions(),
            "threads": torch.get_num_threads(),
        }

    def on_load_checkpoint(self, trainer: Trainer, module: GPTModule, checkpoint: dict) -> None:  # type: ignore[override]
        # Lightning's counters follow from the step alone. A checkpoint lies between two steps, so training goes on at
        # the first micro-batch of a step, however many micro-batches a step had when it was saved. The counters are
        # private to Lightning, whose version pyproject.toml therefore pins.
        step, loop = checkpoint["step"], trainer.fit_loop.state_dict()
        optimizer = loop["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]
        for progress, count in (
            (loop["epoch_loop.batch_progress"], step * module.plan.accumulation),
            (optimizer["step"], step),
            (optimizer["zero_grad"], step),
        ):
            for kind in ("total", "current"):
                progress[kind] = dict.fromkeys(progress[kind], count)
        for kind in ("total", "current"):
            loop["epoch_progress"][kind] |= {"ready": 1, "started": 1}
        loop["epoch_loop.state_dict"]["_batches_that_stepped"] = step
        checkpoint["loops"] = {"fit_loop": loop}


def versions() -> dict[str, str]:
    """The versions on which a run's every bit depends."""
    names = ("torch", "lightning", "tiktoken")
    return {"python": platform.python_version()} | {name: version(name) for name in names}


def git_commit(folder: Path) -> str | None:
    """The commit of the checkout that holds `folder`, or None outside one."""
    try:
        answer = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, encoding="utf-8", timeout=5, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()
