"""Logging beyond TensorBoard and metrics.csv: wandb, mlflow, and callbacks through Lightning's own logging."""

import math
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lightning import Trainer
from lightning.pytorch.loggers import Logger, MLFlowLogger, WandbLogger

from gpt.errors import UserError, reason
from gpt.files import read_text, write_text
from gpt.training.config.schema import Config
from gpt.training.metrics.curves import Curves
from gpt.training.module import GPTModule

PROJECT = "mini-gpt"  # as wandb and mlflow list its runs


def open_loggers(config: Config, run_dir: Path) -> list[Logger]:
    """Start wandb and mlflow where they are asked for, or continue their records of this run; `UserError` if not.

    The run directory keeps the name that each gives the run.
    """
    loggers: list[Logger] = []
    for name in sorted({"wandb", "mlflow"}.intersection(config.logger)):
        file = run_dir / f"{name}_run.txt"
        known = read_text(file).strip() if file.exists() else None
        try:
            logger: Any
            if name == "wandb":
                logger = WandbLogger(project=PROJECT, name=run_dir.name, save_dir=run_dir, id=known)
            else:
                place = os.environ.get("MLFLOW_TRACKING_URI") or "sqlite:///mlflow.db"
                logger = MLFlowLogger(PROJECT, run_dir.name, place, run_id=known)
            logger.log_hyperparams(asdict(config))
        except Exception as error:  # no login, no network, a server without this run
            why = reason(error)
            raise UserError(f"logger={name}: cannot be started ({why}): check its login and address") from error
        if known is None:
            write_text(file, f"{logger.version}\n")
        loggers.append(logger)
    return loggers


def close_loggers(loggers: list[Logger]) -> None:
    """Finish wandb's run, which would go on in this process's next one; Lightning finishes that of mlflow."""
    for logger in loggers:
        if isinstance(logger, WandbLogger):
            logger.experiment.finish()


class UserCurves(Logger):
    """Makes Lightning write into our curves whatever callbacks log, by `module.log` or `trainer.logger.log_metrics`.

    Lightning passes the values of `module.log` on after the checkpoint of their step is saved, so that a resumed run
    would lack them, and again at later steps. So `write` writes them before that, each at the step of its `module.log`.
    """

    name, version = "curves", ""

    def __init__(self, curves: Curves, waiting: dict[str, list]):
        super().__init__()
        self._curves = curves
        # The latest step and value of each tag of `module.log` since it was written; earlier versions had no steps.
        self._waiting = waiting
        for tag in [tag for tag, value in waiting.items() if not isinstance(value, list)]:
            del waiting[tag]
        self._known: set[str] = set()  # tags of `module.log`
        self._steps: dict[str, int] = {}  # of the last point of each curve

    @property
    def experiment(self) -> Any:
        """TensorBoard's writer, as in Lightning's `TensorBoardLogger`; None where that is not a logger of the run."""
        return self._curves.writer

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        # Values of `module.log` come here marked with an epoch and one step behind. They are written already, except
        # for those of the end of the only epoch.
        step = step or 0
        if "epoch" in metrics:
            step += 1
            metrics = {tag: value for tag, value in metrics.items() if tag != "epoch" and tag not in self._known}
        # `LearningRateMonitor` logs the first step twice.
        new = {tag: float(value) for tag, value in metrics.items() if self._steps.get(tag) != step}
        self._steps |= dict.fromkeys(new, step)
        self._curves.write(new, step, everywhere=False)

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Do nothing: a run's configuration is logged already."""

    def note(self, trainer: Trainer, module: GPTModule, step: int) -> None:
        """Collect the values that were logged in a step."""
        for name in module.logged:
            for tag in (name, f"{name}_step"):  # as Lightning calls it where there is a mean over the epoch as well
                if (value := trainer.logged_metrics.get(tag)) is not None:
                    self._waiting[tag] = [step, value]
                    self._known.add(tag)
        module.logged.clear()

    def settle(self) -> None:
        """Turn the waiting values into plain numbers for a checkpoint, and drop NaN, which it would be refused for."""
        for tag, (step, value) in list(self._waiting.items()):
            self._waiting[tag] = [step, float(value)]
            if math.isnan(float(value)):
                del self._waiting[tag]

    def write(self) -> None:
        """Write a point of each tag that waits."""
        self.settle()
        for tag, (step, value) in self._waiting.items():
            self._curves.write({tag: value}, step, everywhere=False)
        self._waiting.clear()
