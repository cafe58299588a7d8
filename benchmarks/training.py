"""Trainings for the benchmarks: configured as train.py would, in this process or in one of their own."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from measuring import ROOT
from omegaconf import DictConfig, OmegaConf

from gpt import hardware
from gpt.training.config import Config, validate
from gpt.training.session import Session

if TYPE_CHECKING:  # the functions below import Lightning late, as it takes memory that prepare.py measures
    from gpt.training.fitting import Fitting


def configure(*overrides: str) -> Config:
    """Compose the configuration of `python train.py GROUP=NAME ... KEY=VALUE ...` (no experiments) without Hydra."""
    root = OmegaConf.load(ROOT / "configs/train.yaml")
    choices = OmegaConf.merge(*(entry for entry in root.pop("defaults") if isinstance(entry, DictConfig)))
    groups = {name: choice for name, choice in choices.items() if choice and (ROOT / f"configs/{name}").is_dir()}
    values = []
    for override in overrides:
        key, _, value = override.partition("=")
        if key in groups:
            groups[key] = value
        else:
            values.append(override)
    del root["hydra"]
    files = {group: OmegaConf.load(ROOT / f"configs/{group}/{name}.yaml") for group, name in groups.items()}
    return validate(OmegaConf.merge(root, files, OmegaConf.from_dotlist(values)))


def build(run_dir: Path, *overrides: str) -> "Fitting":
    """Prepare a training in an empty directory. It will not validate, since training time does not count that."""
    from gpt.training.fitting import Fitting

    hardware.keep_freed_memory()
    session = Session.begin(configure(f"run_dir={run_dir}", *overrides))
    fitting = Fitting(session.config, session.plan, session.corpora, session.run_dir)
    fitting.callbacks.remove(fitting.validation)
    return fitting


def fit(fitting: "Fitting") -> None:
    """Train to the horizon in this process."""
    from gpt.training.processes import together
    from gpt.training.saving import CheckpointFiles

    with together(devices=1, job={"threads": None}) as ranks:
        fitting.run(ranks, CheckpointFiles())


def train_as_user(folder: Path, *overrides: str) -> tuple[Path, dict]:
    """Run train.py as a user would; return the run's directory, made below `folder`, and its metrics.json."""
    run_dir = Path(tempfile.mkdtemp(dir=folder))
    command = [sys.executable, "train.py", *overrides, f"run_dir={run_dir}"]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return run_dir, json.loads((run_dir / "metrics.json").read_text())
