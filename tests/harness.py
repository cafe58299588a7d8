"""Real trainings, in this process or in one of their own, and what it means that two runs are equal."""

import contextlib
import csv
import dataclasses
import importlib
import io
import json
import os
import random
import re
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from gpt.checkpoint import load_checkpoint
from gpt.data.token_files import TokenSequence, map_tokens
from gpt.errors import UserError
from gpt.training import loop
from gpt.training import resume as resuming
from gpt.training.config import Config, parse_config, with_values
from gpt.training.finalize import check_machine, finalize_model
from gpt.training.request import Request, parse_request
from gpt.training.run_directory import RunDirectory
from gpt.training.schedule import Schedule
from gpt.training.start import start_run
from gpt.training.state import Result, RunSpec

ROOT = Path(__file__).resolve().parents[1]
# A model so small that a run takes seconds, with everything that could get out of step: dropout, accumulation, several
# epochs, and intervals that are primes, so that they never coincide.
TINY_RUN = [
    "model.context_length=16",
    "model.d_model=24",
    "model.num_layers=2",
    "model.num_heads=3",
    "model.dropout=0.1",
    "trainer.tokens_per_step=96",
    "trainer.micro_batch_size=3",
    "trainer.short_sequences=8",
    "trainer.log_every=3",
    "trainer.validate_every=17",
    "trainer.checkpoint_every=11",
    "tokenizer=byte",
    "data=text",
    "data.prompts=[alpha]",  # sampling is half of such a run
]
# What every tiny run is told of its text (config/test_advice.py), so that other tests may ask for an empty stderr.
ADVICE_LINES = re.compile(
    r"train\.py: (the validation text has|[\d,]+ steps would|a vocabulary of|validation loss was) .*\n"
)
TIMING_KEYS = ("train_seconds", "tokens_per_second", "peak_memory_bytes")


def write_corpus(folder: Path) -> Path:
    """A text of a few thousand characters, always the same."""
    words = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta"]
    chooser = random.Random(5)
    file = folder / "corpus.txt"
    file.write_text(" ".join(chooser.choice(words) for _ in range(700)), encoding="utf-8")
    return file


_FOLDERS: list[tempfile.TemporaryDirectory] = []


def write_token_sequence(tokens: np.ndarray) -> TokenSequence:
    """Tokens as train.py prepares them: in one file."""
    _FOLDERS.append(tempfile.TemporaryDirectory())
    file = Path(_FOLDERS[-1].name) / "train.bin"
    tokens.tofile(file)
    return TokenSequence([map_tokens(file, tokens.dtype)])


def import_or_skip(module: str) -> Any:
    """Import what only slow tests need; where it is missing the test is skipped, but in CI it fails."""
    if "CI" in os.environ:
        return importlib.import_module(module)
    return pytest.importorskip(module, reason=f"NOT TESTED without {module}: pip install -e '.[dev]'")


