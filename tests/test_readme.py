"""Every command that the README names is run, as it stands there but for a shorter training of a smaller model."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from harness import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```bash\n(.*?)```", README, re.S)
COMMANDS = [line for block in BLOCKS for line in block.strip().splitlines()]
PROSE = re.sub(r"```.*?```", "", README, flags=re.S)
COMMANDS += [command for command in re.findall(r"`(python [^`]+)`", PROSE) if command not in COMMANDS]
SHORT = (
    "horizon=2steps model.d_model=32 model.num_heads=2 model.num_layers=1 model.context_length=64 "
    "trainer.tokens_per_step=256 trainer.validate_every=2"
)
# The names that stand for something of the reader's.
MEANING = {
    "FILE": "book.txt",
    "runs/NAME": "runs/first",
    "PATH": "runs/first",
    "trainer.devices=8": "trainer.devices=2",
}
SETS_UP = "pip install -e '.[dev]' && python -m pytest"  # what .ci/run runs, and this test is a part of
NOT_RUN = {SETS_UP, "python -m pytest -m faults", "python3 -m venv .venv && . .venv/bin/activate"}


@pytest.fixture(scope="module")
def house(tmp_path_factory) -> Path:
    """A copy of the project in which to be the reader, with texts of theirs and a first run."""
    folder = tmp_path_factory.mktemp("house")
    for name in ("gpt", "configs", "train.py", "generate.py"):
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, folder / name)
    words = [f"word{i % 97} is {i}" for i in range(6000)]
    (folder / "book.txt").write_text("\n".join(words))
    (folder / "articles").mkdir()
    for i in range(30):
        lines = [json.dumps({"text": " ".join(words[j : j + 50])}) for j in range(i, 6000, 200)]
        (folder / f"articles/{i}.jsonl").write_text("\n".join(lines) + "\n")
    run(folder, f"python train.py data=text data.path=book.txt run_dir=runs/first {SHORT}")
    return folder


def run(folder: Path, command: str) -> str:
    """What a command prints, in a shell whose `python` is this one; it has to succeed."""
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        command, shell=True, cwd=folder, env=environment, capture_output=True, text=True, timeout=300,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


def adapted(command: str) -> str:
    """The command with the reader's names, and short."""
    command = command.replace("pip install -e . && ", "").replace(" ...", "")
    for name, meaning in MEANING.items():
        command = command.replace(name, meaning)
    trains = command.startswith("python train.py") and "resume=" not in command and "--" not in command
    short = " ".join(word for word in SHORT.split() if "init_from=" not in command or not word.startswith("model."))
    return f"{command} trainer.device=cpu {short}" if trains else command


def test_the_commands_are_found():
    """The two lines of set-up are there, and the kinds of command that the README is about."""
    assert "pip install -e . && python train.py" in COMMANDS
    assert SETS_UP in COMMANDS
    assert "tensorboard --logdir runs" in COMMANDS
    assert sum("generate.py" in command for command in COMMANDS) >= 4
    assert sum("train.py" in command for command in COMMANDS) >= 7
    assert (ROOT / ".ci/run").read_text().count("README.md") == 1


@pytest.mark.parametrize("command", [c for c in COMMANDS if c not in NOT_RUN and not c.startswith("tensorboard")])
def test_command(house, command):
    """It succeeds and prints something."""
    assert run(house, adapted(command)).strip()


def test_tensorboard(house):
    """`tensorboard --logdir runs` finds the runs."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    program = str(Path(sys.executable).parent / "tensorboard")
    arguments = [program, "--logdir", "runs", "--port", str(port)]
    server = subprocess.Popen(arguments, cwd=house, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/data/runs", timeout=10) as answer:
                    if "first" in json.load(answer):
                        break
            except OSError:
                pass
            assert time.monotonic() < deadline
            time.sleep(0.3)
    finally:
        server.terminate()
        server.wait(timeout=30)


def test_every_key_is_in_the_table(house):
    """The table of the configuration names each key there is."""
    printed = run(house, "python train.py --cfg job")
    keys = set(re.findall(r"^\s*(\w+):", printed, re.M)) - {"name", "experiment"}
    assert len(keys) > 35
    named = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`]+)`", PROSE))))
    assert keys - named == set()


def test_every_file_is_in_the_map():
    """The files in reading order are all of them."""
    for file in (ROOT / "gpt").glob("*.py"):
        assert file.name == "__init__.py" or f"[gpt/{file.name}](gpt/{file.name})" in README, file.name
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target


def test_python_snippet(house):
    """It runs as it stands and prints the shapes that it says."""
    (snippet,) = re.findall(r"```python\n(.*?)```", README, re.S)
    (house / "snippet.py").write_text(adapted(snippet))
    printed = run(house, "python snippet.py").splitlines()
    assert re.fullmatch(r"torch.Size\(\[1, (\d+), \d+\]\)", printed[0])
    tokens = re.search(r", (\d+),", printed[0])[1]
    assert printed[1] == f"torch.Size([1, 1, 2, {tokens}, {tokens}])"
