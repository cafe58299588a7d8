"""Find and open models and tokenizers: which file a path means, and which paths are refused in one line."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from gpt.checkpoint import save_checkpoint
from gpt.data.tokenizer import Tokenizer, byte_tokenizer, gpt2_tokenizer, train_bpe
from gpt.interop import huggingface
from gpt.loading import find_checkpoint, find_run, open_model, open_tokenizer
from gpt.model.transformer import GPT
from harness import ROOT, refusal
from models import make_checkpoint, small_model, write_prepared_corpus
from web_server import WebServer

STORY = "It was the best of times, it was the worst of times; 2²³ ≠ 10 €, naïve café\r\n"
GPT2, BPE = gpt2_tokenizer(), train_bpe([STORY * 3], 277)


def write_checkpoint(file: Path, tokenizer: Tokenizer = BPE, seed: int = 3) -> GPT:
    """Save a small model with a tokenizer, and return the model."""
    model = small_model(tokenizer=BPE, seed=seed)
    file.parent.mkdir(parents=True, exist_ok=True)
    save_checkpoint(make_checkpoint(model, tokenizer), file)
    return model


def write_huggingface_config(folder: Path, **changes: object) -> Path:
    """Write the configuration of a Hugging Face GPT-2, and no weights."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2", "vocab_size": 50257} | changes))
    return folder


# --- which file a path means ---


def make_run(runs: Path, name: str, *checkpoints: str, age: int = 0) -> Path:
    """Make a run directory whose checkpoints are empty files, `age` seconds old."""
    run = runs / name
    (run / "checkpoints").mkdir(parents=True)
    (run / "config.yaml").touch()
    for checkpoint in checkpoints:
        file = run / f"checkpoints/{checkpoint}.ckpt"
        file.touch()
        os.utime(file, (1_000_000_000 - age,) * 2)
    return run


def test_a_run_means_its_best_checkpoint_or_else_its_newest(tmp_path):
    """A file means itself."""
    run = make_run(tmp_path, "run", "best", "last", "previous")
    for name in ("best", "last", "previous"):
        file = run / f"checkpoints/{name}.ckpt"
        assert find_checkpoint(run) == find_checkpoint(file.parent) == find_checkpoint(str(file)) == file
        file.unlink()


def test_without_a_path_the_newest_run_is_found(tmp_path, monkeypatch):
    """The newest run is also called `last`, unless a run has that name."""
    monkeypatch.chdir(tmp_path)
    assert refusal(find_run, "last") == "last: not a run directory (it does not exist); give one of those below runs/"
    runs = Path("runs")
    make_run(runs, "c", "best", "last", age=13)
    newest = make_run(runs, "a", "best", age=11)
    make_run(runs, "b", "best", age=5)
    make_run(runs, "d")
    last = newest / "checkpoints/last.ckpt"
    last.touch()
    os.utime(last, (1_000_000_000 - 3,) * 2)
    assert find_checkpoint() == find_checkpoint("last") == newest / "checkpoints/best.ckpt"
    assert find_run("last") == newest
    line = "lst: not a run directory (it does not exist); give one of those below runs/; "
    assert refusal(find_run, "lst") == f"{line}the newest, {newest}, is also called last"
    named_last = make_run(runs, "last", "best", age=99)
    assert find_checkpoint("last") == named_last / "checkpoints/best.ckpt"


def test_a_path_without_a_checkpoint_is_refused(tmp_path):
    run = make_run(tmp_path / "runs", "run")
    for path in (run, tmp_path, run / "checkpoints"):
        assert refusal(find_checkpoint, path).startswith(f"{path}: a folder without checkpoints/best.ckpt or")
    for runs in (tmp_path / "runs", tmp_path / "nowhere"):
        line = f"no run below {runs}/ has a checkpoint: train one first with python train.py"
        assert refusal(find_checkpoint, runs=runs) == line


