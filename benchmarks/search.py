"""Compare recipes on the training part of a text.

python benchmarks/search.py --text FILE --try 'optim.lr=0.002' ...

A candidate is a string of overrides for `python train.py`, such as 'experiment=shakespeare optim.lr=0.002'. The last
tenth of the text is the final test, and is cut off first. Candidates are scored on the last tenth of the rest, so no
choice made here depends on the final test. Each core runs one candidate at a time, so compare candidates by steps, not
by time. Each result is printed as a line, and appended to --log as JSON.

With --rates instead of candidates, models from 2 layers of 64 channels to 8 of 256 train for 250 and 800 steps on one
or more texts. Their learning rates are those of the rule for their shape, and half and twice each rate alone. A line is
a model, a text and a horizon: bits per byte with the rule and with its neighbours, how much worse the rule is than the
best neighbour, and the difference between two seeds with the rule.

With --law, the candidates of model=auto train on the texts, if any are given, and their results are added to law.csv.
Then the constants of gpt/training/scaling_law.py are fitted to all results, and printed beside the predictions.
"""

import argparse
import csv
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from queue import SimpleQueue

import numpy as np
from measuring import ROOT, format_table

from gpt.data.baselines import measure_novelty
from gpt.data.data_config import DataConfig
from gpt.data.prepare import prepare
from gpt.data.tokenizer import TokenizerConfig
from gpt.model.transformer import ModelConfig
from gpt.training import scaling_law as law
from gpt.training.optim import OptimConfig

SHAPES = ((2, 64), (4, 128), (6, 192), (8, 256))  # layers and channels; heads of 32
CHANGES = ((1.0, 1.0), (0.5, 1.0), (2.0, 1.0), (1.0, 0.5), (1.0, 2.0))  # of matrix_lr and lr

VALIDATION_BYTES = 150_000


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
    result = {"overrides": overrides, "seed": seed, "wall_seconds": time.perf_counter() - start}
    if done.returncode:
        return result | {"error": (done.stderr.strip().splitlines() or ["killed"])[-1]}
    metrics = json.loads((run_dir / "metrics.json").read_text())
    keys = ("val_nats_per_byte", "val_bits_per_byte", "best_step", "steps", "tokens", "epochs", "train_seconds")
    return result | {key: metrics[key] for key in keys}


def train_all(candidates: Sequence[tuple[str, int, Path]]) -> Iterator[dict]:
    """Train candidates (overrides, seed, text), one on each core at a time; yield their figures in order."""
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


def shape_overrides(layers: int, channels: int, steps: int) -> str:
    """Return the overrides for a shape with heads of 32 and a context of 128, and a number of steps."""
    model = f"model=mini_128 model.num_layers={layers} model.d_model={channels} model.num_heads={channels // 32}"
    return f"{model} horizon={steps}steps data.validation_bytes={VALIDATION_BYTES} logger=[csv]"


