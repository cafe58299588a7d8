"""What a training will take, before it starts: `python train.py plan=true`, or `plan=json` for programs.

The time and the peak of memory are measured on throwaway models. Memory by part is arithmetic, and so is what fits of
other models. Letters: B windows at once, T tokens of each, C d_model, L layers, V vocabulary, N parameters.
"""

import contextlib
import gc
import json
import math
import os
import re
import sys
from bisect import bisect
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import yaml

from gpt import hardware
from gpt.errors import UserError
from gpt.model.chunked_loss import CHUNK_BYTES, SLICE
from gpt.model.fast_attention import prefers_fused_kernel
from gpt.model.linear import ROUND_AGAIN_FROM
from gpt.model.transformer import GPTConfig
from gpt.training import runs
from gpt.training.concerns import concerns, epochs
from gpt.training.config import Config, parse_horizon
from gpt.training.session import for_seconds, measured, prepared, require_loggers, say

PRESETS = Path(__file__).resolve().parents[2] / "configs/model"
CARDS = (16, 24, 80)  # GB on common GPUs; one goes to the CUDA context and fragmentation
COMPUTE_OPTIMAL = 20  # tokens per parameter: Hoffmann et al. 2022 (arXiv:2203.15556)
CHECKPOINTS = 3  # best, last and previous
CALLBACKS = 64 << 20  # bytes of a process that trains beyond one that times steps: curves, pictures, Lightning's loop


def plan_of(composed: Mapping, overrides: list[str], single: bool) -> str:
    """Return `true` or `json` if the command line asks for a plan, else an empty string.

    It is no key of `Config`, so no run stores it. Raises `UserError` for another value, in a sweep and with `resume`.
    """
    asked = str(composed.get("plan") or False).lower()
    if asked == "false":
        return ""
    if asked not in ("true", "json"):
        raise UserError(f"plan={asked} is not known: choose from true, json, false")
    if not any(re.match(r"\+*plan=", override) for override in overrides):
        raise UserError(f"plan={asked} in a configuration file: ask for a plan on the command line")
    if not single:
        raise UserError(f"plan={asked} describes one run, and -m is for several: leave one of the two out")
    if composed.get("resume"):
        raise UserError(f"plan={asked} describes a new run, and resume continues one: leave one of the two out")
    return asked


def print_plan(config: Config, form: str) -> None:
    """Print what the run of a configuration will take; nothing is written but prepared text, which the run will use."""
    with contextlib.redirect_stdout(sys.stderr):
        figures = forecast(config)
    say(json.dumps(figures, indent=2) if form == "json" else describe(figures))


