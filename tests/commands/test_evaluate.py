"""python -m gpt.evaluate gives the figures of validation, of `transformers` and of slow sums."""

import json
import math
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import harness
from gpt import evaluate
from gpt.checkpoint import save_checkpoint
from gpt.data.batches import validation_batches
from gpt.data.corpus import DataConfig
from gpt.data.prepare import prepare
from gpt.data.tokenizer import Tokenizer, TokenizerConfig, byte_tokenizer, train_bpe
from gpt.loading import open_model
from gpt.model.loss import IGNORE_INDEX
from gpt.model.transformer import GPTConfig
from gpt.sampling.scoring import score, sum_scores
from harness import TINY_RUN, train, write_corpus
from models import SHAPE, gpt2_twin, make_checkpoint, small_model

T = SHAPE.context_length
EOT = byte_tokenizer().end_of_text
FIGURES = ("nats_per_token", "perplexity", "nats_per_byte", "bits_per_byte")


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A folder with a corpus, a cache with its dataset, and a checkpoint of a model with large weights."""
    home = tmp_path_factory.mktemp("evaluate")
    write_corpus(home)
    (home / "other.txt").write_text("omega psi chi phi ypsilon tau sigma rho pi omikron xi ny my lambda kappa " * 7)
    save(home / "run/checkpoints/best.ckpt", prepare_corpus(home, "text", str(home / "corpus.txt")).key)
    return home


@pytest.fixture(autouse=True)
def cache(home, monkeypatch):
    """The cache of this module instead of the project's."""
    monkeypatch.setattr(evaluate, "DEFAULT_CACHE", home / "cache")


def prepare_corpus(home: Path, name: str, path, **changes):
    data = DataConfig(name=name, path=path, **changes)
    return prepare(data, TokenizerConfig("byte"), T, home / "cache", lambda line: None)


def save(file: Path, corpus: object, tokenizer: Tokenizer | None = None, std: float = 0.3) -> Path:
    """Save a checkpoint of a model that was trained on a corpus, and return the file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    model = small_model(tokenizer=tokenizer, std=std)
    save_checkpoint(make_checkpoint(model, tokenizer, corpus=corpus), file)
    return file


def run(capsys, *arguments: object) -> tuple[str, str]:
    """Return what the command prints on stdout and stderr."""
    evaluate.main([str(argument) for argument in arguments])
    return capsys.readouterr()


def read_figures(capsys, *arguments: object) -> dict:
    """Return what the command prints as JSON."""
    out, err = run(capsys, *arguments, "--json")
    assert err == ""
    return json.loads(out)


def refusal(*arguments: object) -> str:
    return harness.refusal(evaluate.main, [str(argument) for argument in arguments])


# --- texts ---


def test_without_a_text_the_score_is_that_of_validation(home, capsys):
    """It is equal to the bit. The same text in a file gives the same figures."""
    source = prepare_corpus(home, "text", str(home / "corpus.txt")).sources[0]
    model, _ = open_model(home / "run")
    num_bytes = sum(map(len, source.validation_text()))
    expected = score(model, validation_batches(source.validation, 4096 // T, T, IGNORE_INDEX), num_bytes)
    figures = read_figures(capsys, "--checkpoint", home / "run")
    assert (figures["documents"], figures["bytes"], figures["tokens"]) == (1, num_bytes, len(source.validation) - 1)
    assert [figures[name] for name in FIGURES] == [getattr(expected, name) for name in FIGURES]
    lines = run(capsys, "--checkpoint", home / "run")[0].splitlines()
    assert lines == [
        f"{name.replace('_', ' '):<16}{f'{value:,.4f}' if isinstance(value, float) else value}"
        for name, value in figures.items()
    ]
    text = home / "validation.txt"
    text.write_bytes(b"".join(source.validation_text()))
    assert read_figures(capsys, "--checkpoint", home / "run", "--text", text) == figures | {"text": str(text)}


def test_reader_options_are_those_of_training(home, capsys):
    text = home / "latin.txt"
    text.write_bytes("un café|un río".encode("latin-1"))
    options = ["--encoding", "latin-1", "--separator", "|"]
    figures = read_figures(capsys, "--checkpoint", home / "run", "--text", text, *options)
    assert (figures["documents"], figures["bytes"]) == (2, len("un caféun río".encode()))


def test_the_validation_texts_of_a_mixture_count_together(home, capsys):
    paths = [str(home / "corpus.txt"), str(home / "other.txt")]
    dataset = prepare_corpus(home, "mix", paths, weights=[1.0, 2.0])
    file = save(home / "mixture.ckpt", dataset.key)
    model, _ = open_model(file)
    expected = sum_scores(
        score(
            model,
            validation_batches(source.validation, 4096 // T, T, IGNORE_INDEX),
            source.metadata["splits"]["validation"]["bytes"],
        )
        for source in dataset.sources
    )
    figures = read_figures(capsys, "--checkpoint", file)
    assert (figures["documents"], figures["tokens"], figures["bytes"]) == (2, expected.tokens, expected.bytes)
    assert figures["nats_per_token"] == expected.nats_per_token


def test_files_are_scored_as_one_text(home, capsys, tmp_path):
    """Each document follows an end-of-text, which is a predicted token between documents."""
    texts = ["the first", "second, with naïve é", "3"]
    (tmp_path / "a.txt").write_text(texts[0])
    (tmp_path / "b.jsonl").write_text("\n".join(json.dumps({"body": text}) for text in ("", *texts[1:])))
    ids = torch.tensor([token for text in texts for token in (EOT, *text.encode())])
    model, _ = open_model(home / "run")
    nats = 0.0
    for i in range(1, len(ids)):
        with torch.no_grad():
            nats += F.cross_entropy(model(ids[None, (i - 1) // T * T : i])[0, -1], ids[i]).item()
    num_bytes = sum(len(text.encode()) for text in texts)
    for paths in ([tmp_path], [tmp_path / "*"], [tmp_path / "a.txt", tmp_path / "b.jsonl", tmp_path / "a.txt"]):
        figures = read_figures(capsys, "--checkpoint", home / "run", "--text-field", "body", "--text", *paths)
        assert (figures["documents"], figures["bytes"], figures["tokens"]) == (3, num_bytes, num_bytes + 2)
        assert figures["nats_per_token"] == pytest.approx(nats / (num_bytes + 2), rel=1e-5)
        assert figures["nats_per_byte"] == pytest.approx(nats / num_bytes, rel=1e-5)


# --- figures ---


@pytest.fixture(scope="module")
def gpt2(home) -> Path:
    """A folder with a small GPT-2 with GPT-2's vocabulary and large random weights, as `transformers` saves it."""
    gpt2_twin(GPTConfig(29, 15, 2, 3)).save_pretrained(home / "gpt2")
    return home / "gpt2"


