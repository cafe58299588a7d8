"""One way to open a model or a tokenizer: which file a path stands for, and what is refused in one line."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar
from urllib.parse import urlsplit

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from gpt.checkpoint import save_checkpoint
from gpt.data.tokenizer import Tokenizer, byte_tokenizer, gpt2_tokenizer, train_bpe
from gpt.interop import huggingface
from gpt.loading import find_checkpoint, find_run, open_model, open_tokenizer
from gpt.model.transformer import GPT
from harness import ROOT, refusal
from model_files import make_checkpoint, small_model, write_prepared_corpus

STORY = "It was the best of times, it was the worst of times; 2²³ ≠ 10 €, naïve café\r\n"
GPT2, BPE = gpt2_tokenizer(), train_bpe([STORY * 3], 277)


def write_checkpoint(file: Path, tokenizer: Tokenizer = BPE, seed: int = 3, **changes) -> GPT:
    """Save a small model, which is returned; `changes` are to what the checkpoint says."""
    model = small_model(tokenizer=BPE, seed=seed)
    file.parent.mkdir(parents=True, exist_ok=True)
    save_checkpoint(make_checkpoint(model, tokenizer, **changes), file)
    return model


def write_huggingface(folder: Path, **changes: object) -> Path:
    """Write the configuration of a Hugging Face GPT-2, and no weights."""
    folder.mkdir(exist_ok=True)
    stored = {"model_type": "gpt2", "vocab_size": 50257} | changes
    (folder / "config.json").write_text(json.dumps({key: value for key, value in stored.items() if value is not None}))
    return folder


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


def test_find_order(tmp_path):
    """A file is itself; a run or its checkpoints folder is the best, else the last, else the one before."""
    run = make_run(tmp_path, "run", "best", "last", "previous")
    for name in ("best", "last", "previous"):
        file = run / f"checkpoints/{name}.ckpt"
        assert find_checkpoint(run) == find_checkpoint(file.parent) == find_checkpoint(str(file)) == file
        (run / f"checkpoints/{name}.ckpt").unlink()


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


def test_the_word_last(tmp_path, monkeypatch):
    """Of generate.py as of `resume`: the run that was saved last, unless something is called so."""
    monkeypatch.chdir(tmp_path)
    assert refusal(find_run, "last") == "last: not a run directory (it does not exist); give one of those below runs/"
    make_run(Path("runs"), "a", "best", age=13)
    newest = make_run(Path("runs"), "b", "last", age=5)
    (newest / "config.yaml").touch()
    assert find_checkpoint("last") == newest / "checkpoints/last.ckpt"
    assert find_run("last") == newest
    line = "lst: not a run directory (it does not exist); give one of those below runs/; "
    assert refusal(find_run, "lst") == f"{line}the newest, {newest}, is also called last"
    own = make_run(Path("runs"), "last", "best", age=99)
    assert find_checkpoint("last") == own / "checkpoints/best.ckpt"


def test_find_nothing(tmp_path):
    """A path that names nothing, folders without checkpoints, and no run at all are named in one line."""
    empty = make_run(tmp_path / "runs", "run")
    assert refusal(find_checkpoint, tmp_path / "nowhere").startswith(f"{tmp_path / 'nowhere'}: there is no such check")
    for path in (empty, tmp_path, empty / "checkpoints"):
        assert refusal(find_checkpoint, path).startswith(f"{path}: a folder without checkpoints/best.ckpt or")
    for runs in (tmp_path / "runs", tmp_path / "nowhere"):
        line = f"no run below {runs}/ has a checkpoint: train one first with python train.py"
        assert refusal(find_checkpoint, runs=runs) == line


def test_find_by_name(tmp_path, monkeypatch):
    """A name is that of a run, unless there is a path of that name; other words are not looked up on the hub."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface, "download_from_hub", lambda name: pytest.fail("looked up"))
    run = make_run(Path("runs"), "gpt2", "best")
    assert find_checkpoint("gpt2") == run / "checkpoints/best.ckpt"
    write_huggingface(Path("gpt2"))
    assert find_checkpoint("gpt2") == find_checkpoint(Path("gpt2")) == Path("gpt2")  # which stands for itself
    Path("models").mkdir()
    hint = "give a path, a name below runs/, or OWNER/NAME on the Hugging Face hub"
    words = ("typo", "gpt-2-medium", "runs/typo", "models/typo", "typo.ckpt", "../typo", "/typo", "a/b/c", "a\0b")
    for name in (*words, "typo" * 1009 + "/"):
        assert refusal(find_checkpoint, name) == f"{name}: there is no such checkpoint or run directory: {hint}"


