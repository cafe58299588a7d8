"""What a run shows in TensorBoard beside its curves' points: charts, references, updates of weights, embeddings."""

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
from lightning import Callback
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.projector.projector_config_pb2 import ProjectorConfig

import gpt.training.metrics.metrics
from gpt.exchange import checkpoint
from gpt.sampling.scoring import Score
from gpt.training.config.loading import validate
from gpt.training.config.schema import Config
from gpt.training.metrics.curves import ROWS, Curves
from gpt.training.metrics.metrics import Metrics
from gpt.training.metrics.report import report
from gpt.training.metrics.samples import frequent
from gpt.training.metrics.tensorboard import layout
from gpt.training.run.run import REFERENCES, Run, text_name
from harness import StopAt, begin_run, differences, fit, read_events, read_table, resume_run, tiny_config

EXPERIMENT = ["horizon=43steps", "trainer.validate_every=7", "trainer.precision=fp32", "model.d_model=36"]


class Watch(Callback):
    """The weights before and after each step."""

    def __init__(self) -> None:
        self.weights: list[list[list[torch.Tensor]]] = []  # by step, block and matrix

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx: int) -> None:
        blocks = module.model.blocks
        self.weights.append([[p.detach().clone() for p in block.parameters() if p.dim() == 2] for block in blocks])


@pytest.fixture(scope="module")
def run(corpus_folder) -> tuple[Run, Watch]:
    """A run that passes one reference of two."""
    session, watch = begin_run(tiny_config(corpus_folder, *EXPERIMENT, f"run_dir={corpus_folder / 'run'}")), Watch()
    fit(session, [watch])
    return session, watch


@pytest.fixture(scope="module")
def events(run) -> EventAccumulator:
    return read_events(run[0].directory)


# --- all that a run says of itself ---


