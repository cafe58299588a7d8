"""The commands in README.md and docs/ run, and the names in them exist.

The quick tests parse every command and run the cheap ones in this process. The slow tests run each command in a copy of
the project. Trainings are then shorter, and models smaller. test_docs.py tests docs/attention.md and model.md.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

import generate
from gpt.files import flatten
from gpt.training.cli import parse_overrides, to_plain_values
from gpt.training.config import Config, parse_horizon
from gpt.training.metrics import METRICS
from gpt.training.request import parse_request
from harness import ROOT, import_or_skip, python_program, train

FILES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/*.md")), ROOT / "data/README.md"]
PAGES = {file.relative_to(ROOT).as_posix(): file.read_text(encoding="utf-8") for file in FILES}
TEXT = "\n".join(text for name, text in PAGES.items() if name not in ("docs/attention.md", "docs/model.md"))
PROSE = re.sub(r"```.*?```", "", TEXT, flags=re.S)
NAMED = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`]+)`", PROSE))))
BLOCKS = re.findall(r"```bash\n(.*?)```", TEXT, re.S)
COMMANDS = list(  # each of them once
    dict.fromkeys(
        [line for block in BLOCKS for line in block.strip().splitlines()] + re.findall(r"`(python\s.+?)`", PROSE)
    )
)
PYTHON = re.findall(r"```python\n(.*?)```", TEXT, re.S)
MODULES = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", TEXT, re.S))  # of the reader, by file
SNIPPETS = [text for text in PYTHON if "ray.train" not in text and not re.match(r"# \w+\.py\n", text)]
RECIPES = {
    name: package + text
    for package, name, text in re.findall(r"```yaml\n(# @package _global_\n)?# (\S+\.yaml)\n(.*?)```", TEXT, re.S)
}
SHORT = (
    "horizon=2steps model.d_model=32 model.num_heads=2 model.num_layers=1 model.context_length=64 "
    "trainer.tokens_per_step=256 trainer.validate_every=2"
)
# What the tests put in place of the reader's names and of long trainings.
MEANING = {
    "FILE": "book.txt",
    "runs/NAME": "runs/first",
    "trainer.devices=8": "trainer.devices=2",
    "trainer.devices=4": "trainer.devices=2",
    "hydra/sweeper=search": "hydra/sweeper=search hydra.sweeper.n_trials=2",
    "8000steps": "4steps",
    "1000steps": "2steps",
    "2000steps": "3steps",
    "3min": "2steps",
}
SETS_UP = "pip install -e '.[test]' && python -m pytest"  # .ci/run runs it, and this test is part of it
NOT_RUN = {
    SETS_UP,
    "python -m pytest",
    "python -m pytest -m slow",
    "python -m pytest -m faults",
    "python train.py experiment=finetune init_from=gpt2 data.path=FILE",  # downloads half a gigabyte
    "python benchmarks/check_machine.py",  # tests/test_check_machine.py runs it
}


def adapted(command: str) -> str:
    """Put in the reader's names, and make trainings short."""
    command = re.sub(r"^pip install (--no-compile )?-e \S+ && ", "", command).replace(" ...", "")
    for name, meaning in MEANING.items():
        command = command.replace(name, meaning)
    trains = command.startswith("python train.py") and not re.search(r"resume=(runs|last)|--cfg", command)
    own_shape = "init_from=" in command or "model=auto" in command
    short = " ".join(word for word in SHORT.split() if not (own_shape and word.startswith("model.")))
    if "model=auto" in command:
        short = short.replace("horizon=2steps", "horizon=2s")
    if len(command.split()) > 2 and not re.search("data|init_from=|experiment=", command):
        short += " data.path=book.txt"  # only the first command trains on the default text
    return f"{command} trainer.device=cpu {short}" if trains else command


ADAPTED = [adapted(command) for command in COMMANDS if command not in NOT_RUN and not command.startswith("tensorboard")]
RUN = list({frozenset(command.split()): command for command in ADAPTED}.values())  # some have the same words


def words(command: str) -> list[str]:
    """Split a command as a shell does, and keep what follows a pipe."""
    return shlex.split(command.split(" | ")[-1])


def write_texts(folder: Path) -> None:
    """Write the reader's files: a book, articles, a poem, notes, callbacks and recipes."""
    book = [f"word{i % 97} is {i}" for i in range(6000)]
    files = {"book.txt": "\n".join(book), "poem.txt": "\n".join(book[:200]), "notes/one.md": "\n".join(book[:200])}
    for i in range(30):
        articles = [json.dumps({"text": " ".join(book[j : j + 50])}) for j in range(i, 6000, 200)]
        files[f"articles/{i}.jsonl"] = "\n".join(articles) + "\n"
    for name, text in (files | MODULES | RECIPES).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")