@pytest.mark.parametrize("name", ["gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "distilgpt2", "me/my-model"])
def test_names_of_the_hub(tmp_path, monkeypatch, name):
    """GPT-2's own, and whatever has an owner."""
    monkeypatch.chdir(tmp_path)
    asked: list[str] = []
    monkeypatch.setattr(
        huggingface, "download_from_hub", lambda name: asked.append(name) or write_huggingface(tmp_path / "hub")
    )
    assert find_checkpoint(name) == tmp_path / "hub"
    assert asked == [name]


# --- the hub ---


class Hub(BaseHTTPRequestHandler):
    """A Hugging Face hub with the models in a folder, at two names each: what `snapshot_download` asks of one."""

    folder: Path
    asked: ClassVar[list[str]] = []
    commit = "23" * 20

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        place = urlsplit(self.path).path
        self.asked.append(place)
        name, _, rest = (
            place.removeprefix("/api/models").lstrip("/").replace("/resolve/", "/revision/").partition("/revision/")
        )
        name = name.split("/tree/")[0]
        files = {file.name: file.read_bytes() for file in (self.folder / name).glob("*")}
        content, headers = b"", {"X-Repo-Commit": self.commit}
        if not files:
            headers["X-Error-Code"] = "RepoNotFound"
        elif "/tree/" in place:
            entries = [{"type": "file", "path": k, "size": len(v), "oid": k} for k, v in files.items()]
            content = json.dumps(entries).encode()
        elif place.startswith("/api"):
            content = json.dumps({"id": name, "sha": self.commit, "siblings": []}).encode()
        else:
            content = files[rest.split("/")[-1]]
            headers["ETag"] = '"' + hashlib.sha256(content).hexdigest() + '"'
        self.send_response(200 if files else 404)
        for key, value in (headers | {"Content-Length": str(len(content))}).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(tmp_path):
    """The environment of a process that knows a hub of ours, and no other."""
    Hub.folder = tmp_path / "hub"
    Hub.asked.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        cache = {"HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_XET": "1"}
        yield os.environ | cache | {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}"}
        server.shutdown()


def open_apart(name: str, env: dict) -> subprocess.CompletedProcess:
    """Open a model in a process of its own, since the hub's address is read once."""
    code = (
        "import sys; from gpt.console import clean_exit; from gpt.loading import open_model\n"
        "with clean_exit('opening'): print(open_model(sys.argv[1])[0].config.num_parameters)"
    )
    return subprocess.run([sys.executable, "-c", code, name], cwd=ROOT, capture_output=True, text=True, env=env)


@pytest.mark.slow
def test_hub(tmp_path, hub):
    """A name is downloaded, once, and no more than is needed."""
    torch.manual_seed(31)
    theirs = GPT2LMHeadModel(GPT2Config(n_embd=6, n_layer=2, n_head=2, n_positions=16))
    theirs.save_pretrained(tmp_path / "hub/tiny/model")
    torch.save(theirs.state_dict(), tmp_path / "hub/tiny/model/pytorch_model.bin")
    (tmp_path / "hub/tiny/model/modeling.py").write_text("raise SystemExit('run')")
    done = open_apart("tiny/model", hub)
    assert (done.returncode, done.stdout) == (0, f"{theirs.num_parameters()}\n"), done.stderr
    fetched = {place.split("/")[-1] for place in Hub.asked if "/resolve/" in place}
    assert fetched == {"config.json", "model.safetensors"}
    done = open_apart("tiny/model", hub | {"HF_HUB_OFFLINE": "1"})
    assert (done.returncode, done.stdout) == (0, f"{theirs.num_parameters()}\n"), done.stderr


@pytest.mark.slow
def test_hub_refusals(tmp_path, hub):
    """Another architecture, a name that the hub does not know, no name at all, no network: one line each."""
    (tmp_path / "hub/other").mkdir(parents=True)
    write_huggingface(tmp_path / "hub/other/model", model_type="llama")
    (tmp_path / "hub/other/model/model.safetensors").write_text("2 3 5 7")
    done = open_apart("other/model", hub)
    assert done.stderr.endswith(": its model_type is 'llama', and only 'gpt2' is supported\n")
    assert not any(place.endswith("model.safetensors") for place in Hub.asked)
    start = "there is no such path or run, and the Hugging Face hub does not give such a model ("
    nowhere = hub | {"HF_ENDPOINT": "http://127.0.0.1:9"}
    for name, env in (("no/model", hub), ("a..b/c", hub), ("tiny/model", nowhere)):
        done = open_apart(name, env)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
        assert done.stderr.startswith(f"opening: {name}: {start}")


def test_hub_without_its_library(monkeypatch):
    """Without the library, the line says what to install."""
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    line = "no/model: neither a path nor a run; for the hub's models: pip install huggingface_hub"
    assert refusal(huggingface.download_from_hub, "no/model") == line


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


def test_open_model_refusals(tmp_path):
    """The line begins with the path: of what is foreign, and of what does not fit together."""
    (tmp_path / "text").write_text("2 3 5 7")
    assert refusal(open_model, tmp_path / "text").startswith(f"{tmp_path / 'text'}: not a checkpoint of this project")
    file = tmp_path / "odd.ckpt"
    write_checkpoint(file, byte_tokenizer())
    assert refusal(open_model, file).startswith(f"{file}: the checkpoint's tokenizer, configuration and weights do not")


# --- tokenizers ---


def test_open_tokenizer(tmp_path):
    """Two names, a run, one checkpoint, a prepared corpus, a Hugging Face GPT-2."""
    best = tmp_path / "run/checkpoints/best.ckpt"
    write_checkpoint(best)
    theirs, prepared = write_huggingface(tmp_path / "theirs"), write_prepared_corpus(tmp_path / "prepared", BPE)
    for where in (tmp_path / "run", best, prepared, "byte", "gpt2", theirs):
        expected = byte_tokenizer() if where == "byte" else GPT2 if where in ("gpt2", theirs) else BPE
        for name in (where, str(where)):
            tokenizer = open_tokenizer(name)
            assert (tokenizer.sha256, tokenizer.encode(STORY)) == (expected.sha256, expected.encode(STORY)), name


@pytest.mark.parametrize("name", ["gpt3", "GPT2", "", "no/where", "a long text\n" * 1009, "a\0b"])
def test_open_tokenizer_of_nothing(tmp_path, monkeypatch, name):
    """A name that means nothing, and is no path either."""
    monkeypatch.chdir(tmp_path)
    choices = "choose gpt2, byte, or the path of a run, a checkpoint, a Hugging Face GPT-2 or a prepared corpus"
    assert refusal(open_tokenizer, name) == f"{name!r} is not a tokenizer: {choices}"


@pytest.mark.parametrize("act", [open_tokenizer, open_model])
def test_other_huggingface_models(tmp_path, act):
    """A Hugging Face directory of another model, or with another vocabulary, before its weights are looked at."""
    for changes, found in (
        ({"model_type": "llama"}, "model_type is 'llama', and only 'gpt2' is supported"),
        ({"vocab_size": 50265}, "vocab_size is 50265, and GPT-2's own tokenizer has 50257 tokens"),
        ({"vocab_size": None}, "vocab_size is None, and GPT-2's own tokenizer has 50257 tokens"),
    ):
        folder = write_huggingface(tmp_path / "theirs", **changes)
        assert refusal(act, folder) == f"{folder}: its {found}"


def test_damaged_tokenizer(tmp_path):
    """A checkpoint's or corpus's tokenizer that is something else, or was changed since it was written."""
    file, changed = tmp_path / "odd.ckpt", BPE.to_dict() | {"sha256": "0" * 64}
    for stored in ({}, {"name": "bpe"}, BPE.to_dict() | {"ranks": None}, changed):
        save_checkpoint(make_checkpoint(small_model(tokenizer=BPE)) | {"tokenizer": stored}, file)
        assert refusal(open_tokenizer, file).startswith(f"{file}: the checkpoint's tokenizer, configuration and")
    assert "do not match their hash" in refusal(open_tokenizer, file)
    folder = write_prepared_corpus(tmp_path / "prepared", BPE)
    (folder / "tokenizer.json").write_text(json.dumps(changed))
    assert "do not match their hash" in refusal(open_tokenizer, folder)


def test_tokenizers_without_torch(tmp_path):
    """torch takes seconds to import, and only a checkpoint needs it."""
    paths = [write_prepared_corpus(tmp_path / "prepared", BPE), write_huggingface(tmp_path / "theirs")]
    code = (
        "import sys; from gpt.loading import find_checkpoint, open_tokenizer\n"
        f"for name in {['gpt2', 'byte', *map(str, paths)]}: print(open_tokenizer(name).vocab_size)\n"
        f"find_checkpoint({str(paths[1])!r})\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.split() == ["50257", "257", str(BPE.vocab_size), "50257", "False"], done.stderr
