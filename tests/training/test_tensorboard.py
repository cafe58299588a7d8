"""TensorBoard and metrics.json of a run: figures, charts, baselines and update ratios."""

import json
import os
import re
import subprocess

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2

from gpt.api import read_curves
from gpt.checkpoint import load_checkpoint
from gpt.training.config import Config
from gpt.training.loggers import open_event_file
from gpt.training.metric_logger import MAX_SAMPLED_ROWS
from gpt.training.metrics import METRICS, chart_patterns
from gpt.training.report import print_report
from gpt.training.run_directory import EVENTS_PATTERN
from gpt.training.state import TrainState
from gpt.training.validation import record_beaten_baselines
from harness import (
    ROOT,
    StopAt,
    Training,
    begin_run,
    differences,
    fit,
    python_program,
    read_events,
    resume_run,
    tiny_config,
)

EXPERIMENT = ["horizon=43steps", "trainer.validate_every=7", "trainer.precision=fp32", "model.d_model=36"]


class Weights:
    """Copies the matrices of the blocks after each step."""

    def __init__(self) -> None:
        self.by_step: list[list[list[torch.Tensor]]] = []  # [step][block][matrix]

    def on_train_step_end(self, module) -> None:
        blocks = module.model.blocks
        self.by_step.append([[p.detach().clone() for p in block.parameters() if p.dim() == 2] for block in blocks])


@pytest.fixture(scope="module")
def run(corpus_folder) -> tuple[Training, Weights]:
    """Return a run that beats one baseline of two, and its weights."""
    training = begin_run(tiny_config(corpus_folder, *EXPERIMENT, f"run_dir={corpus_folder / 'run'}"))
    weights = Weights()
    fit(training, [weights])
    return training, weights


@pytest.fixture(scope="module")
def events(run) -> EventAccumulator:
    return read_events(run[0].path)


# --- figures and charts ---


