"""Real `train.py` processes, the ways to hurt them, and what it means that two runs are the same."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from gpt.exchange import checkpoint

ROOT = Path(__file__).resolve().parents[2]
# A model so small that a run is over in seconds, with everything on that could come out of step: dropout,
# accumulation, several epochs, and intervals that are primes, so that they never fall together.
TINY = [
    "model.context_length=16",
    "model.d_model=24",
    "model.num_layers=2",
    "model.num_heads=3",
    "model.dropout=0.1",
    "trainer.tokens_per_step=96",
    "trainer.micro_batch_size=3",
    "trainer.log_every=3",
    "trainer.validate_every=17",
    "trainer.checkpoint_every=11",
    "tokenizer=byte",
    "data=text",
]
TIMES = ("train_seconds", "tokens_per_second", "peak_memory_bytes")


def write_corpus(folder: Path) -> Path:
    """A text of a few thousand characters, always the same."""
    words = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta"]
    chooser = random.Random(5)
    file = folder / "corpus.txt"
    file.write_text(" ".join(chooser.choice(words) for _ in range(700)), encoding="utf-8")
    return file


def command(*arguments: str | Path) -> list[str]:
    """The command line of a training."""
    return [sys.executable, "train.py", *map(str, arguments)]


def train(*arguments: str | Path, **options) -> subprocess.CompletedProcess:
    """Run a training to its end."""
    return subprocess.run(command(*arguments), cwd=ROOT, capture_output=True, text=True, timeout=300, **options)


@dataclass
class Session:
    """A training process that is to be hurt: its output so far, read as it comes."""

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
        """Read lines until one has `text` in it; False where the output ends first."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output += line
            if text in line:
                return True
        return False

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end(self) -> int:
        """Read the rest; the exit code."""
        rest, _ = self.process.communicate(timeout=300)
        self.output += rest
        return self.process.returncode


def wait_for_file(file: Path, seconds: float = 60.0) -> None:
    """Wait until a file is there."""
    deadline = time.monotonic() + seconds
    while not file.exists():
        assert time.monotonic() < deadline, f"{file} has not appeared"
        time.sleep(0.002)


def flatten(value, name: str = "") -> dict:
    """A nested structure as one dictionary of its leaves."""
    if isinstance(value, dict):
        pairs = [(f"{name}.{key}", inner) for key, inner in value.items()]
    elif isinstance(value, list | tuple):
        pairs = [(f"{name}[{i}]", inner) for i, inner in enumerate(value)]
    else:
        return {name: value}
    return {key: leaf for inner_name, inner in pairs for key, leaf in flatten(inner, inner_name).items()}


def read_curves(run_dir: Path) -> dict:
    """Everything that TensorBoard shows of a run, but for what depends on time: tag to (step, content) pairs."""
    events = EventAccumulator(str(run_dir), size_guidance={"scalars": 0, "tensors": 0, "images": 0})
    events.Reload()
    curves: dict = {}
    for tag in events.Tags()["scalars"]:
        curves[tag] = [(event.step, event.value) for event in events.Scalars(tag)]
    for tag in events.Tags()["tensors"]:
        curves[tag] = [(event.step, event.tensor_proto.SerializeToString()) for event in events.Tensors(tag)]
    for tag in events.Tags()["images"]:
        curves[tag] = [(event.step, event.encoded_image_string) for event in events.Images(tag)]
    return {tag: points for tag, points in curves.items() if not tag.startswith("perf/")}


def differences(run_dir: Path, reference: Path) -> list[str]:
    """What two finished runs do not have in common, bit for bit, times aside. Empty where all is the same."""
    found = []
    for name in ("last", "best"):
        leaves = [flatten(checkpoint.load(run / f"checkpoints/{name}.ckpt")) for run in (run_dir, reference)]
        for key in sorted(leaves[0].keys() | leaves[1].keys()):
            a, b = (side.get(key) for side in leaves)
            same = a.dtype == b.dtype and torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
            if not same and not key.startswith(".callbacks.Clock") and "Journal" not in key and "run_dir" not in key:
                found.append(f"{name}.ckpt{key}: {a} and {b}")
    mine, theirs = read_curves(run_dir), read_curves(reference)
    found += [f"curve {tag}" for tag in sorted(mine.keys() | theirs.keys()) if mine.get(tag) != theirs.get(tag)]
    if (run_dir / "samples.md").read_bytes() != (reference / "samples.md").read_bytes():
        found.append("samples.md")
    metrics = [json.loads((run / "metrics.json").read_text()) for run in (run_dir, reference)]
    found += [f"metrics.json {key}" for key in metrics[0] if key not in TIMES and metrics[0][key] != metrics[1][key]]
    return found
