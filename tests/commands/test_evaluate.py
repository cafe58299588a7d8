"""python -m gpt.evaluate: the same figures as validation, `transformers` and slow sums, and one line for mistakes."""

import json
import math
import re
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

import harness
from gpt import checkpoint, evaluate
from gpt.data.batches import validation_batches
from gpt.data.corpus import DataConfig
from gpt.data.prepare import prepare
from gpt.data.readers import Document
from gpt.data.tokenizer import Tokenizer, TokenizerConfig, byte_tokenizer, train_bpe
from gpt.loading import open_model
from gpt.model.loss import IGNORE_INDEX
from gpt.sampling import scoring
from gpt.sampling.scoring import score, sum_scores
from harness import TINY_RUN, train, write_corpus
from model_files import SHAPE, make_checkpoint, small_model

T = SHAPE.context_length
EOT = byte_tokenizer().end_of_text


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A folder with a corpus, a cache in which it is prepared, and a checkpoint of a model with large weights."""
    home = tmp_path_factory.mktemp("evaluate")
    write_corpus(home)
    (home / "other.txt").write_text("omega psi chi phi ypsilon tau sigma rho pi omikron xi ny my lambda kappa " * 7)
    save(home / "run/checkpoints/best.ckpt", prepare_text(home, "text", str(home / "corpus.txt")).key)
    return home


@pytest.fixture(autouse=True)
def our_cache(home, monkeypatch):
    """The cache of this test instead of the project's."""
    monkeypatch.setattr(evaluate, "DEFAULT_CACHE", home / "cache")


def prepare_text(home: Path, name: str, path, **changes):
    data = DataConfig(name=name, path=path, **changes)
    return prepare(data, TokenizerConfig("byte"), T, home / "cache", print_line=lambda line: None)


def save(file: Path, corpus: object, tokenizer: Tokenizer | None = None, scale: float = 0.3) -> Path:
    """Save a checkpoint that says it was trained on a corpus."""
    file.parent.mkdir(parents=True, exist_ok=True)
    checkpoint.save_checkpoint(
        make_checkpoint(small_model(tokenizer=tokenizer, scale=scale), tokenizer, corpus=corpus), file
    )
    return file


def printed(capsys, *arguments: object) -> tuple[str, str]:
    """What the command prints on stdout and stderr."""
    evaluate.main([str(argument) for argument in arguments])
    return capsys.readouterr()


def figures(capsys, *arguments: object) -> dict:
    """What the command prints as JSON."""
    out, err = printed(capsys, *arguments, "--json")
    assert err == ""
    return json.loads(out)


def refusal(*arguments: object) -> str:
    """The one line with which the command refuses."""
    return harness.refusal(evaluate.main, [str(argument) for argument in arguments])


# --- texts ---


