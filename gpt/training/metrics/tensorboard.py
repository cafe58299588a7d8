"""TensorBoard beyond curves: a run's settings, the charts of CUSTOM SCALARS, and lines to compare with."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
from tensorboard.summary.writer import event_file_writer
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard.summary import custom_scalars, hparams, scalar

from gpt.training.config.schema import Config

# The HPARAMS tab shows the first five settings: by name, but those first that are said to differ between runs.
FIRST = ("model.d_model", "model.num_layers", "optim.lr", "optim.matrix_lr", "seed", "tokenizer.vocab_size")


def opening(config: Config) -> list[Summary]:
    """The summaries that belong at step 0."""
    # As text, or else 128 channels would be shown as 128.00.
    settings = {key: str(v) if type(v) in (list, int) else v for key, v in config.settings().items()}
    compared = dict.fromkeys(("val/loss", "val/bits_per_byte", "train/loss"))  # beside them in the HPARAMS tab
    experiment, *session = hparams(settings, compared)
    plugin = experiment.value[0].metadata.plugin_data
    data = HParamsPluginData.FromString(plugin.content)
    for info in data.experiment.hparam_infos:
        info.differs = info.name in FIRST
    plugin.content = data.SerializeToString()
    return [experiment, *session, custom_scalars(layout(config))]


@contextmanager
def named_after(last: Path | None) -> Iterator[None]:
    """Name event files that are made here by a later second than `last`, even if the clock was set back.

    TensorBoard reads files in the order of their names, and a later one drops what was cut off from those before.
    """
    least = int(last.name.split(".")[3]) + 1 if last else 0
    event_file_writer.time = SimpleNamespace(time=lambda: max(least, time.time()))
    try:
        yield
    finally:
        event_file_writer.time = time


def draw_line(folder: Path, tag: str, value: float, steps: int) -> None:
    """Add a flat line to the chart of a tag, which TensorBoard names by its folder, as if it were a run.

    Of several files in a folder, TensorBoard shows the one that it reads last, so a shorter line adds none.
    """
    folder.mkdir(parents=True, exist_ok=True)
    name = f"events.out.tfevents.{steps:013}"
    if any(file.name >= name for file in folder.glob("events.*")):
        return
    with (folder / name).open("wb") as stream:
        for step in (0, steps):
            event = Event(wall_time=time.time(), step=step, summary=scalar(tag, value))
            RecordWriter(stream).write(event.SerializeToString())


def layout(config: Config) -> dict[str, dict[str, list]]:
    """The charts of several curves by category and title. A chart shows the tags that match its patterns.

    Charts that this run has no points for are left out. TensorBoard merges equal categories and charts of several runs.
    """
    charts: dict[str, dict[str, list[str]]] = {"Loss": {"nats per token": ["train/loss$", "val/loss$"]}}
    if config.data.name == "mix":
        charts["TokenDataset"] = {"bits per byte": ["val_corpora/"], "epochs": ["val_epochs/"]}
    charts["Updates"] = {"learning rates": ["train/lr$", "train/matrix_lr$"]}
    charts["Updates"]["update-to-weight ratio by layer"] = ["weights/update_ratio/"]
    return {name: {title: ["Multiline", tags] for title, tags in group.items()} for name, group in charts.items()}
