"""Logging to wandb and mlflow."""

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger, MLFlowLogger, WandbLogger

from gpt.errors import UserError, summarize_error
from gpt.files import read_text, write_text
from gpt.training.config import Config

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
            why = summarize_error(error)
            raise UserError(f"logger={name}: cannot be started ({why}): check its login and address") from error
        if known is None:
            write_text(file, f"{logger.version}\n")
        loggers.append(logger)
    return loggers


def close_loggers(loggers: list[Logger], has_failed: bool = False) -> None:
    """Finish the runs of wandb and mlflow. The next run of this process would continue an open one of wandb.

    `has_failed` is True if an error ended the training.
    """
    for logger in loggers:
        logger.finalize("failed" if has_failed else "success")
        if isinstance(logger, WandbLogger):
            logger.experiment.finish()