def rate_overrides(layers: int, channels: int, steps: int, change: tuple[float, float]) -> str:
    """Return the overrides for a shape with the learning rates of the rule, multiplied by two factors."""
    shape = ModelConfig(num_layers=layers, d_model=channels, num_heads=channels // 32)
    optim = OptimConfig().for_model(shape)
    assert optim.matrix_lr and optim.lr
    rates = f"optim.matrix_lr={optim.matrix_lr * change[0]:.5g} optim.lr={optim.lr * change[1]:.5g}"
    return f"{shape_overrides(layers, channels, steps)} {rates}"


def compare_rates(texts: Sequence[Path]) -> None:
    """Train every shape with the rule's learning rates and their neighbours, and print the table."""
    rows = []
    jobs = [*((change, 1) for change in CHANGES), (CHANGES[0], 2)]
    for steps, (layers, channels), text in itertools.product((250, 800), SHAPES, texts):
        candidates = [(rate_overrides(layers, channels, steps, change), seed, text) for change, seed in jobs]
        rule, *neighbours, other_seed = (result["val_bits_per_byte"] for result in train_all(candidates))
        differences = [f"{100 * (rule / min(neighbours) - 1):+.2f}%", f"{100 * abs(rule / other_seed - 1):.2f}%"]
        name = f"{layers} x {channels}, {text.name}, {steps} steps"
        rows.append([name, *(f"{bits:.4f}" for bits in [rule, *neighbours]), *differences])
        print("  ".join(rows[-1]))
    print(format_table(["", "rule", "matrix_lr / 2", "x 2", "lr / 2", "x 2", "worse than the best", "seeds"], rows))


POINTS = ROOT / "benchmarks/law.csv"
RUNS = ((3, 96, 3300), (4, 128, 2000), (6, 192, 800), (8, 256, 400))  # a minute of two cores each
RUNS += ((3, 96, 16300), (4, 128, 9800), (6, 192, 3900), (8, 256, 2000))  # five minutes
NUMBERS = (
    "LOSS_EXPONENT",
    "NOVELTY_SCALE",
    "SIZE_EXPONENT",
    "TOKENS_PER_WEIGHT",
    "TOKENS_EXPONENT",
    "OVERFIT_FACTOR",
    "OVERFIT_EXPONENT",
)


def extend_points(texts: Sequence[Path]) -> None:
    """Train the candidates of model=auto on texts, the probe first, and add a row for each run to the points."""
    runs = [(text, run) for text in texts for run in ((2, 64, 1000), *RUNS)]
    candidates = [(shape_overrides(*run), 1, text) for text, run in runs]
    with POINTS.open("a") as stream:
        for (text, (layers, channels, steps)), result in zip(runs, train_all(candidates), strict=True):
            data = DataConfig("text", str(text), validation_bytes=VALIDATION_BYTES)
            prepared = prepare(data, TokenizerConfig(), 128, text.parent / "cache")
            text_columns = (text.stem, f"{measure_novelty(prepared.sources):.2f}", prepared.train_tokens)
            row = (*text_columns, layers, channels, steps, result["val_bits_per_byte"])
            print(*row, sep=",", file=stream, flush=True)


def fit_law() -> None:
    """Fit the logarithms of the law's constants to all points by Levenberg's method; print the predictions."""
    with POINTS.open() as stream:
        rows = [
            {key: value if key == "text" else float(value) for key, value in row.items()}
            for row in csv.DictReader(stream)
        ]
    small = sorted((row for row in rows if row["layers"] == 2 and row["steps"] <= 1000), key=lambda row: row["steps"])
    probes = {row["text"]: row for row in small}  # the longest of each text
    rows = [row for row in rows if row is not probes[row["text"]]]

    def model(row: dict) -> ModelConfig:
        return ModelConfig(num_layers=int(row["layers"]), d_model=int(row["channels"]), num_heads=1)

    def residuals(logarithms: np.ndarray) -> np.ndarray:
        for name, value in zip(NUMBERS, np.exp(logarithms), strict=True):
            setattr(law, name, value)
        errors = []
        for row in rows:
            probe = probes[row["text"]]
            text_law = law.ScalingLaw(int(row["distinct"]), row["novelty"]).calibrate(
                model(probe), 1024 * probe["steps"], probe["bits"]
            )
            try:
                errors.append(math.log(text_law.bits_per_byte(model(row), 1024 * row["steps"]) / row["bits"]))
            except (OverflowError, ValueError):  # too long a step
                errors.append(1e3)
        return np.array(errors)

    logarithms = np.log([getattr(law, name) for name in NUMBERS])
    damping = 1e-3
    errors = residuals(logarithms)
    for _ in range(300):
        identity = np.eye(len(logarithms))
        columns = [(residuals(logarithms + step) - errors) / 1e-5 for step in 1e-5 * identity]
        jacobian = np.stack(columns, axis=1)
        step = np.linalg.solve(jacobian.T @ jacobian + damping * identity, jacobian.T @ errors)
        new_errors = residuals(logarithms - step)
        if new_errors @ new_errors < errors @ errors:
            logarithms = logarithms - step
            errors = new_errors
            damping /= 3
        else:
            damping *= 3
    print(*(f"{name} = {value:.3g}" for name, value in zip(NUMBERS, np.exp(logarithms), strict=True)), sep="\n")
    lines = [
        [
            row["text"],
            f"{row['layers']:.0f} x {row['channels']:.0f}",
            f"{row['steps']:.0f}",
            f"{row['bits']:.4f}",
            f"{100 * error:+.1f}%",
        ]
        for row, error in zip(rows, errors, strict=True)
    ]
    print(format_table(["text", "model", "steps", "bits per byte", "predicted"], lines))
    print(
        f"root mean square {100 * (errors @ errors / len(errors)) ** 0.5:.2f}%, at most {100 * abs(errors).max():.2f}%"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, nargs="+", default=[])
    parser.add_argument("--rates", action="store_true", help="compare the learning rates of several shapes")
    parser.add_argument("--law", action="store_true", help="fit the law of model=auto, with new texts or without")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--log", type=Path, help="a file to append JSON lines to")
    parser.add_argument(
        "--try", dest="candidates", nargs="+", help="overrides separated by spaces; '' is the quick start's"
    )
    args = parser.parse_args()
    with ExitStack() as stack:
        texts = [stack.enter_context(training_part(file)) for file in args.text]
        if args.rates:
            compare_rates(texts)
            return
        if args.law:
            extend_points(texts)
            fit_law()
            return
        seeds = range(1, args.seeds + 1)
        candidates = [(c, seed, text) for text in texts for c in args.candidates or [] for seed in seeds]
        for result in train_all(candidates):
            if args.log:
                with args.log.open("a") as stream:
                    stream.write(json.dumps(result) + "\n")
            if "error" in result:
                print(f"{result['overrides']}: {result['error']}")
                continue
            best = f"  (best at {result['best_step']})" if result["best_step"] != result["steps"] else ""
            print(
                f"{result['val_nats_per_byte']:.4f} nats/byte  {result['steps']:5} steps  "
                f"{result['epochs']:5.1f} epochs  {result['train_seconds']:6.1f} s  seed {result['seed']}  "
                f"{result['overrides']}{best}  [{result['wall_seconds']:.0f} s]"
            )


if __name__ == "__main__":
    main()