def refusal(call: Callable, *arguments, **options) -> str:
    """The one line of the `UserError` that a call raises."""
    with pytest.raises(UserError) as caught:
        call(*arguments, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def command_refusal(capsys: pytest.CaptureFixture, program: str, *arguments: object) -> str:
    """How a command that cannot do what it is asked for ends: the last line of a run of it within this process.

    `program` is a file, or the name of a module; what a test has replaced in other modules stays so.
    """
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as ended:
        patch.setattr(sys, "argv", [program, *map(str, arguments)])
        if program.endswith(".py"):
            runpy.run_path(program, run_name="__main__")
        else:
            patch.delitem(sys.modules, program, raising=False)  # or else runpy warns
            runpy.run_module(program, run_name="__main__")
    assert ended.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


def set_stdin(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    """Put these bytes on standard input."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content), encoding="utf-8"))


@dataclass
class Done:
    """How a training ended, and what it printed."""

    returncode: int
    stdout: str
    stderr: str


def train(*arguments: str | Path, code: int | None = 0) -> Done:
    """Run train.py within this process, which saves the seconds of its imports; it must end with `code`, if given."""
    GlobalHydra.instance().clear()
    out, err = io.StringIO(), io.StringIO()
    before, sys.argv = sys.argv, ["train.py", *map(str, arguments)]
    ended: int | str | None = 0
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            runpy.run_path(str(ROOT / "train.py"), run_name="__main__")
    except SystemExit as end:
        ended = end.code
    finally:
        sys.argv = before
    assert isinstance(ended, int)
    assert code in (None, ended), err.getvalue()
    return Done(ended, out.getvalue(), ADVICE_LINES.sub("", err.getvalue()))


def train_refusal(*arguments: str | Path) -> str:
    """The one line with which train.py refuses these arguments."""
    (line,) = train(*arguments, code=2).stderr.strip().splitlines()
    assert line.startswith("train.py: ")
    return line


def tiny_arguments(folder: Path, *changes: str) -> list[str]:
    """The arguments of a tiny run on the corpus in `folder`."""
    return [*TINY_RUN, f"data.path={folder / 'corpus.txt'}", f"data.cache={folder / 'cache'}", *changes]


def tiny_config(folder: Path, *changes: str) -> Config:
    """The configuration of a tiny run on the corpus in `folder`, which `changes` override as on the command line."""
    values = dict(argument.split("=", 1) for argument in tiny_arguments(folder, *changes))
    values = {f"{key}.name" if key in ("data", "tokenizer", "optim") else key: value for key, value in values.items()}
    nested = OmegaConf.from_dotlist([f"{key}={value}" for key, value in values.items()])
    config = parse_config(OmegaConf.to_container(nested, resolve=True))
    settings = config.with_absolute_paths().settings()
    overridden = [change.partition("=")[0] for change in changes]
    return with_values(config, {"overrides": {key: settings[key] for key in overridden if key in settings}})


def finalize_config(config: Config) -> Config:
    """The configuration with what the machine and the model determine, without a dataset."""
    machine = dataclasses.asdict(check_machine(Request(config)))
    config = with_values(config, {f"trainer.{key}": value for key, value in machine.items()})
    return finalize_model(config, config.model)


@dataclass
class Training:
    """A run that this process holds, and how its training ended."""

    spec: RunSpec
    run: RunDirectory
    result: Result | None = None

    @property
    def config(self) -> Config:
        return self.spec.config

    @property
    def schedule(self) -> Schedule:
        """As the clock has decided it."""
        return self.result.schedule if self.result else self.spec.schedule

    @property
    def path(self) -> Path:
        return self.run.path

    @property
    def metrics(self) -> dict[str, Any]:
        assert self.result is not None
        return self.result.metrics


def begin_run(config: Config, model: str = "") -> Training:
    """Prepare a new run, which this process holds until it was trained."""
    return Training(*start_run(Request(config, model=model)))


def resume_run(path: str | Path, horizon: str = "") -> Training | None:
    """Prepare to resume a run, which this process holds until it was trained; None if it is complete."""
    values = {"resume": str(path)} | ({"horizon": horizon} if horizon else {})
    started = resuming.resume_run(parse_request(values, values))
    return started and Training(*started)


def fit(training: Training, callbacks: Sequence[Any] = ()) -> None:
    """Train a run and release it, as train.py does."""
    with training.run:
        training.result = loop.run_training(training.spec, training.run, callbacks)


def command(*arguments: str | Path) -> list[str]:
    """The command line of a training."""
    return [sys.executable, "train.py", *map(str, arguments)]


def train_in_subprocess(*arguments: str | Path, code: int | None = 0, **options) -> subprocess.CompletedProcess:
    """Run train.py in a process of its own, for tests where the process is the point; it must end with `code`."""
    done = subprocess.run(command(*arguments), cwd=ROOT, capture_output=True, text=True, timeout=300, **options)
    assert code in (None, done.returncode), done.stderr
    done.stderr = ADVICE_LINES.sub("", done.stderr)
    return done


@dataclass
class Process:
    """A training process that is to be hurt, and its output so far."""

    arguments: list
    env: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.process = subprocess.Popen(
            command(*self.arguments),
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | self.env,
        )
        self.output = ""

    def wait_for(self, text: str) -> bool:
        """Read lines until one contains `text`; False if the output ends first."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output += line
            if text in line:
                return True
        return False

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end(self) -> int:
        """Read the rest; returns the exit code."""
        rest, _ = self.process.communicate(timeout=300)
        self.output = ADVICE_LINES.sub("", self.output + rest)
        return self.process.returncode


class CallAt:
    """Does something, once, after some step."""

    def __init__(self, step: int, act: Callable[[], object]):
        self.step, self.act, self.done = step, act, False

    def on_train_step_end(self, step: int) -> None:
        if step == self.step and not self.done:
            self.done = True
            self.act()


class StopAt(CallAt):
    """Sends this process a signal, once, after some step."""

    def __init__(self, step: int, number: signal.Signals = signal.SIGTERM):
        super().__init__(step, lambda: os.kill(os.getpid(), number))


def wait_for_file(file: Path, seconds: float = 60.0, containing: str = "") -> None:
    """Wait until a file exists, and contains this."""
    deadline = time.monotonic() + seconds
    while not (file.exists() and (not containing or containing in file.read_text())):
        assert time.monotonic() < deadline, f"{file} has not appeared"
        time.sleep(0.002)


def flatten(value, name: str = "") -> dict:
    """Flatten a nested structure into one dictionary of its leaves."""
    if isinstance(value, dict):
        pairs = [(f"{name}.{key}", inner) for key, inner in value.items()]
    elif isinstance(value, list | tuple):
        pairs = [(f"{name}[{i}]", inner) for i, inner in enumerate(value)]
    else:
        return {name: value}
    return {key: leaf for inner_name, inner in pairs for key, leaf in flatten(inner, inner_name).items()}


def read_table(run_dir: Path) -> dict[str, list[tuple[int, float]]]:
    """The curves in metrics.csv: tag to (step, value) pairs."""
    curves: dict[str, list[tuple[int, float]]] = {}
    with (run_dir / "metrics.csv").open(newline="") as stream:
        for row in csv.DictReader(stream):
            curves.setdefault(row["tag"], []).append((int(row["step"]), float(row["value"])))
    return curves


def read_events(folder: Path) -> EventAccumulator:
    """All that a folder holds for TensorBoard."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0, "images": 0})
    events.Reload()
    return events


def read_curves(run_dir: Path) -> dict:
    """Everything that TensorBoard shows of a run, except what depends on time: tag to (step, content) pairs."""
    events = read_events(run_dir)
    curves: dict = {}
    for tag in events.Tags()["scalars"]:
        curves[tag] = [(event.step, event.value) for event in events.Scalars(tag)]
    for tag in events.Tags()["tensors"]:
        curves[tag] = [(event.step, event.tensor_proto.SerializeToString()) for event in events.Tensors(tag)]
    for tag in events.Tags()["images"]:
        curves[tag] = [(event.step, event.encoded_image_string) for event in events.Images(tag)]
    return {tag: points for tag, points in curves.items() if not tag.startswith("work/")}


def differences(run_dir: Path, reference: Path) -> list[str]:
    """What differs between two finished runs, bit for bit, times aside; empty if nothing does."""
    found = []
    for name in ("last", "best"):
        leaves = [flatten(load_checkpoint(run / f"checkpoints/{name}.ckpt")) for run in (run_dir, reference)]
        for key in sorted(leaves[0].keys() | leaves[1].keys()):
            a, b = (side.get(key) for side in leaves)
            same = a.dtype == b.dtype and torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
            ignored = ("run_dir", ".config.overrides", ".state.seconds", ".state.log_offsets")
            if not same and not any(name in key for name in ignored):
                found.append(f"{name}.ckpt{key}: {a} and {b}")
    mine, theirs = read_curves(run_dir), read_curves(reference)
    found += [f"curve {tag}" for tag in sorted(mine.keys() | theirs.keys()) if mine.get(tag) != theirs.get(tag)]
    samples = [run / "samples.md" for run in (run_dir, reference)]
    contents = [file.read_bytes() if file.exists() else None for file in samples]
    if contents[0] != contents[1]:
        found.append("samples.md")
    tables = [(run / "metrics.csv").read_text().splitlines() for run in (run_dir, reference)]
    if [row for row in tables[0] if ",work/" not in row] != [row for row in tables[1] if ",work/" not in row]:
        found.append("metrics.csv")
    metrics = [json.loads((run / "metrics.json").read_text()) for run in (run_dir, reference)]
    keys = [key for key in metrics[0] | metrics[1] if key not in TIMING_KEYS]
    found += [f"metrics.json {key}" for key in keys if metrics[0].get(key) != metrics[1].get(key)]
    return found
