"""What a run shows in TensorBoard beside its curves' points: charts, references, updates of weights, embeddings."""

import json
import re
import shutil
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

from gpt.errors import UserError
from gpt.exchange import checkpoint
from gpt.sampling.scoring import Score
from gpt.training import metrics as metrics_module
from gpt.training.board import layout
from gpt.training.config import validate
from gpt.training.embeddings import frequent
from gpt.training.metrics import References
from gpt.training.session import Session
from gpt.training.updates import ROWS, UpdateRatios
from harness import StopAt, differences, read_table, tiny_config, write_corpus

EXPERIMENT = ["horizon=43steps", "trainer.validate_every=7", "trainer.precision=fp32", "model.d_model=36"]


class Watch(Callback):
    """The weights before and after each step."""

    def __init__(self) -> None:
        self.weights: list[list[list[torch.Tensor]]] = []  # by step, block and matrix

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx: int) -> None:
        if (batch_idx + 1) % module.plan.accumulation == 0:
            blocks = module.model.blocks
            self.weights.append([[p.detach().clone() for p in block.parameters() if p.dim() == 2] for block in blocks])


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("board")
    write_corpus(folder)
    return folder


@pytest.fixture(scope="module")
def run(folder) -> tuple[Session, Watch]:
    """A run that passes one reference of two."""
    session, watch = Session.begin(tiny_config(folder, *EXPERIMENT, f"run_dir={folder / 'run'}")), Watch()
    session.fit([watch])
    return session, watch


@pytest.fixture(scope="module")
def events(run) -> EventAccumulator:
    events = EventAccumulator(str(run[0].run_dir), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    return events


# --- all that a run says of itself ---


def test_files_events_and_closing_lines_agree(run, events, capsys):
    """Every point is in metrics.csv and, rounded to float32, in TensorBoard; metrics.json has the last of them."""
    session, _ = run
    table = read_table(session.run_dir)
    shown = {tag: [(one.step, one.value) for one in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert {tag: [(step, float(np.float32(value))) for step, value in points] for tag, points in table.items()} == shown
    figures = json.loads((session.run_dir / "metrics.json").read_text())
    assert figures == session.metrics
    last = {tag: points[-1] for tag, points in table.items()}
    assert last["train/loss"] == (43, figures["train_loss"])
    assert last["val/loss"] == (43, figures["val_loss"])
    assert last["val/bits_per_byte"] == (43, figures["val_bits_per_byte"])
    assert min(table["val/loss"], key=lambda point: point[1])[::-1] == (figures["best_val_loss"], figures["best_step"])
    assert list(figures["references"]) == ["unigram", "bigram"]
    for name, reference in figures["references"].items():
        points = table[f"reference/{name}"]
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


def test_table_of_references(run, events):
    """The Text tab says which references were passed, from the validation on that passed the first."""
    (found,) = events.Tensors("references/text_summary")
    reference = run[0].metrics["references"]["unigram"]
    assert found.step == reference["passed_at"]
    text = found.tensor_proto.string_val[0].decode()
    assert f"| unigram | {reference['bits_per_byte']:.4f} | {found.step} |" in text.splitlines()
    assert text.splitlines()[-1].endswith("|  |")


def test_custom_scalars(run, events):
    """The charts of the CUSTOM SCALARS tab, as TensorBoard reads them: none is empty, and one curve is left out."""
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
    assert {"val/bits_per_byte", "reference/unigram", "reference/bigram"} in shown.values()
    assert {"weights/update_ratio/layer_1", "weights/update_ratio/layer_2"} in shown.values()
    assert set().union(*shown.values()) == {tag for tag in tags if tag != "perf/mfu"}


def test_charts_of_other_runs(run):
    """A mixture has charts of its corpora, fp16 one of its scale; no prompts or whole weights leave one out each."""
    titles = lambda config: {title for group in layout(config).values() for title in group}  # noqa: E731
    data = {"name": "mix", "path": ["python_docs", "x.txt"], "weights": [1, 1], "prompts": []}
    trainer = {"precision": "fp16", "strategy": "fsdp"}
    mine, theirs = (
        titles(run[0].config),
        titles(validate({"data": data, "trainer": trainer, "optim": {"name": "adamw"}})),
    )
    assert theirs - mine == {"bits per byte", "epochs", "loss scale"}
    assert mine - theirs == {"update-to-weight ratio by layer", "longest copied passage, characters"}


# --- references ---


def test_references_are_passed_once(monkeypatch):
    """Being equal does not pass one, and a later rise does not take it back."""
    monkeypatch.setattr(metrics_module, "references", lambda sources: {"a": 2.0, "b": 1.0})
    written: list[dict] = []
    found = References(SimpleNamespace(write=lambda scalars, step: written.append(scalars), writer=None))  # type: ignore[arg-type]
    trainer, module = SimpleNamespace(is_global_zero=True), SimpleNamespace(corpora=SimpleNamespace(sources=()))
    for step, bits in enumerate((3.0, 2.0, 1.5, 2.5, 0.5, 0.4)):
        found.on_validated(trainer, module, step, Score(bits * np.log(2), 1, 1))  # type: ignore[arg-type]
    assert found.figures["a"] == {"bits_per_byte": 2.0, "passed_at": 2}
    assert found.figures["b"] == {"bits_per_byte": 1.0, "passed_at": 4}
    assert written == [{"reference/a": 2.0, "reference/b": 1.0}] * 6


@pytest.fixture(scope="module")
def stopped(run, folder) -> Path:
    """The same run, stopped between a log point, at step 33, and a validation, at step 35."""
    session = Session.begin(tiny_config(folder, *EXPERIMENT, f"run_dir={folder / 'stopped'}"))
    with pytest.raises(SystemExit):
        session.fit([StopAt(34)])
    return session.run_dir


@pytest.fixture
def hurt(stopped, tmp_path) -> Path:
    return Path(shutil.copytree(stopped, tmp_path / "run"))


def resume(run_dir: Path) -> Session:
    session = Session.resume(str(run_dir))
    assert session is not None
    return session


def test_resumed_run(run, hurt):
    """Stopped before a validation and after it, a run knows what it has passed, and its last training loss."""
    passed = run[0].metrics["references"]["unigram"]["passed_at"]
    assert checkpoint.load(hurt / "checkpoints/last.ckpt")["callbacks"]["References"] == {
        "passed_at": {"unigram": passed}
    }
    with pytest.raises(SystemExit):
        resume(hurt).fit([StopAt(35)])
    assert (
        json.loads((hurt / "metrics.json").read_text())["train_loss"]
        == dict(read_table(run[0].run_dir)["train/loss"])[33]
    )
    resume(hurt).fit()
    assert differences(hurt, run[0].run_dir) == []


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"References": {"passed_at": {"unigram": "7"}}}, r"callbacks\.References\.passed_at\.unigram is '7'"),
        ({"References": {"passed_at": 7}}, r"callbacks\.References\.passed_at is of type int"),
        ({"References": {}}, "callbacks.References has no 'passed_at'"),
        ({"Curves": {"losses": 0.0, "num_losses": 0, "loss": "7"}}, r"callbacks\.Curves\.loss is '7'"),
    ],
)
def test_damaged_states(hurt, state, words):
    """The state of references and curves is checked like the rest of a checkpoint."""
    payload = checkpoint.load(hurt / "checkpoints/last.ckpt")
    payload["callbacks"] |= state
    checkpoint.save(payload, hurt / "checkpoints/last.ckpt")
    with pytest.raises(UserError, match=words):
        resume(hurt).fit()


