"""Real trainings, in this process or in another one, and the comparison of two runs."""

import atexit
import contextlib
import dataclasses
import functools
import importlib
import io
import json
import os
import random
import re
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
from processes import ForkedProcess, ForkServer

ROOT = Path(__file__).resolve().parents[1]
# A run of seconds with dropout, accumulation and several epochs. The intervals are primes, so that they never coincide.
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
    "data.prompts=[]",  # sampling would be half of such a run: see SAMPLES
]
SAMPLES = "data.prompts=[alpha]"
# The advice on the text of every tiny run. Without these lines, other tests can expect an empty stderr.
ADVICE_LINES = re.compile(
    r"train\.py: (the validation text has|[\d,]+ steps would|a vocabulary of|validation loss was) .*\n"
)
TIMING_KEYS = ("train_seconds", "tokens_per_second", "peak_memory_bytes")


def write_corpus(folder: Path) -> Path:
    """Write a text of a few thousand characters, always the same, and return its file."""
    words = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta"]
    chooser = random.Random(5)
    file = folder / "corpus.txt"
    file.write_text(" ".join(chooser.choice(words) for _ in range(700)), encoding="utf-8")
    return file


_FOLDERS: list[tempfile.TemporaryDirectory] = []


def write_token_sequence(tokens: np.ndarray) -> TokenSequence:
    """Write tokens to one file, as train.py prepares them, and map it."""
    _FOLDERS.append(tempfile.TemporaryDirectory())
    file = Path(_FOLDERS[-1].name) / "train.bin"
    tokens.tofile(file)
    return TokenSequence([map_tokens(file, tokens.dtype)])


def import_or_skip(module: str) -> Any:
    """Import what only slow tests need. If it is missing, the test is skipped, and fails in CI."""
    if "CI" in os.environ:
        return importlib.import_module(module)
    return pytest.importorskip(module, reason=f"NOT TESTED without {module}: pip install -e '.[dev]'")


