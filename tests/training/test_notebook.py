"""`gpt.train`: the same training as train.py's, in a script or a notebook, and what the result can do."""

import inspect
import re
import signal
import subprocess
import sys
import time
from dataclasses import fields

import numpy as np
import pytest

import gpt
import gpt.api
from gpt.training.config import Config
from harness import ROOT, StopAt, begin_run, differences, import_or_skip, refusal, tiny_arguments, tiny_config, train

MODEL = {"context_length": 16, "d_model": 24, "num_layers": 2, "num_heads": 3, "dropout": 0.1}
TRAINER = {"tokens_per_step": 96, "micro_batch_size": 3, "short_sequences": 8}
TRAINER |= {"log_every": 3, "validate_every": 17, "checkpoint_every": 11}


@pytest.fixture(scope="module")
def settings(corpus_folder) -> dict:
    """The arguments of `gpt.train` for a tiny run."""
    data = {"cache": str(corpus_folder / "cache"), "prompts": ["alpha"]}
    return {"model": MODEL, "trainer": TRAINER, "tokenizer": {"name": "byte"}, "data": data}


def test_same_run_as_on_the_command_line(corpus_folder, settings, tmp_path, capsys):
    """It is the same bit for bit, also when it was stopped and resumed on the way; the model is the best one."""
    train(*tiny_arguments(corpus_folder, "horizon=23steps", f"run_dir={tmp_path / 'a'}"))
    text, where = corpus_folder / "corpus.txt", tmp_path / "b"
    lm = gpt.train(text, horizon="23steps", run_dir=where, callbacks=[StopAt(7)], **settings)
    assert lm.result.stop_signal == signal.SIGTERM
    lm.report()
    assert "\nas of the last validation:\n" in (printed := capsys.readouterr().out)
    assert f"stopped at step 7; continue with: gpt.train(resume={str(where)!r})" in printed
    assert printed.splitlines()[-1] == "go on:        lm.resume()"
    lm = lm.resume()
    assert differences(tmp_path / "a", where) == []
    assert lm.generate("alpha", 7, seed=1) == gpt.load(tmp_path / "a").generate("alpha", 7, seed=1)
    assert repr(lm).startswith("TrainedModel(")
    lm.report()
    assert re.search(r"^trained +23  steps", capsys.readouterr().out, re.M)
    curve = lm.plot().get_lines()[1]
    assert curve.get_label() == "val/loss"
    assert np.asarray(curve.get_xdata()).tolist() == [5, 10, 15, 20, 23]
    assert "complete" in refusal(lm.resume)


def test_before_the_first_validation(corpus_folder, settings, tmp_path, capsys):
    """There is nothing to report then, and it says so; the model is that of the last checkpoint."""
    where = tmp_path / "run"
    lm = gpt.train(corpus_folder / "corpus.txt", seed=0, run_dir=where, callbacks=[StopAt(3)], **settings)
    assert lm.spec.config.seed == 0
    capsys.readouterr()
    lm.report()
    assert capsys.readouterr().out == "nothing to report before the first validation, at step 17\n"
    assert len(lm.generate("alpha", 5)) > 0


@pytest.mark.parametrize(
    ("model", "name"), [({}, "corpus-2x24"), ({"num_layers": 1, "d_model": 12, "num_heads": 2}, "corpus-1x12")]
)
def test_names_of_runs(corpus_folder, settings, tmp_path, monkeypatch, model, name):
    """A run is called by its date, its text and its model."""
    monkeypatch.chdir(tmp_path)
    settings = settings | {"model": MODEL | model}
    run_dir = gpt.train(str(corpus_folder / "corpus.txt"), horizon="1steps", **settings).run_dir
    assert re.fullmatch(rf"runs/\d{{4}}-\d\d-\d\d_\d\d-\d\d-\d\d_{name}", run_dir.as_posix())


def test_name_of_the_default(corpus_folder, tmp_path, monkeypatch):
    """The default model is `mini` on the command line, and here."""
    monkeypatch.chdir(tmp_path)
    config = tiny_config(corpus_folder)
    config.model = Config().model
    config.trainer.tokens_per_step, config.trainer.micro_batch_size = 1024, "auto"
    assert begin_run(config).path.name.endswith("_corpus-mini")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"horizon": "3minutes"}, "horizon='3minutes' is not a horizon"),
        ({"model": {"num_layer": 3}}, "there is no key 'model.num_layer'; did you mean 'model.num_layers'?"),
        ({"tokenizer": "char"}, "tokenizer='char' is not known: choose from bpe, byte, gpt2"),
        ({"optim": {"name": "adam"}}, "optim='adam' is not known: choose from adamw, muon"),
        ({"text": "missing.txt"}, "missing.txt"),
        ({"resume": "runs/typo"}, "runs/typo: not a run directory"),
        ({"resume": "runs/typo", "seed": 3}, "resume continues a run as it was configured, and seed=3 would change it"),
    ],
)
def test_mistakes(tmp_path, monkeypatch, arguments, problem):
    """One line each, which IPython shows without a traceback."""
    monkeypatch.chdir(tmp_path)
    assert problem in refusal(gpt.train, **arguments)


