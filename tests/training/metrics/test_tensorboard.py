"""TensorBoard and metrics.json of a run: figures, charts, references, update ratios and embeddings."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from google.protobuf import text_format
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.projector.projector_config_pb2 import ProjectorConfig

import gpt.training.metrics.metrics
from gpt.exchange import checkpoint
from gpt.sampling.scoring import Score
from gpt.training.config.loading import validate
from gpt.training.config.schedule import Schedule
from gpt.training.config.schema import Config
from gpt.training.metrics.curves import ROWS, Curves
from gpt.training.metrics.metrics import Metrics
from gpt.training.metrics.report import report
from gpt.training.metrics.samples import frequent
from gpt.training.metrics.tensorboard import layout
from gpt.training.run_directory import REFERENCES, RunDirectory, text_name
from gpt.training.state import RunSpec, TrainState
from harness import (
    StopAt,
    Training,
    begin_run,
    differences,
    fit,
    read_events,
    read_table,
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
    """A run that passes one reference of two."""
    training = begin_run(tiny_config(corpus_folder, *EXPERIMENT, f"run_dir={corpus_folder / 'run'}"))
    weights = Weights()
    fit(training, [weights])
    return training, weights


@pytest.fixture(scope="module")
def events(run) -> EventAccumulator:
    return read_events(run[0].path)


# --- figures and charts ---


def test_files_events_and_closing_lines_agree(run, events, capsys):
    """Every point is in metrics.csv and, rounded to float32, in TensorBoard. metrics.json has the last of them.

    TensorBoard shows references as lines instead.
    """
    training, _ = run
    table = read_table(training.path)
    shown = {tag: [(one.step, one.value) for one in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    expected = {tag: [(step, float(np.float32(value))) for step, value in points] for tag, points in table.items()}
    assert {tag: points for tag, points in expected.items() if not tag.startswith("val_references/")} == shown
    assert all(len(dict(points)) == len(points) for points in table.values())
    figures = json.loads((training.path / "metrics.json").read_text())
    assert figures == training.metrics
    last = {tag: points[-1] for tag, points in table.items()}
    assert last["train/loss"] == (43, figures["train_loss"])
    assert last["val/loss"] == (43, figures["val_loss"])
    assert last["val/bits_per_byte"] == (43, figures["val_bits_per_byte"])
    assert min(table["val/loss"], key=lambda point: point[1])[::-1] == (figures["best_val_loss"], figures["best_step"])
    assert list(figures["references"]) == ["unigram", "bigram"]
    for name, reference in figures["references"].items():
        points = table[f"val_references/{name}"]
        assert points == [(step, reference["bits_per_byte"]) for step, _ in table["val/bits_per_byte"]]
        below = [step for step, bits in table["val/bits_per_byte"] if bits < reference["bits_per_byte"]]
        assert reference["passed_at"] == (below[0] if below else None)
    assert [one["passed_at"] is None for one in figures["references"].values()] == [False, True]
    report(training.spec, training.path, training.result)
    printed = capsys.readouterr().out
    for key in ("train_loss", "val_loss", "best_val_loss", "val_bits_per_byte"):
        assert re.search(rf"(?<!\S){figures[key]:.4f}(?!\S)", printed), key
    for name, reference in figures["references"].items():
        when = "not passed" if reference["passed_at"] is None else f"passed at step {reference['passed_at']}"
        assert re.search(rf"^ *{name} +{reference['bits_per_byte']:.4f} +{when}$", printed, re.M)


def test_custom_scalars(run, events):
    """The charts of the CUSTOM SCALARS tab, as TensorBoard reads them: none is empty."""
    (written,) = events.Tensors("custom_scalars__config__")
    read = layout_pb2.Layout.FromString(written.tensor_proto.string_val[0])
    charts = {chart.title: list(chart.multiline.tag) for category in read.category for chart in category.chart}
    expected = [one for group in layout(run[0].config).values() for one in group.items()]
    assert charts == {title: tags for title, (_, tags) in expected}
    tags = events.Tags()["scalars"]
    shown = {
        title: {tag for tag in tags if any(re.match(p, tag) for p in patterns)} for title, patterns in charts.items()
    }
    assert all(shown.values())
    assert next(iter(shown.values())) == {"train/loss", "val/loss"}
    assert {"weights/update_ratio/layer_1", "weights/update_ratio/layer_2"} in shown.values()


def test_charts_of_other_runs(run):
    """A mixture has charts of its corpora."""
    titles = lambda config: {title for group in layout(config).values() for title in group}  # noqa: E731
    data = {"name": "mix", "path": ["python_docs", "x.txt"], "weights": [1, 1]}
    other = validate({"data": data})
    mine, theirs = titles(run[0].config), titles(other)
    assert theirs - mine == {"bits per byte", "epochs"}
    assert mine - theirs == set()


# --- references ---


def test_references_are_passed_once(tmp_path, monkeypatch):
    """Being equal does not pass one, and a later rise does not take it back."""
    monkeypatch.setattr(gpt.training.metrics.metrics, "measure_baselines", lambda sources: {"a": 2.0, "b": 1.0})
    dataset = SimpleNamespace(sources=[], train_tokens=1)
    spec = RunSpec(Config(), Schedule(), dataset)  # type: ignore[arg-type]
    run, state = RunDirectory(tmp_path), TrainState(seconds=1.0, commits={"0": "none"})
    model = SimpleNamespace(config=SimpleNamespace(num_parameters=1))
    curves = Curves(spec, run, state)
    metrics = Metrics(spec, run, state, curves)
    curves.open(0)
    for step, bits in enumerate((3.0, 2.0, 1.5, 2.5, 0.5, 0.4)):
        module, score = SimpleNamespace(model=model, device=torch.device("cpu")), Score(bits * np.log(2), 1, 1)
        metrics.write(module, step, score, [], 5)  # type: ignore[arg-type]
    curves.close()
    stored = json.loads((tmp_path / "metrics.json").read_text())["references"]
    assert stored == {"a": {"bits_per_byte": 2.0, "passed_at": 2}, "b": {"bits_per_byte": 1.0, "passed_at": 4}}
    assert read_table(tmp_path)["val_references/a"] == [(step, 2.0) for step in range(6)]


def test_resumed_run(run, corpus_folder, tmp_path):
    """A resumed run has the references that it has passed, and its last training loss.

    It is stopped between a log point (33) and a validation (35), and after that validation.
    """
    config = tiny_config(corpus_folder, *EXPERIMENT, f"run_dir={tmp_path / 'run'}")
    training = begin_run(config)
    fit(training, [StopAt(34)])
    fit(resume_run(training.path), [StopAt(35)])
    passed_at = run[0].metrics["references"]["unigram"]["passed_at"]
    state = checkpoint.load(training.path / "checkpoints/last.ckpt")["state"]
    assert state["beaten_at_step"] == {"unigram": passed_at}
    last = dict(read_table(run[0].path)["train/loss"])[33]
    assert json.loads((training.path / "metrics.json").read_text())["train_loss"] == last
    fit(resume_run(training.path))
    assert differences(training.path, run[0].path) == []


def lines(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return the lines that TensorBoard shows of the references in a folder: name to points."""
    return {
        line.name: [(event.step, event.value) for event in read_events(line).Scalars("val/bits_per_byte")]
        for line in (folder / REFERENCES).iterdir()
    }


