"""The loggers that write curves: TensorBoard's event file, wandb and mlflow."""

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from lightning.pytorch.loggers import Logger, MLFlowLogger, WandbLogger

from gpt.errors import UserError, summarize_error
from gpt.files import read_text, write_text
from gpt.training.config import Config
from gpt.training.metrics import SETTINGS_WITHOUT_EFFECT, chart_patterns
from gpt.training.run_directory import EVENTS_PATTERN, EVENTS_SUFFIX

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

PROJECT_NAME = "mini-gpt"  # in wandb and mlflow


# --- TensorBoard ---


def open_event_file(config: Config, run_dir: Path, step: int) -> "SummaryWriter":
    """Return a writer to a new event file for the steps after `step`. At step 0, write the settings and charts.

    TensorBoard drops points after `step` that an interrupted process wrote.
    """
    from tensorboard.plugins.hparams.summary_v2 import hparams_pb
    from torch.utils.tensorboard import SummaryWriter

    with _name_after(max(run_dir.glob(EVENTS_PATTERN), default=None)):
        writer = SummaryWriter(run_dir, purge_step=step + 1, filename_suffix=EVENTS_SUFFIX)
    if step == 0:
        charts = {title: ["Multiline", patterns] for title, patterns in chart_patterns().items()}
        writer.add_custom_scalars({"Charts": charts})
        assert writer.file_writer is not None
        # `writer.add_hparams` would write them as another run, in a folder of its own.
        writer.file_writer.add_summary(hparams_pb(comparable_settings(config), trial_id=run_dir.name), 0)
    return writer


@contextlib.contextmanager
def _name_after(newest: Path | None) -> Iterator[None]:
    """In this block, name event files by a later second than `newest`, even if the clock was set back.

    TensorBoard reads files in the order of their names, which begin with the second. A later one drops the points that
    an interrupted process wrote into those before it.
    """
    from tensorboard.summary.writer import event_file_writer

    next_second = int(newest.name.split(".")[3]) + 1 if newest else 0
    event_file_writer.time = SimpleNamespace(time=lambda: max(next_second, time.time()))
    try:
        yield
    finally:
        event_file_writer.time = time


def comparable_settings(config: Config) -> dict[str, str | float | bool]:
    """Return the settings for the HPARAMS tab. It shows settings that differ between runs first."""
    settings = {}
    for key, value in config.settings().items():
        if value is not None and key not in SETTINGS_WITHOUT_EFFECT:
            # Integers are text, because TensorBoard would show 128 channels as 128.00.
            settings[key] = str(value) if isinstance(value, list) or type(value) is int else value
    return settings


# --- wandb and mlflow ---


def open_loggers(config: Config, run_dir: Path) -> list[Logger]:
    """Return the loggers of wandb and mlflow that the configuration asks for. A resumed run continues its record.

    The run directory stores the id under which each of them has the run.

    Raises:
        UserError: A logger cannot be started.
    """
    loggers: list[Logger] = []
    for name in sorted({"wandb", "mlflow"}.intersection(config.logger)):
        file = run_dir / f"{name}_run.txt"
        run_id = read_text(file).strip() if file.exists() else None
        try:
            logger: Any
            if name == "wandb":
                logger = WandbLogger(project=PROJECT_NAME, name=run_dir.name, save_dir=run_dir, id=run_id)
            else:
                uri = os.environ.get("MLFLOW_TRACKING_URI") or "sqlite:///mlflow.db"
                logger = MLFlowLogger(PROJECT_NAME, run_dir.name, uri, run_id=run_id)
            logger.log_hyperparams(asdict(config))
        except Exception as error:  # no login, no network, or a server without this run
            cause = summarize_error(error)
            raise UserError(f"logger={name}: cannot be started ({cause}): check its login and address") from error
        if run_id is None:
            write_text(file, f"{logger.version}\n")
        loggers.append(logger)
    return loggers


def close_loggers(loggers: list[Logger], has_failed: bool = False) -> None:
    """Finish the runs in wandb and mlflow, with the status `failed` or `success`."""
    for logger in loggers:
        logger.finalize("failed" if has_failed else "success")
        if isinstance(logger, WandbLogger):
            logger.experiment.finish()  # otherwise the next run of this process would continue it
