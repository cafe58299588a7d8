"""One way to open a model or a tokenizer: which file a path stands for, and what is refused in one line."""

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from gpt.errors import UserError
from gpt.exchange.checkpoint import save
from gpt.exchange.opening import find_checkpoint, open_model, open_tokenizer
from gpt.model.transformer import GPT, GPTConfig, ModelConfig
from gpt.text import shards
from gpt.text.tokenizer import Tokenizer, byte_tokenizer, gpt2_tokenizer, train_bpe

ROOT = Path(__file__).parents[2]
SHAPE = ModelConfig(context_length=13, d_model=14, num_layers=2, num_heads=7)
STORY = "It was the best of times, it was the worst of times; 2²³ ≠ 10 €, naïve café\r\n"
GPT2, BPE = gpt2_tokenizer(), train_bpe([STORY * 3], 277)


def write_checkpoint(file: Path, tokenizer: object = None, seed: int = 3) -> GPT:
    """Save a small model, which is returned; or a checkpoint without weights whose tokenizer is the one given."""
    torch.manual_seed(seed)
    model = GPT(GPTConfig(**asdict(SHAPE), vocab_size=BPE.vocab_size))
    stored = BPE.to_dict() if tokenizer is None else tokenizer
    weights = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    file.parent.mkdir(parents=True, exist_ok=True)
    save({"format": 1, "state_dict": weights, "config": {"model": asdict(SHAPE)}, "tokenizer": stored}, file)
    return model.eval()


def write_prepared(folder: Path, tokenizer: Tokenizer) -> Path:
    """Write a prepared corpus of a few tokens."""
    folder.mkdir()
    dtype, splits = shards.width(tokenizer), {}
    for split in shards.SPLITS:
        with shards.Writer(folder, split, dtype) as writer:
            writer.append(np.array([2, 3, 5, 7], dtype))
            writer.close()
        splits[split] = {"tokens": writer.length, "sha256": writer.hashes}
    manifest = {"tokenizer": tokenizer.sha256, "dtype": dtype.name, "shard_bytes": shards.SHARD_BYTES, "splits": splits}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer.to_dict()))
    return folder


def write_huggingface(folder: Path, **changes: object) -> Path:
    """Write the configuration of a Hugging Face GPT-2, and no weights."""
    folder.mkdir(exist_ok=True)
    stored = {"model_type": "gpt2", "vocab_size": 50257} | changes
    (folder / "config.json").write_text(json.dumps({key: value for key, value in stored.items() if value is not None}))
    return folder


