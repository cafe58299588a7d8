"""Train with two workers of Ray Train, and kill one of them once: python ray_worker.py FOLDER KEY=VALUE ...

Ray writes its own files to FOLDER. It restarts the workers, and the run continues.
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import ray
from omegaconf import OmegaConf
from ray.train import FailureConfig, RunConfig, ScalingConfig, get_context
from ray.train.torch import TorchTrainer

import gpt


def work(settings: dict[str, Any]) -> None:
    """Train on one worker. Ray calls this in a thread."""
    text = settings["data"].pop("path")
    killed = Path(settings.pop("killed"))
    checkpoint = Path(settings["run_dir"]) / "checkpoints/best.ckpt"

    def kill_once() -> None:
        while not checkpoint.exists():
            time.sleep(0.01)
        killed.touch()
        os.kill(os.getpid(), signal.SIGKILL)

    if get_context().get_world_rank() == 1 and not killed.exists():
        threading.Thread(target=kill_once, daemon=True).start()
    gpt.train(text, **settings)


if __name__ == "__main__":
    folder, *words = sys.argv[1:]
    settings = OmegaConf.to_container(OmegaConf.from_dotlist([*words, f"killed={folder}/killed"]))
    ray.init(num_cpus=2, include_dashboard=False)
    TorchTrainer(
        work,
        train_loop_config=settings,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=folder, failure_config=FailureConfig(max_failures=1)),
    ).fit()