def test_a_clock_that_was_set_back(corpus_folder, tmp_path, monkeypatch):
    """The curves of a process whose clock is an hour behind follow those of the process before."""
    real, config = time.time, tiny_config(corpus_folder, "horizon=12steps", f"run_dir={tmp_path / 'run'}")
    monkeypatch.setattr(time, "time", lambda: real() + 3600)
    fit(begin_run(config), [StopAt(6)])
    monkeypatch.setattr(time, "time", real)
    fit(resume_run(tmp_path / "run"))
    steps = [event.step for event in read_events(tmp_path / "run").Scalars("train/loss")]
    assert steps == [3, 6, 9, 12]


def test_lines(run, corpus_folder, tmp_path, monkeypatch):
    """The best two references are a line each, named by text and figure. The runs in runs/ share them.

    The line of the longest run counts, so that none is cut off in an open page.
    """
    references = {name: float(np.float32(one["bits_per_byte"])) for name, one in run[0].metrics["references"].items()}
    expected = lambda steps: {f"{text} {name} {y:.4f}": [(0, y), (steps, y)] for name, y in references.items()}  # noqa: E731
    text = text_name(run[0].config.data)
    assert lines(run[0].path) == expected(43)
    monkeypatch.chdir(tmp_path)
    for steps in (2, 5, 3):
        fit(begin_run(tiny_config(corpus_folder, f"horizon={steps}steps", "data.prompts=[]"), "tiny"))
    assert lines(tmp_path / "runs") == expected(5)
    drawn = [list(line.iterdir()) for line in (tmp_path / "runs" / REFERENCES).iterdir()]
    assert [len(files) for files in drawn] == [2, 2]  # of 2 steps and of 5
    assert sorted((tmp_path / "runs").iterdir())[-1].name == REFERENCES