def refusal(act, *arguments) -> str:
    """The one line with which a function refuses its arguments."""
    with pytest.raises(UserError) as caught:
        act(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- which file a path stands for ---


def make_run(runs: Path, name: str, *files: str, age: int = 0) -> Path:
    """A run directory with empty checkpoints that are `age` seconds old."""
    folder = runs / name / "checkpoints"
    folder.mkdir(parents=True)
    for file in files:
        path = folder / f"{file}.ckpt"
        path.touch()
        os.utime(path, (1_000_000_000 - age,) * 2)
    return runs / name


def test_find_by_path(tmp_path):
    """A file is itself; a run directory and its checkpoints folder mean the same file."""
    run = make_run(tmp_path, "run", "best", "last", "previous")
    for name in ("best", "last", "previous"):
        file = run / "checkpoints" / f"{name}.ckpt"
        assert find_checkpoint(file) == find_checkpoint(str(file)) == file
    assert find_checkpoint(run) == find_checkpoint(run / "checkpoints") == run / "checkpoints/best.ckpt"


@pytest.mark.parametrize(
    ("there", "expected"),
    [(["best", "last"], "best"), (["last", "previous"], "last"), (["best", "previous"], "best"), (["previous"],) * 2],
)
def test_find_order(tmp_path, there, expected):
    """The best, else the last, else the one before."""
    run, expected = make_run(tmp_path, "run", *there), "".join(expected)
    assert find_checkpoint(run) == run / f"checkpoints/{expected}.ckpt"


def test_find_the_newest_run(tmp_path):
    """Without a path: the run whose best or last is the newest, whatever its name, and of it the preferred one."""
    make_run(tmp_path, "c", "best", "last", age=13)
    newest = make_run(tmp_path, "a", "best", age=11)
    make_run(tmp_path, "b", "best", age=5)
    make_run(tmp_path, "d")
    last = newest / "checkpoints/last.ckpt"
    last.touch()
    os.utime(last, (1_000_000_000 - 3,) * 2)
    assert find_checkpoint(runs=tmp_path) == newest / "checkpoints/best.ckpt"


@pytest.mark.parametrize("runs", ["", "nowhere"])
def test_find_no_run(tmp_path, runs):
    """Where nothing has been trained, the line says how to."""
    with pytest.raises(UserError, match=r"no run below .* has a checkpoint: .*python train.py") as caught:
        find_checkpoint(runs=tmp_path / runs)
    assert "\n" not in str(caught.value)


def test_find_nothing(tmp_path):
    """A path that names nothing, and folders without checkpoints, are named in one line."""
    empty = make_run(tmp_path, "run")
    cases = {tmp_path / "nowhere": "no such checkpoint", empty: "a folder without", tmp_path: "a folder without"}
    cases[empty / "checkpoints"] = "a folder without"
    for path, reason in cases.items():
        with pytest.raises(UserError, match=reason) as caught:
            find_checkpoint(path)
        assert str(caught.value).startswith(f"{path}: ")
        assert "\n" not in str(caught.value)


def test_find_huggingface(tmp_path):
    """A Hugging Face directory stands for itself."""
    folder = write_huggingface(tmp_path / "theirs")
    assert find_checkpoint(folder) == find_checkpoint(str(folder)) == folder


# --- models ---


@torch.no_grad()
def test_open_model(tmp_path):
    """A run, its folder of checkpoints and the file itself are the very same model."""
    run = tmp_path / "run"
    model = write_checkpoint(run / "checkpoints/best.ckpt")
    write_checkpoint(run / "checkpoints/last.ckpt", seed=5)
    idx = torch.tensor([BPE.encode(STORY)[:13]])
    for path in (run, str(run), run / "checkpoints", run / "checkpoints/best.ckpt"):
        opened, tokenizer = open_model(path)
        assert (opened.training, opened.config, tokenizer.sha256) == (False, model.config, BPE.sha256)
        assert torch.equal(opened(idx), model(idx))
    assert not torch.equal(open_model(run / "checkpoints/last.ckpt")[0](idx), model(idx))


@torch.no_grad()
def test_open_huggingface_model(tmp_path):
    """A GPT-2 saved by `transformers` comes with GPT-2's tokenizer."""
    torch.manual_seed(31)
    theirs = GPT2LMHeadModel(GPT2Config(n_embd=6, n_layer=2, n_head=2, n_positions=16)).eval()
    theirs.save_pretrained(tmp_path)
    model, tokenizer = open_model(tmp_path)
    assert (model.training, tokenizer.sha256) == (False, GPT2.sha256)
    idx = torch.tensor([tokenizer.encode("Two three five seven eleven")])
    torch.testing.assert_close(model(idx), theirs(idx).logits, atol=1e-4, rtol=0.0)


def test_open_model_refusals(tmp_path):
    """The line begins with the path: of what is missing, of what is foreign, and of what does not fit together."""
    assert refusal(open_model, tmp_path / "nowhere").startswith(f"{tmp_path / 'nowhere'}: there is no such checkpoint")
    (tmp_path / "text").write_text("2 3 5 7")
    assert refusal(open_model, tmp_path / "text").startswith(f"{tmp_path / 'text'}: not a checkpoint of this project")
    file = tmp_path / "odd.ckpt"
    write_checkpoint(file, byte_tokenizer().to_dict())
    assert refusal(open_model, file).startswith(f"{file}: the checkpoint's tokenizer, configuration and weights do not")
    folder = write_huggingface(tmp_path / "theirs", vocab_size=101)
    message = refusal(open_model, folder)
    assert message.startswith(f"{folder}: its model_type is 'gpt2' and its vocab_size 101; ")
    assert message.endswith("only 'gpt2' with GPT-2's vocabulary of 50257 tokens is supported")


# --- tokenizers ---


@pytest.mark.parametrize("source", ["gpt2", "byte", "run", "checkpoints", "file", "prepared", "huggingface"])
def test_open_tokenizer(tmp_path, source):
    """Two names, a run, its folder of checkpoints, one checkpoint, a prepared corpus, a Hugging Face GPT-2."""
    best = tmp_path / "run/checkpoints/best.ckpt"
    write_checkpoint(best)
    where, expected = {
        "gpt2": ("gpt2", GPT2),
        "byte": ("byte", byte_tokenizer()),
        "run": (tmp_path / "run", BPE),
        "checkpoints": (best.parent, BPE),
        "file": (best, BPE),
        "prepared": (write_prepared(tmp_path / "prepared", BPE), BPE),
        "huggingface": (write_huggingface(tmp_path / "theirs"), GPT2),
    }[source]
    for name in (where, str(where)):
        tokenizer = open_tokenizer(name)
        assert (tokenizer.sha256, tokenizer.encode(STORY)) == (expected.sha256, expected.encode(STORY))


@pytest.mark.parametrize("name", ["gpt3", "GPT2", "", "no/where", "a long text\n" * 1009, "a\0b"])
def test_open_tokenizer_of_nothing(tmp_path, monkeypatch, name):
    """A name that means nothing, and is no path either."""
    monkeypatch.chdir(tmp_path)
    choices = "choose gpt2, byte, or the path of a run, a checkpoint, a Hugging Face GPT-2 or a prepared corpus"
    assert refusal(open_tokenizer, name) == f"{name!r} is not a tokenizer: {choices}"


def test_open_tokenizer_of_a_folder(tmp_path):
    """A folder that holds nothing of the kind."""
    assert refusal(open_tokenizer, tmp_path).startswith(f"{tmp_path}: a folder without checkpoints")
    (tmp_path / "text").write_text("2 3 5 7")
    assert refusal(open_tokenizer, tmp_path / "text").startswith(f"{tmp_path / 'text'}: not a checkpoint of this")


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"model_type": "llama"}, "'llama' and its vocab_size 50257"),
        ({"vocab_size": 50265}, "'gpt2' and its vocab_size 50265"),
        ({"vocab_size": None}, "'gpt2' and its vocab_size None"),
        ({"model_type": None}, "None and its vocab_size 50257"),
    ],
)
@pytest.mark.parametrize("act", [open_tokenizer, open_model])
def test_other_huggingface_models(tmp_path, act, changes, found):
    """A Hugging Face directory of another model, or with another vocabulary, before its weights are looked at."""
    folder = write_huggingface(tmp_path / "theirs", **changes)
    supported = "only 'gpt2' with GPT-2's vocabulary of 50257 tokens is supported"
    assert refusal(act, folder) == f"{folder}: its model_type is {found}; {supported}"


