"""The command `python -m gpt.compare`: compare runs by their best validation.

Runs that differ only in their seeds form a group with a mean and a standard deviation. Student's t test at 95% decides
whether two groups differ by more than the noise of their seeds. A group has few runs, so all groups of a table share
one variance. Losses on different text cannot be compared, so each dataset has a table of its own.
"""

import argparse
import contextlib
import json
import math
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from gpt.console import Parser, clean_exit, print_line
from gpt.errors import UserError, summarize_error
from gpt.files import TRAIN_COMMAND, expand_path, flatten, read_text, read_yaml
from gpt.training.metrics import METRICS, SETTINGS_WITHOUT_EFFECT

RUNS = Path("runs")
SEEDS = ("seed", "data.seed")
# Keys that record how the values were chosen; older versions wrote some of them.
RECORD_KEYS = re.compile(r"resume|rerun|(decided|amended|overrides)(\..*)?")
COLUMNS = [metric for metric in METRICS.values() if metric.column]
STUDENT_T = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)  # at 95%, for 1, 2, ... degrees of freedom
TABLE_WIDTH = 80


@dataclass(frozen=True)
class RunSummary:
    """A run as its directory describes it.

    Args:
        name: The directory's name in runs/, or its path.
        settings: The settings that affect the model, by dotted keys, and the `code` version.
        best: The lowest bits per byte of all validations; infinite before the first.
        metrics: The metrics of `COLUMNS` that metrics.json has.
    """

    name: str
    settings: dict[str, Any]
    best: float
    metrics: dict[str, float]

    @property
    def dataset(self) -> dict[str, Any]:
        """The settings of the text, without seeds."""
        return {key: value for key, value in self.settings.items() if key.startswith("data.") and key not in SEEDS}

    @property
    def seeds(self) -> list[Any]:
        return [self.settings.get(key) for key in SEEDS]

    @property
    def recipe(self) -> dict[str, Any]:
        """The settings without seeds, and the number of steps unless the horizon is a time."""
        recipe = {key: value for key, value in self.settings.items() if key not in SEEDS}
        has_time_horizon = re.search(r"\d\s*(s|min|h)$", str(self.settings.get("horizon")))
        return recipe if has_time_horizon else recipe | {"steps": self.metrics.get("steps")}


def main(arguments: list[str] | None = None) -> None:
    """Print the runs, best first, as tables or as JSON."""
    args = parse_arguments(arguments)
    runs = [read_run(path if path.exists() else RUNS / path) for path in args.runs] or list(read_all_runs())
    by_dataset = group_runs(runs, lambda run, other: run.dataset == other.dataset)
    keys = differing_keys([runs[0].dataset for runs in by_dataset])
    tables: list[dict[str, Any]] = []
    for runs in by_dataset:
        dataset = {key: value for key, value in runs[0].dataset.items() if key in keys and value is not None}
        tables.append({"dataset": dataset, "runs": compare_runs(runs)})
    if args.json:
        print(json.dumps(tables, indent=2, default=str))
    else:
        print("validation in bits per byte, best first")
        for table in tables:
            print_table(table["dataset"], table["runs"])


def compare_runs(runs: list[RunSummary]) -> list[dict[str, Any]]:
    """Return a row for each group of runs on one dataset, best first, and test how each differs from the first."""
    groups = group_runs(sorted(runs, key=lambda run: run.best), differ_only_in_seeds)
    groups.sort(key=lambda group: fmean(run.best for run in group))
    keys = differing_keys([group[0].settings for group in groups])
    rows = [summarize_group(group, keys) for group in groups]
    degrees_of_freedom = sum(len(group) - 1 for group in groups)
    if degrees_of_freedom:
        variance = sum(row["std"] ** 2 * (row["runs"] - 1) for row in rows if row["runs"] > 1) / degrees_of_freedom
        t = STUDENT_T[min(degrees_of_freedom, len(STUDENT_T)) - 1]
        for row in rows[1:]:
            if row["best"] is not None:
                row["worse_by"] = row["best"] - rows[0]["best"]
                row["seeds_noise"] = t * math.sqrt(variance * (1 / rows[0]["runs"] + 1 / row["runs"]))
    return rows


def group_runs(
    runs: list[RunSummary], belong_together: Callable[[RunSummary, RunSummary], bool]
) -> list[list[RunSummary]]:
    """Put each run into the first group with all of whose runs it belongs together, or else into a new group."""
    groups: list[list[RunSummary]] = []
    for run in runs:
        for group in groups:
            if all(belong_together(run, other) for other in group):
                group.append(run)
                break
        else:
            groups.append([run])
    return groups


def differ_only_in_seeds(run: RunSummary, other: RunSummary) -> bool:
    """Return True if two validated runs have one recipe and different seeds.

    A repetition with the same seeds contributes nothing to the noise between seeds.
    """
    are_validated = math.isfinite(run.best) and math.isfinite(other.best)
    return are_validated and run.recipe == other.recipe and run.seeds != other.seeds