def test_older_checkpoints(run, hurt):
    """A run that an older version began, without references, goes on and passes them now."""
    payload = checkpoint.load(hurt / "checkpoints/last.ckpt")
    del payload["callbacks"]["References"], payload["callbacks"]["Curves"]["loss"]
    checkpoint.save(payload, hurt / "checkpoints/last.ckpt")
    resumed = resume(hurt)
    resumed.fit()
    assert resumed.metrics["references"]["unigram"]["passed_at"] == 35
    assert resumed.metrics["val_loss"] == run[0].metrics["val_loss"]


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
    ("strategy", "skipped", "expected"),
    [("auto", None, [5]), ("auto", False, [5]), ("auto", True, []), ("fsdp", None, [])],
)
def test_steps_without_update_ratios(run, strategy, skipped, expected):
    """Steps that fp16 skips have no point, and weights that are split among devices have none at all."""
    written: dict[int, dict] = {}
    ratios = UpdateRatios(SimpleNamespace(writing=True, write=lambda scalars, step: written.update({step: scalars})))  # type: ignore[arg-type]
    model = torch.nn.Linear(7, 3)
    module = SimpleNamespace(
        plan=run[0].plan,
        config=SimpleNamespace(trainer=SimpleNamespace(log_every=5, strategy=strategy), logger=["csv"]),
        model=SimpleNamespace(blocks=[model]),
        loss_scaling=None if skipped is None else SimpleNamespace(skipped=skipped),
    )
    for step in (4, 5, 6):
        ratios.on_before_optimizer_step(SimpleNamespace(global_step=step - 1), module, None)  # type: ignore[arg-type]
        with torch.no_grad():
            model.weight *= 1.25
        ratios.on_step_end(None, module, step)  # type: ignore[arg-type]
    assert written == {step: {"weights/update_ratio/layer_1": pytest.approx(0.25)} for step in expected}


# --- embeddings ---


def test_embeddings(run):
    """The projector's files, as it reads them: the last weights of each token, beside the token."""
    session, _ = run
    (config,) = text_format.Parse(
        (session.run_dir / "projector_config.pbtxt").read_text(), ProjectorConfig()
    ).embeddings
    shape = list(config.tensor_shape)
    found = np.fromfile(session.run_dir / config.tensor_path, "<f4").reshape(shape)
    tokens = (session.run_dir / config.metadata_path).read_text(encoding="utf-8").splitlines()
    assert shape == [257, 36] and len(tokens) == 257
    assert tokens[:2] == ["a", "·"] and "<|endoftext|>" in tokens and "⏎" in tokens
    weight = checkpoint.load(session.run_dir / "checkpoints/last.ckpt")["state_dict"]["token_embedding.weight"]
    assert np.array_equal(found[tokens.index("z")], weight[ord("z")].numpy())


def test_frequent_tokens(run):
    """Most frequent first, equally frequent ones by id."""
    corpora = run[0].corpora
    ids = corpora.sources[0].train[: len(corpora.sources[0].train)]
    counts = np.bincount(ids, minlength=257)
    expected = sorted(range(257), key=lambda i: (-counts[i], i))
    assert frequent(corpora, 257).tolist() == expected
    assert frequent(corpora, 11).tolist() == expected[:11]
