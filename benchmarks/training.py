"""Trainings for the benchmarks: configured as train.py would, in this process or in one of their own."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from measuring import ROOT
from omegaconf import DictConfig, OmegaConf

from gpt.training.config import Config, validate
from gpt.training.session import Session

if TYPE_CHECKING:  # prepare.py measures memory without Lightning
    from lightning import Trainer


def configure(*overrides: str) -> Config:
    """Compose the configuration of `python train.py GROUP=NAME ... KEY=VALUE ...` (no experiments) without Hydra."""
    root = OmegaConf.load(ROOT / "configs/train.yaml")
    choices = OmegaConf.merge(*(entry for entry in root.pop("defaults") if isinstance(entry, DictConfig)))
    groups = {name: choice for name, choice in choices.items() if choice and (ROOT / f"configs/{name}").is_dir()}
    pairs = [override.partition("=")[::2] for override in overrides]
    groups |= {key: value for key, value in pairs if key in groups}
    values = [f"{key}={value}" for key, value in pairs if key not in groups]
    del root["hydra"]
    files = {group: OmegaConf.load(ROOT / f"configs/{group}/{name}.yaml") for group, name in groups.items()}
    return validate(OmegaConf.merge(root, files, OmegaConf.from_dotlist(values)))


def begin(run_dir: Path, *overrides: str) -> Session:
    """Begin a run as train.py would, in an empty directory."""
    return Session.begin(configure(f"run_dir={run_dir}", *overrides))


def skip_validation(trainer: "Trainer") -> None:
    """Train without validation, since a run's training time does not include it."""
    from gpt.training.validation import Validation

    validation = next(callback for callback in trainer.callbacks if isinstance(callback, Validation))
    validation.on_step_end = lambda *_: None


def train_as_user(folder: Path, *overrides: str) -> tuple[Path, dict]:
    """Run train.py as a user would; return the run's directory, made below `folder`, and its metrics.json."""
    run_dir = Path(tempfile.mkdtemp(dir=folder))
    command = [sys.executable, "train.py", *overrides, f"run_dir={run_dir}"]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return run_dir, json.loads((run_dir / "metrics.json").read_text())
