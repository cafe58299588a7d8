"""Callbacks named on the command line: what is loaded and refused, and that a run cannot name any."""

import re
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml

from gpt.checkpoint import load_checkpoint, save_checkpoint
from gpt.training.callbacks import load_callbacks
from gpt.training.config import parse_config
from harness import TINY_RUN, refusal, resume_run, tiny_arguments, train, train_refusal

MODULE = """
class Counter:
    def __init__(self):
        self.steps = 0
    def on_train_step_end(self):
        self.steps += 1
    def on_train_end(self):
        print("counted", self.steps)
    def state_dict(self):
        return {"steps": self.steps}
    def load_state_dict(self, state):
        self.steps = state["steps"]

class StopAt5:
    def on_train_step_end(self, step, stop):
        if step == 5:
            stop()

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


def test_functions_classes_and_objects_are_loaded(place):
    """A name may be of a callback, of its class, or of a function that returns one."""
    for name in ("make", "Counter", "made"):
        (callback,) = load_callbacks([f"of_mine:{name}"])
        assert type(callback) is sys.modules["of_mine"].Counter
        assert (callback is sys.modules["of_mine"].made) == (name == "made")
    assert load_callbacks([]) == []


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["of_mine"], "'of_mine' is not of the form module:name, as in my_callbacks:PrintNorm"),
        (["of_mine:missing"], r"of_mine:missing cannot be .* \(AttributeError: .* has no attribute 'missing'\)"),
        (["broken:make"], r"broken:make cannot be .* \(SyntaxError: .*\)"),
        (["of_mine:fails"], r"of_mine:fails cannot be .* \(RuntimeError: no luck\)"),
        (["of_mine:seven"], "of_mine:seven is of type int, with none of on_train_start, .*"),
    ],
)
def test_names_that_are_refused(place, names, words):
    """One line has the name and the reason."""
    assert re.fullmatch(f"callbacks: {words}", refusal(load_callbacks, names))


def test_mistakes_are_found_first(place):
    """Callbacks are checked before the text is read and a directory is created."""
    names = "callbacks=[of_mine:make,of_mine:made]"
    words = "2 of class Counter have a state_dict"
    assert words in train_refusal(*TINY_RUN, f"data.path={place / 'none.txt'}", f"run_dir={place / 'run'}", names)
    assert not (place / "run").exists()
    assert words in train_refusal(names, "plan=true")


@pytest.mark.slow
def test_names_are_given_again_on_resuming(place, corpus_folder):
    """A resumed run stores no names of callbacks. One that is named again continues with its state."""
    run_dir = place / "run"
    run = tiny_arguments(corpus_folder, f"run_dir={run_dir}", "logger=[]", "horizon=7steps")
    done = train(*run, "callbacks=[of_mine:make,of_mine:StopAt5]")
    assert "counted 5" in done.stdout
    assert "of_mine" not in (run_dir / "config.yaml").read_text()
    stored = load_checkpoint(run_dir / "checkpoints/last.ckpt")
    assert stored["callbacks"] == {"Counter": {"steps": 5}}
    assert "callbacks" not in stored["config"]
    done = train(f"resume={run_dir}", "callbacks=of_mine:make")
    assert done.stderr == ""
    assert "counted 7" in done.stdout


def test_runs_name_no_callbacks(place, trained, run_copy):
    """A forged checkpoint or config.yaml that names a callback is refused, and nothing is imported."""
    (place / "evil.py").write_text(f"open({str(place / 'ran')!r}, 'w')\n")
    file = run_copy / "config.yaml"
    stored = yaml.safe_load(file.read_text())
    file.write_text(yaml.safe_dump(stored | {"callbacks": ["evil:make"]}))
    assert "there is no key 'callbacks'" in refusal(resume_run, run_copy)
    file.write_text(yaml.safe_dump(stored))
    last = run_copy / "checkpoints/last.ckpt"
    forged = load_checkpoint(last)
    forged["config"]["callbacks"] = ["evil:make"]
    (run_copy / "checkpoints/best.ckpt").unlink()
    save_checkpoint(forged, last)
    assert "cannot be resumed: there is no key 'callbacks'" in refusal(resume_run, run_copy, "15steps")
    assert "there is no key 'callbacks'" in refusal(parse_config, asdict(trained.config) | {"callbacks": []})
    assert not (place / "ran").exists()
