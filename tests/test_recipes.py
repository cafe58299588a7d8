"""The README's recipes: each file composes to what it says, and each command trains with it."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

import train  # noqa: F401 - registers the defaults under which configs/train.yaml composes
from gpt.model.transformer import ModelConfig
from gpt.training.config import Config, to_plain, validate
from gpt.training.habits import leaves
from harness import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
FILES = {
    name: package + text
    for package, name, text in re.findall(r"```yaml\n(# @package _global_\n)?# (\S+\.yaml)\n(.*?)```", README, re.S)
}
COMMANDS = [line for block in re.findall(r"```sh\n(.*?)```", README, re.S) for line in block.strip().splitlines()]
TINY = (
    "model.d_model=24 model.num_heads=2 model.num_layers=1 model.context_length=16 trainer.tokens_per_step=96 "
    "trainer.device=cpu horizon=2steps data.cache=cache"
)


@pytest.fixture(scope="module")
def house(tmp_path_factory) -> Path:
    """A copy of the project with the recipes in it, a poem, and notes in the home directory."""
    folder = tmp_path_factory.mktemp("house")
    for name in ("gpt", "configs", "train.py"):
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, folder / name)
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    text = "\n".join(f"line {i} of a poem, {i * 7 % 97}" for i in range(200))
    (folder / "poem.txt").write_text(text)
    (folder / "notes").mkdir()
    (folder / "notes/one.md").write_text(text)
    return folder


def test_the_recipes_are_found():
    """An experiment, a model, and one of each in a folder of one's own; nobody has to type more than a few lines."""
    assert [Path(name).parts[-2] for name in FILES] == ["experiment", "model", "experiment"]
    assert {Path(name).parts[0] for name in FILES} == {"configs", "recipes"}
    assert len(COMMANDS) == 3
    assert all(len(text.splitlines()) <= 6 for text in FILES.values())
    assert not any((ROOT / name).exists() for name in FILES)


@pytest.mark.parametrize("command", COMMANDS)
def test_recipe_composes(house, command):
    """What a recipe says arrives at its keys, and everything else is as without it."""
    words = shlex.split(command)[2:]
    extra = [f"hydra.searchpath=[file://{house / words[1]}]"] if words[0] == "--config-dir" else []
    words = words[2:] if extra else words
    with initialize_config_dir(str(house / "configs"), version_base="1.3"):
        config = leaves(to_plain(validate(compose("train", [*extra, *words]))))
    for name, text in FILES.items():
        group, file = Path(name).parts[-2:]
        if f"{group}={Path(file).stem}" in words:
            said = OmegaConf.to_container(OmegaConf.create(text))
            said.pop("defaults", None)
            said = leaves(said if group == "experiment" else {group: said})
            assert {key: config[key] for key in said} == said
            assert said


def test_partial_model_is_mini_otherwise(house):
    """A model file that names two keys leaves the others as the quick start has them."""
    (name,) = [name for name in FILES if "/model/" in name]
    with initialize_config_dir(str(house / "configs"), version_base="1.3"):
        model = validate(compose("train", [f"model={Path(name).stem}"])).model
        mini = validate(compose("train", [])).model
    assert mini == Config().model == ModelConfig()
    said = OmegaConf.to_container(OmegaConf.create(FILES[name]))
    assert vars(model) == vars(mini) | said != vars(mini)


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_recipe_trains(house, command):
    """Each command does as a reader runs it, at a tiny size."""
    done = subprocess.run(
        [sys.executable, *shlex.split(command)[1:], *TINY.split()],
        cwd=house, env=os.environ | {"HOME": str(house)}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert re.search(r"^trained +2  steps: ", done.stdout, re.M)
