"""TensorBoard: the event file of a run, its settings, and charts of several curves."""

import time
from pathlib import Path

from tensorboard.plugins.hparams.summary_v2 import hparams_pb
from torch.utils.tensorboard import SummaryWriter

from gpt.training.config import Config
from gpt.training.metrics import chart_patterns
from gpt.training.run_directory import EVENTS_PATTERN, EVENTS_SUFFIX

# Settings without an effect on the model.
INCOMPARABLE_KEYS = {"run_dir", "logger", "data.cache", "data.cache_bytes", "data.prompts"}


def open_writer(config: Config, run_dir: Path, step: int) -> SummaryWriter:
    """Return a writer to a new event file, for the steps after `step`. At step 0 it writes the settings and charts.

    A running TensorBoard then drops what an interrupted process wrote after the checkpoint.
    """
    newest = max(run_dir.glob(EVENTS_PATTERN), default=None)
    if newest is not None and newest.name.split(".")[3] == f"{int(time.time()):010}":
        # TensorBoard reads the files in the order of their names, and these begin with the second.
        time.sleep(1 - time.time() % 1)
    writer = SummaryWriter(run_dir, purge_step=step + 1, filename_suffix=EVENTS_SUFFIX)
    if step == 0:
        charts = {title: ["Multiline", patterns] for title, patterns in chart_patterns().items()}
        writer.add_custom_scalars({"Charts": charts})
        assert writer.file_writer is not None
        # `writer.add_hparams` would make another run of it, in a folder of its own.
        writer.file_writer.add_summary(hparams_pb(comparable_settings(config), trial_id=run_dir.name), 0)
    return writer


def comparable_settings(config: Config) -> dict[str, str | float | bool]:
    """Return the settings as the HPARAMS tab can show them. It shows first what differs between runs."""
    settings = {}
    for key, value in config.settings().items():
        if value is not None and key not in INCOMPARABLE_KEYS:
            # As text, since TensorBoard would show 128 channels as 128.00.
            settings[key] = str(value) if isinstance(value, list) or type(value) is int else value
    return settings
