"""How long one waits for the first step and the first token: python benchmarks/startup.py [--runs 5] [--json FILE].

Wall time from the start of the command, as a user would type it: of `python train.py` with prepared data to the end of
its first step, which it writes to TensorBoard, and of `python generate.py` to the first character it prints. Last, of
GPT-2 124M to the end of its second token, the first that `--compile` compiles, without it and with it: PyTorch has kept
on disk what it compiled the first time.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from measuring import ROOT, finish, machine, parser, table
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

LARGE = ["model=gpt2_small", "tokenizer=gpt2", "model.context_length=128", "data.validation_bytes=20000"]
GENERATE = [sys.executable, "generate.py", "--prompt", "a", "--checkpoint"]
TRAIN = ["train.py", "horizon=2steps", "trainer.log_every=1", "trainer.validate_every=2"]


def first_step(folder: Path) -> float:
    """Seconds to the event of the first step's loss."""
    run_dir = tempfile.mkdtemp(dir=folder)
    begin = time.time()
    command = [sys.executable, *TRAIN, f"run_dir={run_dir}"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    curves = EventAccumulator(run_dir)
    curves.Reload()
    return curves.Scalars("train/loss")[0].wall_time - begin


def first_token(run_dir: Path) -> float:
    """Seconds to the first character after the prompt."""
    command = [*GENERATE, str(run_dir), "--max-new-tokens", "50"]
    begin = time.time()
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.read(1) == b"a"
        process.stdout.read(1)
        seconds = time.time() - begin
        process.stdout.read()
    return seconds


def second_token(run_dir: Path, *options: str) -> float:
    """Seconds to the end of two tokens of 8-bit weights, the second of them compiled where that is asked for."""
    command = [*GENERATE, str(run_dir), "--max-new-tokens", "2", "--precision", "int8", *options]
    begin = time.time()
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return time.time() - begin


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--runs", type=int, default=5)
    args = arguments.parse_args()
    print(machine())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model, large = folder / "model", folder / "large"
        for run_dir, overrides in ((model, []), (large, LARGE)):  # prepares the data as well, where it was not
            command = [sys.executable, *TRAIN, *overrides, f"run_dir={run_dir}"]
            subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
        second_token(large, "--compile")
        found = {
            "first step": [first_step(folder) for _ in range(args.runs)],
            "first token": [first_token(model) for _ in range(args.runs)],
            "second token of GPT-2 124M": [second_token(large) for _ in range(args.runs)],
            "the same, compiled before": [second_token(large, "--compile") for _ in range(args.runs)],
        }
    rows = [[kind, *(f"{f(times):.2f}" for f in (min, statistics.median, max))] for kind, times in found.items()]
    print(table(["seconds to the", "least", "median", "most"], rows))
    finish(json.loads(json.dumps(found)), args.json)


if __name__ == "__main__":
    main()