def test_a_name_means_a_path_or_else_a_run(tmp_path, monkeypatch):
    """Names that cannot be a model's are not looked up on the hub."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface, "download_from_hub", lambda name: pytest.fail("looked up"))
    run = make_run(Path("runs"), "gpt2", "best")
    assert find_checkpoint("gpt2") == run / "checkpoints/best.ckpt"
    write_huggingface_config(Path("gpt2"))
    assert find_checkpoint("gpt2") == find_checkpoint(Path("gpt2")) == Path("gpt2")
    Path("models").mkdir()
    hint = "give a path, a name below runs/, or OWNER/NAME on the Hugging Face hub"
    names = ["typo", "gpt-2-medium", "runs/typo", "models/typo", "typo.ckpt", "../typo", "/typo", "a/b/c", "a\0b"]
    names += ["out/ckpt.pt", "me/model.safetensors", "me/model.gguf"]
    for name in (*names, "typo" * 1009 + "/"):
        assert refusal(find_checkpoint, name) == f"{name}: there is no such checkpoint or run directory: {hint}"


def test_names_of_the_hub_are_downloaded(tmp_path, monkeypatch):
    """GPT-2's own names, and every name with an owner."""
    monkeypatch.chdir(tmp_path)
    folder = write_huggingface_config(tmp_path / "hub")
    monkeypatch.setattr(huggingface, "download_from_hub", lambda name: folder / name)
    for name in ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "distilgpt2", "me/my-model"):
        (folder / name).parent.mkdir(exist_ok=True)
        write_huggingface_config(folder / name)
        assert find_checkpoint(name) == folder / name


def test_a_file_of_a_huggingface_folder_means_the_folder(tmp_path):
    folder = write_huggingface_config(tmp_path / "gpt2")
    for name in ("model.safetensors", "model-00001-of-00002.safetensors", "model.safetensors.index.json"):
        (folder / name).touch()
        assert find_checkpoint(folder / name) == folder
    assert find_checkpoint(folder / "config.json") == folder


def test_models_of_other_programs_are_named(tmp_path):
    """The line ends with what to give instead."""
    trainer = tmp_path / "trainer"
    for step in (500, 1500, 90):
        (trainer / f"checkpoint-{step}").mkdir(parents=True)
        (trainer / f"checkpoint-{step}/config.json").touch()
    (trainer / "checkpoint-best").mkdir()
    lora = tmp_path / "lora"
    lora.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (lora / name).touch()
    weights = tmp_path / "weights"
    weights.mkdir()
    files = [weights / "model.gguf", weights / "model.safetensors", weights / "pytorch_model.bin"]
    for file in files:
        file.touch()
    assert refusal(find_checkpoint, trainer).endswith(f"give a checkpoint in it, such as {trainer}/checkpoint-1500")
    for path in (lora, lora / "adapter_model.safetensors"):
        assert "an adapter such as LoRA" in refusal(find_checkpoint, path)
    assert "a GGUF file" in refusal(find_checkpoint, files[0])
    for file in files[1:]:
        assert refusal(find_checkpoint, file).endswith(f"put them into a folder with it, and give {weights}")


# --- the hub ---


@pytest.fixture
def hub() -> Iterator[WebServer]:
    server = WebServer()
    yield server
    server.stop()


@pytest.fixture
def environment(hub, tmp_path) -> dict[str, str]:
    """The environment of a process that uses this hub instead of Hugging Face's."""
    settings = {"HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_XET": "1"}
    return os.environ | settings | {"HF_ENDPOINT": hub.url(), "no_proxy": "127.0.0.1"}


def open_in_subprocess(environment: dict, *names: str) -> list[str]:
    """Return the size of each model, or the line that refuses it. A process reads the hub's address only once."""
    code = (
        "import sys; from gpt.errors import UserError; from gpt.loading import open_model\n"
        "for name in sys.argv[1:]:\n"
        "    try: print(open_model(name)[0].config.num_parameters)\n"
        "    except UserError as error: print(error)"
    )
    command = [sys.executable, "-c", code, *names]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    lines = done.stdout.splitlines()
    assert len(lines) == len(names), done.stdout + done.stderr
    return lines


@pytest.mark.promise("security.md#Downloads")
@pytest.mark.slow
def test_hub(tmp_path, hub, environment):
    """A model is downloaded once, without its code and other files that are not needed."""
    torch.manual_seed(31)
    gpt2 = GPT2LMHeadModel(GPT2Config(n_embd=6, n_layer=2, n_head=2, n_positions=16))
    gpt2.save_pretrained(tmp_path / "model")
    files = {file.name: file.read_bytes() for file in (tmp_path / "model").iterdir()}
    hub.add_repository("tiny/model", files | {"pytorch_model.bin": b"2 3 5", "modeling.py": b"raise SystemExit('run')"})
    for more in ({}, {"HF_HUB_OFFLINE": "1"}):
        assert open_in_subprocess(environment | more, "tiny/model") == [str(gpt2.num_parameters())]
    downloaded = {request.split()[0].split("/")[-1] for request in hub.requests if "/resolve/" in request}
    assert downloaded == {"config.json", "model.safetensors"}