def summarize_group(group: list[RunSummary], keys: list[str]) -> dict[str, Any]:
    """Return the means of a group, and the name and the settings named in `keys` of its best run."""
    best = fmean(run.best for run in group)
    row: dict[str, Any] = {"run": group[0].name, "best": best if math.isfinite(best) else None}
    row["std"] = stdev(run.best for run in group) if len(group) > 1 else None
    row["runs"] = len(group)
    for metric in COLUMNS:
        values = [run.metrics[metric.name] for run in group if metric.name in run.metrics]
        row[metric.name] = fmean(values) if values else None
    row["settings"] = {key: group[0].settings[key] for key in keys if key in group[0].settings}
    return row


def differing_keys(settings: list[dict[str, Any]]) -> list[str]:
    """Return the keys whose values differ, without seeds."""
    keys = dict.fromkeys(key for values in settings for key in values if key not in SEEDS)
    return [key for key in keys if any(values.get(key) != settings[0].get(key) for values in settings)]


# --- reading ---


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = Parser("python -m gpt.compare", "Compare runs by their best validation, and by the noise of their seeds.")
    help_text = "a run directory or its name (default: all in runs/)"
    parser.add_argument("runs", metavar="RUN", nargs="*", type=expand_path, help=help_text)
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    return parser.parse_args(arguments)


def read_all_runs() -> Iterator[RunSummary]:
    """Read every run in runs/. Report damaged runs and skip them; raise `UserError` if no run can be read."""
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
    """Read a run's configuration and metrics; raise `UserError` if the folder is not a run, or is damaged."""
    name = folder.name if folder.parent == RUNS else str(folder)
    config_file = folder / "config.yaml"
    metrics_file = folder / "metrics.json"
    if not config_file.is_file():
        raise UserError(f"{folder}: not a run directory (it has no config.yaml); give one of those in {RUNS}/")
    with damage_errors(config_file):
        config = flatten(read_yaml(config_file))
        keys = [key for key in config if not RECORD_KEYS.fullmatch(key) and key not in SETTINGS_WITHOUT_EFFECT]
        settings = {key: config[key] for key in keys}
    if not metrics_file.is_file():
        return RunSummary(name, settings, math.inf, {})
    with damage_errors(metrics_file):
        stored = json.loads(read_text(metrics_file))
        loss, bits, best_loss = (float(stored[key]) for key in ("val_loss", "val_bits_per_byte", "best_val_loss"))
        metrics = {metric.name: float(stored[metric.name]) for metric in COLUMNS if metric.name in stored}
        settings["code"] = re.sub(r"^([0-9a-f]{7})[0-9a-f]{33}", r"\1", str(stored.get("git_commit")))
        best = best_loss / loss * bits if best_loss else 0.0  # if the best loss is 0, the last one may be 0 too
    return RunSummary(name, settings, best, metrics)


@contextlib.contextmanager
def damage_errors(file: Path) -> Iterator[None]:
    """Turn an error about a file's content into `UserError`."""
    try:
        yield
    except UserError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError, RecursionError) as error:
        raise UserError(f"{file}: damaged ({summarize_error(error)}); leave this run out, or move it away") from None


# --- printing ---


def print_table(dataset: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Print the runs on a dataset: a line of figures for each, and the settings that differ below it."""
    print("\n".join(["", *textwrap.wrap(format_settings(dataset), TABLE_WIDTH, break_on_hyphens=False)]))
    columns = [("best", "best", ".4f"), ("std", "std", ".4f"), ("runs", "runs", ".0f")]
    columns += [(metric.column, metric.name, metric.format) for metric in COLUMNS]
    print("".join(f"{heading:>8}" for heading, _, _ in columns) + "  run")
    for row in rows:
        cells = ["-" if row[key] is None else format(row[key], spec) for _, key, spec in columns]
        print("".join(f"{cell:>8}" for cell in cells) + f"  {row['run']}")
        for line in textwrap.wrap(format_settings(row["settings"]), TABLE_WIDTH - 10, break_on_hyphens=False):
            print(" " * 10 + line)
        if "worse_by" in row:
            verdict = "more than" if row["worse_by"] > row["seeds_noise"] else "within"
            print(f"{'':10}worse by {row['worse_by']:.4f}, {verdict} the seeds' noise of {row['seeds_noise']:.4f}")


def format_settings(settings: dict[str, Any]) -> str:
    """Return each key with its value, shortened to 40 characters."""
    words = []
    for key, value in settings.items():
        text = json.dumps(value, ensure_ascii=False, default=str).strip('"')
        if len(text) > 40:
            text = f"{text[:18]}...{text[-19:]}"
        words.append(f"{key}={text}")
    return "  ".join(words)


if __name__ == "__main__":
    with clean_exit("gpt.compare"):
        main()
