"""The README is true: its commands run, and the files, keys and options that it names are the ones there are.

The quick tests parse every command and run the cheap ones in this process. The slow ones run each command as a reader
would, in a copy of the project, except that trainings are shorter and models smaller.
"""

import itertools
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from importlib.util import find_spec
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser

import generate
import train as program
from gpt import compare, evaluate, export, tokens
from gpt.training.config import parse_horizon, validate
from harness import ROOT, train

README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```bash\n(.*?)```", README, re.S)
PROSE = re.sub(r"```.*?```", "", README, flags=re.S)
COMMANDS = [line for block in BLOCKS for line in block.strip().splitlines()]
COMMANDS += [command for command in re.findall(r"`(python\s[^`]+)`", PROSE) if command not in COMMANDS]
SNIPPETS = re.findall(r"```python\n(.*?)```", README, re.S)
NAMED = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`]+)`", PROSE))))
SHORT = (
    "horizon=2steps model.d_model=32 model.num_heads=2 model.num_layers=1 model.context_length=64 "
    "trainer.tokens_per_step=256 trainer.validate_every=2"
)
# What stands for something of the reader's, or would take long.
MEANING = {
    "FILE": "book.txt",
    "runs/NAME": "runs/first",
    "PATH": "runs/first",
    "=NAME": "=first",
    "trainer.devices=8": "trainer.devices=2",
    "hydra/sweeper=search": "hydra/sweeper=search hydra.sweeper.n_trials=2",
    "8000steps": "4steps",
    "1000steps": "2steps",
    '"horizon"': '"model": {"d_model": 32, "num_layers": 1}, "horizon"',
}
SETS_UP = "pip install -e '.[dev]' && python -m pytest"  # .ci/run runs it, and this test is part of it
NOT_RUN = {
    SETS_UP,
    "python -m pytest -m slow",
    "python -m pytest -m faults",
    "python train.py experiment=finetune init_from=gpt2 data=text data.path=FILE",  # downloads half a gigabyte
    "python3 -m venv .venv && . .venv/bin/activate",
}
RUN = [command for command in COMMANDS if command not in NOT_RUN and not command.startswith("tensorboard")]


def adapted(command: str) -> str:
    """Put in the reader's names, and make trainings short."""
    command = re.sub(r"^pip install -e \S+ && ", "", command).replace(" ...", "")
    for name, meaning in MEANING.items():
        command = command.replace(name, meaning)
    trains = command.startswith("python train.py") and "resume=runs" not in command and "--" not in command
    short = " ".join(word for word in SHORT.split() if "init_from=" not in command or not word.startswith("model."))
    return f"{command} trainer.device=cpu {short}" if trains else command


def words(command: str) -> list[str]:
    """Split an adapted command as a shell does, and keep what follows a pipe."""
    return shlex.split(adapted(command).split(" | ")[-1])


def write_book(folder: Path) -> None:
    (folder / "book.txt").write_text("\n".join(f"word{i % 97} is {i}" for i in range(6000)))
    (folder / "mymodule.py").write_text(
        "from lightning import Callback\n\n\ndef make_callback():\n    return Callback()\n"
    )


def test_the_commands_are_found():
    """Both lines of set-up are there, and enough of each kind of command."""
    assert [command for command in COMMANDS if "\n" in command] == []  # nobody can copy those
    assert "pip install -e . && python train.py" in COMMANDS
    assert SETS_UP in COMMANDS
    assert "tensorboard --logdir runs" in COMMANDS
    assert sum("generate.py" in command for command in COMMANDS) >= 4
    assert sum("train.py" in command for command in COMMANDS) >= 10
    assert sum("gpt.tokens" in command for command in COMMANDS) == 2
    assert set(COMMANDS) >= NOT_RUN - {"python3 -m venv .venv && . .venv/bin/activate"}


def test_ci_runs_the_commands_for_the_tests():
    """The README's own line, then the slow tests."""
    script = (ROOT / ".ci/run").read_text()
    assert script.count("README.md") == 1
    assert "python -m pytest -m slow" in script
    markers = (ROOT / "pyproject.toml").read_text()
    for command in NOT_RUN:
        for marker in re.findall(r"-m pytest -m (\w+)", command):
            assert f'"{marker}: ' in markers