@pytest.mark.slow
def test_models_that_the_hub_does_not_have_are_refused(hub, environment):
    """Another architecture, an unknown name, an impossible name, or no network."""
    hub.add_repository("other/model", {"config.json": b'{"model_type": "llama"}', "model.safetensors": b"2 3 5 7"})
    llama, *unknown = open_in_subprocess(environment, "other/model", "no/model", "a..b/c")
    assert llama.endswith(": its model_type is 'llama', and only 'gpt2' is supported")
    assert not any("model.safetensors" in request for request in hub.requests)
    unknown += open_in_subprocess(environment | {"HF_ENDPOINT": "http://127.0.0.1:9"}, "tiny/model")
    for name, line in zip(("no/model", "a..b/c", "tiny/model"), unknown, strict=True):
        reason = "there is no such path or run, and the Hugging Face hub does not give such a model ("
        assert line.startswith(f"{name}: {reason}")


def test_without_its_library_the_hub_is_refused(monkeypatch):
    """The line names the package to install."""
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    line = "no/model: neither a path nor a run; for the hub's models: pip install huggingface_hub"
    assert refusal(huggingface.download_from_hub, "no/model") == line


# --- models ---


@torch.no_grad()
def test_every_path_of_a_run_opens_the_same_model(tmp_path):
    run = tmp_path / "run"
    model = write_checkpoint(run / "checkpoints/best.ckpt")
    write_checkpoint(run / "checkpoints/last.ckpt", seed=5)
    idx = torch.tensor([BPE.encode(STORY)[:13]])
    for path in (run, str(run), run / "checkpoints", run / "checkpoints/best.ckpt"):
        opened, tokenizer = open_model(path)
        assert (opened.training, opened.config, tokenizer.sha256) == (False, model.config, BPE.sha256)
        assert torch.equal(opened(idx), model(idx))
    assert not torch.equal(open_model(run / "checkpoints/last.ckpt")[0](idx), model(idx))


# --- tokenizers ---


def test_a_tokenizer_comes_from_a_name_or_any_model_or_corpus(tmp_path):
    best = tmp_path / "run/checkpoints/best.ckpt"
    write_checkpoint(best)
    corpus = write_prepared_corpus(tmp_path / "corpus", BPE)
    gpt2 = write_huggingface_config(tmp_path / "gpt2")
    expected = {"byte": byte_tokenizer(), "gpt2": GPT2, gpt2: GPT2, tmp_path / "run": BPE, best: BPE, corpus: BPE}
    for name, tokenizer in expected.items():
        for path in (name, str(name)):
            opened = open_tokenizer(path)
            assert (opened.sha256, opened.encode(STORY)) == (tokenizer.sha256, tokenizer.encode(STORY)), path


@pytest.mark.parametrize("name", ["gpt3", "GPT2", "", "no/where", "a long text\n" * 1009, "a\0b"])
def test_other_names_are_no_tokenizer(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    choices = "choose gpt2, byte, or the path of a run, a checkpoint, a Hugging Face GPT-2 or a prepared corpus"
    assert refusal(open_tokenizer, name) == f"{name!r} is not a tokenizer: {choices}"


def test_a_damaged_tokenizer_is_refused(tmp_path):
    """The tokenizer of a checkpoint or a corpus is another object, or was changed after it was written."""
    file = tmp_path / "odd.ckpt"
    changed = BPE.to_dict() | {"sha256": "0" * 64}
    for tokenizer in ({}, {"name": "bpe"}, BPE.to_dict() | {"ranks": None}, changed):
        save_checkpoint(make_checkpoint(small_model(tokenizer=BPE)) | {"tokenizer": tokenizer}, file)
        assert refusal(open_tokenizer, file).startswith(f"{file}: the checkpoint's tokenizer, configuration and")
    assert "do not match their hash" in refusal(open_tokenizer, file)
    folder = write_prepared_corpus(tmp_path / "corpus", BPE)
    (folder / "tokenizer.json").write_text(json.dumps(changed))
    assert "do not match their hash" in refusal(open_tokenizer, folder)


def test_tokenizers_are_opened_without_torch(tmp_path):
    """torch takes seconds to import, and only a checkpoint needs it."""
    paths = [write_prepared_corpus(tmp_path / "corpus", BPE), write_huggingface_config(tmp_path / "gpt2")]
    code = (
        "import sys; from gpt.loading import find_checkpoint, open_tokenizer\n"
        f"for name in {['gpt2', 'byte', *map(str, paths)]}: print(open_tokenizer(name).vocab_size)\n"
        f"find_checkpoint({str(paths[1])!r})\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.split() == ["50257", "257", str(BPE.vocab_size), "50257", "False"], done.stderr
