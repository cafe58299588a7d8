"""Runs of versions before 1.0: their models can be used, and their training cannot be resumed.

tests/formats has a small run and a small store of each format, as the version of that time wrote them.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch

import gpt
from gpt import checkpoint, evaluate, export
from gpt.api import read_curves
from gpt.checkpoint_formats import ADDED_KEYS, upgrade_config
from gpt.files import flatten, read_yaml
from gpt.loading import open_model
from gpt.training.config import Config, config_to_yaml, load_config
from gpt.training.resume import FIRST_RESUMABLE_FORMAT
from harness import ROOT, contents, train, train_refusal

FORMATS = ROOT / "tests/formats"
BEFORE_1 = range(1, FIRST_RESUMABLE_FORMAT)
NEW_RUN = ["data=text", "data.path=text.txt", "data.cache=cache", "trainer.device=cpu", "trainer.precision=fp32"]
NEW_RUN += ["trainer.tokens_per_step=32", "data.prompts=[never]", "horizon=1steps", "run_dir=new"]


@pytest.fixture
def earlier(tmp_path, monkeypatch) -> None:
    """A copy of all formats in the current folder."""
    shutil.copytree(FORMATS, tmp_path / "formats")
    monkeypatch.chdir(tmp_path / "formats")


def last_loss(number: int) -> float:
    """Return the validation loss that a run measured at its end, in nats per token."""
    return json.loads(Path(f"run-{number}/metrics.json").read_text())["val_loss"]


@pytest.mark.promise("runs.md#Every later version")
def test_every_format_has_a_run():
    """Whoever raises `CHECKPOINT_FORMAT` adds a run of the format before."""
    assert [file.name for file in sorted(FORMATS.glob("run-*"))] == [
        f"run-{n}" for n in range(1, checkpoint.CHECKPOINT_FORMAT)
    ]
    for number in BEFORE_1:
        assert checkpoint.load_checkpoint(FORMATS / f"run-{number}/checkpoints/last.ckpt")["format"] == number


@pytest.mark.promise("runs.md#Checkpoints of 0.x")
@pytest.mark.parametrize("number", BEFORE_1)
@pytest.mark.parametrize("name", ["best", "last"])
def test_new_run_starts_from_its_weights(earlier, name, number):
    """Before its first step, the new run measures the loss that the old run measured at its end."""
    file = Path(f"run-{number}/checkpoints/{name}.ckpt")
    if name == "best":  # the best step of these runs is the last
        file.with_name("last.ckpt").rename(file)
    train(*NEW_RUN, f"init_from={file}")
    losses = read_curves(Path("new"))["val/loss"]
    assert losses[0] == (0, pytest.approx(last_loss(number), rel=1e-5))
    assert losses[1][0] == 1 and losses[1][1] != losses[0][1]


@pytest.mark.promise("runs.md#Checkpoints of 0.x")
@pytest.mark.parametrize("number", BEFORE_1)
def test_its_model_generates_and_is_exported(earlier, capsys, number):
    """The exported folder has the same weights, and generates the same text."""
    options = {"max_new_tokens": 23, "temperature": 0.0}
    export.main(["--checkpoint", f"run-{number}", "--to", "exported"])
    stored = checkpoint.load_checkpoint(Path(f"run-{number}/checkpoints/last.ckpt"))["state_dict"]
    exported = open_model("exported")[0].state_dict()
    assert stored.keys() == exported.keys()
    assert all(torch.equal(weight, stored[name]) for name, weight in exported.items())
    text = gpt.load(f"run-{number}", "cpu").generate("never", **options)
    assert text and text == gpt.load("exported", "cpu").generate("never", **options)


@pytest.mark.promise("runs.md#training cannot be resumed")
@pytest.mark.parametrize("number", BEFORE_1)
def test_resuming_is_refused(earlier, number):
    """One line has the format, the last version that can resume, and the remedy. No file changes."""
    contents_before = contents(f"run-{number}")
    line = train_refusal(f"resume=run-{number}", "horizon=6steps")
    assert f"of format {number}," in line and "0.5.0" in line
    assert line.endswith(f"init_from=run-{number}/checkpoints/last.ckpt")
    assert contents(f"run-{number}") == contents_before


@pytest.mark.promise("runs.md#Checkpoints of 0.x")
@pytest.mark.parametrize("number", BEFORE_1)
def test_its_configuration_is_read_and_its_model_evaluated(earlier, monkeypatch, capsys, number):
    """A key that came later has the value that stands for what the code did before.

    gpt.evaluate measures the loss that the old run measured at its end.
    """
    config = load_config(Path(f"run-{number}/config.yaml"))
    stored = flatten(read_yaml(Path(f"run-{number}/config.yaml")))
    came = {key: value for key, value in ADDED_KEYS.items() if key not in stored and key != "overrides"}
    assert came.items() <= config.settings().items()
    assert config.overrides == {}
    Path("again").mkdir()
    Path("again/config.yaml").write_text(config_to_yaml(config))
    train("--config-dir", "again", "--config-name", "config", "run_dir=new", "horizon=1steps")  # prepares its text
    monkeypatch.setattr(evaluate, "DEFAULT_CACHE", Path("cache"))
    evaluate.main(["--checkpoint", f"run-{number}", "--json"])
    assert json.loads(capsys.readouterr().out)["nats_per_token"] == pytest.approx(last_loss(number), rel=1e-5)


def test_every_key_that_came_is_known():
    """If no run of format 1 has a key, the table has it, with what the code did before."""
    stored = flatten(read_yaml(FORMATS / "run-1/config.yaml"))
    assert {*Config().settings(), "overrides"} - stored.keys() == ADDED_KEYS.keys()
    came = upgrade_config({"trainer": {}, "data": {}, "model": {}})
    assert ADDED_KEYS.keys() <= flatten(came).keys() | {"overrides"}
    assert upgrade_config({"trainer": {"short_window": 8}})["trainer"]["short_sequences"] == 8


def test_store_trains_as_it_is(earlier, tmp_path):
    """A store of prepared text that an earlier version published needs no preparation."""
    small = ["model.context_length=8", "model.d_model=8", "model.num_layers=1", "model.num_heads=2"]
    folders = ["data.path=store-1", f"data.cache={tmp_path / 'cache'}", f"run_dir={tmp_path / 'run'}"]
    train(*small, "data=tokens", *folders, "horizon=1steps", "trainer.tokens_per_step=16")
    assert (tmp_path / "run/checkpoints/last.ckpt").exists()


def test_unknown_key_names_its_file(earlier):
    """The line also has the version of the code that wrote the run."""
    with open("run-1/config.yaml", "a") as file:
        file.write("gradient_noise: 0.1\n")
    line = train_refusal("resume=run-1")
    assert "run-1/config.yaml: there is no key 'gradient_noise'" in line and "(the run is of " in line