@pytest.fixture(scope="module")
def house(tmp_path_factory) -> Path:
    """A copy of the project with the reader's own files in it."""
    folder = tmp_path_factory.mktemp("house")
    for name in ("gpt", "configs", "docs", "train.py", "generate.py"):
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, folder / name)
    write_texts(folder)
    return folder


def test_ci_runs_the_commands_for_the_tests():
    """It takes the quick tests' line from the README. Every marker that the pages name exists."""
    (pattern,) = re.findall(r"""grep -m1 "(.*?)" README.md""", (ROOT / ".ci/run").read_text())
    assert re.match(pattern.replace("\\.", "[.]"), SETS_UP)
    assert f"\n{SETS_UP}\n" in PAGES["README.md"]
    markers = (ROOT / "pyproject.toml").read_text()
    assert [name for name in re.findall(r"-m pytest -m (\w+)", TEXT) if f'"{name}: ' not in markers] == []


def composed(folder: Path, overrides: list[str]) -> Config:
    """Return the configuration of a command line, with the files in the folder's configs/."""
    if overrides[:1] == ["--config-dir"]:
        overrides = [f"hydra.searchpath=[file://{folder / overrides[1]}]", *overrides[2:]]
    with initialize_config_dir(str(folder / "configs"), version_base="1.3"):
        values, model = to_plain_values(compose("train", overrides)), "auto" if "model=auto" in overrides else ""
    return parse_request(values, parse_overrides(overrides), model=model).config


def test_a_command_that_no_test_runs_composes(house):
    """Hydra and every check of the configuration accept it."""
    (command,) = [command for command in NOT_RUN if "train.py" in command]
    composed(house, words(command.replace("FILE", "book.txt"))[2:])


@pytest.mark.parametrize("name", RECIPES)
def test_recipe(house, name):
    """Its values arrive at its keys. A model file with two keys leaves all others as they are."""
    group, file = Path(name).parts[-2:]
    said = OmegaConf.to_container(OmegaConf.create(RECIPES[name]))
    said.pop("defaults", None)
    said = flatten(said if group == "experiment" else {group: said})
    overrides = [f"{group}={Path(file).stem}"] + (["data.path=poem.txt"] if file == "poem.yaml" else [])
    folder = Path(name).parts[0]
    config = composed(house, [*(["--config-dir", folder] if folder != "configs" else []), *overrides])
    assert said.items() <= config.settings().items()
    if group == "model":
        plain = composed(house, []).settings()
        assert {key for key, value in config.settings().items() if value != plain[key]} == set(said)


def test_cheap_commands_run(tmp_path, monkeypatch, capsys):
    """Commands run in this process. The pages name every metric, curve and file of the run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("gpt.data.dataset_cache.DEFAULT_CACHE", tmp_path / "cache")
    write_texts(tmp_path)
    own = ["data.cache=cache", "trainer.device=cpu"]
    monkeypatch.setattr("sys.path", [*sys.path])  # train.py adds the current folder to it
    callbacks = [
        f"{file[:-3]}:{name}" for file, text in MODULES.items() for name in re.findall(r"^class (\w+)", text, re.M)
    ]
    own.append(f"callbacks=[{','.join(callbacks)}]")
    train("data=text", "data.path=book.txt", "run_dir=runs/first", *own, *SHORT.split(), "trainer.log_every=1")
    for command in RUN:
        arguments = words(command)
        if module := re.search(r"-m (gpt\.(?:tokens|compare|evaluate))", command):
            import_module(module[1]).main(arguments[3:])
        elif "generate.py --prompt" in command:
            generate.main([*arguments[2:], "--max-new-tokens", "3"])
        else:
            continue
        assert capsys.readouterr().out.strip(), command
    page = PAGES["docs/runs.md"]
    assert set(json.loads((tmp_path / "runs/first/metrics.json").read_text())) - NAMED == set()
    curves = [metric.curve for metric in METRICS.values() if metric.curve]
    assert [curve for curve in curves if f"`{curve}" not in page] == []
    assert [name.name for name in (tmp_path / "runs/first").iterdir() if not row_of(name.name, page)] == []


def row_of(name: str, page: str) -> bool:
    """Return True if the page's table of files has this name."""
    rows = " ".join(re.findall(r"^\| (`.*?) \|", page, re.M))
    return any(re.fullmatch(re.escape(file).replace(r"\*", ".*"), name) for file in re.findall(r"`([\w.*-]+)", rows))


