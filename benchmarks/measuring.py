"""Shared by the benchmarks: variants that are measured in turn, trainings, the machine's own limits, and tables.

A machine's speed changes from minute to minute, so only figures measured in turn can be compared. Each variant runs in
its own process, with its own memory and allocator, a few steps at a time.
"""

import argparse
import itertools
import json
import multiprocessing
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
sys.stdout.reconfigure(line_buffering=True)  # a pipe gets each line as it comes

import torch  # noqa: E402

from gpt.hardware.device import DTYPES, choose_device, choose_precision  # noqa: E402
from gpt.hardware.memory import peak_memory_bytes  # noqa: E402

if TYPE_CHECKING:  # a benchmark that does not train measures memory without it
    from gpt.training.config import Config


class Worker:
    """A process that runs one variant. `make(**arguments)` returns the function of a step."""

    def __init__(self, name: str, make: Callable[..., Callable[[], Any]], **arguments):
        self.name = name
        self.times: list[float] = []  # seconds a step
        self.peak = 0  # bytes
        self.facts: dict[str, Any] = {}
        self._pipe, worker_pipe = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(target=_serve, args=(worker_pipe, make, arguments), daemon=True)
        self._process.start()
        worker_pipe.close()
        self._receive()

    def run(self, steps: int) -> list[float]:
        """Take some steps, return their times, and add them to `times`."""
        self._pipe.send(steps)
        times, self.peak, self.facts = self._receive()
        self.times += times
        return times

    @property
    def median(self) -> float:
        return statistics.median(self.times)

    def close(self) -> None:
        self._pipe.close()
        self._process.join()

    def _receive(self):
        try:
            status, value = self._pipe.recv()
        except EOFError:
            raise SystemExit(f"{self.name}: its process died (out of memory?)") from None
        if status == "error":
            raise SystemExit(f"{self.name}: {value}")
        return value


def _serve(pipe, make: Callable[..., Callable[[], Any]], arguments: dict) -> None:
    try:
        step = make(**arguments)
        pipe.send(("ready", None))
        while True:
            times = []
            for _ in range(pipe.recv()):
                synchronize()
                start = time.perf_counter()
                result = step()
                synchronize()
                times.append(time.perf_counter() - start)
            peak = peak_memory_bytes(choose_device())
            pipe.send(("times", (times, peak, result if isinstance(result, dict) else {})))
    except EOFError:
        pass
    except ImportError as error:
        pipe.send(("error", f"{error.name} is not installed"))
    except Exception:
        pipe.send(("error", traceback.format_exc()))


def synchronize() -> None:
    """Wait for the GPU, if there is one, to finish its work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def matrix_peak(dtype: str, n: int, seconds: float = 1.0) -> Callable[[], dict]:
    """Return a step that measures the median FLOP/s of n x n matrix products over some seconds."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    n = 8192 if device == "cuda" else n
    a = torch.randn(n, n, device=device).to(getattr(torch, dtype))

    def step() -> dict:
        times, begin = [], time.perf_counter()
        while time.perf_counter() - begin < seconds:
            start = time.perf_counter()
            a @ a
            synchronize()
            times.append(time.perf_counter() - start)
        return {"flops": 2 * n**3 / statistics.median(times)}

    return step


def read_bandwidth(size: int = 2**30, seconds: float = 1.0) -> Callable[[], dict]:
    """Return a step that measures how many bytes a second can be read from memory, not from the caches."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    a = torch.ones(size // 4, device=device)

    def step() -> dict:
        best, begin = float("inf"), time.perf_counter()
        while time.perf_counter() - begin < seconds:
            start = time.perf_counter()
            a.sum()
            synchronize()
            best = min(best, time.perf_counter() - start)
        return {"bytes_per_second": a.nbytes / best}

    return step


def configure(*overrides: str) -> "Config":
    """Compose the configuration of `python train.py GROUP=NAME ... KEY=VALUE ...` (no experiments) without Hydra."""
    from omegaconf import DictConfig, OmegaConf

    from gpt.training.config import parse_config

    root = OmegaConf.load(ROOT / "configs/train.yaml")
    choices = OmegaConf.merge(*(entry for entry in root.pop("defaults") if isinstance(entry, DictConfig)))
    groups = {name: choice for name, choice in choices.items() if choice and (ROOT / f"configs/{name}").is_dir()}
    pairs = [override.partition("=")[::2] for override in overrides]
    groups |= {key: value for key, value in pairs if key in groups}
    values = [f"{key}={value}" for key, value in pairs if key not in groups]
    del root["hydra"]
    files = {group: OmegaConf.load(ROOT / f"configs/{group}/{name}.yaml") for group, name in groups.items()}
    composed = OmegaConf.merge(root, files, OmegaConf.from_dotlist(values))
    plain = OmegaConf.to_container(composed, resolve=True)
    return parse_config({key: value for key, value in plain.items() if key not in ("callbacks", "plan")})


def train_as_user(folder: Path, *overrides: str) -> tuple[Path, dict]:
    """Run train.py as a user would; return the run's directory, a new one below `folder`, and its metrics.json."""
    run_dir = Path(tempfile.mkdtemp(dir=folder))
    command = [sys.executable, "train.py", *overrides, f"run_dir={run_dir}"]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return run_dir, json.loads((run_dir / "metrics.json").read_text())


def describe_machine() -> dict:
    """Return the properties of the machine that affect the figures."""
    cpu_info = Path("/proc/cpuinfo")
    cpu = platform.processor()
    if cpu_info.exists():
        names = [line.split(":")[1] for line in cpu_info.read_text().splitlines() if "model name" in line]
        cpu = names[0].strip() if names else cpu
    facts = {"cpu": cpu, "threads": torch.get_num_threads(), "torch": torch.__version__}
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
    return facts


def format_table(head: list[str], rows: list[list[Any]]) -> str:
    """Format columns of text, the first aligned to the left and the others to the right."""
    lines = [head]
    for row in rows:
        lines.append([cell if isinstance(cell, str) else f"{cell:,.2f}" for cell in row])
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    formatted = []
    for first, *others in lines:
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        formatted.append("  ".join([first.ljust(widths[0]), *cells]).rstrip())
    return "\n".join(formatted)


def rounds(seconds: float, min_rounds: int = 3) -> Iterator[int]:
    """Count rounds until `seconds` have passed, but at least `min_rounds`."""
    begin = time.perf_counter()
    for i in itertools.count():
        if i >= min_rounds and time.perf_counter() - begin > seconds:
            return
        yield i


def training_dtype() -> str:
    """Return the precision that training uses on this machine, as PyTorch names it."""
    name = choose_precision("auto", choose_device())
    return str(DTYPES[name]).removeprefix("torch.")


def make_parser(doc: str) -> argparse.ArgumentParser:
    """Return a parser with the arguments of every benchmark."""
    arguments = argparse.ArgumentParser(description=doc.splitlines()[0])
    arguments.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    return arguments


def write_report(report: dict, path: Path | None) -> None:
    """Write the figures as JSON if a file is given."""
    if path is not None:
        path.write_text(json.dumps({"machine": describe_machine()} | report, indent=2) + "\n")
