"""The closing report of a run: its figures, its last samples, and the commands to try next."""

import re
import shutil
import textwrap
from collections.abc import Iterator, Sequence
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

MOST_SAMPLES = 3
UNSMOOTHED = "http://localhost:6006/?smoothing=0"  # or else TensorBoard shows a final loss that is too high
LONG_COPY = 60  # characters, about ten words: shorter passages recur in any text


def report(spec: RunSpec, run_dir: Path, result: Result, brief: bool = False) -> None:
    """Print the final figures of a run, samples, and what to try next.

    Args:
        spec: What the run was to do.
        run_dir: Its directory.
        result: How its training ended.
        brief: Print one line, as for a job of a sweep.
    """
    figures, config = result.metrics, spec.config
    if not distributed.is_main_process():
        return
    if not figures:
        print_line(f"nothing to report before the first validation, at step {spec.schedule.validate_every}")
        return
    if brief:
        bits, steps, seconds = (figures[key] for key in ("val_bits_per_byte", "steps", "train_seconds"))
        print_line(f"{run_dir}: {bits:.4f} bits per byte after {steps} steps in {format_duration(seconds)}")
        return
    if result.stop_signal:
        print_line("as of the last validation:")
    prompt = ((config.data.prompts or [""])[-1].splitlines() or [""])[0]
    shorter = suggest_shorter_horizon(config, spec.dataset, figures["best_step"])
    longer = ""  # a run that stopped before its horizon continues to that
    if figures["steps"] >= result.schedule.total_steps:
        longer = f"{2 * spec.schedule.seconds:g}s" if spec.schedule.seconds else f"{2 * figures['steps']}steps"
    figures = figures | {"longest_copy": result.longest_copy}
    for line in format_report(figures, result.samples, prompt, shorter, longer, run_dir, spec.in_python):
        print_line(line)


def format_report(
    figures: dict[str, Any],
    samples: Sequence[str],
    prompt: str,
    shorter: int,
    longer: str,
    run_dir: Path,
    in_python: bool = False,
) -> Iterator[str]:
    """The lines of the report: `figures` as in metrics.json, `samples` of the last validation, and what to do next.

    `prompt` is for the commands, which are calls where the run was started in Python. `shorter` is the horizon in steps
    to suggest if validation has turned, and `longer` the one to suggest otherwise, or empty if the run has stopped
    before its own.
    """
    yield ""
    rows = list(_metric_rows(figures))
    label, value = (max(len(row[i]) for row in rows) for i in range(2))
    yield from (f"{row[0]:{label}}  {row[1]:>{value}}  {row[2]}" for row in rows)
    if samples:
        yield f"\nsamples after step {figures['steps']}, more in samples.md:"
        for sample in samples[-MOST_SAMPLES:]:
            yield from _item(sample, shutil.get_terminal_size().columns)
    if is_memorizing(figures):
        losses = f"{figures['train_loss']:.2f} nats per token on it, {figures['val_loss']:.2f} on other text"
        copied = figures.get("longest_copy", 0)
        copy = f", and a copied passage of {copied} characters" if copied > LONG_COPY else ""
        yield f"\nthe model learns its training text by heart: {losses}{copy}; docs/reading.md says what helps"
    yield ""
    for what, command in _next(figures, prompt, shorter, longer, run_dir, in_python):
        yield f"{what + ':':13} {command}"


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
    peak = metrics["peak_memory_bytes"] / 2**30
    time_note = f" ({format_duration(seconds)})" if seconds >= 60 else ""
    time_note += f": {metrics['tokens_per_second']:,.0f} tokens/s"
    time_note += f", {peak:.2f} GiB at peak" if peak else ""
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
        excess = 100 * (metrics["val_bits_per_byte"] / metrics["expected_bits_per_byte"] - 1)
        verdict = "worse" if excess > 0 else "better"
        notes["expected_bits_per_byte"] = f", by model=auto; the result is {abs(excess):.1f}% {verdict}"
    return notes


def resume_command(run_dir: Path, in_python: bool, horizon: str = "") -> str:
    """The command, or the call, that continues a run, to a new horizon if one is given."""
    if in_python:
        return f"gpt.train(resume={str(run_dir)!r}{f', horizon={horizon!r}' if horizon else ''})"
    return f"python train.py {shell_quote(f'resume={run_dir}')}{f' horizon={horizon}' if horizon else ''}"


def _next(
    figures: dict[str, Any], prompt: str, shorter: int, longer: str, run_dir: Path, in_python: bool
) -> Iterator[tuple[str, str]]:
    """Commands or calls to try, the last of which fits how the run has ended."""
    run = str(run_dir)
    yield "the run", run
    if in_python:
        yield "sample it", f"print(gpt.load({run!r}).generate({prompt!r}))"
        yield "see why", f"gpt.load({run!r}).insight({prompt!r}).save('page.html')"
    else:
        sample = f"python generate.py --checkpoint {shell_quote(run)} --prompt{'=' if prompt.startswith('-') else ' '}"
        sample += shell_quote(prompt)
        yield "sample it", sample
        yield "see why", "the same with --insight page.html"
    yield "its curves", f"tensorboard --logdir {shell_quote(str(run_dir.parent))}, and {UNSMOOTHED}"
    turned = figures["val_loss"] > OVERFIT_LOSS_RATIO * figures["best_val_loss"]
    if turned or is_memorizing(figures):  # it may have turned unseen, between too few validations
        steps = shorter if turned else min(shorter, max(1, figures["steps"] // 2))
        command = repeat_command(run_dir, f"horizon={steps}steps")
        yield "run shorter", f"gpt.train(..., horizon='{steps}steps')" if in_python else command
    else:
        call = f"lm.resume({f'horizon={longer!r}' if longer else ''})"  # of the model whose report this is
        yield "train longer" if longer else "go on", call if in_python else resume_command(run_dir, in_python, longer)


# --- text that fits a terminal ---


def fit_on_line(text: str, width: int) -> str:
    """Put text on a line of at most `width` columns, but 8, with signs for line ends and control characters."""
    width = max(8, width)
    text = re.sub(r"\s*\n\s*", " ⏎ ", text.strip()[: 4 * width])
    line = " ".join(show_token(word.encode()) for word in text.split(" "))  # it has a sign for spaces, too
    return line if disp_len(line) <= width else disp_trim(line, width - 1) + "…"


def _item(text: str, width: int) -> list[str]:
    """A text on at most two lines."""
    line = fit_on_line(text, 4 * width)
    width = width * len(line) // max(1, disp_len(line))  # in characters, some of which take two columns
    return textwrap.wrap(
        line, max(20, width), initial_indent="- ", subsequent_indent="  ", max_lines=2, placeholder=" …"
    )