def strided_loss(folder: Path, ids: torch.Tensor, stride: int) -> float:
    """Return the strided loss as the documentation of `transformers` computes it.

    Only the weights are exact: its loop counts one token too few in every window but the first.
    """
    from transformers import GPT2LMHeadModel

    model = GPT2LMHeadModel.from_pretrained(folder).eval()
    length, previous_end, nats = model.config.n_positions, 0, 0.0
    for begin in range(0, len(ids), stride):
        end = min(begin + length, len(ids))
        labels = ids[None, begin:end].clone()
        labels[:, : -(end - previous_end)] = -100
        with torch.no_grad():
            nats += model(ids[None, begin:end], labels=labels).loss.item() * int((labels[:, 1:] != -100).sum())
        previous_end = end
        if end == len(ids):
            break
    return nats / (len(ids) - 1)


@pytest.mark.parametrize(
    ("stride", "size"), [(28, 997), *(pytest.param(stride, 4022, marks=pytest.mark.slow) for stride in (28, 13, 7))]
)
def test_strided_perplexity_equals_that_of_transformers(gpt2, home, capsys, tmp_path, stride, size):
    text = (home / "corpus.txt").read_text()[:size]
    (tmp_path / "text.txt").write_text(text)
    figures = read_figures(capsys, "--checkpoint", gpt2, "--text", tmp_path / "text.txt", "--stride", stride)
    tokenizer = open_model(gpt2)[1]
    ids = torch.tensor([tokenizer.end_of_text, *tokenizer.encode(text)])
    expected = strided_loss(gpt2, ids, stride)
    assert (len(text), figures["bytes"], figures["tokens"]) == (size, size, len(ids) - 1)
    assert figures["nats_per_token"] == pytest.approx(expected, rel=1e-6)
    assert figures["perplexity"] == pytest.approx(math.exp(expected), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "other"), [("fp32", "bf16"), ("bf16", "fp32"), ("fp16", "fp32")])