def refusal(call: Callable, *arguments, **options) -> str:
    """Return the one line of the `UserError` that a call raises."""
    with pytest.raises(UserError) as caught:
        call(*arguments, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def command_refusal(capsys: pytest.CaptureFixture, program: str, *arguments: object) -> str:
    """Run a command in this process, expect exit code 2, and return the last line on stderr.

    Args:
        capsys: pytest's.
        program: a file, or the name of a module.
        arguments: the arguments of the command.
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
    """Replace standard input by these bytes."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content), encoding="utf-8"))


def train(*arguments: str | Path, code: int | None = 0) -> subprocess.CompletedProcess:
    """Run train.py in this process, to save the seconds of its imports.

    Args:
        arguments: the arguments of train.py.
        code: the exit code that it must have, if not None.
    """
    GlobalHydra.instance().clear()
    out, err = io.StringIO(), io.StringIO()
    exit_code: int | str | None = 0
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patch.setattr(sys, "argv", ["train.py", *map(str, arguments)])
        try:
            runpy.run_path(str(ROOT / "train.py"), run_name="__main__")
        except SystemExit as end:
            exit_code = end.code
    assert isinstance(exit_code, int)
    assert code in (None, exit_code), err.getvalue()
    return subprocess.CompletedProcess(arguments, exit_code, out.getvalue(), ADVICE_LINES.sub("", err.getvalue()))


def train_refusal(*arguments: str | Path) -> str:
    """Run train.py in this process, expect exit code 2, and return its one line."""
    (line,) = train(*arguments, code=2).stderr.strip().splitlines()
    assert line.startswith("train.py: ")
    return line


def tiny_arguments(folder: Path, *changes: str) -> list[str]:
    """Return the arguments of a tiny run on the corpus in `folder`."""
    return [*TINY_RUN, f"data.path={folder / 'corpus.txt'}", f"data.cache={folder / 'cache'}", *changes]


def tiny_config(folder: Path, *changes: str) -> Config:
    """Return the configuration of a tiny run on the corpus in `folder`, with `changes` as on the command line."""
    values = dict(argument.split("=", 1) for argument in tiny_arguments(folder, *changes))
    values = {f"{key}.name" if key in ("data", "tokenizer", "optim") else key: value for key, value in values.items()}
    nested = OmegaConf.from_dotlist([f"{key}={value}" for key, value in values.items()])
    config = parse_config(OmegaConf.to_container(nested, resolve=True))
    settings = config.with_absolute_paths().settings()
    overridden = [change.partition("=")[0] for change in changes]
    return with_values(config, {"overrides": {key: settings[key] for key in overridden if key in settings}})


def finalize_config(config: Config) -> Config:
    """Return the configuration with the values that the machine and the model determine, without a dataset."""
    machine = dataclasses.asdict(check_machine(Request(config)))
    config = with_values(config, {f"trainer.{key}": value for key, value in machine.items()})
    return finalize_model(config, config.model)


@dataclass
class Training:
    """A run that this process has locked, and the result of its training."""

    spec: RunSpec
    run: RunDirectory
    result: Result | None = None

    @property
    def config(self) -> Config:
        return self.spec.config

    @property
    def schedule(self) -> Schedule:
        """The schedule, with what the clock decided."""
        return self.result.schedule if self.result else self.spec.schedule

    @property
    def path(self) -> Path:
        return self.run.path

    @property
    def metrics(self) -> dict[str, Any]:
        assert self.result is not None
        return self.result.metrics


def begin_run(config: Config, model: str = "") -> Training:
    """Prepare a new run. This process locks it until it is trained."""
    return Training(*start_run(Request(config, model=model)))


def begin_again(training: Training, folder: Path, **changes: Any) -> Training:
    """Prepare the same run in another folder, with a changed configuration."""
    return begin_run(dataclasses.replace(training.config, run_dir=str(folder / "run"), **changes))


def resume_run(path: str | Path, horizon: str = "") -> Training | None:
    """Prepare to resume a run, or return None if it is complete. This process locks it until it is trained."""
    values = {"resume": str(path)} | ({"horizon": horizon} if horizon else {})
    started = resuming.resume_run(parse_request(values, values))
    return started and Training(*started)


def fit(training: Training, callbacks: Sequence[Any] = ()) -> None:
    """Train a run and release it, as train.py does."""
    with training.run:
        training.result = loop.run_training(training.spec, training.run, callbacks)


def command(*arguments: str | Path) -> list[str]:
    """Return the command line of a training."""
    return [sys.executable, "train.py", *map(str, arguments)]


@functools.cache
def fork_server(**variables: str) -> ForkServer:
    """Start a process that has imported the libraries of a training, but nothing of gpt. It ends with this process.

    `variables` are what the libraries read from the environment when they are loaded, such as LD_PRELOAD.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        server = ForkServer(["torch", "lightning.fabric", "hydra", "tensorboard.summary.writer.event_file_writer"])
    atexit.register(server.close)
    return server


def python_program() -> str:
    """Return a program that runs commands as `python` does, in processes that need not import the slow libraries."""
    return str(fork_server().python()) if hasattr(os, "fork") else sys.executable


def train_in_subprocess(
    *arguments: str | Path, code: int | None = 0, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess:
    """Run train.py in another process, for tests where the process is the point.

    Args:
        arguments: the arguments of train.py.
        code: the exit code that it must have, if not None.
        env: the environment of a process that is not forked.
    """
    words = [sys.executable if env else python_program(), *command(*arguments)[1:]]
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert code in (None, done.returncode), done.stderr
    done.stderr = ADVICE_LINES.sub("", done.stderr)
    return done


class Process:
    """A training in another process. A test may stop or kill it.

    Args:
        arguments: the arguments of train.py.
        env: what is added to the environment.
        launcher: what stands before train.py in the command, such as -m torch.distributed.run.
        server: what forks the process; by default, the server of most tests.
    """

    def __init__(
        self,
        arguments: Sequence[str | Path],
        env: Mapping[str, str] | None = None,
        launcher: Sequence[str] = (),
        server: ForkServer | None = None,
    ):
        self._log = tempfile.TemporaryFile("a+b")  # noqa: SIM115, because it lives as long as this object
        self._position = 0
        self.output = ""  # without the advice on tiny runs, once the process has ended
        words = [*launcher, *command(*arguments)[1:]]
        environment = os.environ | (env or {})
        self._process: ForkedProcess | subprocess.Popen
        if hasattr(os, "fork"):
            self._process = ForkedProcess(server or fork_server(), words, self._log, ROOT, environment)
        else:
            streams = {"stdin": subprocess.DEVNULL, "stdout": self._log, "stderr": subprocess.STDOUT}
            self._process = subprocess.Popen([sys.executable, *words], cwd=ROOT, env=environment, **streams)
        self.pid = self._process.pid

    def _read(self) -> str:
        return os.pread(self._log.fileno(), 1 << 30, 0).decode(errors="replace")

    def poll(self) -> int | None:
        """Return the exit code, or None while the process runs."""
        return self._process.poll()

    def wait_for(self, text: str) -> bool:
        """Wait until the output has `text` after the text of the last call. Return False if the process ends first."""
        while True:
            has_ended = self.poll() is not None
            index = self._read().find(text, self._position)
            if index >= 0:
                self._position = index + len(text)
                return True
            if has_ended:
                return False
            time.sleep(0.002)

    def send(self, number: signal.Signals) -> None:
        """Send a signal."""
        self._process.send_signal(number)

    def end(self) -> int:
        """Wait for the end, and return the exit code."""
        code = self._process.wait(300)
        if not self._log.closed:
            self.output = ADVICE_LINES.sub("", self._read())
            self._log.close()
        return code


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return str(server.getsockname()[1])


def torchrun_variables(rank: int, count: int, port: str) -> dict[str, str]:
    """Return the variables that torchrun sets for a process on a machine with `count` of them."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    numbers = dict(zip(names, map(str, (rank, count, rank, count)), strict=True))
    return numbers | {"MASTER_ADDR": "localhost", "MASTER_PORT": port}


def start_ranks(count: int, *arguments: str | Path) -> list[Process]:
    """Start the processes of one training as torchrun does, without the seconds of their imports."""
    port = free_port()
    return [Process(arguments, torchrun_variables(rank, count, port)) for rank in range(count)]


def train_on_ranks(count: int, *arguments: str | Path) -> str:
    """Train on several processes, and return what rank 0 has printed. The others must print nothing."""
    ranks = start_ranks(count, *arguments)
    codes = [rank.end() for rank in ranks]
    outputs = [rank.output for rank in ranks]
    assert codes == [0] * count, "".join(outputs)
    assert outputs[1:] == [""] * (count - 1)
    return outputs[0]


class CallAt:
    """Calls a function once, after a step."""

    def __init__(self, step: int, act: Callable[[], object]):
        self.step, self.act, self.done = step, act, False

    def on_train_step_end(self, step: int) -> None:
        if step == self.step and not self.done:
            self.done = True
            self.act()


class StopAt(CallAt):
    """Sends this process a signal once, after a step."""

    def __init__(self, step: int, number: signal.Signals = signal.SIGTERM):
        super().__init__(step, lambda: os.kill(os.getpid(), number))


def wait_for_file(file: Path, seconds: float = 60.0, containing: str = "") -> None:
    """Wait until a file exists and contains a text."""
    deadline = time.monotonic() + seconds
    while not (file.exists() and (not containing or containing in file.read_text())):
        assert time.monotonic() < deadline, f"{file} has not appeared"
        time.sleep(0.002)


def contents(run_dir: str | Path) -> dict[Path, bytes]:
    """Return every file of a run, except its lock."""
    return {file: file.read_bytes() for file in Path(run_dir).rglob("*") if file.is_file() and file.name != ".lock"}


def truncate(file: Path) -> None:
    """Cut a file in half."""
    os.truncate(file, file.stat().st_size // 2)


def flip_a_bit(file: Path) -> None:
    """Change one bit in the middle of a file, and of no other name of it."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.unlink()
    file.write_bytes(content)


def flatten(value, name: str = "") -> dict:
    """Flatten a nested structure into one dictionary of its leaves."""
    if isinstance(value, dict):
        pairs = [(f"{name}.{key}", inner) for key, inner in value.items()]
    elif isinstance(value, list | tuple):
        pairs = [(f"{name}[{i}]", inner) for i, inner in enumerate(value)]
    else:
        return {name: value}
    return {key: leaf for inner_name, inner in pairs for key, leaf in flatten(inner, inner_name).items()}


def read_events(folder: Path) -> EventAccumulator:
    """Return all that a folder holds for TensorBoard."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0, "images": 0})
    events.Reload()
    return events


def read_tensorboard(run_dir: Path) -> dict:
    """Return all that TensorBoard shows of a run, except speed and memory: tag to (step, content) pairs."""
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
    """Return the names of what differs between two finished runs, bit for bit, except for times."""
    differing = []
    pair = (run_dir, reference)
    ignored = ("run_dir", ".config.overrides", ".state.seconds", ".state.log_offsets")
    for name in ("last", "best"):
        first, second = (flatten(load_checkpoint(run / f"checkpoints/{name}.ckpt")) for run in pair)
        for key in sorted(first.keys() | second.keys()):
            a, b = first.get(key), second.get(key)
            is_same = a.dtype == b.dtype and torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
            if not is_same and not any(part in key for part in ignored):
                differing.append(f"{name}.ckpt{key}: {a} and {b}")
    first, second = map(read_tensorboard, pair)
    differing += [f"curve {tag}" for tag in sorted(first.keys() | second.keys()) if first.get(tag) != second.get(tag)]
    first, second = (file.read_bytes() if file.exists() else None for file in [run / "samples.md" for run in pair])
    if first != second:
        differing.append("samples.md")
    first, second = (
        [row for row in (run / "metrics.csv").read_text().splitlines() if ",work/" not in row] for run in pair
    )
    if first != second:
        differing.append("metrics.csv")
    first, second = (json.loads((run / "metrics.json").read_text()) for run in pair)
    keys = [key for key in first | second if key not in TIMING_KEYS]
    return differing + [f"metrics.json {key}" for key in keys if first.get(key) != second.get(key)]
