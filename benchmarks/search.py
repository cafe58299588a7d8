"""Compare recipes on the training part of a text: python benchmarks/search.py --text FILE 'optim.lr=0.002' ...

A candidate is a string of overrides for `python train.py experiment=shakespeare`. The last tenth of the text, on which
the README's figures are measured, is cut off first, and candidates are scored on the last tenth of the rest: no choice
made here has seen the final test. Each core runs one candidate at a time, so compare candidates by steps, not by time.
Results are printed as they come, a line each, and appended to --log as JSON.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).resolve().parents[1]


def train(overrides: str, seed: int, text: Path, core: int, folder: Path) -> dict:
    """Train on one core; return the figures, or the error."""
    run_dir = Path(tempfile.mkdtemp(dir=folder))
    command = [sys.executable, "train.py", "experiment=shakespeare", "data=text", f"data.path={text}"]
    command += [f"data.cache={folder / 'cache'}", f"run_dir={run_dir}", f"seed={seed}", *overrides.split()]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: os.sched_setaffinity(0, [core]),
        capture_output=True,
        text=True,
    )
    if done.returncode:
        return {
            "overrides": overrides,
            "seed": seed,
            "error": (done.stderr.strip().splitlines() or ["killed"])[-1],
        }
    facts = json.loads((run_dir / "metrics.json").read_text())
    keys = ("val_nats_per_byte", "best_step", "steps", "tokens", "epochs", "train_seconds", "parameters")
    return {"overrides": overrides, "seed": seed} | {key: facts[key] for key in keys}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--log", type=Path, help="a file to append JSON lines to")
    parser.add_argument("candidates", nargs="+", help="overrides separated by spaces; '' is the recipe as it is")
    args = parser.parse_args()
    content = args.text.read_text(encoding="utf-8")
    cores: SimpleQueue[int] = SimpleQueue()
    for core in os.sched_getaffinity(0):
        cores.put(core)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text = folder / "training.txt"
        text.write_text(content[: len(content) - len(content) // 10], encoding="utf-8")

        def run(candidate: tuple[str, int]) -> None:
            core = cores.get()
            start = time.perf_counter()
            try:
                found = train(*candidate, text, core, folder)
            finally:
                cores.put(core)
            if args.log:
                with args.log.open("a") as stream:
                    stream.write(json.dumps(found) + "\n")
            if "error" in found:
                print(f"{found['overrides']}: {found['error']}", flush=True)
                return
            print(
                f"{found['val_nats_per_byte']:.4f} nats/byte  {found['steps']:5} steps  {found['epochs']:5.1f} epochs  "
                f"{found['train_seconds']:6.1f} s  seed {found['seed']}  {found['overrides']}"
                + (f"  (best at {found['best_step']})" if found["best_step"] != found["steps"] else "")
                + ("" if sys.stdout.isatty() else f"  [{time.perf_counter() - start:.0f} s]"),
                flush=True,
            )

        with ThreadPoolExecutor(cores.qsize()) as pool:
            list(pool.map(run, [(c, seed) for c in args.candidates for seed in range(1, args.seeds + 1)]))


if __name__ == "__main__":
    main()