def test_every_key_and_choice_is_named():
    """The table in docs/configuration.md names every key of the configuration, and every file in configs/."""
    printed = train("--cfg", "job").stdout
    keys = set(re.findall(r"^\s*(\w+):", printed, re.M)) - {"name", "experiment"}
    assert {"horizon", "context_length", "tokens_per_step"} < keys
    page = PAGES["docs/configuration.md"]
    assert keys - set(re.findall(r"\w+", " ".join(re.findall(r"^\|.*", page, re.M)))) == set()
    rows = dict(re.findall(r"^\| `(\w+)` \| (`.*?`) \|", page, re.M))
    for group in [folder for folder in (ROOT / "configs").iterdir() if folder.is_dir() and folder.name != "hydra"]:
        assert set(re.findall(r"`(\w+)`", rows[group.name])) == {file.stem for file in group.iterdir()}


def test_names_on_the_pages_exist(capsys):
    """Each horizon such as `2000steps`, each option in docs/sampling.md, each option of a script beside a figure."""
    for horizon in re.findall(r"`(?:horizon=)?(\d+(?:steps|Mtokens|epochs|s|min|h))`", PROSE):
        parse_horizon(horizon)
    with pytest.raises(SystemExit):
        generate.parse_arguments(["--help"])
    options = capsys.readouterr().out
    assert [name for name in re.findall(r"`(--[\w-]+)", PAGES["docs/sampling.md"]) if name not in options] == []
    figures = PAGES["README.md"] + PAGES["docs/machines.md"]
    for script, option in re.findall(r"`(\w+\.py)( --\w+)?[^`]*` \|$", figures, re.M):
        assert not option or f'"{option.strip()}"' in (ROOT / "benchmarks" / script).read_text(), (script, option)


@pytest.mark.parametrize("name", [*PAGES, "benchmarks/LOG.md"])
def test_links_lead_somewhere(name):
    """Each link to a file or to a heading of a page."""
    text = re.sub(r"```.*?```", "", (ROOT / name).read_text(encoding="utf-8"), flags=re.S)
    for target in re.findall(r"\]\(((?!https?:)[^)]+)\)", text):
        path, _, heading = target.partition("#")
        file = (ROOT / name).parent / path if path else ROOT / name
        assert file.exists(), target
        headings = re.findall(r"^#+ (.*)", file.read_text(encoding="utf-8"), re.M) if heading else []
        assert not heading or heading in [re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in headings]


def run(folder: Path, command: str, is_forked: bool = True) -> str:
    """Run a command in a shell, and return what it prints.

    Args:
        folder: the current folder.
        command: the command, which must succeed.
        is_forked: whether `python` forks a process with all imports. Otherwise it starts this Python.
    """
    programs = [Path(python_program()).parent] * is_forked + [Path(sys.executable).parent, os.environ["PATH"]]
    environment = os.environ | {"PATH": os.pathsep.join(map(str, programs)), "WANDB_MODE": "offline"}
    done = subprocess.run(
        command, shell=True, cwd=folder, env=environment | {"HOME": str(folder)}, capture_output=True, text=True,
        timeout=300, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def lived_in(house) -> Path:
    """The house with a first run."""
    run(house, f"python train.py data.path=book.txt run_dir=runs/first {SHORT}")
    return house


@pytest.mark.slow
@pytest.mark.parametrize("command", [*RUN, "tensorboard --logdir runs --inspect"])
def test_command(lived_in, command):
    """It succeeds and prints something. The first training and the first sampling start Python."""
    if "wandb" in command:
        import_or_skip("wandb")
    shutil.rmtree(lived_in / "my-model", ignore_errors=True)
    first = next((other for other in RUN if command.split()[:2] == other.split()[:2]), command)
    assert run(lived_in, command, is_forked=command != first).strip()


@pytest.mark.slow
@pytest.mark.parametrize("snippet", SNIPPETS, ids=[re.search(r"import ([\w, ]+)", text)[1] for text in SNIPPETS])
def test_snippet(lived_in, snippet):
    """It runs as a program. ray_worker.py does with two CPUs what the snippet of Ray Train does."""
    if "my-model" in snippet and not (lived_in / "my-model").exists():
        run(lived_in, "python -m gpt.export --checkpoint runs/first --to my-model")
    (lived_in / "snippet.py").write_text(adapted(snippet))
    assert run(lived_in, "python snippet.py").strip()