def test_files_events_and_closing_lines_agree(run, events, capsys):
    """Every point is in metrics.csv and, rounded to float32, in TensorBoard. metrics.json has the last of them."""
    training, _ = run
    table = read_curves(training.path)
    shown = {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    expected = {tag: [(step, float(np.float32(value))) for step, value in points] for tag, points in table.items()}
    assert expected == shown
    assert all(len(dict(points)) == len(points) for points in table.values())
    figures = json.loads((training.path / "metrics.json").read_text())
    assert figures == training.metrics
    last = {tag: points[-1] for tag, points in table.items()}
    assert last["train/loss"] == (43, figures["train_loss"])
    assert last["val/loss"] == (43, figures["val_loss"])
    assert last["val/bits_per_byte"] == (43, figures["val_bits_per_byte"])
    assert min(table["val/loss"], key=lambda point: point[1])[::-1] == (figures["best_val_loss"], figures["best_step"])
    assert list(figures["baselines"]) == list(figures["beaten_at_step"]) == ["unigram", "bigram"]
    for name, bits_per_byte in figures["baselines"].items():
        assert table[f"val_baselines/{name}"] == [(step, bits_per_byte) for step, _ in table["val/bits_per_byte"]]
        below = [step for step, bits in table["val/bits_per_byte"] if bits < bits_per_byte]
        assert figures["beaten_at_step"][name] == (below[0] if below else None)
    assert [step is None for step in figures["beaten_at_step"].values()] == [False, True]
    print_report(training.spec, training.path, training.result)
    printed = capsys.readouterr().out
    for key in ("train_loss", "val_loss", "best_val_loss", "val_bits_per_byte"):
        assert re.search(rf"(?<!\S){figures[key]:.4f}(?!\S)", printed), key
    for name, bits_per_byte in figures["baselines"].items():
        step = figures["beaten_at_step"][name]
        note = "not beaten" if step is None else f"beaten at step {step}"
        assert re.search(rf"^ *{name} +{bits_per_byte:.4f} +bits per byte, {note}$", printed, re.M)


def test_every_metric_has_an_entry(run):
    """The table of metrics contains all curves of a run, and all numbers in metrics.json."""
    curves = [metric.curve for metric in METRICS.values() if metric.curve]
    unknown = [
        tag
        for tag in read_curves(run[0].path)
        if not any(tag.startswith(curve) if curve.endswith("/") else tag == curve for curve in curves)
    ]
    assert unknown == []
    assert run[0].metrics.keys() - METRICS.keys() == {"git_commit", "commits"}


def test_custom_scalars(events):
    """TensorBoard reads the charts of the CUSTOM SCALARS tab, and none of them is empty."""
    (written,) = events.Tensors("custom_scalars__config__")
    read = layout_pb2.Layout.FromString(written.tensor_proto.string_val[0])
    charts = {chart.title: list(chart.multiline.tag) for category in read.category for chart in category.chart}
    assert charts == chart_patterns()
    tags = events.Tags()["scalars"]
    shown = {
        title: {tag for tag in tags if any(re.match(p, tag) for p in patterns)} for title, patterns in charts.items()
    }
    assert all(shown.values())
    assert shown["nats per token"] == {"train/loss", "val/loss"}
    assert shown["bits per byte"] == {"val/bits_per_byte", "val_baselines/unigram", "val_baselines/bigram"}
    assert {"weights/update_ratio/layer_1", "weights/update_ratio/layer_2"} in shown.values()


# --- baselines ---


def test_baselines_are_beaten_once():
    """An equal score does not beat a baseline. A baseline stays beaten after a later rise."""
    state, baselines = TrainState(), {"a": 2.0, "b": 1.0, "c": 0.1}
    for step, bits_per_byte in enumerate((3.0, 2.0, 1.5, 2.5, 0.5, 0.4)):
        beaten_at_step = record_beaten_baselines(state, baselines, bits_per_byte, step)
    assert beaten_at_step == {"a": 2, "b": 4, "c": None}
    assert state.beaten_at_step == {"a": 2, "b": 4}


def test_a_resumed_run_keeps_its_beaten_baselines_and_training_loss(run, corpus_folder, tmp_path):
    """The run is stopped between a log point (33) and a validation (35), and after that validation."""
    config = tiny_config(corpus_folder, *EXPERIMENT, f"run_dir={tmp_path / 'run'}")
    training = begin_run(config)
    fit(training, [StopAt(34)])
    fit(resume_run(training.path), [StopAt(35)])
    beaten_at_step = run[0].metrics["beaten_at_step"]["unigram"]
    state = load_checkpoint(training.path / "checkpoints/last.ckpt")["state"]
    assert state["beaten_at_step"] == {"unigram": beaten_at_step}
    last = dict(read_curves(run[0].path)["train/loss"])[33]
    assert json.loads((training.path / "metrics.json").read_text())["train_loss"] == last
    fit(resume_run(training.path))
    assert differences(training.path, run[0].path) == []


def test_event_files_are_named_in_their_order(tmp_path):
    """TensorBoard reads files in the order of their names, also those of one second and after the clock was set back.

    The points of each file replace those of earlier files after its first step.
    """
    for step in (0, 5, 9):
        writer = open_event_file(Config(), tmp_path, step)
        for later in range(step + 1, step + 8):
            writer.add_scalar("a", step, later)
        writer.close()
        newest = max(tmp_path.glob(EVENTS_PATTERN))
        prefix = f"events.out.tfevents.{int(newest.name.split('.')[3]) + 3600}."
        newest.rename(tmp_path / (prefix + newest.name.split(".", 4)[4]))  # as if the clock had been an hour ahead
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(point.step, point.value) for point in events.Scalars("a")] == [
        *((step, 0) for step in range(1, 6)),
        *((step, 5) for step in range(6, 10)),
        *((step, 9) for step in range(10, 17)),
    ]


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="Windows has no limit of a file's size")
def test_a_disk_that_is_full_at_the_end(tmp_path):
    """The last points raise one error in the caller. TensorBoard's thread prints nothing."""
    code = """
import resource, signal, sys
from pathlib import Path
from gpt.training.config import Config
from gpt.training.metric_logger import MetricLogger
from gpt.training.run_directory import RunDirectory
from gpt.training.schedule import Schedule
from gpt.training.state import RunSpec, TrainState

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
spec = RunSpec(Config(run_dir=sys.argv[1]), Schedule(), dataset=None)
logger = MetricLogger(spec, RunDirectory(Path(sys.argv[1])), TrainState())
logger.open(0)
for step in range(100):
    logger.write({"train/loss": 1.0}, step)
logger.writer.flush()
resource.setrlimit(resource.RLIMIT_FSIZE, (3000, resource.RLIM_INFINITY))
logger.write({"train/loss": 1.0}, 100)
try:
    logger.close()
except OSError as error:
    print(error.strerror)
"""
    done = subprocess.run([python_program(), "-c", code, tmp_path], cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("File too large\n", "")


# --- updates ---


def test_update_ratios(run, events):
    """The ratio equals one computed from the same rows, and is close to the ratio of whole matrices."""
    weights = run[1].by_step
    for layer in range(2):
        points = events.Scalars(f"weights/update_ratio/layer_{layer + 1}")
        assert [point.step for point in points] == [*range(3, 43, 3), 43]
        for point in points:
            before, after = weights[point.step - 2][layer], weights[point.step - 1][layer]
            ratios = []
            for every in (-(-4 * 36 // MAX_SAMPLED_ROWS), 1):
                picked = [[p[::every].flatten().double() for p in side] for side in (before, after)]
                old, new = (torch.cat(side) for side in picked)
                ratios.append(float((new - old).norm() / old.norm()))
            assert point.value == pytest.approx(ratios[0], rel=1e-4)
            assert point.value == pytest.approx(ratios[1], rel=0.05)
