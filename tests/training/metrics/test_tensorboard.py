"""What a run shows in TensorBoard beside its curves' points: charts, references, updates of weights, embeddings."""

import json
import re
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

from gpt.exchange import checkpoint
from gpt.sampling.scoring import Score
from gpt.training import decide
from gpt.training.callbacks.base import Clock
from gpt.training.callbacks.samples import frequent
from gpt.training.config.loading import validate
from gpt.training.config.schema import Config
from gpt.training.metrics.curves import ROWS, Curves
from gpt.training.metrics.metrics import Metrics
from gpt.training.metrics.tensorboard import layout
from gpt.training.run.run import Run
from gpt.training.session import Session
from harness import StopAt, differences, read_events, read_table, tiny_config

EXPERIMENT = ["horizon=43steps", "trainer.validate_every=7", "trainer.precision=fp32", "model.d_model=36"]


class Watch(Callback):
    """The weights before and after each step."""

    def __init__(self) -> None:
        self.weights: list[list[list[torch.Tensor]]] = []  # by step, block and matrix

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx: int) -> None:
        if (batch_idx + 1) % module.schedule.accumulation == 0:
            blocks = module.model.blocks
            self.weights.append([[p.detach().clone() for p in block.parameters() if p.dim() == 2] for block in blocks])


@pytest.fixture(scope="module")
def run(corpus_folder) -> tuple[Session, Watch]:
    """A run that passes one reference of two."""
    session, watch = decide.begin(tiny_config(corpus_folder, *EXPERIMENT, f"run_dir={corpus_folder / 'run'}")), Watch()
    session.fit([watch])
    return session, watch


@pytest.fixture(scope="module")
def events(run) -> EventAccumulator:
    return read_events(run[0].run_dir)


# --- all that a run says of itself ---