@pytest.mark.parametrize("command", [command for command in RUN if "train.py" in command])
def test_training_command_composes(command):
    """Hydra and every check of the configuration accept it; of a sweep, each job."""
    overrides = [word for word in words(command)[2:] if word != "job" and not word.startswith(("-", "hydra"))]
    parsed = OverridesParser.create().parse_overrides(overrides)
    choices = [
        [f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()]
        if override.is_sweep_override()
        else [text]
        for override, text in zip(parsed, overrides, strict=True)
    ]
    jobs = list(itertools.product(*choices))
    assert len(jobs) == (2 if " -m optim" in command else 1)
    for job in jobs:
        with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
            config = validate(compose("train", list(job)))
        program.refuse_contradictions(config, list(job))


@pytest.mark.parametrize("command", [command for command in RUN if "train.py" not in command])
def test_other_command_parses(command, capsys):
    """Its program exists and knows every option."""
    python, *rest = words(command)
    assert python == "python"
    if rest[0] == "-m":
        assert find_spec(rest[1]) is not None
        programs = {"gpt.tokens": tokens, "gpt.evaluate": evaluate, "gpt.export": export, "gpt.compare": compare}
        if rest[1] != "gpt.verify":
            programs[rest[1]].parse_arguments(rest[2:])
        return
    assert rest[0] == "generate.py"
    if rest[1:] == ["--help"]:
        with pytest.raises(SystemExit):
            generate.parse_arguments(["--help"])
        assert "--prompt" in capsys.readouterr().out
    else:
        generate.parse_arguments(rest[1:])


def test_cheap_commands_run(tmp_path, monkeypatch, capsys):
    """A training, sampling, splitting text, comparing and measuring runs, in this process."""
    monkeypatch.chdir(tmp_path)
    write_book(tmp_path)
    own = ["data.cache=cache", "trainer.device=cpu"]
    done = train("data=text", "data.path=book.txt", "run_dir=runs/first", *own, *SHORT.split())
    assert done.returncode == 0, done.stderr
    for command in RUN:
        arguments = words(command)
        if "gpt.tokens" in command:
            tokens.main(arguments[3:])
        elif "generate.py --prompt" in command:
            generate.main([*arguments[2:], "--max-new-tokens", "3"])
        elif "gpt.compare" in command:
            compare.main(arguments[3:])
        elif "gpt.evaluate --" in command:
            evaluate.main(arguments[3:])
        else:
            continue
        assert capsys.readouterr().out.strip(), command
    for snippet in SNIPPETS:
        if "transformers" not in snippet:
            exec(adapted(snippet).replace('"path"', '"cache": "cache", "path"'), {})
    out = capsys.readouterr().out
    assert "trained" not in out  # that is what `report` prints
    assert len(list((tmp_path / "runs").glob("*_run/metrics.json"))) == 1
    assert "Name: val/loss, dtype: float64" in out
    assert re.search(r"\[\(b'.*', -\d", out)  # tokens with their log-probabilities


def test_every_key_is_named():
    """The configuration's keys, the keys of metrics.json and the tags of the curves."""
    printed = train("--cfg", "job").stdout
    keys = set(re.findall(r"^\s*(\w+):", printed, re.M)) - {"name", "experiment"}
    assert len(keys) > 35
    assert keys - NAMED == set()
    metrics = re.findall(r'^ +"(\w+)": ', (ROOT / "gpt/training/metrics.py").read_text(), re.M)
    assert len(metrics) == 13
    assert set(metrics) - NAMED == set()
    tags = re.findall(r'"((?:train|val|perf)/\w+)"', (ROOT / "gpt/training/curves.py").read_text())
    assert len(set(tags)) == 9
    assert [tag for tag in tags if tag not in PROSE] == []


def test_choices_are_the_files_in_configs():
    """Each group's row of the table names every choice."""
    rows = dict(re.findall(r"^\| `(\w+)` \| (`.*?`) \|", README.split("## Configuration")[1], re.M))
    groups = [folder.name for folder in (ROOT / "configs").iterdir() if folder.is_dir() and folder.name != "hydra"]
    for group in groups:
        assert set(re.findall(r"`(\w+)`", rows[group])) == {file.stem for file in (ROOT / "configs" / group).iterdir()}


