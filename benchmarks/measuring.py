"""What the benchmarks share: several programs measured in turn in one run, the machine's own limits, and tables.

Machines change their speed from minute to minute, so only what is measured side by side may be compared. Every variant
lives in a process of its own, which has its own memory and its own allocator, and is asked for a few steps at a time.
"""

import argparse
import json
import multiprocessing
import platform
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from gpt.hardware import choose_device, peak_memory_bytes  # noqa: E402


class Worker:
    """A process that holds one variant: `make(**arguments)` returns the function that does one step of it."""

    def __init__(self, name: str, make: Callable[..., Callable[[], Any]], **arguments):
        self.name = name
        self.times: list[float] = []  # seconds a step
        self.peak = 0  # bytes
        self.facts: dict[str, Any] = {}
        here, there = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(target=_serve, args=(there, make, arguments), daemon=True)
        self._process.start()
        there.close()
        self._pipe = here
        self._answer()

    def run(self, steps: int) -> list[float]:
        """Do some steps; returns their times, which are kept as well."""
        self._pipe.send(steps)
        times, self.peak, self.facts = self._answer()
        self.times += times
        return times

    @property
    def median(self) -> float:
        return statistics.median(self.times)

    def close(self) -> None:
        self._pipe.close()
        self._process.join()

    def _answer(self):
        try:
            kind, value = self._pipe.recv()
        except EOFError:
            raise SystemExit(f"{self.name}: its process has ended (out of memory?)") from None
        if kind == "error":
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
    except Exception:
        pipe.send(("error", traceback.format_exc()))


def synchronize() -> None:
    """Wait until a GPU, where there is one, has done what it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def matrix_peak(dtype: str, n: int, seconds: float = 1.0) -> Callable[[], dict]:
    """A step that measures FLOP/s of products of n x n matrices, their median over some seconds, in one precision."""
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
    """A step that measures the bytes a second that can be read from memory, far more than caches hold."""
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


def machine() -> dict:
    """What the figures were measured on."""
    info = Path("/proc/cpuinfo")
    models = [line.split(":")[1].strip() for line in info.read_text().splitlines() if "model name" in line] if (
        info.exists()
    ) else [platform.processor()]  # fmt: skip
    facts = {"cpu": models[0], "threads": torch.get_num_threads(), "torch": torch.__version__}
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
    return facts


def table(head: list[str], rows: list[list[Any]]) -> str:
    """Columns of text, the first to the left and the others to the right."""
    lines = [head, *[[cell if isinstance(cell, str) else f"{cell:,.2f}" for cell in row] for row in rows]]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) if i == 0 else cell.rjust(width) for i, (cell, width) in
                  enumerate(zip(line, widths, strict=True))).rstrip()
        for line in lines
    )  # fmt: skip


def parser(doc: str) -> argparse.ArgumentParser:
    """The arguments that every benchmark has."""
    arguments = argparse.ArgumentParser(description=doc.splitlines()[0])
    arguments.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file as well")
    return arguments


def finish(report: dict, path: Path | None) -> None:
    """Write the figures as JSON where that is asked for."""
    if path is not None:
        path.write_text(json.dumps({"machine": machine()} | report, indent=2) + "\n")
