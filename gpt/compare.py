"""The command `python -m gpt.compare`: which runs are best, and what differs between them.

Runs that differ in nothing but their seeds make one group, with its mean and its scatter. A difference between groups
is beyond their seeds if Student's t says so at 95%; each group has few runs, so their scatter is that of all together.
Losses on different text do not compare, so each text has its own table.
"""

import argparse
import contextlib
import csv
import json
import math
import re
import statistics
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from gpt.console import Parser, command_line, say
from gpt.errors import UserError, reason
from gpt.files import TRAIN, HeldError, flatten, hold, home_path, read_text, read_yaml

RUNS = Path("runs")
LINES = "9999-references"  # a folder in RUNS which is no run: what a training draws for TensorBoard
LOSS, SPEED = "val/bits_per_byte", "work/tokens_per_second"
SEEDS = {"seed", "data.seed"}
STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)  # t for 1, 2, ... degrees of freedom
FIGURES = ("val_loss", "val_bits_per_byte", "best_val_loss", "steps", "train_seconds", "tokens_per_second")
# Keys with no effect on the model.
NOT_LEARNT = {"run_dir", "resume", "rerun", "logger", "data.cache", "data.cache_bytes", "data.prompts"}
COLUMNS = {  # of the table: the heading, and how to write the figure
    "best": ("best", ".4f"), "scatter": ("+-", ".4f"), "runs": ("runs", ".0f"),
    "at_equal_tokens": ("tokens", ".4f"), "at_equal_seconds": ("time", ".4f"),
    "steps": ("steps", ".0f"), "train_seconds": ("seconds", ".1f"),
}  # fmt: skip
WIDTH = 80


@dataclass
class RunSummary:
    """A run as its directory describes it."""

    folder: Path
    config: dict[str, Any]  # by dotted keys
    tokens_per_step: int
    figures: dict[str, float]  # metrics.json; empty before the first validation
    code: str = ""  # its commit, and whether it was changed

    @property
    def text(self) -> dict[str, Any]:
        """The settings that say what it is trained and validated on."""
        return {k: v for k, v in self.config.items() if k.startswith("data.") and k not in NOT_LEARNT | SEEDS}

    @property
    def trains(self) -> bool:
        """Whether a process is training it now."""
        if (file := self.folder / ".lock").exists():
            with contextlib.suppress(OSError):
                try:
                    hold(file).release()
                except HeldError:
                    return True
        return False

    @cached_property
    def curve(self) -> np.ndarray:
        """Tokens, seconds of training and bits per byte at each validation: (3, validations).

        The seconds add up from the throughput, which is logged with the training loss. Without metrics.csv there is
        one validation, the last.
        """
        points, end, tokens = read_curves(self.folder, (LOSS, SPEED)), self.figures["steps"], self.tokens_per_step
        steps, bits = np.array(points[LOSS] or [(end, self.figures["val_bits_per_byte"])]).T
        logged, speeds = np.array(points[SPEED] or [(end, self.figures["tokens_per_second"])]).T
        clock = np.cumsum(np.diff(logged, prepend=0) * tokens / speeds)
        return np.array([steps * tokens, np.interp(steps, [0, *logged], [0, *clock]), bits])

    @property
    def best(self) -> float:
        """The lowest bits per byte; infinite before the first validation."""
        if not self.figures:
            return math.inf
        return self.figures["best_val_loss"] * self.figures["val_bits_per_byte"] / self.figures["val_loss"]

    def bits_at(self, row: int, amount: float) -> float | None:
        """Bits per byte when a row of the curve reaches `amount`, on a straight line between two validations."""
        if not self.figures or self.curve[row, 0] > amount:
            return None
        return float(np.interp(amount, self.curve[row], self.curve[2]))


def main(arguments: list[str] | None = None) -> None:
    """Print the runs, best first, for people or as JSON."""
    args = parse_arguments(arguments)
    named = [path for path in args.runs if path.name != LINES]  # as runs/* has it
    runs = [read_run(path if path.exists() else RUNS / path) for path in named] or list(all_runs())
    by_text: dict[str, list[RunSummary]] = {}
    for run in runs:
        by_text.setdefault(json.dumps(run.text, default=str), []).append(run)
    texts, _ = differences([of_text[0] for of_text in by_text.values()], most=len(by_text))
    tables = []
    for keys, of_text in zip(texts, by_text.values(), strict=True):
        text = {key: of_text[0].text[key] for key in keys if of_text[0].text.get(key) is not None}
        tables.append({"text": text} | table_of(of_text, is_named=bool(named)))
    if args.json:
        print(json.dumps(tables, indent=2, default=str))
    else:
        print_tables(tables)