def test_a_runs_validation_is_reproduced_in_its_precision(tmp_path, capsys, precision, other):
    """The text is found in the cache that the run named."""
    write_corpus(tmp_path)
    data = [f"data.path={tmp_path}/corpus.txt", f"data.cache={tmp_path}/cache", f"run_dir={tmp_path}/run"]
    train(*TINY_RUN, *data, "horizon=20steps", "trainer.device=cpu", f"trainer.precision={precision}")
    metrics = json.loads((tmp_path / "run/metrics.json").read_text())
    last = tmp_path / "run/checkpoints/last.ckpt"
    figures = read_figures(capsys, "--checkpoint", last, "--precision", precision)
    assert figures["nats_per_token"] == pytest.approx(metrics["val_loss"], rel=1e-6)
    assert figures["nats_per_byte"] == pytest.approx(metrics["val_nats_per_byte"], rel=1e-6)
    assert figures["bits_per_byte"] == pytest.approx(metrics["val_bits_per_byte"], rel=1e-6)
    in_other_precision = read_figures(capsys, "--checkpoint", last, "--precision", other)
    assert 1e-7 < abs(in_other_precision["nats_per_token"] / metrics["val_loss"] - 1) < 1e-2


# --- mistakes ---


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--stride", "0"], "--stride=0 is out of range: it must be at least 1 and at most 13 (the model's context)"),
        (["--stride", "14"], "--stride=14 is out of range: it must be at least 1 and at most 13 (the model's context)"),
        (["--text", "{home}/rows.jsonl"], "{home}/rows.jsonl: line 1 has no text under 'text'; "
         "name the key with --text-field= (a)"),
        (["--text", "{home}/rows.jsonl", "--text-field", "a"], "{home}/rows.jsonl: every document is empty; "
         "give a text, or its key with --text-field="),
    ],
)  # fmt: skip
def test_mistakes_are_reported_with_an_option_of_this_command(home, capsys, arguments, line):
    (home / "rows.jsonl").write_text('{"a": ""}')
    arguments = [argument.format(home=home) for argument in arguments]
    refused = harness.command_refusal(capsys, "gpt.evaluate", "--checkpoint", home / "run", *arguments)
    assert refused == f"gpt.evaluate: {line.format(home=home)}"


def test_the_cache_may_be_named(home, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(evaluate, "DEFAULT_CACHE", tmp_path)
    file = home / "run/checkpoints/best.ckpt"
    assert refusal("--checkpoint", file).endswith(f"is not in {tmp_path}: give a text with --text")
    assert read_figures(capsys, "--checkpoint", file, "--cache", home / "cache")["checkpoint"] == str(file)


def test_only_the_text_of_the_run_is_its_validation_text(home, gpt2, tmp_path, capsys):
    """The cache has text of another run, or with another tokenizer; the key is damaged, or there is no run."""
    key = prepare_corpus(home, "text", str(home / "corpus.txt")).key
    reason = f"the validation text of its run, if any, is not in {home}/cache: give a text with --text"
    another = key | {"corpus": "0" * 64}
    damaged: list = [None, "text", {"mix": 3}, {"mix": []}, torch.ones(2), {"corpus": torch.ones(2)}]
    for corpus in (another, {"mix": [key, another]}, *damaged):
        file = save(tmp_path / "other.ckpt", corpus)
        assert refusal("--checkpoint", file) == f"{file}: {reason}"
    bpe = train_bpe(["ab " * 5], 257)  # merges nothing, but is not the byte tokenizer
    file = save(tmp_path / "other.ckpt", key, bpe)
    assert refusal("--checkpoint", file) == f"{file}: {reason}"
    assert refusal("--checkpoint", gpt2) == f"{gpt2}: {reason}"
    (home / "cache/damaged").mkdir()
    (home / "cache/damaged/dataset.json").write_text("{")
    assert read_figures(capsys, "--checkpoint", home / "run")["documents"] == 1  # the damaged dataset is skipped


def test_a_model_that_predicts_nothing_finite_is_refused(home):
    line = refusal("--checkpoint", save(home / "wild.ckpt", None, std=1e19), "--text", home / "corpus.txt")
    reason = "so its weights are probably damaged: use another checkpoint"
    assert re.fullmatch(rf"the model needs \S+ nats per token, {reason}", line)


def test_skipped_files_are_named_on_stderr(home, capsys, tmp_path):
    (tmp_path / "a.txt").write_text("alpha")
    (tmp_path / "b.png").write_bytes(b"\0\0")
    out, err = run(capsys, "--checkpoint", home / "run", "--text", tmp_path, "--json")
    assert (json.loads(out)["tokens"], err.count("\n")) == (5, 1)
    assert err.startswith("skipping 1 of 2 files")
