"""The wheel that pip installs has all files that gpt/ reads. It works in any folder and leaves its own unchanged."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from harness import ROOT, import_or_skip, write_corpus

SETUP = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
CODE = """
import gpt
size = {"d_model": 32, "num_layers": 1, "num_heads": 2, "context_length": 16}
step = {"tokens_per_step": 64}
lm = gpt.train("corpus.txt", optim="adamw", tokenizer="byte", horizon="6steps", model=size, trainer=step)
lm.report()
print(lm.spec.config.optim.name, lm.run_dir)
try:
    gpt.train("corpus.txt", model="gpt2_smal")
except ValueError as error:
    print(error)
"""


def test_every_room_is_installed():
    """The packages in pyproject.toml are the folders of gpt/ and configs/."""
    folders = {
        file.parent.relative_to(ROOT) for kind in ("gpt/**/*.py", "configs/**/*.yaml") for file in ROOT.glob(kind)
    }
    rooms = {".".join(folder.parts).replace("configs", "gpt.configs") for folder in folders}
    assert {*rooms, "gpt.assets"} == set(SETUP["tool"]["setuptools"]["packages"])


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """A folder into which pip has installed the wheel."""
    import_or_skip("build")
    wheel_folder, site = (tmp_path_factory.mktemp(name) for name in ("wheel", "site"))
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(wheel_folder), str(ROOT)]
    done = subprocess.run(build, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "absent from the `packages`" not in done.stdout + done.stderr
    (wheel,) = wheel_folder.iterdir()
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", str(site), str(wheel)]
    subprocess.run(pip, check=True)
    return site


def run(site: Path, folder: Path, *words: str) -> str:
    """Run a command that finds only the installed package, with an empty home, and return what it prints."""
    environment = os.environ | {"PYTHONPATH": str(site), "HOME": str(folder / "home")}
    environment.pop("XDG_CACHE_HOME", None)
    command = [sys.executable, *words]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_files(site):
    """The wheel has all files that git tracks in gpt/ and configs/, and no script."""
    listed = subprocess.check_output(["git", "ls-files", "gpt", "configs"], cwd=ROOT, text=True).splitlines()
    expected = {re.sub("^configs/", "gpt/configs/", name) for name in listed}
    installed = {file.relative_to(site).as_posix() for file in site.rglob("*") if file.is_file()}
    assert {name for name in installed if "__pycache__" not in name and "dist-info" not in name} == expected


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the cache of other systems lies elsewhere")
def test_installed(site, tmp_path):
    """A training reads groups of configs/, has its cache at home, records its code version, and suggests calls."""
    write_corpus(tmp_path)
    before = {file for file in site.rglob("*") if "__pycache__" not in file.parts}
    shown = run(site, tmp_path, "-c", CODE)
    name, folder = re.findall(r"^(adamw) (runs/\S+)$", shown, re.M)[0]
    assert name == "adamw"
    assert "lm.resume(horizon='12steps')" in shown
    assert "train.py" not in shown
    assert (
        "model='gpt2_smal' is not known: choose from auto, gpt2_large, gpt2_medium, gpt2_small, gpt2_xl, mini" in shown
    )
    assert list((tmp_path / "home/.cache/mini-gpt").glob("text-byte-*/train-*.bin"))
    assert {file for file in site.rglob("*") if "__pycache__" not in file.parts} == before
    assert folder.removeprefix("runs/") in run(site, tmp_path, "-m", "gpt.compare")
    code = json.loads((tmp_path / folder / "metrics.json").read_text())["git_commit"]
    assert re.fullmatch(rf"{re.escape(SETUP['project']['version'])}\+[0-9a-f]{{12}}", code)
    run(site, tmp_path, "-m", "gpt.evaluate", "--checkpoint", folder, "--text", "corpus.txt")
    (tmp_path / "empty").mkdir()
    nothing = "import gpt\ntry: gpt.load()\nexcept ValueError as error: print(error)"
    assert run(site, tmp_path / "empty", "-c", nothing).endswith("train one first with gpt.train()\n")