def forecast(config: Config) -> dict[str, Any]:
    """Everything that plan=json prints, in bytes, seconds and counts."""
    require_loggers(config)
    if config.run_dir:
        runs.require_empty(Path(config.run_dir))
    config, plan, corpora, given = prepared(config)[:4]  # without weights, which a run does not keep either
    from gpt.training.probe import seconds_validating  # imports what stays in memory while training

    device = torch.device(config.trainer.device)
    free, process = hardware.free_memory(device), _held(device)
    say("timing a few steps and part of a validation")
    plan, seconds = measured(config, plan, corpora, given)
    if parse_horizon(config.horizon).unit == "seconds":
        config, plan = for_seconds(config, plan, seconds)
    gc.collect()
    with hardware.explained("choose a smaller model"):
        validating = seconds_validating(config, plan, corpora)
    shape = GPTConfig(vocab_size=corpora.tokenizer.vocab_size, **asdict(config.model))
    parts = memory(shape, config, device.type, plan.micro_batch_size, plan.accumulation > 1)
    extra = CALLBACKS if device.type != "cuda" else 0
    peak = extra + (_held(device) or parts["peak"])
    settings, steps, N = config.trainer, plan.total_steps, parameters(shape)
    tokens = steps * settings.tokens_per_step
    seen = dict(zip(corpora.names, epochs(tokens, corpora), strict=True))
    return {
        "parameters": N,
        "tokenizer": {"name": corpora.tokenizer.name, "vocab_size": shape.vocab_size},
        "trainer": {name: getattr(settings, name) for name in ("device", "precision", "compile", "tokens_per_step")}
        | {"devices": settings.world_size, "micro_batch_size": plan.micro_batch_size},
        "text": {
            "train_tokens": corpora.train_tokens,
            "validation_bytes": sum(source.manifest["splits"]["validation"]["bytes"] for source in corpora.sources),
        },
        "steps": steps,
        "tokens": tokens,
        "epochs": seen,
        "tokens_per_parameter": tokens / N,
        "seconds_per_step": seconds,
        "train_seconds": steps * seconds,
        "validations": -(-steps // plan.validate_every),
        "validation_seconds": validating,
        "checkpoints": CHECKPOINTS + (steps // settings.keep_every if settings.keep_every else 0),
        "checkpoint_bytes": 4 * N + optimizer_bytes(shape, config),
        "free_memory": free,
        "memory": parts | {"process": process + extra, "peak": peak},
        "models": presets(config, shape.vocab_size, free),
        "concerns": concerns(config, plan, corpora),
    }


def memory(shape: GPTConfig, config: Config, device: str, B: int, accumulates: bool = True) -> dict[str, float]:
    """The bytes on one device by what they are for, without those of the process; `peak` is the most at once.

    `accumulates` says whether a step has several micro-batches of B windows.
    """
    T, C, L, V, N = shape.context_length, shape.d_model, shape.num_layers, shape.vocab_size, parameters(shape)
    dtype, on_cpu, drops = hardware.DTYPES[config.trainer.precision], device == "cpu", shape.dropout > 0
    size, tokens = dtype.itemsize, B * T

    # What autograd keeps of a token in a block: the residual stream and its sum in fp32; then in `size` bytes each
    # half's input and context, queries, keys, values, and the feed-forward part. tests/training/ counts them.
    scores = size * shape.num_heads * T
    block: float
    if prefers_fused_kernel(torch.empty(T, 0, dtype=dtype, device="cpu" if on_cpu else "meta", requires_grad=True)):
        block = C * (8 + 14 * size) + 3 * scores * (on_cpu and drops)
    elif T <= 256:
        block = C * (8 + (13 + drops) * size) + scores * (1 + 2 * drops)
    else:  # in two halves, of which the early one has half the scores
        block = C * (8 + (15 + drops) * size) + 0.75 * scores * (1 + 2 * drops)
    block += 2 * C * size * drops
    kept = L * 4 * C + block if config.trainer.activation_checkpointing else L * block
    rounded = [n * C * C for n in (1, 3, 4, 4) if size < 4 and (not on_cpu or n * C * C < ROUND_AGAIN_FROM)]
    passing = C * (16 + 8 * size) + 2 * scores  # gradients of the block at hand, and scores on their way
    activations = tokens * (kept + passing) + L * sum(rounded) * size

    # Of the logits, a chunk of rows is kept, and a slice of the vocabulary is at work in fp32.
    width = min(V, SLICE) if on_cpu else V
    rows = tokens / math.ceil(tokens * V * size / CHUNK_BYTES.get(device, 2**27))
    logits = rows * (V * size + width * (4 if on_cpu else 8)) + tokens * C * (4 + 2 * size) + 4 * V * C

    sharded = config.trainer.strategy == "fsdp"
    split = config.trainer.world_size if sharded else 1
    buckets = 4 * N if config.trainer.world_size > 1 and not sharded else 0  # in which gradients are exchanged
    weights, gradients, state = (
        4 * N / split + L * T * T,
        4 * N / split + buckets,
        optimizer_bytes(shape, config) / split,
    )
    update = 0.0
    if config.optim.name == "muon":  # the directions of all matrices, of which those of one shape are orthogonalised
        fast = 4 if on_cpu and hardware.choose_precision("auto", torch.device("cpu")) == "fp32" else 2
        update = 12 * L * C * C * (4 * on_cpu + fast + (8 + fast) * 2 / 3)
    # A CPU's allocator rarely finds room for an update where activations were; a GPU's peak is counted without gaps.
    if on_cpu:
        most = gradients + activations + logits + update
    else:
        most = max((gradients if accumulates else buckets) + activations + logits, gradients + update)
    parts = {"weights": weights, "gradients": gradients, "optimizer_state": state, "update": update}
    return parts | {"activations": activations, "logits": logits, "peak": weights + state + most}


def parameters(shape: GPTConfig) -> int:
    """The number of parameters of a model that is not built."""
    C = shape.d_model
    block = 12 * C * C + (13 if shape.qkv_bias else 10) * C
    return (shape.vocab_size + shape.context_length + 2) * C + shape.num_layers * block


def optimizer_bytes(shape: GPTConfig, config: Config) -> int:
    """Count two numbers a parameter for AdamW, and one for Muon, which has the matrices of the blocks."""
    matrices = 12 * shape.num_layers * shape.d_model**2 if config.optim.name == "muon" else 0
    return 8 * parameters(shape) - 4 * matrices


def presets(config: Config, vocab_size: int, free: float) -> dict[str, dict[str, int]]:
    """For each other model in configs/model: its parameters, and the largest micro-batch here and on some GPUs."""
    found = {}
    on_card = replace(config, trainer=replace(config.trainer, precision="bf16"))
    for file in PRESETS.glob("*.yaml"):
        try:
            shape = GPTConfig(vocab_size=vocab_size, **yaml.safe_load(file.read_text(encoding="utf-8")))
        except (TypeError, ValueError, yaml.YAMLError):  # it needs Hydra to be understood
            continue
        if asdict(shape) | {"dropout": 0} != asdict(config.model) | {"dropout": 0, "vocab_size": vocab_size}:
            fitting = {"here": _largest(shape, config, config.trainer.device, free)}
            fitting |= {f"{size} GB": _largest(shape, on_card, "cuda", (size - 1) << 30) for size in CARDS}
            found[file.stem] = {"parameters": parameters(shape)} | fitting
    return dict(sorted(found.items(), key=lambda item: item[1]["parameters"]))


def _largest(shape: GPTConfig, config: Config, device: str, room: float) -> int:
    """The most windows at once that fit into `room` bytes; 0 if none does."""
    return bisect(range(1, 1025), room, key=lambda B: memory(shape, config, device, B)["peak"])


def describe(f: dict[str, Any]) -> str:
    """The figures of `forecast` as text."""
    trainer, text, held, models = f["trainer"], f["text"], f["memory"], f["models"]
    several, share = trainer["devices"] > 1, f["validation_seconds"] / (f["train_seconds"] + f["validation_seconds"])
    where = f"{trainer['devices']} x {trainer['device']}" if several else trainer["device"]
    each = [f"{times:,.3g} times{f' in {name}' if len(f['epochs']) > 1 else ''}" for name, times in f["epochs"].items()]
    ratio = f"{f['tokens_per_parameter']:.3g} per parameter (compute-optimal: {COMPUTE_OPTIMAL})"
    rows = [
        ("model", f"{f['parameters']:,} parameters, in {trainer['precision']} on {where}"),
        ("text", f"{text['train_tokens']:,} tokens, and {text['validation_bytes']:,} bytes for validation"),
        ("training", f"{f['steps']:,} steps of {trainer['tokens_per_step']:,} tokens see each byte {', '.join(each)}"),
        ("", f"{f['tokens']:,} tokens, {ratio}"),
        ("time", f"{_time(f['train_seconds'])} at {f['seconds_per_step'] * 1000:,.1f} ms a step"),
        ("", f"{_time(f['validation_seconds'])} more ({share:.0%}) for {f['validations']} validations with samples"),
        ("disk", f"{_size(f['checkpoints'] * f['checkpoint_bytes'])} for {f['checkpoints']} checkpoints"),
        (
            "memory",
            f"{_size(held['peak'])} at peak{' on each' * several}, of {_size(f['free_memory'])} free; its parts:",
        ),
        *(("", f"{_size(size):>9}  {name.replace('_', ' ')}") for name, size in held.items() if name != "peak"),
    ]
    lines = [f"{name:10}{line}" for name, line in rows]
    if models:
        lines += ["", "windows that fit at once, with other models", _row("", list(next(iter(models.values()))))]
        lines += [
            _row(name, [f"{count:,}" if count else "-" for count in row.values()]) for name, row in models.items()
        ]
    return "\n".join([*lines, *([""] if f["concerns"] else []), *f["concerns"]])


def _row(name: str, cells: list[str]) -> str:
    return f"{name:14}{cells[0]:>14}{''.join(f'{cell:>8}' for cell in cells[1:])}"


def _time(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 6000 else f"{seconds / 3600:,.3g} h"


def _size(size: float) -> str:
    return f"{size / 2**20:,.0f} MiB" if size < 1000 * 2**20 else f"{size / 2**30:,.1f} GiB"


def _held(device: torch.device) -> int:
    """The memory that is held now, or where the system does not tell, the most so far; 0 if it tells neither."""
    if device.type == "cpu" and os.path.exists("/proc/self/statm"):
        return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return hardware.peak_memory_bytes(device)
