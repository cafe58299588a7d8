"""`gpt.train` is the training of train.py, in a script or a notebook; and the methods of its result."""

import contextlib
import inspect
import io
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch

import gpt
from gpt.api import make_request
from gpt.training.config import Config
from gpt.training.start import start_run
from harness import ROOT, SAMPLES, StopAt, differences, import_or_skip, refusal, tiny_arguments, train, write_corpus

MODEL = {"context_length": 16, "d_model": 24, "num_layers": 2, "num_heads": 3, "dropout": 0.1}
TRAINER = {"tokens_per_step": 96, "micro_batch_size": 3, "short_sequences": 8}
TRAINER |= {"log_every": 3, "validate_every": 17, "checkpoint_every": 11}


@pytest.fixture(scope="module")
def settings(corpus_folder) -> dict:
    """The arguments of `gpt.train` for a tiny run."""
    data = {"cache": str(corpus_folder / "cache"), "prompts": ["alpha"]}
    return {"model": MODEL, "trainer": TRAINER, "tokenizer": {"name": "byte"}, "data": data}


@pytest.mark.slow
def test_a_run_equals_that_of_the_command_line(corpus_folder, settings, tmp_path, capsys):
    """They are equal bit for bit, also if `gpt.train` was stopped and resumed. The model is the best one."""
    train(*tiny_arguments(corpus_folder, SAMPLES, "horizon=23steps", f"run_dir={tmp_path / 'a'}"))
    text, run_dir = corpus_folder / "corpus.txt", tmp_path / "b"
    lm = gpt.train(text, horizon="23steps", run_dir=run_dir, callbacks=[StopAt(7)], **settings)
    assert lm.result.stop_signal == signal.SIGTERM
    lm.report()
    assert "\nas of the last validation:\n" in (printed := capsys.readouterr().out)
    assert f"stopped at step 7; continue with: python train.py resume={run_dir}\n" in printed
    assert f"in Python: gpt.train(resume={str(run_dir)!r})\n" in printed
    assert printed.splitlines()[-1] == "continue:     lm.resume()"
    lm = lm.resume()
    assert differences(tmp_path / "a", run_dir) == []
    assert lm.generate("alpha", 7, seed=1) == gpt.load(tmp_path / "a").generate("alpha", 7, seed=1)
    assert repr(lm).startswith("TrainedModel(")
    lm.report()
    assert re.search(r"^trained +23  steps", capsys.readouterr().out, re.M)
    curve = lm.plot().get_lines()[1]
    assert curve.get_label() == "val/loss"
    assert np.asarray(curve.get_xdata()).tolist() == [5, 10, 15, 20, 23]
    assert "complete" in refusal(lm.resume)


def test_before_the_first_validation_there_is_no_report(corpus_folder, settings, tmp_path, capsys):
    """The model is that of the last checkpoint."""
    run_dir = tmp_path / "run"
    lm = gpt.train(corpus_folder / "corpus.txt", seed=0, run_dir=run_dir, callbacks=[StopAt(3)], **settings)
    assert lm.spec.config.seed == 0
    capsys.readouterr()
    lm.report()
    assert capsys.readouterr().out == "nothing to report before the first validation, at step 17\n"
    assert len(lm.generate("alpha", 5, seed=1)) > 0


def test_the_name_of_a_run_has_its_date_text_and_model(corpus_folder, settings, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for changes, name in (({}, "corpus-2x24"), ({"model": None, "trainer": None}, "corpus-mini")):
        request = make_request(str(corpus_folder / "corpus.txt"), horizon="1steps", **(settings | changes))
        _, run = start_run(request)
        run.close()
        assert re.fullmatch(rf"runs/\d{{4}}-\d\d-\d\d_\d\d-\d\d-\d\d_{name}", run.path.as_posix())


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"model": {"num_layer": 3}}, "there is no key 'model.num_layer'; did you mean 'model.num_layers'?"),
        ({"optim": {"name": "adam"}}, "optim='adam' is not known: choose from adamw, muon"),
        ({"resume": "runs/typo", "seed": 3}, "resume continues a run as it was configured, and seed=3 would change it"),
    ],
)
def test_mistakes_are_one_line(tmp_path, monkeypatch, arguments, problem):
    monkeypatch.chdir(tmp_path)
    assert problem in refusal(gpt.train, **arguments)


