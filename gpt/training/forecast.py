"""What a training will take, before it starts: `python train.py plan=true`, or `plan=json` for programs.

The time and the peak of memory are measured on throwaway models.
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
from gpt.model.memory_estimate import activation_bytes
from gpt.model.transformer import GPT, GPTConfig
from gpt.training.advice import epochs, list_warnings
from gpt.training.config import Config
from gpt.training.finalize import finalize, find_candidates
from gpt.training.optim import build_optimizer
from gpt.training.request import Request
from gpt.training.run_directory import require_empty
from gpt.training.start import open_dataset

COMPUTE_OPTIMAL = 20  # tokens per parameter: Hoffmann et al. 2022 (arXiv:2203.15556)
HORIZONS = (600, 3600, 28800)  # seconds: a plan says what model=auto would choose for each
CHECKPOINTS = 3  # best, last and previous
LOG_BYTES = 64 << 20  # memory of a process that trains beyond one that only times steps: curves, pictures, checkpoints


def print_plan(request: Request) -> None:
    """Print what a run will take; nothing is written but its prepared text."""
    with contextlib.redirect_stdout(sys.stderr):
        figures = forecast(request)
    print_line(json.dumps(figures, indent=2) if request.plan == "json" else describe_plan(figures))


def forecast(request: Request) -> dict[str, Any]:
    """Everything that plan=json prints, in bytes, seconds and counts."""
    if request.config.run_dir:
        require_empty(Path(request.config.run_dir))
    request, machine, text, _ = open_dataset(request)
    members = find_candidates(request, machine, text, HORIZONS[-1]) if request.model == "auto" else ()
    config, schedule, _ = finalize(request, machine, text, members)
    horizon = schedule.seconds
    from gpt.training.auto_model import list_predictions
    from gpt.training.timing import (  # imports what stays in memory while training
        measure_validation_seconds,
        plan_in_steps,
    )

    device = torch.device(config.trainer.device)
    free = free_memory(device)
    print_line("timing a few steps and part of a validation")
    config, schedule, seconds = plan_in_steps(config, schedule, text)
    settings = config.trainer
    gc.collect()
    validating = measure_validation_seconds(config, schedule, text)
    shape = GPTConfig(vocab_size=text.tokenizer.vocab_size, **asdict(config.model))
    steps, N = schedule.total_steps, shape.num_parameters
    tokens = steps * settings.tokens_per_step
    return {
        "parameters": N,
        "tokenizer": {"name": text.tokenizer.name, "vocab_size": shape.vocab_size},
        "trainer": {name: getattr(settings, name) for name in ("device", "precision", "compile", "tokens_per_step")}
        | {"devices": settings.world_size, "micro_batch_size": config.micro_batch_size},
        "text": {
            "train_tokens": text.train_tokens,
            "validation_bytes": sum(source.metadata["splits"]["validation"]["bytes"] for source in text.sources),
        },
        "steps": steps,
        "tokens": tokens,
        "epochs": epochs(tokens, text),
        "tokens_per_parameter": tokens / N,
        "seconds_per_step": seconds,
        "train_seconds": steps * seconds,
        "validations": schedule.num_validations,
        "validation_seconds": validating,
        "checkpoints": CHECKPOINTS + (steps // settings.keep_every if settings.keep_every else 0),
        "checkpoint_bytes": 4 * N + optimizer_bytes(shape, config),
        "free_memory": free,
        "peak_memory": peak_memory(device, shape, config),
        "warnings": list_warnings(config, schedule, text),
    } | ({"expected": list_predictions(members, horizon, HORIZONS)} if members else {})


def optimizer_bytes(shape: GPTConfig, config: Config) -> int:
    """Count what the optimizer keeps for the weights."""
    with torch.device("meta"):
        weights = dict(GPT(shape).named_parameters())
    optimizer = build_optimizer(weights, shape.num_heads, config.optim, torch.float32)
    return sum(value.nbytes for state in optimizer.state.values() for value in state.values())


def peak_memory(device: torch.device, shape: GPTConfig, config: Config) -> float:
    """The most memory that a run holds on a device: as measured, or where no measurement tells it, by arithmetic.

    The arithmetic counts weights, gradients, AdamW's state and activations. It leaves out the process itself, and what
    comes and goes with an update.
    """
    extra = LOG_BYTES if device.type != "cuda" else 0
    if measured := peak_memory_bytes(device):
        return measured + extra
    trainer, micro_batch = config.trainer, config.micro_batch_size
    precision = DTYPES[trainer.precision]
    passing = activation_bytes(shape, micro_batch, precision, device.type, trainer.activation_checkpointing)
    return 16 * shape.num_parameters + passing + extra


def describe_plan(f: dict[str, Any]) -> str:
    """The figures of `forecast` as text."""
    trainer, text, devices = f["trainer"], f["text"], f["trainer"]["devices"]
    share = f["validation_seconds"] / (f["train_seconds"] + f["validation_seconds"])
    where = f"{devices} x {trainer['device']}" if devices > 1 else trainer["device"]
    alone = ", without the exchange among devices" if devices > 1 else ""
    each = [f"{times:,.2f} times{f' in {name}' if len(f['epochs']) > 1 else ''}" for name, times in f["epochs"].items()]
    ratio = f"{f['tokens_per_parameter']:,.2f} per parameter (compute-optimal: {COMPUTE_OPTIMAL})"
    validating = f"{format_duration(f['validation_seconds'])} more ({share:.0%})"
    rows = [
        ("model", f"{f['parameters']:,} parameters, in {trainer['precision']} on {where}"),
        ("text", f"{text['train_tokens']:,} tokens, and {text['validation_bytes']:,} bytes for validation"),
        ("training", f"{f['steps']:,} steps of {trainer['tokens_per_step']:,} tokens see each byte {', '.join(each)}"),
        ("", f"{f['tokens']:,} tokens, {ratio}"),
        ("time", f"{format_duration(f['train_seconds'])} at {f['seconds_per_step'] * 1000:,.1f} ms a step{alone}"),
        ("", f"{validating} for {f['validations']} validations with samples"),
        ("disk", f"{_size(f['checkpoints'] * f['checkpoint_bytes'])} for {f['checkpoints']} checkpoints"),
        ("memory", f"{_size(f['peak_memory'])} at peak on each device, of {_size(f['free_memory'])} free"),
    ]
    for i, row in enumerate(f.get("expected", [])):
        line = (
            f"about {row['bits_per_byte']:.2f} bits per byte in {format_duration(row['seconds'])} with {row['model']}"
        )
        rows.append(("" if i else "expected", line))
    lines = [f"{name:10}{line}" for name, line in rows]
    return "\n".join([*lines, *([""] if f["warnings"] else []), *f["warnings"]])


def _size(size: float) -> str:
    return f"{size / 2**20:,.0f} MiB" if size < 1000 * 2**20 else f"{size / 2**30:,.1f} GiB"
