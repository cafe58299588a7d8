"""A dry run, `python train.py plan=true` or `plan=json`: what a run will take, before it starts.

Time and peak memory are measured on throwaway models.
"""

import contextlib
import gc
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from gpt.console import format_duration, print_line
from gpt.hardware.device import DTYPES
from gpt.hardware.memory import free_memory, peak_memory_bytes
from gpt.model.fast.operations import SkipInit
from gpt.model.memory_estimate import activation_bytes
from gpt.model.transformer import GPT, GPTConfig
from gpt.training.advice import count_epochs, list_warnings
from gpt.training.config import Config
from gpt.training.finalize import finalize, find_candidates
from gpt.training.optim import build_optimizer
from gpt.training.request import Request
from gpt.training.run_directory import require_empty
from gpt.training.start import open_dataset

COMPUTE_OPTIMAL_RATIO = 20  # tokens per parameter: Hoffmann et al. 2022 (arXiv:2203.15556)
PREDICTED_SECONDS = (600, 3600, 28800)  # for each of these horizons, print what model=auto would choose
NUM_CHECKPOINTS = 3  # best, last and previous
LOG_BYTES = 64 << 20  # a process that trains needs more memory than timed steps: for curves, images and checkpoints


def print_plan(request: Request) -> None:
    """Print what a run will take. Only its prepared text is written."""
    with contextlib.redirect_stdout(sys.stderr):
        figures = forecast(request)
    print_line(json.dumps(figures, indent=2) if request.plan == "json" else describe_plan(figures))


def forecast(request: Request) -> dict[str, Any]:
    """Return everything that plan=json prints, in bytes, seconds and counts."""
    if request.config.run_dir:
        require_empty(Path(request.config.run_dir))
    request, machine, dataset, _ = open_dataset(request)
    candidates = find_candidates(request, machine, dataset, PREDICTED_SECONDS[-1]) if request.model == "auto" else ()
    config, schedule, _ = finalize(request, machine, dataset, candidates)
    seconds = schedule.seconds
    from gpt.training.auto_model import list_predictions  # imports Lightning
    from gpt.training.timing import measure_validation_seconds, plan_in_steps

    device = torch.device(config.trainer.device)
    free_bytes = free_memory(device)  # with Lightning imported, as in training
    print_line("timing a few steps and part of a validation")
    config, schedule, step_seconds = plan_in_steps(config, schedule, dataset)
    gc.collect()
    validation_seconds = measure_validation_seconds(config, schedule, dataset)
    trainer, steps = config.trainer, schedule.total_steps
    shape = GPTConfig(vocab_size=dataset.tokenizer.vocab_size, **asdict(config.model))
    N = shape.num_parameters
    tokens = steps * trainer.tokens_per_step
    num_kept = steps // trainer.keep_every if trainer.keep_every else 0
    figures = {
        "parameters": N,
        "tokenizer": {"name": dataset.tokenizer.name, "vocab_size": shape.vocab_size},
        "trainer": {
            "device": trainer.device,
            "precision": trainer.precision,
            "compile": trainer.compile,
            "tokens_per_step": trainer.tokens_per_step,
            "devices": trainer.world_size,
            "micro_batch_size": config.micro_batch_size,
        },
        "text": {
            "train_tokens": dataset.train_tokens,
            "validation_bytes": sum(source.metadata["splits"]["validation"]["bytes"] for source in dataset.sources),
        },
        "steps": steps,
        "tokens": tokens,
        "epochs": count_epochs(tokens, dataset),
        "tokens_per_parameter": tokens / N,
        "seconds_per_step": step_seconds,
        "train_seconds": steps * step_seconds,
        "validations": schedule.num_validations,
        "validation_seconds": validation_seconds,
        "checkpoints": NUM_CHECKPOINTS + num_kept,
        "checkpoint_bytes": 4 * N + optimizer_bytes(shape, config),
        "free_memory": free_bytes,
        "peak_memory": peak_memory(device, shape, config),
        "warnings": list_warnings(config, schedule, dataset),
    }
    if candidates:
        figures["expected"] = list_predictions(candidates, seconds, PREDICTED_SECONDS)
    return figures


def optimizer_bytes(shape: GPTConfig, config: Config) -> int:
    """Return the bytes of the optimizer's state, counted without allocating it."""
    with torch.device("meta"), SkipInit():
        weights = dict(GPT(shape).named_parameters())
    optimizer = build_optimizer(weights, shape.num_heads, config.optim, torch.float32)
    return sum(value.nbytes for state in optimizer.state.values() for value in state.values())


def peak_memory(device: torch.device, shape: GPTConfig, config: Config) -> float:
    """Return the largest amount of memory, in bytes, that a run holds on a device.

    It is the peak of the steps timed so far. If this device has no such measurement, it is estimated: weights,
    gradients, AdamW's state and activations. The estimate leaves out the process itself and temporary memory.
    """
    log_bytes = LOG_BYTES if device.type != "cuda" else 0
    measured_bytes = peak_memory_bytes(device)
    if measured_bytes:
        return measured_bytes + log_bytes
    trainer = config.trainer
    micro_batch_bytes = activation_bytes(
        shape, config.micro_batch_size, DTYPES[trainer.precision], device.type, trainer.activation_checkpointing
    )
    return 16 * shape.num_parameters + micro_batch_bytes + log_bytes


def describe_plan(figures: dict[str, Any]) -> str:
    """Return the figures of `forecast` as text."""
    f, trainer, text = figures, figures["trainer"], figures["text"]
    train_time, validation_time = format_duration(f["train_seconds"]), format_duration(f["validation_seconds"])
    validation_fraction = f["validation_seconds"] / (f["train_seconds"] + f["validation_seconds"])
    device, communication = trainer["device"], ""
    if trainer["devices"] > 1:
        device, communication = f"{trainer['devices']} x {device}", ", without communication between devices"
    epochs = [f"{number:,.2f} times in {name}" for name, number in f["epochs"].items()]
    if len(epochs) == 1:
        epochs = [epochs[0].partition(" in ")[0]]
    lines = [
        f"model     {f['parameters']:,} parameters, in {trainer['precision']} on {device}",
        f"text      {text['train_tokens']:,} tokens, and {text['validation_bytes']:,} bytes for validation",
        f"training  {f['steps']:,} steps of {trainer['tokens_per_step']:,} tokens see each byte {', '.join(epochs)}",
        f"          {f['tokens']:,} tokens, {f['tokens_per_parameter']:,.2f} per parameter "
        f"(compute-optimal: {COMPUTE_OPTIMAL_RATIO})",
        f"time      {train_time} at {f['seconds_per_step'] * 1000:,.1f} ms a step{communication}",
        f"          {validation_time} more ({validation_fraction:.0%}) for {f['validations']} validations with samples",
        f"disk      {_size(f['checkpoints'] * f['checkpoint_bytes'])} for {f['checkpoints']} checkpoints",
        f"memory    {_size(f['peak_memory'])} at peak on each device, of {_size(f['free_memory'])} free",
    ]
    for i, row in enumerate(f.get("expected", [])):
        label, time = "" if i else "expected", format_duration(row["seconds"])
        lines.append(f"{label:10}about {row['bits_per_byte']:.2f} bits per byte in {time} with {row['model']}")
    if f["warnings"]:
        lines += ["", *f["warnings"]]
    return "\n".join(lines)


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:,.0f} MiB" if num_bytes < 1000 * 2**20 else f"{num_bytes / 2**30:,.1f} GiB"