def test_a_group_brings_its_settings(monkeypatch):
    """By its name, alone or among other keys, as on the command line."""
    requests = []
    monkeypatch.setattr(gpt.api, "start_run", lambda request: requests.append(request) or 1 / 0)
    for optim in ("adamw", {"name": "adamw", "clip": 0.5}):
        with pytest.raises(ZeroDivisionError):
            gpt.train(optim=optim, model="gpt2_small", tokenizer="byte", trainer={"tokens_per_step": 1024})
    with pytest.raises(ZeroDivisionError):
        gpt.train(model="mini_128")
    first, second, third = (request.config for request in requests)
    assert (third.model.context_length, third.model.d_model) == (128, Config().model.d_model)
    assert (first.optim.lr, first.optim.schedule, first.optim.clip, second.optim.clip) == (0.001, "cosine", 1.0, 0.5)
    assert (first.model.num_layers, requests[0].model, first.tokenizer.name) == (12, "gpt2_small", "byte")


def test_arguments_are_keys():
    """Every argument but the text, the callbacks and the run to resume is a key of the configuration."""
    arguments = inspect.signature(gpt.train).parameters.keys() - {"text", "callbacks"}
    assert arguments == {field.name for field in fields(Config)} - {"logger", "overrides"}


def test_no_hydra_and_no_lightning_before_training():
    """What a notebook imports first is quick, and looking at a model needs neither."""
    code = "import sys, gpt\ngpt.train\nprint({'hydra', 'lightning', 'matplotlib', 'IPython'} & sys.modules.keys())"
    assert subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True, timeout=120) == "set()\n"


# --- in a real kernel ---


@pytest.mark.slow
def test_first_steps(tmp_path):
    """The notebook of the documentation runs, and shows the curve, the attention, the page and the figures."""
    NotebookClient, nbformat = import_or_skip("nbclient").NotebookClient, import_or_skip("nbformat")
    book = nbformat.read(ROOT / "docs/first-steps.ipynb", 4)
    install = book.cells.pop(1)  # the rest needs no checkout: it runs in an empty folder
    assert re.fullmatch(r'%pip install -q "mini-gpt\[notebook\] @ git\+https://\S+"', install.source)
    for cell in book.cells:
        cell.source = cell.source.replace("3min", "6steps").replace("4min", "9steps")
    NotebookClient(book, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = {
        cell.source: {kind for output in cell.outputs for kind in output.get("data", {"text": ""})}
        for cell in book.cells
        if cell.cell_type == "code"
    }
    trained, reported, drawn, generated, streamed, attention, page, resumed, exported = shown.values()
    assert "application/vnd.jupyter.widget-view+json" in trained & resumed
    assert "image/png" in drawn & attention
    assert "text/html" in page
    assert "text" in reported & generated & streamed & exported
    printed = "".join(output.get("text", "") for cell in book.cells for output in cell.get("outputs", []))
    assert re.search(r"^trained +9  steps", printed, re.M)
    assert "load it:  AutoModelForCausalLM.from_pretrained('my-model')" in printed
    assert not [output for cell in book.cells for output in cell.get("outputs", []) if output.get("name") == "stderr"]


@pytest.mark.slow
def test_interrupted_kernel(corpus_folder, settings, tmp_path):
    """Interrupting the kernel saves, and lets the rest of the cell run."""
    manager, client = import_or_skip("jupyter_client.manager").start_new_kernel(cwd=str(tmp_path))
    contents: list[dict] = []
    try:
        call = f"gpt.train({str(corpus_folder / 'corpus.txt')!r}, horizon='1h', **{settings!r})"
        client.execute(f"import gpt\nlm = {call}\nprint('step', lm.result.metrics['steps'], lm.result.stop_signal)")
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            message = client.get_iopub_msg(timeout=120)
            contents.append(message["content"])
            if "step 17/" in message["content"].get("text", ""):
                manager.interrupt_kernel()
            if message["content"].get("execution_state") == "idle" and len(contents) > 5:
                break
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    printed = "".join(content.get("text", "") for content in contents)
    assert "stopped at step" in printed
    assert re.search(r"^step \d+ 2$", printed, re.M)
    assert list(tmp_path.glob("runs/*/checkpoints/last.ckpt")) != []
    assert [content for content in contents if "traceback" in content] == []


@pytest.mark.slow
def test_errors_are_one_line(tmp_path):
    """A mistake in a cell is shown as the line that it is."""
    nbclient, nbformat = import_or_skip("nbclient"), import_or_skip("nbformat")
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("import gpt\ngpt.train('missing.txt')")])
    with pytest.raises(nbclient.exceptions.CellExecutionError):
        nbclient.NotebookClient(book, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert len(book.cells[0].outputs[-1]["traceback"]) == 1
    assert book.cells[0].outputs[-1]["traceback"][0].startswith("UserError: ")
    assert "missing.txt" in book.cells[0].outputs[-1]["traceback"][0]
