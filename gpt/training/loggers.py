"""What logs beside TensorBoard and metrics.csv: wandb and mlflow, and callbacks through Lightning's own logging."""

import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning import Trainer
from lightning.pytorch.loggers import Logger, MLFlowLogger, WandbLogger

from gpt.errors import UserError
from gpt.files import write_text
from gpt.training.config import Config, to_plain
from gpt.training.curves import Curves
from gpt.training.module import GPTModule
from gpt.training.steps import StepCallback

PROJECT = "mini-gpt"  # as wandb and mlflow list its runs


def open_loggers(config: Config, run_dir: Path) -> list[Logger]:
    """Start wandb and mlflow where they are asked for, or continue their records of this run; `UserError` if not.

    The run directory keeps the name that each gives the run.
    """
    loggers: list[Logger] = []
    for name in config.logger:
        if name not in ("wandb", "mlflow"):
            continue
        file = run_dir / f"{name}_run.txt"
        known = file.read_text(encoding="utf-8", errors="replace").strip() if file.exists() else None
        if known is not None and not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", known):
            raise UserError(f"{file}: holds no name of a run of {name}: delete it to log to a new one")
        try:
            logger: Any
            if name == "wandb":
                logger = WandbLogger(project=PROJECT, name=run_dir.name, save_dir=run_dir, id=known)
            else:
                place = os.environ.get("MLFLOW_TRACKING_URI") or "sqlite:///mlflow.db"
                logger = MLFlowLogger(PROJECT, run_dir.name, place, run_id=known)
            identity = logger.experiment.id if name == "wandb" else logger.run_id
            logger.log_hyperparams(to_plain(config))
        except Exception as error:  # no login, no network, a server without this run
            why = " ".join(str(error).split())
            raise UserError(f"logger={name}: cannot be started ({why}): check its login and address") from error
        if known is None:
            write_text(file, f"{identity}\n")
        loggers.append(logger)
    return loggers


def close_loggers(loggers: Sequence[Logger]) -> None:
    """End the wandb run of this process, as another run of a sweep would go on in it. Lightning ends that of mlflow."""
    for logger in loggers:
        if isinstance(logger, WandbLogger):
            logger.experiment.finish()


class UserCurves(Logger):
    """Has Lightning write into our curves: what callbacks log with `module.log` or `trainer.logger.log_metrics`."""

    name, version = "curves", ""

    def __init__(self, curves: Curves):
        super().__init__()
        self._curves = curves
        self._steps: dict[str, int] = {}  # of the last point of each curve
        self.written: dict[str, float] = {}  # the latest value of each tag of `module.log`

    @property
    def experiment(self) -> Any:
        """TensorBoard's writer, as in Lightning's `TensorBoardLogger`; None where that is not a logger of the run."""
        return self._curves.writer

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        # Values of `module.log` come here, marked with an epoch and one step behind, after the checkpoint of their step
        # is saved. `UserValues` has written them before that, except for those of the end of the only epoch.
        step = step or 0
        if "epoch" in metrics:
            step += 1
            metrics = {tag: value for tag, value in metrics.items() if tag != "epoch" and tag not in self.written}
        # `LearningRateMonitor` logs once for each micro-batch.
        new = {tag: float(value) for tag, value in metrics.items() if self._steps.get(tag) != step}
        self._steps |= dict.fromkeys(new, step)
        self._curves.write(new, step, everywhere=False)

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Do nothing: a run's configuration is logged already."""


class UserValues(StepCallback):
    """Writes the values of `module.log` at each log point, the latest of each tag, as Lightning would.

    Lightning does so after the checkpoint of the step is saved, so that a resumed run would lack them.
    """

    def __init__(self, curves: Curves, logger: UserCurves):
        self._curves, self._logger = curves, logger
        self._trainer: Trainer | None = None

    def on_train_start(self, trainer: Trainer, module: GPTModule) -> None:  # type: ignore[override]
        self._trainer = trainer

    def on_step_end(self, trainer: Trainer, module: GPTModule, step: int) -> None:
        if module.plan.due(step, module.config.trainer.log_every):
            self._curves.write(self._take(), step, everywhere=False)

    def _take(self) -> dict[str, float]:
        latest = self._trainer.logged_metrics if self._trainer is not None else {}
        self._logger.written |= {tag: float(value) for tag, value in latest.items()}
        return self._logger.written

    def state_dict(self) -> dict:
        # A checkpoint with a NaN is refused.
        values = {tag: value for tag, value in self._take().items() if not math.isnan(value)}
        return {"values": values} if values else {}

    def load_state_dict(self, state: dict) -> None:
        self._logger.written.update(state["values"])