def test_the_name_of_a_file_gives_its_settings():
    """The name may be the value of a group or one of its keys."""
    request = make_request(optim="adamw", model="gpt2_small", tokenizer="byte", trainer={"tokens_per_step": 1024})
    config = request.config
    assert (config.optim.lr, config.optim.schedule, config.optim.clip) == (0.001, "cosine", 1.0)
    assert (config.model.num_layers, request.model, config.tokenizer.name) == (12, "gpt2_small", "byte")
    config = make_request(optim={"name": "adamw", "clip": 0.5}, model="mini_128").config
    assert (config.optim.lr, config.optim.clip) == (0.001, 0.5)
    assert (config.model.context_length, config.model.d_model) == (128, Config().model.d_model)


def test_arguments_are_keys_of_the_configuration():
    """The text and the callbacks are the exceptions."""
    arguments = inspect.signature(gpt.train).parameters.keys() - {"text", "callbacks"}
    assert arguments == {field.name for field in fields(Config)} - {"logger", "overrides"}


# --- in a real kernel ---


@pytest.mark.slow
def test_the_notebook_of_the_documentation_runs(tmp_path):
    """It shows the curve, the attention, the page and the figures."""
    NotebookClient, nbformat = import_or_skip("nbclient").NotebookClient, import_or_skip("nbformat")
    book = nbformat.read(ROOT / "docs/first-steps.ipynb", 4)
    install = book.cells.pop(1)  # the rest needs no checkout: it runs in an empty folder
    assert re.fullmatch(r'%pip install -q "mini-gpt\[notebook\] @ git\+https://\S+"', install.source)
    for cell in book.cells:
        cell.source = cell.source.replace("3min", "6steps").replace("4min", "9steps")
        cell.source = cell.source.replace("seed=2", f"seed=2, model={MODEL}, trainer={TRAINER}")
    NotebookClient(book, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [cell.outputs for cell in book.cells if cell.cell_type == "code"]
    mime_types = [{key for output in cell for key in output.get("data", {"text": ""})} for cell in outputs]
    trained, reported, plotted, generated, streamed, attention, page, resumed, exported = mime_types
    assert "application/vnd.jupyter.widget-view+json" in trained & resumed
    assert "image/png" in plotted & attention
    assert "text/html" in page
    assert "text" in reported & generated & streamed & exported
    printed = "".join(output.get("text", "") for cell in outputs for output in cell)
    assert re.search(r"^trained +9  steps", printed, re.M)
    assert "load it:  AutoModelForCausalLM.from_pretrained('my-model')" in printed
    assert not [output for cell in outputs for output in cell if output.get("name") == "stderr"]


@pytest.mark.slow
def test_an_interrupted_kernel_saves_and_runs_the_rest_of_the_cell(corpus_folder, settings, tmp_path):
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
def test_a_mistake_in_a_cell_has_no_traceback(tmp_path):
    nbclient, nbformat = import_or_skip("nbclient"), import_or_skip("nbformat")
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("import gpt\ngpt.train('missing.txt')")])
    with pytest.raises(nbclient.exceptions.CellExecutionError):
        nbclient.NotebookClient(book, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert len(book.cells[0].outputs[-1]["traceback"]) == 1
    assert book.cells[0].outputs[-1]["traceback"][0].startswith("UserError: ")
    assert "missing.txt" in book.cells[0].outputs[-1]["traceback"][0]


def test_values_of_numpy_and_pytorch_are_numbers():
    """Paths in groups, and tuples, are what they are on the command line too."""
    request = make_request(
        [Path("a.txt"), "b.txt"],
        seed=np.int64(3),
        patience=torch.tensor(5),
        model={"d_model": np.arange(20, 21)[0], "num_heads": 2},
        optim={"lr": np.float32(0.25), "betas": (0.5, np.float64(0.75))},
        data={"cache": Path("cache"), "prompts": ("The", "river")},
        run_dir=Path("run"),
    )
    config = request.config
    assert (config.seed, config.patience, config.model.d_model, config.optim.lr) == (3, 5, 20, 0.25)
    assert {type(value) for value in (config.seed, config.patience, config.model.d_model)} == {int}
    assert (config.optim.betas, config.data.prompts) == ([0.5, 0.75], ["The", "river"])
    assert (config.data.path, config.data.cache, config.run_dir) == (["a.txt", "b.txt"], "cache", "run")
    assert make_request(np.array(["a.txt"])).config.data.path == ["a.txt"]


@pytest.mark.parametrize(
    ("arguments", "settings", "reason"),
    [
        ([[]], {}, "text=[] is neither a path nor a list of paths"),
        ([""], {}, "text='' is neither"),
        ([b"book.txt"], {}, "text=b'book.txt' is neither"),
        ([{"text": ["a"]}], {}, "text={'text': ['a']} is neither"),
        ([7], {}, "text=7 is neither"),
        ([io.StringIO("a line\n")], {}, "text=<_io.StringIO object"),
        ([["a.txt", 7]], {}, "text=['a.txt', 7] is neither"),
        ([], {"model": 3}, "model=3 is neither a name nor a dictionary"),
        ([], {"trainer": ["cpu"]}, "trainer=['cpu'] is neither a name nor a dictionary"),
        ([], {"seed": np.float64(1.5)}, "seed=1.5 is not of type int"),
    ],
)
def test_what_is_no_path_and_no_key_is_refused(arguments, settings, reason):
    line = refusal(make_request, *arguments, **settings)
    assert line.startswith(reason) and len(line) < 200


def test_the_text_itself_is_refused_in_a_short_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for text in ("The quiet river.\n" * 999, "The quiet river. " * 999, "two\nlines"):
        line = refusal(gpt.train, text, data={"cache": "cache"}, run_dir="run")
        assert line.endswith("not the text itself") and len(line) < 300
    assert not Path("run").exists()


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(previous)


@pytest.mark.slow
def test_settings_of_pytorch_that_a_notebook_left_behind_change_nothing(tmp_path):
    """Nor does training change them, or the state of PyTorch's random generator."""
    text = write_corpus(tmp_path)
    settings = {"horizon": "3steps", "tokenizer": "byte", "data": {"cache": tmp_path / "cache"}}
    settings["model"] = {"context_length": 16, "d_model": 24, "num_layers": 1, "num_heads": 2, "dropout": 0.1}
    settings["trainer"] = {"tokens_per_step": 96}
    expected = gpt.train(text, run_dir=tmp_path / "plain", **settings).model.state_dict()
    contexts = {
        "float64": default_dtype(torch.float64),
        "no_grad": torch.no_grad(),
        "inference": torch.inference_mode(),
        "autocast": torch.autocast("cpu", torch.bfloat16),
    }
    for name, context in contexts.items():
        with context:
            torch.manual_seed(7)
            dtype, has_gradients = torch.get_default_dtype(), torch.is_grad_enabled()
            random_state = torch.get_rng_state()
            state = gpt.train(text, run_dir=tmp_path / name, **settings).model.state_dict()
            assert torch.equal(torch.get_rng_state(), random_state)
            assert (torch.get_default_dtype(), torch.is_grad_enabled()) == (dtype, has_gradients)
        assert all(torch.equal(weight, expected[key]) for key, weight in state.items()), name


def test_another_default_device_is_refused_before_the_run_exists(tmp_path):
    with torch.device("meta"):
        line = refusal(gpt.train, write_corpus(tmp_path), run_dir=tmp_path / "run")
    assert line.startswith("PyTorch's default device is 'meta'")
    assert not (tmp_path / "run").exists()
