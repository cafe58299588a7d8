"""Seconds to the first step and to the first token: python benchmarks/startup.py [--runs 3] [--json FILE].

Measures wall time from the start of a command as a user types it. For `python train.py` with prepared data, it ends
when the loss of the first step is written to TensorBoard. For `python generate.py`, it ends with the first printed
character. For GPT-2 124M, it ends with the second token, without and with `--compile`.
"""

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from measuring import ROOT, describe_machine, format_table, make_parser, train_as_user, write_report
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

SHORT = ["horizon=2steps", "trainer.log_every=1"]
LARGE = ["model=gpt2_small", "tokenizer=gpt2", "model.context_length=128", "data.validation_bytes=20000"]
GENERATE = [sys.executable, "generate.py", "--prompt", "a", "--checkpoint"]


def first_step(folder: Path) -> float:
    """Return the seconds to the TensorBoard event with the first step's loss."""
    begin = time.time()
    run_dir, _ = train_as_user(folder, *SHORT)
    curves = EventAccumulator(str(run_dir))
    curves.Reload()
    return curves.Scalars("train/loss")[0].wall_time - begin


def first_token(run_dir: Path) -> float:
    """Return the seconds to the first character after the prompt."""
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
    """Return the seconds to sample two tokens with 8-bit weights."""
    command = [*GENERATE, str(run_dir), "--max-new-tokens", "2", "--precision", "int8", *options]
    begin = time.time()
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return time.time() - begin


def main() -> None:
    arguments = make_parser(__doc__)
    arguments.add_argument("--runs", type=int, default=3)
    args = arguments.parse_args()
    print(describe_machine())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        mini, _ = train_as_user(folder, *SHORT)  # this prepares the data as well
        large, _ = train_as_user(folder, *SHORT, *LARGE)
        seconds = {
            "first step": [first_step(folder) for _ in range(args.runs)],
            "first token": [first_token(mini) for _ in range(args.runs)],
            "second token of GPT-2 124M": [second_token(large) for _ in range(args.runs)],
            "the same with --compile": [second_token(large, "--compile") for _ in range(args.runs)],
        }
    statistics_shown = (min, statistics.median, max)
    rows = [[name, *(f"{f(times):.2f}" for f in statistics_shown)] for name, times in seconds.items()]
    print(format_table(["seconds to the", "min", "median", "max"], rows))
    write_report(seconds, args.json)


if __name__ == "__main__":
    main()
