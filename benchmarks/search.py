"""Compare recipes on the training part of a text: python benchmarks/search.py --text FILE 'optim.lr=0.002' ...

A candidate is a string of overrides for `python train.py`, such as 'experiment=shakespeare optim.lr=0.002'. The last
tenth of the text, on which figures are measured, is cut off first, and candidates are scored on the last tenth of the
rest: no choice made here has seen the final test. Each core runs one candidate at a time, so compare candidates by
steps, not by time. Results are printed as they come, a line each, and appended to --log as JSON.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).resolve().parents[1]


@contextmanager
def training_part(file: Path) -> Iterator[Path]:
    """Yield a file, alone in its folder, with all but the last tenth of a text."""
    content = file.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as name:
        text = Path(name) / file.name
        text.write_text(content[: len(content) - len(content) // 10], encoding="utf-8")
        yield text


def train(overrides: str, seed: int, text: Path, core: int) -> dict:
    """Train on one core; return the figures, or the error."""
    run_dir = Path(tempfile.mkdtemp(dir=text.parent))
    command = [sys.executable, "train.py", "data=text", f"data.path={text}"]
    command += [f"data.cache={text.parent / 'cache'}", f"run_dir={run_dir}", f"seed={seed}", *overrides.split()]
    start = time.perf_counter()
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: os.sched_setaffinity(0, [core]),
        capture_output=True,
        text=True,
    )
    found = {"overrides": overrides, "seed": seed, "wall_seconds": time.perf_counter() - start}
    if done.returncode:
        return found | {"error": (done.stderr.strip().splitlines() or ["killed"])[-1]}
    facts = json.loads((run_dir / "metrics.json").read_text())
    keys = ("val_nats_per_byte", "val_bits_per_byte", "best_step", "steps", "tokens", "epochs", "train_seconds")
    return found | {key: facts[key] for key in keys}


def train_all(candidates: Sequence[tuple[str, int, Path]]) -> Iterator[dict]:
    """Train candidates of overrides, seed and text, one on each core at a time; yield their figures in order."""
    cores: SimpleQueue[int] = SimpleQueue()
    for core in os.sched_getaffinity(0):
        cores.put(core)

    def run(candidate: tuple[str, int, Path]) -> dict:
        core = cores.get()
        try:
            return train(*candidate, core)
        finally:
            cores.put(core)

    with ThreadPoolExecutor(cores.qsize()) as pool:
        yield from pool.map(run, candidates)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--log", type=Path, help="a file to append JSON lines to")
    parser.add_argument("candidates", nargs="+", help="overrides separated by spaces; '' is the quick start's recipe")
    args = parser.parse_args()
    with training_part(args.text) as text:
        seeds = range(1, args.seeds + 1)
        for found in train_all([(candidate, seed, text) for candidate in args.candidates for seed in seeds]):
            if args.log:
                with args.log.open("a") as stream:
                    stream.write(json.dumps(found) + "\n")
            if "error" in found:
                print(f"{found['overrides']}: {found['error']}", flush=True)
                continue
            print(
                f"{found['val_nats_per_byte']:.4f} nats/byte  {found['steps']:5} steps  {found['epochs']:5.1f} epochs  "
                f"{found['train_seconds']:6.1f} s  seed {found['seed']}  {found['overrides']}"
                + (f"  (best at {found['best_step']})" if found["best_step"] != found["steps"] else "")
                + f"  [{found['wall_seconds']:.0f} s]",
                flush=True,
            )


if __name__ == "__main__":
    main()
