"""Check that training works on this machine, and print a report that you can send: python benchmarks/check_machine.py

It trains the mini model for 60 steps, resumes the run from its middle, and samples twice. It needs no network and no
text, takes one to three minutes, and runs on Linux, macOS and Windows. More arguments go to train.py:

    python benchmarks/check_machine.py trainer.device=cpu
"""

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
STEPS = 60


def print_row(name: str, value: str) -> None:
    print(f"{name:12} {value}", flush=True)


def run(script: str, *arguments: str) -> str:
    """Run a script of the project and return its output, or end with the report's last rows if it fails."""
    command = [sys.executable, str(ROOT / script), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, encoding="utf-8", errors="replace")
    if done.returncode:
        print_row("failed", f"{script} {' '.join(arguments)}: exit code {done.returncode}")
        sys.exit(f"{done.stdout}\n{done.stderr}"[-3000:])
    return done.stdout


def describe_machine() -> None:
    """Print the system, the processors and the versions."""
    processor = torch.cpu.get_capabilities().get("cpu_name") or platform.processor() or platform.machine()
    print_row("system", f"{platform.platform()}, Python {platform.python_version()}")
    print_row("processor", f"{processor}, {os.cpu_count()} CPUs, {torch.get_num_threads()} threads")
    if torch.cuda.is_available():
        print_row("GPU", f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda or torch.version.hip}")
    elif torch.backends.mps.is_available():
        print_row("GPU", "Apple (MPS)")
    print_row("versions", ", ".join(f"{name} {version(name)}" for name in ("torch", "lightning", "numpy")))


def check_training(path: Path, overrides: list[str]) -> None:
    """Train, resume from the middle, and compare the weights of both runs."""
    first, second = path / "first", path / "second"
    places = [f"run_dir={first.as_posix()}", f"data.cache={path.as_posix()}/cache"]
    run("train.py", f"horizon={STEPS}steps", f"trainer.keep_every={STEPS // 2}", *places, *overrides)
    metrics = json.loads((first / "metrics.json").read_text(encoding="utf-8"))
    checkpoint = torch.load(first / "checkpoints/last.ckpt", map_location="cpu", weights_only=True)
    trainer = checkpoint["config"]["trainer"]
    memory = metrics["peak_memory_bytes"] / 2**20
    print_row("training", f"{trainer['device']} in {trainer['precision']}, compile={trainer['compile']}")
    print_row("speed", f"{metrics['tokens_per_second']:,.0f} tokens/s, {memory:,.0f} MiB at peak")
    print_row("loss", f"{metrics['val_loss']:.4f} nats per token, {metrics['val_bits_per_byte']:.4f} bits per byte")

    shutil.copytree(first, second)
    checkpoints = second / "checkpoints"
    (checkpoints / f"step-{STEPS // 2:08}.ckpt").replace(checkpoints / "last.ckpt")
    for name in ("best.ckpt", "previous.ckpt"):
        (checkpoints / name).unlink(missing_ok=True)
    run("train.py", f"resume={second.as_posix()}")
    weights = torch.load(checkpoints / "last.ckpt", map_location="cpu", weights_only=True)["state_dict"]
    difference = max(float((weights[name] - weight).abs().max()) for name, weight in checkpoint["state_dict"].items())
    outcome = f"weights differ by up to {difference:.1e}" if difference else "the same weights bit for bit"
    print_row("resume", outcome)


def check_sampling(path: Path) -> None:
    """Sample the same text twice, and time it."""
    options = ["--prompt=Return", "--seed=1", "--max-new-tokens=100"]
    began = time.perf_counter()
    texts = [run("generate.py", f"--checkpoint={path.as_posix()}/first", *options) for _ in range(2)]
    seconds = (time.perf_counter() - began) / 2
    outcome = "the same text twice" if texts[0] == texts[1] else "two different texts"
    print_row("sampling", f"{outcome}, 100 tokens in {seconds:.1f} s with the start of Python")


if __name__ == "__main__":
    describe_machine()
    with tempfile.TemporaryDirectory() as folder:
        check_training(Path(folder), sys.argv[1:])
        check_sampling(Path(folder))