def test_every_horizon_is_one():
    """`2000steps` and the others in that sentence."""
    (sentence,) = re.findall(r"`horizon` says how long to train: (.*?)\.", README, re.S)
    horizons = re.findall(r"`(\w+)`", sentence)
    assert len(horizons) == 6
    for horizon in horizons:
        parse_horizon(horizon)


def test_every_option_of_generate_exists(capsys):
    with pytest.raises(SystemExit):
        generate.parse_arguments(["--help"])
    known = capsys.readouterr().out
    named = re.findall(r"`(--[\w-]+)", README.split("## Sampling")[1].split("\n## ")[0])
    assert len(named) >= 8
    assert [option for option in named if option not in known] == []


def test_benchmarks_exist():
    """Each script in the table of speeds, with the options it is given there."""
    table = README.split("## How fast it is")[1].split("\n## ")[0]
    commands = re.findall(r"\| `(\w+\.py)( --\w+)?[^`]*` \|$", table, re.M)
    assert len(commands) >= 9
    for script, option in commands:
        assert not option or f'"{option.strip()}"' in (ROOT / "benchmarks" / script).read_text(), (script, option)


def test_every_file_is_named():
    """The list of the core and the map of the folders name each module once, and nothing else; links lead somewhere."""
    named = re.findall(r"^\d\. \[(\S+)\]\(\1\)", README, re.M)
    assert len(named) == 7
    folder = ""
    (listing,) = re.findall(r"folder by folder:\n\n```\n(.*?)```", README, re.S | re.M)
    for line in listing.splitlines():
        if found := re.match(r"(gpt/\w+/) ", line):
            folder = found[1]
        else:
            files = re.match(r"( *)(\S+\.py(?:, \S+\.py)*) ", line)
            assert files, line
            named += [(folder if files[1] else "") + file for file in files[2].split(", ")]
    there = [file.relative_to(ROOT).as_posix() for file in (ROOT / "gpt").rglob("*.py") if file.name != "__init__.py"]
    assert sorted(named) == sorted([*there, "train.py", "generate.py"])
    for target in re.findall(r"\]\(((?!https:)[^)#]+)\)", README):
        assert (ROOT / target).exists(), target


@pytest.fixture(scope="module")
def house(tmp_path_factory) -> Path:
    """A copy of the project with texts of the reader's and a first run."""
    folder = tmp_path_factory.mktemp("house")
    for name in ("gpt", "configs", "train.py", "generate.py"):
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, folder / name)
    write_book(folder)
    lines = (folder / "book.txt").read_text().splitlines()
    (folder / "articles").mkdir()
    for i in range(30):
        articles = [json.dumps({"text": " ".join(lines[j : j + 50])}) for j in range(i, 6000, 200)]
        (folder / f"articles/{i}.jsonl").write_text("\n".join(articles) + "\n")
    run(folder, f"python train.py data=text data.path=book.txt run_dir=runs/first {SHORT}")
    return folder


def run(folder: Path, command: str) -> str:
    """Run a command that must succeed, in a shell whose `python` is this one; return what it prints."""
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    environment |= {"WANDB_MODE": "offline"}
    done = subprocess.run(
        command, shell=True, cwd=folder, env=environment, capture_output=True, text=True, timeout=300,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("command", RUN)
def test_command(house, command):
    """It succeeds and prints something."""
    if "wandb" in command and find_spec("wandb") is None:
        pytest.skip("NOT TESTED: wandb is not installed")
    shutil.rmtree(house / "my-model", ignore_errors=True)
    assert run(house, adapted(command)).strip()


@pytest.mark.slow
@pytest.mark.parametrize("snippet", SNIPPETS, ids=["train", "curves", "sample", "transformers"])
def test_snippet(house, snippet):
    """It runs as a program of its own."""
    if "my-model" in snippet and not (house / "my-model").exists():
        run(house, "python -m gpt.export --checkpoint runs/first --to my-model")
    (house / "snippet.py").write_text(adapted(snippet))
    assert run(house, "python snippet.py").strip()


@pytest.mark.slow
def test_tensorboard(house):
    """`tensorboard --logdir runs` finds the runs."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    tensorboard = str(Path(sys.executable).parent / "tensorboard")
    arguments = [tensorboard, "--logdir", "runs", "--port", str(port)]
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
