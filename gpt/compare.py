"""The command `python -m gpt.compare`: which runs are best, and what differs between them.

Runs that differ only in their seeds form a group with a mean and a standard deviation. Two groups differ by more than
the seeds' noise if Student's t test finds a difference at 95%. A group has few runs, so all groups of a table share one
variance. Losses on different text cannot be compared, so each dataset has a table of its own.
"""

import argparse
import json
import math
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from gpt.console import Parser, clean_exit, print_line
from gpt.errors import UserError, summarize_error
from gpt.files import TRAIN_COMMAND, expand_path, flatten, read_text, read_yaml
from gpt.training.metrics import METRICS

RUNS = Path("runs")
SEEDS = ("seed", "data.seed")
# Settings without an effect on the model, and records of how the values were chosen.
IGNORED = re.compile(
    r"run_dir|resume|rerun|logger|data\.(cache|cache_bytes|prompts)|(decided|amended|overrides)(\..*)?"
)
SCORES = ("val_loss", "val_bits_per_byte", "best_val_loss")
COLUMNS = [metric for metric in METRICS.values() if metric.column]
STUDENT_T = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)  # at 95%, for 1, 2, ... degrees of freedom
WIDTH = 80


@dataclass(frozen=True)
class RunSummary:
    """A run as its directory describes it.

    Args:
        name: The directory's name in runs/, or its path.
        settings: What affects the model, by dotted keys, and the `code`.
        best: The lowest bits per byte of its validations; infinite before the first.
        metrics: The metrics of `COLUMNS`, as far as metrics.json has them.
    """

    name: str
    settings: dict[str, Any]
    best: float
    metrics: dict[str, float]

    @property
    def dataset(self) -> dict[str, Any]:
        """The settings of the text that it is trained and validated on."""
        return {key: value for key, value in self.settings.items() if key.startswith("data.") and key not in SEEDS}


def main(arguments: list[str] | None = None) -> None:
    """Print the runs, best first, for people or as JSON."""
    args = parse_arguments(arguments)
    runs = [read_run(path if path.exists() else RUNS / path) for path in args.runs] or list(read_all_runs())
    by_dataset: dict[str, list[RunSummary]] = {}
    for run in runs:
        by_dataset.setdefault(json.dumps(run.dataset, default=str), []).append(run)
    shown = differing_keys([runs[0].dataset for runs in by_dataset.values()])
    tables: list[dict[str, Any]] = []
    for runs in by_dataset.values():
        settings = runs[0].dataset
        dataset = {key: settings[key] for key in shown if settings.get(key) is not None}
        tables.append({"dataset": dataset, "runs": compare_runs(runs)})
    if args.json:
        print(json.dumps(tables, indent=2, default=str))
    else:
        print("validation in bits per byte, best first")
        for table in tables:
            print_table(table["dataset"], table["runs"])


def compare_runs(runs: list[RunSummary]) -> list[dict[str, Any]]:
    """Return a row for each group of runs on one dataset, best first, and test how each differs from the first."""
    groups = group_by_settings(runs)
    shown = differing_keys([group[0].settings for group in groups])
    rows = [summarize_group(group, shown) for group in groups]
    degrees = sum(len(group) - 1 for group in groups)
    if degrees:
        variance = sum(row["std"] ** 2 * (row["runs"] - 1) for row in rows if row["runs"] > 1) / degrees
        t = STUDENT_T[min(degrees, len(STUDENT_T)) - 1]
        for row in rows[1:]:
            if row["best"] is not None:
                row["worse_by"] = row["best"] - rows[0]["best"]
                row["seeds_noise"] = t * math.sqrt(variance * (1 / rows[0]["runs"] + 1 / row["runs"]))
    return rows


def group_by_settings(runs: list[RunSummary]) -> list[list[RunSummary]]:
    """Group runs that differ only in their seeds and have as many steps, the best first, also within a group.

    A repetition with the same seeds adds nothing about their noise, so it begins another group.
    """
    groups: dict[str, list[RunSummary]] = {}
    repetitions: Counter[str] = Counter()
    for run in sorted(runs, key=lambda run: run.best):
        settings = {key: value for key, value in run.settings.items() if key not in SEEDS}
        if not re.search(r"\d\s*(s|min|h)$", str(run.settings.get("horizon"))):  # a time makes the steps vary
            settings["steps"] = run.metrics.get("steps")
        with_seeds = json.dumps([settings, [run.settings.get(key) for key in SEEDS]], default=str)
        repetitions[with_seeds] += 1
        is_validated = math.isfinite(run.best)
        key = json.dumps([settings, repetitions[with_seeds]], default=str) if is_validated else run.name
        groups.setdefault(key, []).append(run)
    return sorted(groups.values(), key=lambda group: fmean(run.best for run in group))