def test_files_events_and_closing_lines_agree(run, events, capsys):
    """Every point is in metrics.csv and, rounded to float32, in TensorBoard, where references are lines of their own;
    metrics.json has the last of them.
    """
    session, _ = run
    table = read_table(session.directory)
    shown = {tag: [(one.step, one.value) for one in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    expected = {tag: [(step, float(np.float32(value))) for step, value in points] for tag, points in table.items()}
    assert {tag: points for tag, points in expected.items() if not tag.startswith("val_references/")} == shown
    assert all(len(dict(points)) == len(points) for points in table.values())
    figures = json.loads((session.directory / "metrics.json").read_text())
    assert figures == session.metrics
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
    report(session)
    said = capsys.readouterr().out
    for key in ("train_loss", "val_loss", "best_val_loss", "val_bits_per_byte"):
        assert re.search(rf"(?<!\S){figures[key]:.4f}(?!\S)", said), key
    for name, reference in figures["references"].items():
        when = "not passed" if reference["passed_at"] is None else f"passed at step {reference['passed_at']}"
        assert re.search(rf"^ *{name} +{reference['bits_per_byte']:.4f} +{when}$", said, re.M)


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
    monkeypatch.setattr(gpt.training.metrics.metrics, "references", lambda sources: {"a": 2.0, "b": 1.0})
    text = SimpleNamespace(sources=[], train_tokens=1)
    run = Run(tmp_path, Config(), text=text, commits={"0": "none"})  # type: ignore[arg-type]
    run.state.seconds = 1.0
    model = SimpleNamespace(config=SimpleNamespace(num_parameters=1))
    curves = Curves(run)
    metrics = Metrics(run, curves)
    curves.open(0)
    for step, bits in enumerate((3.0, 2.0, 1.5, 2.5, 0.5, 0.4)):
        module, score = SimpleNamespace(model=model, device=torch.device("cpu")), Score(bits * np.log(2), 1, 1)
        metrics.write(module, step, score, [], 5)  # type: ignore[arg-type]
    curves.close()
    stored = json.loads((tmp_path / "metrics.json").read_text())["references"]
    assert stored == {"a": {"bits_per_byte": 2.0, "passed_at": 2}, "b": {"bits_per_byte": 1.0, "passed_at": 4}}
    assert read_table(tmp_path)["val_references/a"] == [(step, 2.0) for step in range(6)]


def test_resumed_run(run, corpus_folder, tmp_path):
    """Stopped between a log point (33) and a validation (35), and after it, a run knows what it has passed, and its
    last training loss.
    """
    part = tmp_path / "run"
    for session, step in (
        (begin_run(tiny_config(corpus_folder, *EXPERIMENT, f"run_dir={part}")), 34),
        (lambda: resume_run(str(part)), 35),
    ):
        fit((session() if callable(session) else session), [StopAt(step)])
    passed = run[0].metrics["references"]["unigram"]["passed_at"]
    assert checkpoint.load(part / "checkpoints/last.ckpt")["state"]["passed_at"] == {"unigram": passed}
    last = dict(read_table(run[0].directory)["train/loss"])[33]
    assert json.loads((part / "metrics.json").read_text())["train_loss"] == last
    fit(resume_run(str(part)))
    assert differences(part, run[0].directory) == []


def lines(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """The lines that TensorBoard shows of the references in a folder: name to points."""
    return {
        line.name: [(event.step, event.value) for event in read_events(line).Scalars("val/bits_per_byte")]
        for line in (folder / REFERENCES).iterdir()
    }


def test_a_clock_that_was_set_back(corpus_folder, tmp_path, monkeypatch):
    """The curves of a session whose clock is an hour behind follow those of the one before."""
    real, config = time.time, tiny_config(corpus_folder, "horizon=12steps", f"run_dir={tmp_path / 'run'}")
    monkeypatch.setattr(time, "time", lambda: real() + 3600)
    fit(begin_run(config), [StopAt(6)])
    monkeypatch.setattr(time, "time", real)
    fit(resume_run(str(tmp_path / "run")))
    steps = [event.step for event in read_events(tmp_path / "run").Scalars("train/loss")]
    assert steps == [3, 6, 9, 12]


def test_lines(run, corpus_folder, tmp_path, monkeypatch):
    """The best two references are a line each, named by text and figure, which runs in runs/ share.

    The longest run has drawn it last, so that none is cut off in a page that is open.
    """
    references = {name: float(np.float32(one["bits_per_byte"])) for name, one in run[0].metrics["references"].items()}
    expected = lambda steps: {f"{text} {name} {y:.4f}": [(0, y), (steps, y)] for name, y in references.items()}  # noqa: E731
    text = text_name(run[0].config.data)
    assert lines(run[0].directory) == expected(43)
    monkeypatch.chdir(tmp_path)
    for steps in (2, 5, 3):
        fit(begin_run(tiny_config(corpus_folder, f"horizon={steps}steps", "data.prompts=[]"), "tiny"))
    assert lines(tmp_path / "runs") == expected(5)
    drawn = [list(line.iterdir()) for line in (tmp_path / "runs" / REFERENCES).iterdir()]
    assert [len(files) for files in drawn] == [2, 2]  # of 2 steps and of 5
    assert sorted((tmp_path / "runs").iterdir())[-1].name == REFERENCES


def test_the_best_two_lines(tmp_path):
    """Of all references of a text."""
    curves = Curves(Run(tmp_path, Config(run_dir=str(tmp_path))))
    curves.open(0)
    curves.draw_references({"unigram": 3.2, "bigram": 2.15, "gzip -9": 2.4, "xz -9e": 2.1}, 5)
    curves.close()
    assert {line.name for line in (tmp_path / REFERENCES).iterdir()} == {
        "python_docs xz -9e 2.1000",
        "python_docs bigram 2.1500",
    }


@pytest.mark.skipif(os.name == "nt", reason="Windows has no limit of a file's size")
def test_a_disk_that_is_full_at_the_end(tmp_path):
    """The last points fail by one error of the caller's, and none that TensorBoard's thread prints on its own."""
    code = """
import resource, signal, sys
from pathlib import Path
from gpt.training.config.schema import Config
from gpt.training.metrics.curves import Curves
from gpt.training.run.run import Run

run = Run(Path(sys.argv[1]), Config(run_dir=sys.argv[1]))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
curves = Curves(run)
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
    """A run does without them."""
    session = begin_run(tiny_config(corpus_folder, "horizon=1steps", f"run_dir={tmp_path / 'run'}"))
    (tmp_path / "run" / REFERENCES).write_text("a file")
    fit(session)
    assert list(session.metrics["references"]) == ["unigram", "bigram"]


# --- updates ---


def test_update_ratios(run, events):
    """The measured share of the rows is that of these rows by hand, and close to that of the whole matrices."""
    weights = run[1].weights
    for layer in range(2):
        points = events.Scalars(f"weights/update_ratio/layer_{layer + 1}")
        assert [point.step for point in points] == [*range(3, 43, 3), 43]
        for point in points:
            before, after = weights[point.step - 2][layer], weights[point.step - 1][layer]
            ratios = []
            for every in (-(-4 * 36 // ROWS), 1):
                picked = [[p[::every].flatten().double() for p in side] for side in (before, after)]
                then, now = (torch.cat(side) for side in picked)
                ratios.append(float((now - then).norm() / then.norm()))
            assert point.value == pytest.approx(ratios[0], rel=1e-4)
            assert point.value == pytest.approx(ratios[1], rel=0.05)


# --- embeddings ---


def test_embeddings(run):
    """The projector's files, as it reads them: the last weights of each token, beside the token."""
    session, _ = run
    (config,) = text_format.Parse(
        (session.directory / "projector_config.pbtxt").read_text(), ProjectorConfig()
    ).embeddings
    shape = list(config.tensor_shape)
    found = np.fromfile(session.directory / config.tensor_path, "<f4").reshape(shape)
    header, *rows = (session.directory / config.metadata_path).read_text(encoding="utf-8").splitlines()
    tokens, kinds = zip(*(row.split("\t") for row in rows), strict=True)
    assert header == "token\tkind"
    assert kinds[:2] == ("letters", "white space") and len(set(kinds)) == 5  # no token of bytes is "space and letters"
    assert shape == [257, 36] and len(tokens) == 257
    assert tokens[:2] == ("a", "·") and "<|endoftext|>" in tokens and "⏎" in tokens
    weight = checkpoint.load(session.directory / "checkpoints/last.ckpt")["state_dict"]["token_embedding.weight"]
    assert np.array_equal(found[tokens.index("z")], weight[ord("z")].numpy())


def test_frequent_tokens(run):
    """Most frequent first, equally frequent ones by id."""
    corpora = run[0].text
    ids = corpora.sources[0].at_hand
    counts = np.bincount(ids, minlength=257)
    assert frequent(corpora) == sorted(range(257), key=lambda i: (-counts[i], i))
