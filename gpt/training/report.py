"""The report at the end of a run: its metrics, its last samples, and the commands to try next."""

import re
import shutil
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tqdm.utils import disp_len, disp_trim

from gpt.console import format_duration, print_line, shell_quote
from gpt.data.chunking import show_token
from gpt.training import distributed
from gpt.training.advice import OVERFIT_LOSS_RATIO, suggest_shorter_horizon
from gpt.training.health import is_memorizing
from gpt.training.metrics import METRICS
from gpt.training.run_directory import repeat_command
from gpt.training.state import Result, RunSpec

MAX_PRINTED_SAMPLES = 3
UNSMOOTHED_URL = "http://localhost:6006/?smoothing=0"  # by default TensorBoard smooths, and shows too high a final loss
MIN_COPY_CHARS = 60  # about ten words: shorter passages recur in any text


def print_brief_report(run_dir: Path, result: Result) -> None:
    """Print one line about a run, as for a job of a sweep."""
    metrics = result.metrics
    if metrics and distributed.is_main_process():
        bits_per_byte, time = metrics["val_bits_per_byte"], format_duration(metrics["train_seconds"])
        print_line(f"{run_dir}: {bits_per_byte:.4f} bits per byte after {metrics['steps']} steps in {time}")


def next_commands(run_dir: Path, prompt: str, shorter: str, longer: str) -> Iterator[tuple[str, str]]:
    """Yield commands to try after a run, each with a label.

    Args:
        run_dir: The directory of the run.
        prompt: A prompt for the model.
        shorter: The horizon of a shorter run, if the model overfits; otherwise empty.
        longer: The horizon to train longer; empty if the run stopped before its own horizon.
    """
    dash = "=" if prompt.startswith("-") else " "
    yield (
        "sample it",
        f"python generate.py --checkpoint {shell_quote(str(run_dir))} --prompt{dash}{shell_quote(prompt)}",
    )
    yield "see why", "the same with --insight page.html"
    yield "its curves", tensorboard_command(run_dir)
    if shorter:
        yield "run shorter", repeat_command(run_dir, f"horizon={shorter}")
    else:
        yield "train longer" if longer else "continue", resume_command(run_dir, longer)


def tensorboard_command(run_dir: Path) -> str:
    """Return the command and the address that show the curves of a run beside those of its neighbours."""
    return f"tensorboard --logdir {shell_quote(str(run_dir.parent))}, and {UNSMOOTHED_URL}"


def resume_command(run_dir: Path, horizon: str = "") -> str:
    """Return the command that resumes a run, to a new horizon if one is given."""
    command = f"python train.py {shell_quote(f'resume={run_dir}')}"
    return f"{command} horizon={horizon}" if horizon else command


def print_report(
    spec: RunSpec,
    run_dir: Path,
    result: Result,
    list_commands: Callable[[Path, str, str, str], Iterator[tuple[str, str]]] = next_commands,
) -> None:
    """Print the final metrics of a run, samples, and what to try next.

    Args:
        spec: What the run was to do.
        run_dir: Its directory.
        result: How its training ended.
        list_commands: Returns what to try next; it takes the arguments of `next_commands`.
    """
    metrics = result.metrics
    if not distributed.is_main_process():
        return
    if not metrics:
        print_line(f"nothing to report before the first validation, at step {spec.schedule.validate_every}")
        return
    if result.stop_signal:
        print_line("as of the last validation:")
    for line in format_report(metrics, result.samples, result.longest_copy):
        print_line(line)
    prompts = spec.config.data.prompts or [""]
    prompt = (prompts[-1].splitlines() or [""])[0]
    shorter = shorter_horizon(metrics, suggest_shorter_horizon(spec.config, spec.dataset, metrics["best_step"]))
    longer = ""
    if metrics["steps"] >= result.schedule.total_steps:
        seconds = spec.schedule.seconds
        longer = f"{2 * seconds:g}s" if seconds else f"{2 * metrics['steps']}steps"
    print_line("")
    for label, command in [("the run", str(run_dir)), *list_commands(run_dir, prompt, shorter, longer)]:
        print_line(f"{label + ':':13} {command}")


def shorter_horizon(metrics: dict[str, Any], suggested_steps: int) -> str:
    """Return the horizon of a shorter run if the model overfits or memorizes its text; otherwise an empty string.

    Args:
        metrics: As in metrics.json.
        suggested_steps: The steps after which validation is about at its best.
    """
    if metrics["val_loss"] > OVERFIT_LOSS_RATIO * metrics["best_val_loss"]:
        return f"{suggested_steps}steps"
    if is_memorizing(metrics):  # the loss may have risen unseen, between too few validations
        return f"{min(suggested_steps, max(1, metrics['steps'] // 2))}steps"
    return ""