def summarize_group(group: list[RunSummary], shown: list[str]) -> dict[str, Any]:
    """Return the means of a group, the name of its best run, and those of its settings that are `shown`."""
    best = fmean(run.best for run in group)
    row: dict[str, Any] = {"run": group[0].name, "best": best if math.isfinite(best) else None}
    row["std"] = stdev(run.best for run in group) if len(group) > 1 else None
    row["runs"] = len(group)
    for metric in COLUMNS:
        values = [run.metrics[metric.name] for run in group if metric.name in run.metrics]
        row[metric.name] = fmean(values) if values else None
    row["settings"] = {key: group[0].settings[key] for key in shown if key in group[0].settings}
    return row


def differing_keys(settings: list[dict[str, Any]]) -> list[str]:
    """Return the keys that have more than one value, without seeds."""
    keys = dict.fromkeys(key for one in settings for key in one if key not in SEEDS)
    return [key for key in keys if any(one.get(key) != settings[0].get(key) for one in settings)]


# --- reading ---


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    about = "Print runs by their best validation, and whether they differ by more than the noise of their seeds."
    parser = Parser("python -m gpt.compare", about)
    which = "a run directory or its name (default: all in runs/)"
    parser.add_argument("runs", metavar="RUN", nargs="*", type=expand_path, help=which)
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    return parser.parse_args(arguments)


def read_all_runs() -> Iterator[RunSummary]:
    """Read every run in runs/; report a damaged one and leave it out. `UserError` if there is no other."""
    folders = sorted(file.parent for file in RUNS.glob("*/config.yaml"))
    if not folders:
        raise UserError(f"there are no runs in {RUNS}/: train one first with {TRAIN_COMMAND}")
    num_damaged = 0
    for folder in folders:
        try:
            yield read_run(folder)
        except UserError as error:
            num_damaged += 1
            print_line(f"gpt.compare: {error}", sys.stderr)
    if num_damaged == len(folders):
        raise UserError(f"no run in {RUNS}/ can be read: train one with {TRAIN_COMMAND}")


def read_run(folder: Path) -> RunSummary:
    """Read a run's configuration and metrics; `UserError` if it is no run, or damaged."""
    file = folder / "config.yaml"
    if not file.is_file():
        raise UserError(f"{folder}: not a run directory (it has no config.yaml); give one of those in {RUNS}/")
    best, metrics = math.inf, {}
    try:
        config = flatten(read_yaml(file))
        settings = {key: value for key, value in config.items() if not IGNORED.fullmatch(key)}
        file = folder / "metrics.json"
        if file.is_file():
            stored = json.loads(read_text(file))
            loss, bits, best_loss = (float(stored[key]) for key in SCORES)
            best = best_loss / loss * bits
            metrics = {metric.name: float(stored[metric.name]) for metric in COLUMNS if metric.name in stored}
            settings["code"] = re.sub(r"^([0-9a-f]{7})[0-9a-f]{33}", r"\1", str(stored.get("git_commit")))
    except UserError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError, RecursionError) as error:
        raise UserError(f"{file}: damaged ({summarize_error(error)}); leave this run out, or move it away") from None
    return RunSummary(folder.name if folder.parent == RUNS else str(folder), settings, best, metrics)


# --- printing ---


def print_table(dataset: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Print the runs on a dataset: a line of figures for each, and below it the settings that differ."""
    print("\n".join(["", *textwrap.wrap(format_settings(dataset), WIDTH, break_on_hyphens=False)]))
    columns = [("best", "best", ".4f"), ("std", "std", ".4f"), ("runs", "runs", ".0f")]
    columns += [(metric.column, metric.name, metric.format) for metric in COLUMNS]
    print("".join(f"{heading:>8}" for heading, _, _ in columns) + "  run")
    for row in rows:
        cells = ["-" if row[key] is None else format(row[key], spec) for _, key, spec in columns]
        print("".join(f"{cell:>8}" for cell in cells) + f"  {row['run']}")
        for line in textwrap.wrap(format_settings(row["settings"]), WIDTH - 10, break_on_hyphens=False):
            print(" " * 10 + line)
        if "worse_by" in row:
            verdict = "more than" if row["worse_by"] > row["seeds_noise"] else "within"
            print(f"{'':10}worse by {row['worse_by']:.4f}, {verdict} the seeds' noise of {row['seeds_noise']:.4f}")


def format_settings(settings: dict[str, Any]) -> str:
    """Return each key with its value, in at most 40 characters."""
    words = []
    for key, value in settings.items():
        text = json.dumps(value, ensure_ascii=False, default=str).strip('"')
        words.append(f"{key}={text if len(text) <= 40 else f'{text[:18]}...{text[-19:]}'}")
    return "  ".join(words)


if __name__ == "__main__":
    with clean_exit("gpt.compare"):
        main()