@pytest.mark.parametrize("content", ["[]", "[7]", "{", "", "null", '"gpt2"'])
@pytest.mark.parametrize("act", [open_tokenizer, open_model])
def test_damaged_huggingface_config(tmp_path, act, content):
    """A config.json that is no JSON, or no JSON object."""
    (tmp_path / "config.json").write_text(content)
    assert refusal(act, tmp_path).startswith(f"{tmp_path}: cannot be read as a Hugging Face model (")


@pytest.mark.parametrize("stored", [{}, {"name": "bpe"}, [7], "bpe", {**BPE.to_dict(), "ranks": None}])
def test_invalid_tokenizer_in_a_checkpoint(tmp_path, stored):
    """A checkpoint whose tokenizer is something else."""
    file = tmp_path / "odd.ckpt"
    write_checkpoint(file, stored)
    assert refusal(open_tokenizer, file).startswith(f"{file}: the tokenizer in it is invalid (")


def test_damaged_tokenizer(tmp_path):
    """A tokenizer that was changed since it was written."""
    changed = BPE.to_dict() | {"sha256": "0" * 64}
    write_checkpoint(tmp_path / "odd.ckpt", changed)
    assert "do not match their hash" in refusal(open_tokenizer, tmp_path / "odd.ckpt")
    folder = write_prepared(tmp_path / "prepared", BPE)
    (folder / "tokenizer.json").write_text(json.dumps(changed))
    assert "do not match their hash" in refusal(open_tokenizer, folder)


def test_tokenizers_without_torch(tmp_path):
    """torch takes seconds to import, and only a checkpoint needs it."""
    paths = [write_prepared(tmp_path / "prepared", BPE), write_huggingface(tmp_path / "theirs")]
    code = (
        "import sys; from gpt.exchange.opening import find_checkpoint, open_tokenizer\n"
        f"for name in {['gpt2', 'byte', *map(str, paths)]}: print(open_tokenizer(name).vocab_size)\n"
        f"find_checkpoint({str(paths[1])!r})\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.split() == ["50257", "257", str(BPE.vocab_size), "50257", "False"], done.stderr
