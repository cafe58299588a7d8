"""Callbacks named on the command line: how they are found, what is refused, and that no run brings its own."""

import re
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import yaml
from lightning import Callback
from lightning.pytorch.callbacks import Timer

from gpt.exchange import checkpoint
from gpt.training.config.loading import load_callbacks, validate
from harness import TINY, StopAt, begin_run, fit, refusal, refused, resume_run, tiny_arguments, tiny_config, train

MODULE = """
from lightning import Callback

class Counter(Callback):
    def __init__(self):
        self.steps = 0
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.steps += 1
    def on_train_end(self, trainer, module):
        print("counted", self.steps)
    def state_dict(self):
        return {"steps": self.steps}
    def load_state_dict(self, state):
        self.steps = state["steps"]

def make():
    return Counter()

made = Counter()
seven = 7

def fails():
    raise RuntimeError("no\\nluck")
"""


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    """The current directory, with a module of callbacks."""
    (tmp_path / "of_mine.py").write_text(MODULE)
    (tmp_path / "broken.py").write_text("def (:\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    yield tmp_path
    for name in ("of_mine", "broken"):
        sys.modules.pop(name, None)


def test_functions_classes_and_callbacks(place):
    """Each form is taken, from the current directory or from what is installed."""
    made, of_class, instance = load_callbacks(["of_mine:make", "of_mine:Counter", "of_mine:made"])
    assert {type(callback).__name__ for callback in (made, of_class, instance)} == {"Counter"}
    assert instance is sys.modules["of_mine"].made
    assert isinstance(load_callbacks(["lightning.pytorch.callbacks:Timer"])[0], Timer)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("of_mine", r"'of_mine' is not of the form module:name, as in lightning\.pytorch\.callbacks:Timer"),
        (":make", r"':make' is not of the form module:name, .*"),
        (
            "nowhere:make",
            r"nowhere:make cannot be imported and made \(ModuleNotFoundError: No module named 'nowhere'\)",
        ),
        (
            "of_mine:missing",
            r"of_mine:missing cannot be imported and made \(AttributeError: .* has no attribute 'missing'\)",
        ),
        ("broken:make", r"broken:make cannot be imported and made \(SyntaxError: .*\)"),
        ("of_mine:fails", r"of_mine:fails cannot be imported and made \(RuntimeError: no luck\)"),
        (
            "lightning.pytorch.callbacks:EarlyStopping",
            r"EarlyStopping cannot be imported and made \(TypeError: .*'monitor'\)",
        ),
        ("of_mine:seven", r"of_mine:seven is of type int, not a lightning\.Callback"),
    ],
)
def test_what_is_no_callback(place, name, words):
    """One line says what is wrong with it."""
    assert re.fullmatch(f"callbacks: .*{words}", refusal(load_callbacks, [name]))


def test_a_mistake_comes_first(place):
    """A callback that cannot be had ends the command before anything is prepared or made."""
    line = refused(*TINY, f"data.path={place / 'none.txt'}", f"run_dir={place / 'run'}", "callbacks=of_mine:fails")
    assert "callbacks: of_mine:fails cannot be imported and made (RuntimeError: no luck)" in line
    assert not (place / "run").exists()
    for words in (["callbacks=7"], ["callbacks=7", "plan=true"]):
        assert "callbacks: '7' is not of the form module:name, as in " in refused(*words)


@pytest.mark.slow
def test_never_stored_and_allowed_on_resuming(place, corpus_folder):
    """A callback goes on with its state when it is named again; the run itself does not know of it."""
    run_dir = place / "run"
    run = tiny_arguments(corpus_folder, f"run_dir={run_dir}", "logger=[]")
    stop = "harness:STOP_AT_5"
    sys.modules["harness"].STOP_AT_5 = StopAt(5)  # type: ignore[attr-defined]
    done = train(*run, "horizon=7steps", f"callbacks=[of_mine:make,{stop}]", code=143)
    assert "counted 5" in done.stdout
    assert "of_mine" not in (run_dir / "config.yaml").read_text()
    payload = checkpoint.load(run_dir / "checkpoints/last.ckpt")
    assert payload["callbacks"]["Counter"] == {"steps": 5}
    assert "callbacks" not in payload["config"]
    done = train(f"resume={run_dir}", "callbacks=of_mine:make")
    assert done.stderr == ""
    assert "counted 7" in done.stdout


def test_no_run_brings_callbacks(place, corpus_folder):
    """A crafted checkpoint or config.yaml that names one is refused, and nothing is imported."""
    (place / "evil.py").write_text(f"open({str(place / 'ran')!r}, 'w')\n")
    session = begin_run(tiny_config(corpus_folder, "horizon=2steps", f"run_dir={place / 'run'}"))
    config = session.directory / "config.yaml"
    stored = yaml.safe_load(config.read_text())
    config.write_text(yaml.safe_dump(stored | {"callbacks": ["evil:make"]}))
    assert "there is no key 'callbacks'" in refusal(resume_run, str(session.directory))
    config.write_text(yaml.safe_dump(stored))
    fit(session)
    last = session.directory / "checkpoints/last.ckpt"
    payload = checkpoint.load(last)
    payload["config"]["callbacks"] = ["evil:make"]
    checkpoint.save(payload, last)
    assert "cannot be continued: there is no key 'callbacks'" in refusal(resume_run, str(session.directory))
    assert "there is no key 'callbacks'" in refusal(validate, asdict(session.config) | {"callbacks": []})
    assert not (place / "ran").exists()


class Hoards(Callback):
    """A callback whose state no checkpoint could be read with."""

    def state_dict(self) -> dict:
        return {"values": [1.0, {"mean": np.float64(2.0)}]}


def test_state_that_cannot_be_read_back(corpus_folder, tmp_path):
    """It is named instead of saved: a checkpoint with it would be lost."""
    session = begin_run(tiny_config(corpus_folder, "horizon=2steps", f"run_dir={tmp_path / 'run'}"))
    line = refusal(fit, session, [Hoards()])
    assert "callback Hoards: its state cannot be stored (Unsupported: float64)" in line
    assert not list(session.directory.glob("checkpoints/*"))


def test_the_same_state_twice(corpus_folder, tmp_path):
    """Two callbacks of which a checkpoint could keep one are refused in one line."""
    names = ["lightning.pytorch.callbacks:Timer"] * 2
    line = refused(*tiny_arguments(corpus_folder, f"run_dir={tmp_path / 'run'}", f"callbacks={names}"))
    assert "Found more than one stateful callback of type `Timer`" in line