def test_validation_text(home, capsys):
    """Without a text, the score is that of validation during training, to the bit; as a table, in a few lines."""
    prepared = prepare_text(home, "text", str(home / "corpus.txt")).sources[0]
    model, _ = open_model(home / "run")
    [size] = {sum(map(len, prepared.validation_text()))}
    expected = score(model, validation_batches(prepared.validation, 4096 // T, T, IGNORE_INDEX), size)
    found = figures(capsys, "--checkpoint", home / "run")
    assert (found["documents"], found["bytes"], found["tokens"]) == (1, size, len(prepared.validation) - 1)
    names = ("nats_per_token", "perplexity", "nats_per_byte", "bits_per_byte")
    assert [found[name] for name in names] == [getattr(expected, name) for name in names]
    assert printed(capsys, "--checkpoint", home / "run")[0] == (
        f"checkpoint      {home}/run/checkpoints/best.ckpt\n"
        "precision       fp32\n"
        "text            the run's validation text\n"
        "context         13\n"
        "stride          13\n"
        "documents       1\n"
        f"bytes           {size}\n"
        f"tokens          {size}\n"
        f"nats per token  {expected.nats_per_token:.4f}\n"
        f"perplexity      {expected.perplexity:,.4f}\n"
        f"nats per byte   {expected.nats_per_byte:.4f}\n"
        f"bits per byte   {expected.bits_per_byte:.4f}\n"
    )
    text = home / "validation.txt"
    text.write_bytes(b"".join(prepared.validation_text()))
    again = figures(capsys, "--checkpoint", home / "run", "--text", text)
    assert {name for name in found if found[name] != again[name]} == {"text"}


def test_how_a_text_is_read(home, capsys):
    """The options of the readers are those of training."""
    text = home / "latin.txt"
    text.write_bytes("un café|un río".encode("latin-1"))
    found = figures(capsys, "--checkpoint", home / "run", "--text", text, "--encoding", "latin-1", "--separator", "|")
    assert (found["documents"], found["bytes"]) == (2, len("un caféun río".encode()))


def test_mixture(home, capsys):
    """The validation texts of a mixture count together, as in training."""
    paths = [str(home / "corpus.txt"), str(home / "other.txt")]
    corpora = prepare_text(home, "mix", paths, weights=[1.0, 2.0])
    file = save(home / "mixture.ckpt", corpora.key)
    model, _ = open_model(file)
    splits = [source.metadata["splits"]["validation"] for source in corpora.sources]
    expected = sum_scores(
        score(model, validation_batches(source.validation, 4096 // T, T, IGNORE_INDEX), split["bytes"])
        for source, split in zip(corpora.sources, splits, strict=True)
    )
    found = figures(capsys, "--checkpoint", file)
    assert (found["documents"], found["tokens"], found["bytes"]) == (2, expected.tokens, expected.bytes)
    assert found["nats_per_token"] == expected.nats_per_token


def test_documents(home, capsys, tmp_path):
    """Several files are scored as one text: each document follows an end-of-text, which counts between documents."""
    texts = ["the first", "second, with naïve é", "3"]
    (tmp_path / "a.txt").write_text(texts[0])
    (tmp_path / "b.jsonl").write_text("\n".join(json.dumps({"body": text}) for text in ("", *texts[1:])))
    ids = torch.tensor([token for text in texts for token in (EOT, *text.encode())])
    model, _ = open_model(home / "run")
    nats = 0.0
    for i in range(1, len(ids)):
        with torch.no_grad():
            nats += F.cross_entropy(model(ids[None, (i - 1) // T * T : i])[0, -1], ids[i]).item()
    for given in ([tmp_path], [tmp_path / "*"], [tmp_path / "a.txt", tmp_path / "b.jsonl", tmp_path / "a.txt"]):
        found = figures(capsys, "--checkpoint", home / "run", "--text-field", "body", "--text", *given)
        size = sum(len(text.encode()) for text in texts)
        assert (found["documents"], found["bytes"], found["tokens"]) == (3, size, size + 2)
        assert found["nats_per_token"] == pytest.approx(nats / (size + 2), rel=1e-5)
        assert found["nats_per_byte"] == pytest.approx(nats / size, rel=1e-5)


@pytest.mark.parametrize("vocab_size", [257, 65537])
def test_ids_of_any_width(vocab_size):
    """Ids are stored in as many bytes as the vocabulary needs, and a text of one byte is long enough."""
    tokenizer = byte_tokenizer()
    tokenizer.vocab_size, tokenizer.end_of_text = vocab_size, vocab_size - 1
    corpus = evaluate.Corpus("text", (Path("a"),), lambda file, start: map(Document, [["x"], [], ["", "yz"]]))
    text = evaluate.encode(corpus, tokenizer)
    assert text.tokens.tolist() == [vocab_size - 1, ord("x"), vocab_size - 1, ord("y"), ord("z")]
    assert (text.tokens.dtype, text.documents, text.bytes) == ("uint16" if vocab_size == 257 else "uint32", 2, 3)


@pytest.fixture(scope="module")
def theirs(home) -> Path:
    """A GPT-2 with GPT-2's vocabulary, large random weights and a small shape, as `transformers` saves it."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(5)
    model = GPT2LMHeadModel(GPT2Config(n_positions=29, n_embd=15, n_layer=2, n_head=3))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    model.save_pretrained(home / "theirs")
    return home / "theirs"


def usual_loss(folder: Path, ids: torch.Tensor, stride: int) -> float:
    """The strided loss as the documentation of `transformers` computes it.

    Only the weights are exact: its loop counts one token too few of every window but the first.
    """
    from transformers import GPT2LMHeadModel

    model = GPT2LMHeadModel.from_pretrained(folder).eval()
    length, end_before, nats = model.config.n_positions, 0, 0.0
    for begin in range(0, len(ids), stride):
        end = min(begin + length, len(ids))
        labels = ids[None, begin:end].clone()
        labels[:, : -(end - end_before)] = -100
        with torch.no_grad():
            nats += model(ids[None, begin:end], labels=labels).loss.item() * int((labels[:, 1:] != -100).sum())
        end_before = end
        if end == len(ids):
            break
    return nats / (len(ids) - 1)


@pytest.mark.parametrize(
    ("stride", "size"), [(28, 997), *(pytest.param(stride, 4022, marks=pytest.mark.slow) for stride in (28, 13, 7))]
)
def test_equals_transformers(theirs, home, capsys, tmp_path, stride, size):
    """The usual strided perplexity of `transformers` on the ids of a text after an end-of-text."""
    text = (home / "corpus.txt").read_text()[:size]
    (tmp_path / "text.txt").write_text(text)
    found = figures(capsys, "--checkpoint", theirs, "--text", tmp_path / "text.txt", "--stride", stride)
    tokenizer = open_model(theirs)[1]
    ids = torch.tensor([tokenizer.end_of_text, *tokenizer.encode(text)])
    expected = usual_loss(theirs, ids, stride)
    assert (len(text), found["bytes"], found["tokens"]) == (size, size, len(ids) - 1)
    assert found["nats_per_token"] == pytest.approx(expected, rel=1e-6)
    assert found["perplexity"] == pytest.approx(math.exp(expected), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_reproduces_a_run(tmp_path, monkeypatch, capsys, precision):
    """A finished run's last checkpoint has the validation loss of its metrics.json, in the precision of training."""
    write_corpus(tmp_path)
    given = [f"data.path={tmp_path}/corpus.txt", f"data.cache={tmp_path}/cache", f"run_dir={tmp_path}/run"]
    settings = ["horizon=20steps", "trainer.device=cpu", f"trainer.precision={precision}"]
    train(*TINY_RUN, *given, *settings)
    monkeypatch.setattr(evaluate, "DEFAULT_CACHE", tmp_path / "cache")
    metrics = json.loads((tmp_path / "run/metrics.json").read_text())
    found = figures(capsys, "--checkpoint", tmp_path / "run/checkpoints/last.ckpt", "--precision", precision)
    assert found["nats_per_token"] == pytest.approx(metrics["val_loss"], rel=1e-6)
    assert found["nats_per_byte"] == pytest.approx(metrics["val_nats_per_byte"], rel=1e-6)
    assert found["bits_per_byte"] == pytest.approx(metrics["val_bits_per_byte"], rel=1e-6)
    other = {"fp32": "bf16", "bf16": "fp32", "fp16": "fp32"}[precision]
    elsewhere = figures(capsys, "--checkpoint", tmp_path / "run/checkpoints/last.ckpt", "--precision", other)
    assert 1e-7 < abs(elsewhere["nats_per_token"] / metrics["val_loss"] - 1) < 1e-2


def test_out_of_memory(home, capsys, monkeypatch):
    """If memory runs out, that is said in one line."""
    message = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 7 bytes"
    monkeypatch.setattr(scoring, "strided_score", mock.Mock(side_effect=RuntimeError(message)))
    told = harness.command_refusal(capsys, "gpt.evaluate", "--checkpoint", home / "run", "--text", home / "corpus.txt")
    assert told.startswith("gpt.evaluate: memory has run out: choose a smaller model")


# --- mistakes ---


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--stride", "0"], "--stride=0 is out of range: it must be at least 1 and at most 13 (the model's context)"),
        (["--stride", "14"], "--stride=14 is out of range: it must be at least 1 and at most 13 (the model's context)"),
        (["--text", "nowhere"], "--text='nowhere' names no text file: "
         "give the path of a file, a folder or a quoted glob"),
        (["--text", "{home}/empty.txt"], "{home}/empty.txt: the file is empty; give a file with text in it"),
        (["--text", "{home}/latin.txt"], "{home}/latin.txt: not UTF-8 (byte 0xe9 at offset 1); "
         "convert it first, for example with iconv -f windows-1252 -t utf-8, or set --encoding=windows-1252 or "
         "--errors=replace"),
        (["--text", "{home}/rows.jsonl"], "{home}/rows.jsonl: line 1 has no text under 'text'; "
         "name the key with --text-field= (a)"),
        (["--text", "{home}/rows.jsonl", "--text-field", "a"], "{home}/rows.jsonl: every document is empty; "
         "give a text, or its key with --text-field="),
    ],
)  # fmt: skip
def test_mistakes(home, capsys, arguments, complaint):
    """Each in one line that names an option of this command."""
    (home / "empty.txt").touch()
    (home / "latin.txt").write_bytes(b"b\xe9")
    (home / "rows.jsonl").write_text('{"a": ""}')
    given = [argument.format(home=home) for argument in arguments]
    told = harness.command_refusal(capsys, "gpt.evaluate", "--checkpoint", home / "run", *given)
    assert told == f"gpt.evaluate: {complaint.format(home=home)}"


def test_no_validation_text(home, theirs, tmp_path):
    """The text of another run, of none, of one with another tokenizer, or damaged, is not taken for this run's."""
    key = prepare_text(home, "text", str(home / "corpus.txt")).key
    gone = f"the validation text of its run, if any, is not in {home}/cache: give a text with --text"
    mixed = {"mix": [key, key | {"corpus": "0" * 64}]}
    strange: list = [None, "text", {"mix": 3}, {"mix": []}, torch.ones(2), {"corpus": torch.ones(2)}]
    for corpus in (key | {"corpus": "0" * 64}, mixed, *strange):
        file = save(tmp_path / "other.ckpt", corpus)
        assert refusal("--checkpoint", file) == f"{file}: {gone}"
    bpe = train_bpe(["ab " * 5], 257)  # merges nothing, but is no byte tokenizer
    file = save(tmp_path / "other.ckpt", key, bpe)
    assert refusal("--checkpoint", file) == f"{file}: {gone}"
    assert refusal("--checkpoint", theirs) == f"{theirs}: {gone}"


def test_damaged_manifest(home, capsys):
    """A prepared text whose dataset.json is damaged is passed over."""
    (home / "cache/another").mkdir()
    (home / "cache/another/dataset.json").write_text("{")
    (home / "cache/another/train.bin").touch()
    assert figures(capsys, "--checkpoint", home / "run")["documents"] == 1


def test_damaged_model(home):
    """A model that predicts nothing finite, or next to nothing, is no figure."""
    line = refusal("--checkpoint", save(home / "wild.ckpt", None, scale=1e19), "--text", home / "corpus.txt")
    assert re.fullmatch(
        r"the model needs \S+ nats per token, so its weights are probably damaged: use another checkpoint", line
    )


def test_skipped_files_are_named(home, capsys, tmp_path):
    """What the readers skip is said on stderr, so that the figures stay alone on stdout."""
    (tmp_path / "a.txt").write_text("alpha")
    (tmp_path / "b.png").write_bytes(b"\0\0")
    out, err = printed(capsys, "--checkpoint", home / "run", "--text", tmp_path, "--json")
    assert (json.loads(out)["tokens"], err.count("\n")) == (5, 1)
    assert err.startswith("skipping 1 of 2 files")
