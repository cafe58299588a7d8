"""resume=auto: the same command begins a run, continues it, and finds it complete, as job queues repeat it."""

import re

import pytest
import yaml

from gpt.errors import UserError
from gpt.training import runs
from gpt.training.config import to_yaml
from gpt.training.requeue import begin_or_continue
from harness import TINY, differences, tiny_config, train, write_corpus


@pytest.fixture
def arguments(tmp_path):
    """A command for a job queue."""
    places = [f"data.path={write_corpus(tmp_path)}", f"data.cache={tmp_path / 'cache'}", f"run_dir={tmp_path / 'run'}"]
    return [*TINY, "data.prompts=null", *places, "resume=auto", "horizon=5steps", "trainer.checkpoint_every=2"]


def test_begun_continued_and_complete(arguments, tmp_path):
    """A run that was stopped after two steps ends like one that never was, and then there is nothing to do."""
    assert train(*arguments).returncode == 0
    whole = (tmp_path / "run").rename(tmp_path / "whole")
    runs.release(tmp_path / "run")
    stored = yaml.safe_load((whole / "config.yaml").read_text())
    assert (stored["resume"], stored["run_dir"]) == (None, str(tmp_path / "run"))
    assert len(stored["data"]["prompts"]) == 2  # as they were taken from the text

    # As a kill leaves it: nothing but the lock and a file that was being written.
    (tmp_path / "run").mkdir()
    (tmp_path / "run/.lock").touch()
    (tmp_path / "run/.config.yaml.4321").touch()
    begun = train(*arguments)
    assert (begun.returncode, begun.stderr) == (0, "")
    assert "continuing" not in begun.stdout
    (tmp_path / "run/checkpoints/last.ckpt").unlink()
    (tmp_path / "run/checkpoints/best.ckpt").unlink()
    continued = train(*arguments)
    assert continued.returncode == 0
    assert re.search(r"continuing \S+/run at step \d of 5", continued.stdout)
    assert differences(tmp_path / "run", whole) == []
    complete = train(*arguments)
    assert (complete.returncode, complete.stderr) == (0, "")
    assert "is complete: it has trained all of its 5 steps" in complete.stdout


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ("seed=3", "seed=3 here, and 1 in the run of run_dir="),
        ("model.num_layers=1", "model.num_layers=1 here, and 2 in the run"),
        ("horizon=7steps", "horizon=7steps here, and 5steps in the run of"),
        ("data.prompts=[once]", "data.prompts=['once'] here, and ['', 'beta'] in the run of"),
        ("trainer.micro_batch_size=2", "trainer.micro_batch_size=2 here, and 3 in the run of"),
    ],
)
def test_other_settings(tmp_path, change, line):
    """A repeated command that says something else is refused, naming the key, both values and the remedy."""
    write_corpus(tmp_path)
    config = tiny_config(tmp_path, "horizon=5steps", "data.prompts=['',beta]")
    runs.make(str(tmp_path / "run"), "run", to_yaml(config))
    asked = ["data.prompts=null", "resume=auto", f"run_dir={tmp_path / 'run'}", "horizon=5steps"]
    with pytest.raises(UserError, match=re.escape(line)) as caught:
        begin_or_continue(tiny_config(tmp_path, *asked, change))
    assert "resume=" in str(caught.value)
    assert begin_or_continue(tiny_config(tmp_path, *asked)).resume == str(tmp_path / "run")


def test_what_the_run_has_decided(tmp_path):
    """A time that became steps, `auto`, and a model that came with its weights are no differences."""
    write_corpus(tmp_path)
    stored = tiny_config(tmp_path, "horizon=1234steps", "init_from=gpt2", "model.num_layers=7")
    runs.make(str(tmp_path / "run"), "run", to_yaml(stored))
    asked = ["resume=auto", f"run_dir={tmp_path / 'run'}", "init_from=gpt2", "trainer.micro_batch_size=auto"]
    assert begin_or_continue(tiny_config(tmp_path, *asked, "horizon=2h")).resume == str(tmp_path / "run")
    with pytest.raises(UserError, match=r"model\.dropout=0\.2 here"):
        begin_or_continue(tiny_config(tmp_path, *asked, "horizon=2h", "model.dropout=0.2"))


def test_without_a_directory(tmp_path):
    """There is nothing to look for."""
    write_corpus(tmp_path)
    with pytest.raises(UserError, match="add run_dir=DIR"):
        begin_or_continue(tiny_config(tmp_path, "resume=auto"))
