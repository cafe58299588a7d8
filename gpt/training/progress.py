"""What a run prints: its first line, a progress bar, two lines for each validation, and why it stopped."""

import contextlib
import json
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gpt.console import format_duration, import_tqdm, is_notebook, print_line
from gpt.model.transformer import GPTConfig
from gpt.sampling.scoring import Score
from gpt.training import distributed
from gpt.training.advice import suggest_shorter_horizon
from gpt.training.metric_logger import MetricLogger
from gpt.training.report import fit_on_line, resume_command
from gpt.training.run_directory import RunDirectory
from gpt.training.state import Result, RunSpec, TrainState

# The bar comes last, because a narrow terminal cuts the end of the line.
BAR_FORMAT = "{n}/{total_fmt} {percentage:2.0f}%  {remaining} left{postfix}  {bar}"
MIN_TIMED_SECONDS = 5.0  # of training, before the remaining time is estimated


class ProgressDisplay:
    """Shows step, losses in nats per token, bits per byte and speed, and a sample of the model.

    `num_steps` is the expected length of the run. It changes if the horizon is a time.
    """

    def __init__(self, spec: RunSpec, state: TrainState, logger: MetricLogger):
        self._spec = spec
        self._state = state
        self._logger = logger
        self._validation: tuple[float, float] | None = None  # the last result: nats per token, bits per byte
        self._bar: Any = None
        self._has_printed_time = False

    def open(self, run_dir: Path, step: int, num_steps: int) -> None:
        """Show the bar, if this is a terminal or a notebook."""
        self.num_steps = num_steps
        self._first_step = step
        self._first_seconds = self._state.seconds
        self._validation = _last_validation(run_dir, step)
        if distributed.is_main_process() and (_is_terminal() or is_notebook()):
            self._bar = import_tqdm()(
                total=num_steps,
                initial=step,
                bar_format=BAR_FORMAT,
                postfix=self._format_figures(),
                leave=False,
                dynamic_ncols=True,
                mininterval=0.5,
                smoothing=0.01,  # the remaining time follows the speed of about the last hundred steps
                delay=1e-9,  # appears after the first step, when there is a speed
            )

    def end_step(self, step: int, is_log_point: bool) -> None:
        """Advance the bar. Without a bar, print the remaining time once."""
        if self._bar is not None:
            if is_log_point:
                self._bar.set_postfix_str(self._format_figures(), refresh=False)
            self._bar.total = self.num_steps
            self._bar.update()
            return
        seconds = self._state.seconds - self._first_seconds
        if seconds > MIN_TIMED_SECONDS and not self._has_printed_time:
            self._has_printed_time = True
            seconds_left = (self.num_steps - step) * seconds / (step - self._first_step)
            if distributed.is_main_process() and seconds_left > MIN_TIMED_SECONDS:
                print_line(f"about {format_duration(seconds_left)} to go at this machine's speed, besides validations")

    def print_validation(self, step: int, score: Score, samples: Sequence[str]) -> None:
        """Print the figures of a validation, and the last of the samples."""
        self._validation = score.nats_per_token, score.bits_per_byte
        if distributed.is_main_process():
            width = shutil.get_terminal_size().columns - 4
            sample = "".join(f"\n    {fit_on_line(text, width)}" for text in samples[-1:])
            print_line(f"step {step}/{self.num_steps}  {self._format_figures()}{sample}", sys.stdout)

    def _format_figures(self) -> str:
        loss, bits_per_byte = self._validation or (None, None)
        speed = self._logger.tokens_per_second
        return (
            f"train {_format(self._state.train_loss):>5} val {_format(loss):>5}  "
            f"{_format(bits_per_byte):>5} bits/byte  "
            f"{import_tqdm().format_sizeof(speed) if speed else '-':>5} tok/s"
        )

    def close(self) -> None:
        """Clear the bar."""
        if self._bar is not None:
            self._bar.close()


def _is_terminal() -> bool:
    """Return True if stderr is a terminal with columns. Some programs provide a terminal of width 0."""
    with contextlib.suppress(OSError):
        if os.get_terminal_size(sys.stderr.fileno()).columns == 0:
            return False
    return sys.stderr.isatty()


def _last_validation(run_dir: Path, step: int) -> tuple[float, float] | None:
    """Return nats per token and bits per byte from metrics.json, unless they are missing or of a later step."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        metrics = json.loads((run_dir / "metrics.json").read_bytes())
        if metrics["steps"] <= step:  # a kill may have come between metrics.json and the checkpoint
            return float(metrics["val_loss"]), float(metrics["val_bits_per_byte"])
    return None


def _format(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if value < 9.9995 else f"{value:.4g}"


# --- the first line and the last ---


def print_start(spec: RunSpec, run: RunDirectory) -> None:
    """Print what is trained, and where the run is written."""
    if not distributed.is_main_process():
        return
    config = spec.config
    model = GPTConfig(vocab_size=spec.dataset.tokenizer.vocab_size, **asdict(config.model))
    horizon = f"{config.horizon} in steps" if spec.schedule.seconds else f"{spec.schedule.total_steps} steps"
    print_line(
        f"{model.num_parameters:,} parameters on {config.trainer.device} in {config.trainer.precision}, {horizon} "
        f"of {config.trainer.tokens_per_step:,} tokens; writing to {run.path}"
    )


def print_stop_reason(spec: RunSpec, run: RunDirectory, result: Result) -> None:
    """If a run ended before its horizon, print why, and how to continue."""
    if not distributed.is_main_process():
        return
    command = resume_command(run.path)
    if result.stop_reason == "signal":
        print_line(f"stopped at step {result.step}; continue with: {command}")
    elif result.stop_reason == "patience":
        best_step = result.metrics["best_step"]
        advice = ""
        if spec.config.optim.schedule != "constant":
            horizon = suggest_shorter_horizon(spec.config, spec.dataset, best_step)
            advice = (
                f". The learning rate was still falling: a shorter run, such as horizon={horizon}steps, will probably "
                "do better"
            )
        print_line(
            f"stopped early at step {result.step}: no improvement in the last {spec.config.patience} validations "
            f"(best at step {best_step}){advice}"
        )
    elif result.stop_reason == "callback":
        print_line(f"stopped early at step {result.step}, as a callback requested; to continue anyway: {command}")