def format_report(metrics: dict[str, Any], samples: Sequence[str], longest_copy: int = 0) -> Iterator[str]:
    """Yield the lines of a report.

    Args:
        metrics: As in metrics.json.
        samples: The texts sampled at the last validation.
        longest_copy: Characters of the longest passage in them that occurs in the training text.
    """
    yield ""
    rows = list(_metric_rows(metrics))
    label_width, value_width = (max(len(row[i]) for row in rows) for i in range(2))
    for label, value, unit in rows:
        yield f"{label:{label_width}}  {value:>{value_width}}  {unit}"
    if samples:
        yield f"\nsamples after step {metrics['steps']}, more in samples.md:"
        for sample in samples[-MAX_PRINTED_SAMPLES:]:
            yield from _format_sample(sample, shutil.get_terminal_size().columns)
    if is_memorizing(metrics):
        losses = f"{metrics['train_loss']:.2f} nats per token on it, {metrics['val_loss']:.2f} on other text"
        copy = f", and a copied passage of {longest_copy} characters" if longest_copy > MIN_COPY_CHARS else ""
        yield f"\nthe model memorizes its training text: {losses}{copy}; docs/reading.md has remedies"


def _metric_rows(metrics: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield the label, the value and the unit of each metric that has a label, with a note on some."""
    notes = _notes(metrics)
    for metric in METRICS.values():
        if not metric.label or metric.name not in metrics:
            continue
        value = metrics[metric.name]
        if isinstance(value, dict):
            for part, number in value.items():
                note = notes.get(metric.name, {}).get(part, "")
                yield metric.label.format(part), format(number, metric.format), metric.unit + note
        else:
            yield metric.label, format(value, metric.format), metric.unit + notes.get(metric.name, "")


def _notes(metrics: dict[str, Any]) -> dict[str, Any]:
    """Return what follows the units of some metrics, by their names."""
    seconds, best_step = metrics["train_seconds"], metrics["best_step"]
    peak_gib = metrics["peak_memory_bytes"] / 2**30
    time_note = f" ({format_duration(seconds)})" if seconds >= 60 else ""
    time_note += f": {metrics['tokens_per_second']:,.0f} tokens/s"
    time_note += f", {peak_gib:.2f} GiB at peak" if peak_gib else ""
    notes: dict[str, Any] = {
        "steps": f": {metrics['tokens']:,} tokens, {metrics['epochs']:.2f} epochs",
        "train_seconds": time_note,
        "best_val_loss": f", at step {best_step}, " + ("the last" if best_step == metrics["steps"] else "in best.ckpt"),
        "corpus_bits_per_byte": {
            name: f", after {epochs:.2f} epochs" for name, epochs in metrics.get("corpus_epochs", {}).items()
        },
        "baselines": {
            name: ", not beaten" if step is None else f", beaten at step {step}"
            for name, step in metrics["beaten_at_step"].items()
        },
    }
    if "expected_bits_per_byte" in metrics:
        excess_percent = 100 * (metrics["val_bits_per_byte"] / metrics["expected_bits_per_byte"] - 1)
        verdict = "worse" if excess_percent > 0 else "better"
        notes["expected_bits_per_byte"] = f", by model=auto; the result is {abs(excess_percent):.1f}% {verdict}"
    return notes


# --- text that fits a terminal ---


def fit_on_line(text: str, width: int) -> str:
    """Return text on one line of at most `width` columns, but 8, with signs for line ends and control characters."""
    width = max(8, width)
    text = re.sub(r"\s*\n\s*", " ⏎ ", text.strip()[: 4 * width])
    line = " ".join(show_token(word.encode()) for word in text.split(" "))  # `show_token` would replace spaces
    return line if disp_len(line) <= width else disp_trim(line, width - 1) + "…"


def _format_sample(text: str, width: int) -> list[str]:
    """Return a text on at most two lines of a list."""
    line = fit_on_line(text, 4 * width)
    chars = max(20, width * len(line) // max(1, disp_len(line)))  # some characters take two columns
    return textwrap.wrap(line, chars, initial_indent="- ", subsequent_indent="  ", max_lines=2, placeholder=" …")