def test_files_events_and_closing_lines_agree(run, events, capsys):
    """Every point is in metrics.csv and, rounded to float32, in TensorBoard, where references are lines of their own;
    metrics.json has the last of them.
    """
    session, _ = run
    table = read_table(session.run_dir)
    shown = {tag: [(one.step, one.value) for one in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    expected = {tag: [(step, float(np.float32(value))) for step, value in points] for tag, points in table.items()}
    assert {tag: points for tag, points in expected.items() if not tag.startswith("val_references/")} == shown
    assert all(len(dict(points)) == len(points) for points in table.values())
    figures = json.loads((session.run_dir / "metrics.json").read_text())
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
    session.report()
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


def test_references_are_passed_once(tmp_path):
    """Being equal does not pass one, and a later rise does not take it back."""
    written: list[dict] = []
    curves = SimpleNamespace(write=lambda scalars, step: written.append(scalars))
    metrics = Metrics(Run(tmp_path, Config()), None, None, curves)  # type: ignore[arg-type]
    metrics._references = {"a": 2.0, "b": 1.0}
    for step, bits in enumerate((3.0, 2.0, 1.5, 2.5, 0.5, 0.4)):
        metrics._compare(step, Score(bits * np.log(2), 1, 1))
    assert metrics.state_dict() == {"a": 2, "b": 4}
    assert written == [{"val_references/a": 2.0, "val_references/b": 1.0}] * 6


def test_resumed_run(run, corpus_folder, tmp_path):
    """Stopped between a log point (33) and a validation (35), and after it, a run knows what it has passed, and its
    last training loss.
    """
    part = tmp_path / "run"
    for session, step in (
        (decide.begin(tiny_config(corpus_folder, *EXPERIMENT, f"run_dir={part}")), 34),
        (lambda: decide.resume(str(part)), 35),
    ):
        (session() if callable(session) else session).fit([StopAt(step)])
    passed = run[0].metrics["references"]["unigram"]["passed_at"]
    assert checkpoint.load(part / "checkpoints/last.ckpt")["callbacks"]["Metrics"] == {"unigram": passed}
    last = dict(read_table(run[0].run_dir)["train/loss"])[33]
    assert json.loads((part / "metrics.json").read_text())["train_loss"] == last
    decide.resume(str(part)).fit()
    assert differences(part, run[0].run_dir) == []


def lines(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """The lines that TensorBoard shows of the references in a folder: name to points."""
    return {
        line.name: [(event.step, event.value) for event in read_events(line).Scalars("val/bits_per_byte")]
        for line in (folder / ".references").iterdir()
    }


def test_a_clock_that_was_set_back(corpus_folder, tmp_path, monkeypatch):
    """The curves of a session whose clock is an hour behind follow those of the one before."""
    real, config = time.time, tiny_config(corpus_folder, "horizon=12steps", f"run_dir={tmp_path / 'run'}")
    monkeypatch.setattr(time, "time", lambda: real() + 3600)
    decide.begin(config).fit([StopAt(6)])
    monkeypatch.setattr(time, "time", real)
    decide.resume(str(tmp_path / "run")).fit()
    steps = [event.step for event in read_events(tmp_path / "run").Scalars("train/loss")]
    assert steps == [3, 6, 9, 12]


def test_lines(run, corpus_folder, tmp_path, monkeypatch):
    """Each reference is one line, named with its figure, which runs in runs/ share; the longest run draws it last."""
    references = {name: float(np.float32(one["bits_per_byte"])) for name, one in run[0].metrics["references"].items()}
    expected = lambda steps: {f"{name} {y:.4f}": [(0, y), (steps, y)] for name, y in references.items()}  # noqa: E731
    assert lines(run[0].run_dir) == expected(43)
    monkeypatch.chdir(tmp_path)
    for steps in (2, 5, 3):
        decide.begin(tiny_config(corpus_folder, f"horizon={steps}steps", "data.prompts=[]"), "tiny").fit()
    assert lines(tmp_path / "runs") == expected(5)
    assert list(tmp_path.rglob(".references")) == [tmp_path / "runs/.references"]


def test_lines_that_cannot_be_drawn(corpus_folder, tmp_path):
    """A run does without them."""
    session = decide.begin(tiny_config(corpus_folder, "horizon=1steps", f"run_dir={tmp_path / 'run'}"))
    (tmp_path / "run/.references").write_text("a file")
    session.fit()
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


@pytest.mark.parametrize(
    ("skipped", "expected"),
    [(None, [5]), (False, [5]), (True, [])],
)
def test_steps_without_update_ratios(run, tmp_path, skipped, expected):
    """Steps that fp16 skips have no point."""
    curves, written = Curves(tmp_path, Clock()), {}
    curves.writing = True
    model = torch.nn.Linear(7, 3)
    module = SimpleNamespace(
        schedule=run[0].schedule,
        config=SimpleNamespace(trainer=SimpleNamespace(log_every=5), logger=["csv"]),
        model=SimpleNamespace(blocks=[model]),
        loss_scaling=None if skipped is None else SimpleNamespace(skipped=skipped),
    )
    for step in (4, 5, 6):
        curves.on_before_optimizer_step(SimpleNamespace(global_step=step - 1), module, None)  # type: ignore[arg-type]
        with torch.no_grad():
            model.weight *= 1.25
        written[step] = curves._update_ratios(module)  # type: ignore[arg-type]
    ratio = {"weights/update_ratio/layer_1": pytest.approx(0.25)}
    assert written == {step: ratio if step in expected else {} for step in (4, 5, 6)}


# --- embeddings ---


def test_embeddings(run):
    """The projector's files, as it reads them: the last weights of each token, beside the token."""
    session, _ = run
    (config,) = text_format.Parse(
        (session.run_dir / "projector_config.pbtxt").read_text(), ProjectorConfig()
    ).embeddings
    shape = list(config.tensor_shape)
    found = np.fromfile(session.run_dir / config.tensor_path, "<f4").reshape(shape)
    header, *rows = (session.run_dir / config.metadata_path).read_text(encoding="utf-8").splitlines()
    tokens, kinds = zip(*(row.split("\t") for row in rows), strict=True)
    assert header == "token\tkind"
    assert kinds[:2] == ("letters", "white space") and len(set(kinds)) == 5  # no token of bytes is "space and letters"
    assert shape == [257, 36] and len(tokens) == 257
    assert tokens[:2] == ("a", "·") and "<|endoftext|>" in tokens and "⏎" in tokens
    weight = checkpoint.load(session.run_dir / "checkpoints/last.ckpt")["state_dict"]["token_embedding.weight"]
    assert np.array_equal(found[tokens.index("z")], weight[ord("z")].numpy())


def test_frequent_tokens(run):
    """Most frequent first, equally frequent ones by id."""
    corpora = run[0].corpora
    ids = corpora.sources[0].train[: len(corpora.sources[0].train)]
    counts = np.bincount(ids, minlength=257)
    assert frequent(corpora) == sorted(range(257), key=lambda i: (-counts[i], i))
