"""Train with two workers of Ray Train, of which one is killed once: python on_ray.py FOLDER KEY=VALUE ...

FOLDER takes Ray's own files. The run is to go on by itself.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import ray
from omegaconf import OmegaConf
from ray.train import FailureConfig, RunConfig, ScalingConfig, get_context
from ray.train.torch import TorchTrainer

import gpt
from harness import At


def work(given: dict[str, Any]) -> None:
    """Train on one worker, in a thread, as Ray has it."""
    text, killed = given["data"].pop("path"), Path(given.pop("killed"))

    def die() -> None:
        if get_context().get_world_rank() == 1 and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    gpt.train(text, **given, callbacks=[At(43, die)])


if __name__ == "__main__":
    folder, *words = sys.argv[1:]
    given = OmegaConf.to_container(OmegaConf.from_dotlist([*words, f"killed={folder}/killed"]))
    ray.init(num_cpus=2, include_dashboard=False)
    TorchTrainer(
        work,
        train_loop_config=given,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=folder, failure_config=FailureConfig(max_failures=1)),
    ).fit()
