"""`rerun=` repeats a run from its stored configuration, with changes."""

import dataclasses
from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_dir

import gpt.training.config.command  # noqa: F401
from gpt.files import flatten
from gpt.training.config.loading import composed_values, to_yaml, validate
from gpt.training.config.schema import Config
from gpt.training.config.words import given_by
from harness import ROOT, differences, refusal, tiny_arguments, tiny_config, train

AUTO = ("device", "precision", "compile", "micro_batch_size")


@pytest.fixture
def stored(tmp_path) -> Path:
    """A run directory whose configuration differs from the defaults in every way that matters here."""
    config = tiny_config(tmp_path, "optim=adamw", "optim.lr=0.004", "seed=7", "run_dir=elsewhere", "trainer.device=cpu")
    config.data.path = "${oc.env:HOME}/book.txt"
    config.optim.betas = [0.7, 0.8]
    config.trainer.precision, config.trainer.compile = "bf16", "false"
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.yaml").write_text(to_yaml(config), encoding="utf-8")
    return tmp_path / "run"


def rerun(run: Path, *overrides: str) -> Config:
    """Return the configuration of `python train.py rerun=RUN ...`."""
    overrides = (f"rerun={run}", *overrides)
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        return validate(composed_values(compose("train", list(overrides)), list(given_by(list(overrides)))))


def changes(run: Path, config: Config) -> dict:
    """Return what differs from the stored configuration, by dotted key."""
    before = flatten(yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8")))
    return {key: value for key, value in flatten(dataclasses.asdict(config)).items() if value != before[key]}


def test_every_setting_is_repeated(stored):
    """Only the run's directory is not. No value is interpolated."""
    config = rerun(stored)
    assert changes(stored, config) == {"run_dir": None}
    assert config.data.path == "${oc.env:HOME}/book.txt"


def test_keys_and_groups_replace_settings(stored):
    """A key replaces one value, and a group the whole group. A key that is removed has its default."""
    steps = ["trainer.tokens_per_step=768"]
    config = rerun(stored, "seed=2", "data.path=other.txt", "model=mini", "model.num_layers=5", *steps, "~optim.betas")
    assert (config.seed, config.data.path, config.trainer.tokens_per_step) == (2, "other.txt", 768)
    assert dataclasses.astuple(config.model) == (256, 128, 5, 4, 0.0, True)
    assert (config.optim.name, config.optim.lr, config.optim.betas) == ("adamw", 0.004, Config().optim.betas)
    assert rerun(stored, "optim=muon").optim.lr is None


def test_path_replaces_the_text(stored):
    """A run on a corpus becomes a run on text, and a run on a mixture stays one."""
    file = stored / "config.yaml"
    plain = yaml.safe_load(file.read_text(encoding="utf-8"))
    for name, path, weights in (("python_docs", None, []), ("mix", ["a", "b"], [1, 2])):
        file.write_text(yaml.safe_dump(plain | {"data": {"name": name, "path": path, "weights": weights}}))
        config = rerun(stored, "data.path=[a,c]")
        assert (config.data.name, config.data.path) == ("mix" if weights else "text", ["a", "c"])


@pytest.mark.parametrize(
    ("override", "automatic"),
    [
        ("seed=3", []),
        ("trainer.log_every=5", []),
        ("model.num_layers=1", ["micro_batch_size"]),
        ("trainer.tokens_per_step=160", ["micro_batch_size"]),
        ("trainer.device=cpu", ["precision", "compile", "micro_batch_size"]),
        ("trainer=default", [*AUTO]),
    ],
)
def test_choices_for_the_machine_stay(stored, override, automatic):
    """The same bits need the same choices. Only a change to what they were made for opens them again."""
    config = rerun(stored, override)
    assert [key for key in AUTO if getattr(config.trainer, key) == "auto"] == automatic


@pytest.mark.parametrize(
    ("override", "opened"), [("seed=3", False), ("horizon=9steps", True), ("trainer.tokens_per_step=160", True)]
)
def test_bpe_dropout_is_chosen_again_for_other_epochs(stored, override, opened):
    """If the user gave it, it stays."""
    file = stored / "config.yaml"
    before = yaml.safe_load(file.read_text(encoding="utf-8"))
    before["data"]["bpe_dropout"] = 0.1
    for decided in ({"data.bpe_dropout": None}, {}):
        file.write_text(yaml.safe_dump(before | {"decided": decided}))
        assert rerun(stored, override).data.bpe_dropout == (None if opened and decided else 0.1)


@pytest.mark.parametrize(("override", "opened"), [("seed=3", False), ("model.context_length=32", True)])
def test_short_sequences_are_chosen_again_for_another_context(stored, override, opened):
    """If the user gave their length, it stays."""
    file = stored / "config.yaml"
    before = yaml.safe_load(file.read_text(encoding="utf-8"))
    before["trainer"] |= {"short_window": 8, "micro_batch_size": 1}
    for decided in ({"trainer.short_window": None}, {}):
        file.write_text(yaml.safe_dump(before | {"decided": decided}))
        assert rerun(stored, override).trainer.short_window == (None if opened and decided else 8)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["experiment=shakespeare"], "experiment and rerun exclude each other"),
        (["rerun=/nowhere"], "/nowhere: not a run directory"),
        (["rerun="], "rerun= is empty"),
        (["seed=-1"], "seed=-1 is out of range"),
    ],
)
def test_mistake_is_one_line(stored, overrides, words):
    """The line names the value."""
    assert words in refusal(rerun, stored, *overrides)


@pytest.mark.slow
def test_repeated_run_is_equal_bit_for_bit(corpus_folder, tmp_path, monkeypatch):
    """A sweep repeats a run several times, each time with another override."""
    monkeypatch.chdir(tmp_path)
    train(*tiny_arguments(corpus_folder, "horizon=20steps", "seed=5", "trainer.device=cpu", "run_dir=first"))
    done = train("-m", "rerun=first", "seed=5,6")
    assert done.stderr == ""
    assert "job 1: rerun=first seed=6\n" in done.stdout
    same, other = sorted((tmp_path / "runs").glob("2*"))
    assert same.name.endswith("_corpus-rerun_seed=5")
    assert differences(same, tmp_path / "first") == []
    assert changes(same, validate(yaml.safe_load((other / "config.yaml").read_text()))) == {"seed": 6}


def test_run_that_was_extended_is_not_repeated_bit_for_bit(corpus_folder, tmp_path, monkeypatch):
    """A warning names the change. The repeated run has no such change, and so gives no warning."""
    monkeypatch.chdir(tmp_path)
    train(*tiny_arguments(corpus_folder, "horizon=2steps", "run_dir=first"))
    train("resume=first", "horizon=3steps")
    [warning] = train("rerun=first", "run_dir=second").stderr.splitlines()
    assert "first " in warning and "(horizon=2steps until step 2)" in warning
    assert train("rerun=second", "run_dir=third").stderr == ""
