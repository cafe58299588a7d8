"""Whatever this project wrote continues: tests/formats keeps a small run and a small store of each format."""

import json
import shutil

import pytest

from gpt.exchange.checkpoint import FORMAT
from gpt.exchange.formats import CAME, upgraded
from gpt.files import flatten, read_yaml
from gpt.training.config.schema import NOTES, Config
from harness import ROOT, refused, train

FORMATS = ROOT / "tests/formats"
AT_STEP_6 = {
    1: 5.138565540313721,
    2: 5.138565540313721,
    3: 5.138565540313721,
}  # the validation loss of a run of each format, where the code that wrote it went on


@pytest.fixture
def earlier(tmp_path, monkeypatch):
    """A folder with copies of everything, in which one stands."""
    shutil.copytree(FORMATS, tmp_path / "formats")
    monkeypatch.chdir(tmp_path / "formats")


def test_every_format_is_kept():
    """Raising `FORMAT` takes a run of the one before."""
    assert sorted(AT_STEP_6) == list(range(1, FORMAT + 1))


@pytest.mark.parametrize("number", AT_STEP_6)
def test_a_run_continues(earlier, number):
    """It goes on as the code would have that wrote it, dropout and optimizer included."""
    done = train(f"resume=run-{number}", "horizon=6steps", "trainer.devices=1")
    assert "of other versions, so the run may not continue bit for bit" in done.stderr
    with open(f"run-{number}/metrics.json") as file:
        assert json.load(file)["val_loss"] == pytest.approx(AT_STEP_6[number], rel=1e-5)
    assert train(f"resume=run-{number}").stderr == ""


def test_every_key_that_came_is_known():
    """A key that no run of format 1 has is in the table, with what the code did before."""
    stored = flatten(read_yaml(FORMATS / "run-1/config.yaml"))
    assert {*flatten(Config().settings()), *NOTES} - stored.keys() == CAME.keys()
    assert CAME.keys() <= flatten(upgraded({"trainer": {}, "data": {}, "model": {}})).keys()


def test_keys_that_went():
    """A value that is no more gets the name of what it is now; what is no configuration stays what it is."""
    assert upgraded({"trainer": {"strategy": "fsdp"}})["trainer"]["strategy"] == "auto"
    assert upgraded({"trainer": 3})["trainer"] == 3


def test_a_store_opens(earlier, tmp_path):
    """What was published before trains as it is."""
    small = ["model.context_length=8", "model.d_model=8", "model.num_layers=1", "model.num_heads=2"]
    where = ["data=prepared", "data.path=store-1", f"data.cache={tmp_path / 'cache'}", f"run_dir={tmp_path / 'run'}"]
    assert train(*small, *where, "horizon=1steps", "trainer.tokens_per_step=16").returncode == 0


def test_a_newer_config_names_its_file(earlier):
    """A key that this code does not know is told with the file that has it, and the code that wrote it."""
    with open("run-1/config.yaml", "a") as file:
        file.write("gradient_noise: 0.1\n")
    line = refused("resume=run-1")
    assert "run-1/config.yaml: there is no key 'gradient_noise'" in line and "(the run is of " in line