def test_only_the_best_two_references_are_drawn(tmp_path):
    """A text may have more of them."""
    spec = RunSpec(Config(run_dir=str(tmp_path)), Schedule(), dataset=None)  # type: ignore[arg-type]
    curves = Curves(spec, RunDirectory(tmp_path), TrainState())
    curves.open(0)
    curves.draw_references({"unigram": 3.2, "bigram": 2.15, "gzip -9": 2.4, "xz -9e": 2.1}, 5)
    curves.close()
    assert {line.name for line in (tmp_path / REFERENCES).iterdir()} == {
        "python_docs xz -9e 2.1000",
        "python_docs bigram 2.1500",
    }


@pytest.mark.skipif(os.name == "nt", reason="Windows has no limit of a file's size")
def test_a_disk_that_is_full_at_the_end(tmp_path):
    """The last points raise one error in the caller, and TensorBoard's thread prints none."""
    code = """
import resource, signal, sys
from pathlib import Path
from gpt.training.config.schedule import Schedule
from gpt.training.config.schema import Config
from gpt.training.metrics.curves import Curves
from gpt.training.run_directory import RunDirectory
from gpt.training.state import RunSpec, TrainState

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
spec = RunSpec(Config(run_dir=sys.argv[1]), Schedule(), dataset=None)
curves = Curves(spec, RunDirectory(Path(sys.argv[1])), TrainState())
curves.open(0)
for step in range(100):
    curves.write({"train/loss": 1.0}, step)
curves.writer.flush()
resource.setrlimit(resource.RLIMIT_FSIZE, (3000, resource.RLIM_INFINITY))
curves.write({"train/loss": 1.0}, 100)
try:
    curves.close()
except OSError as error:
    print(error.strerror)
"""
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("File too large\n", "")


def test_lines_that_cannot_be_drawn(corpus_folder, tmp_path):
    """A run continues without them."""
    training = begin_run(tiny_config(corpus_folder, "horizon=1steps", f"run_dir={tmp_path / 'run'}"))
    (tmp_path / "run" / REFERENCES).write_text("a file")
    fit(training)
    assert list(training.metrics["references"]) == ["unigram", "bigram"]


# --- updates ---


def test_update_ratios(run, events):
    """The ratio of the sampled rows equals that of the same rows by hand, and nearly that of the whole matrices."""
    weights = run[1].by_step
    for layer in range(2):
        points = events.Scalars(f"weights/update_ratio/layer_{layer + 1}")
        assert [point.step for point in points] == [*range(3, 43, 3), 43]
        for point in points:
            before, after = weights[point.step - 2][layer], weights[point.step - 1][layer]
            ratios = []
            for every in (-(-4 * 36 // ROWS), 1):
                picked = [[p[::every].flatten().double() for p in side] for side in (before, after)]
                old, new = (torch.cat(side) for side in picked)
                ratios.append(float((new - old).norm() / old.norm()))
            assert point.value == pytest.approx(ratios[0], rel=1e-4)
            assert point.value == pytest.approx(ratios[1], rel=0.05)


# --- embeddings ---


def test_embeddings(run):
    """The projector's files, as it reads them: the last weights of each token, beside the token."""
    training, _ = run
    (config,) = text_format.Parse((training.path / "projector_config.pbtxt").read_text(), ProjectorConfig()).embeddings
    shape = list(config.tensor_shape)
    found = np.fromfile(training.path / config.tensor_path, "<f4").reshape(shape)
    header, *rows = (training.path / config.metadata_path).read_text(encoding="utf-8").splitlines()
    tokens, kinds = zip(*(row.split("\t") for row in rows), strict=True)
    assert header == "token\tkind"
    assert kinds[:2] == ("letters", "white space") and len(set(kinds)) == 5  # no token of bytes is "space and letters"
    assert shape == [257, 36] and len(tokens) == 257
    assert tokens[:2] == ("a", "·") and "<|endoftext|>" in tokens and "⏎" in tokens
    weight = checkpoint.load(training.path / "checkpoints/last.ckpt")["state_dict"]["token_embedding.weight"]
    assert np.array_equal(found[tokens.index("z")], weight[ord("z")].numpy())


def test_frequent_tokens(run):
    """Most frequent first, equally frequent ones by id."""
    corpora = run[0].spec.dataset
    ids = corpora.sources[0].train
    counts = np.bincount(ids, minlength=257)
    assert frequent(corpora) == sorted(range(257), key=lambda i: (-counts[i], i))