def table_of(runs: list[RunSummary], is_named: bool) -> dict[str, Any]:
    """Compare runs on one text; if they are named, also after equal tokens and equal time."""
    ends = [run.curve[:2, -1] for run in runs if run.figures] if is_named else []
    equal = dict(zip(("tokens", "seconds"), np.min(ends, axis=0).tolist(), strict=True)) if ends else {}
    groups = grouped(runs)
    shown, usual = differences([group[0] for group in groups], most=len(groups) if is_named else len(groups) // 2)
    rows = [row_of(group, equal, keys) for group, keys in zip(groups, shown, strict=True)]
    judge(rows)
    return {"runs": rows, "usual": usual, "equal": equal}


def grouped(runs: list[RunSummary]) -> list[list[RunSummary]]:
    """Put runs together that differ in nothing but seeds and have come as far: the best first, in each group too.

    A repetition with the same seeds says nothing of their scatter, and begins another group.
    """
    groups: dict[str, list[RunSummary]] = {}
    times: Counter[str] = Counter()
    for run in sorted(runs, key=lambda run: run.best):
        alike: dict[str, Any] = {key: value for key, value in run.config.items() if key not in NOT_LEARNT | SEEDS}
        if not re.search(r"\d\s*(s|min|h)$", str(run.config.get("horizon"))):  # whose steps differ by chance
            alike["steps"] = run.figures.get("steps")
        same = json.dumps([alike, *(run.config.get(key) for key in sorted(SEEDS))], default=str)
        times[same] += 1
        group = [alike, times[same]] if run.figures else str(run.folder)
        groups.setdefault(json.dumps(group, default=str), []).append(run)
    return sorted(groups.values(), key=lambda group: statistics.fmean(run.best for run in group))


def row_of(group: list[RunSummary], equal: dict[str, float], keys: list[str]) -> dict[str, Any]:
    """Sum up a group: means over its runs, their scatter, the name of the best, and the keys that differ."""
    first, several = group[0], len(group) > 1
    row: dict[str, Any] = {"run": first.folder.name if first.folder.parent == RUNS else str(first.folder)}
    row |= {"best": mean([run.best for run in group if run.figures]), "runs": len(group)}
    row["training"] = any(run.trains for run in group)
    row["scatter"] = statistics.stdev(run.best for run in group) if several else None
    for i, (what, end) in enumerate(equal.items()):
        row[f"at_equal_{what}"] = mean([run.bits_at(i, end) for run in group])
    row["code"] = ", ".join(sorted({run.code for run in group if run.code}))
    row |= {key: mean([run.figures.get(key) for run in group]) for key in ("steps", "train_seconds")}
    return row | {"differs": {key: first.config[key] for key in keys if not (several and key in SEEDS)}}


def mean(values: list[float | None]) -> float | None:
    """The mean; None if there are no values, or one is missing."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known and len(known) == len(values) else None


def judge(rows: list[dict[str, Any]]) -> None:
    """Add to each row how much worse than the first it is, and how much of that the seeds explain."""
    if not (freedom := sum(row["runs"] - 1 for row in rows)):
        return
    variance = sum((row["scatter"] or 0.0) ** 2 * (row["runs"] - 1) for row in rows) / freedom
    t, first = STUDENT[min(freedom, len(STUDENT)) - 1], rows[0]
    for row in rows[1:]:
        if row["best"] is not None:
            row["worse_by"] = row["best"] - first["best"]
            row["seeds_explain"] = t * math.sqrt(variance * (1 / first["runs"] + 1 / row["runs"]))


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    about = "Print runs by their best validation, after equal tokens and equal time, and what differs between them."
    parser = Parser("python -m gpt.compare", about)
    which = "a run directory or its name (default: all in runs/, each with what differs from most of the others)"
    parser.add_argument("runs", metavar="RUN", nargs="*", type=home_path, help=which)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    return parser.parse_args(arguments)


def all_runs() -> Iterator[RunSummary]:
    """Read every run in runs/; a damaged one is reported and left out. `UserError` if there is no other."""
    folders = sorted(file.parent for file in RUNS.glob("*/config.yaml"))
    if not folders:
        raise UserError(f"there are no runs in {RUNS}/: train one first with {TRAIN}")
    unread = 0
    for folder in folders:
        try:
            yield read_run(folder)
        except UserError as error:
            unread += 1
            say(f"gpt.compare: {error}", sys.stderr)
    if unread == len(folders):
        raise UserError(f"no run in {RUNS}/ can be read: train one with {TRAIN}")


def read_run(folder: Path) -> RunSummary:
    """Read a run's configuration and figures; `UserError` if it is no run, or damaged."""
    if not (file := folder / "config.yaml").is_file():
        raise UserError(f"{folder}: not a run directory (it has no config.yaml); give one of those in {RUNS}/")
    try:
        config = flatten(read_yaml(file))
        run = RunSummary(folder, config, int(config["trainer.tokens_per_step"]), {})
        if (file := folder / "metrics.json").is_file():
            stored = json.loads(read_text(file))
            run.figures = {key: float(stored[key]) for key in FIGURES}
            commit, _, changed = (stored.get("git_commit") or "").partition("-")
            run.code = (commit if "+" in commit else commit[:7]) + ("+changes" if changed else "")
    except UserError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise damaged(file, error) from None
    return run


def read_curves(folder: Path, tags: Sequence[str]) -> dict[str, list[tuple[float, float]]]:
    """The (step, value) points of the curves with these tags, from metrics.csv; none without that file."""
    points: dict[str, list[tuple[float, float]]] = {tag: [] for tag in tags}
    if not (file := folder / "metrics.csv").is_file():
        return points
    try:
        with file.open(encoding="utf-8", newline="") as stream:
            for row in csv.DictReader(stream):
                if row["tag"] in points:
                    points[row["tag"]].append((float(row["step"]), float(row["value"])))
    except (OSError, ValueError, KeyError, TypeError, csv.Error) as error:
        raise damaged(file, error) from None
    return points


def damaged(file: Path, error: Exception) -> UserError:
    return UserError(f"{file}: damaged ({reason(error)}); leave this run out, or move it away")


def differences(runs: list[RunSummary], most: int) -> tuple[list[list[str]], dict[str, Any]]:
    """Return the keys to show of each run, and the values that more than `most` runs share, of the keys that differ."""
    configs = [
        {key: json.dumps(value, default=str) for key, value in run.config.items() if key not in NOT_LEARNT}
        for run in runs
    ]
    counts = Counter(pair for config in configs for pair in config.items())
    values = Counter(key for key, _ in counts)  # how many there are of a key
    usual = {key: value for (key, value), count in counts.items() if values[key] > 1 and count > most}
    shown = [[key for key, value in c.items() if values[key] > 1 and value != usual.get(key)] for c in configs]
    return shown, {key: json.loads(value) for key, value in usual.items()}


def print_tables(tables: list[dict[str, Any]]) -> None:
    """Print a table for each text, and what its signs mean."""
    title = "validation in bits per byte, best first; -: not reached, or the scatter of a single run"
    codes = {row["code"] for table in tables for row in table["runs"] if row["code"]}
    if len(codes) == 1:
        title += f"; code {codes.pop()}"
    print(textwrap.fill(title, WIDTH))
    for table in tables:
        heading = ["  ".join(settings(table["text"]))] if table["text"] else []
        if equal := table["equal"]:
            heading += [f"tokens: after {equal['tokens']:,.0f}; time: after {equal['seconds']:,.1f} s of training"]
        if heading:
            print("\n" * bool(table["text"]) + textwrap.fill("; ".join(heading), WIDTH, break_on_hyphens=False))
        print_table(table["runs"], table["usual"], codes)


def print_table(rows: list[dict[str, Any]], usual: dict[str, Any], codes: set[str]) -> None:
    """Print a line for each run on a text, and below it what differs from the others, or from what is usual."""
    columns = {key: column for key, column in COLUMNS.items() if key in rows[0]}
    if all(row["runs"] == 1 for row in rows):
        columns = {key: column for key, column in columns.items() if key not in ("runs", "scatter")}
    print("".join(f"{head:>8}" for head, _ in columns.values()) + "  run")
    for row in rows:
        cells = ["-" if row[key] is None else format(row[key], form) for key, (_, form) in columns.items()]
        note = ": still training" * bool(row["training"]) + ": no validation yet" * (not row["steps"])
        print("".join(f"{cell:>8}" for cell in cells) + f"  {row['run']}{note}")
        words = settings(row["differs"]) + ([f"code={row['code']}"] if row["code"] and codes else [])
        for line in textwrap.wrap("  ".join(words), WIDTH - 10, break_on_hyphens=False):
            print(" " * 10 + line)
        if "worse_by" in row:
            beyond = "more than" if row["worse_by"] > row["seeds_explain"] else "no more than"
            judged = f"worse than the first by {row['worse_by']:.4f}, {beyond} seeds explain"
            print(f"{'':10}{judged} ({row['seeds_explain']:.4f})")
    if usual:
        others = f"settings of all runs that do not name another: {'  '.join(settings(usual))}"
        print(textwrap.fill(others, WIDTH, break_on_hyphens=False))


def settings(config: dict[str, Any]) -> list[str]:
    """Each key of a configuration with its value, in at most 40 characters."""

    def shorten(value: Any) -> str:
        whole = json.dumps(value, ensure_ascii=False, default=str).strip('"')
        text = f"{value:.6g}" if isinstance(value, float) else whole
        return text if len(text) <= 40 else f"{text[:18]}...{text[-19:]}"

    return [f"{key}={shorten(value)}" for key, value in config.items()]


if __name__ == "__main__":
    with command_line("gpt.compare"):
        main()
