"""Whether a checkpoint can be continued: it is checked as a whole before training starts."""

import math
from collections.abc import Iterator
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gpt.errors import UserError
from gpt.exchange.assembly import is_finite
from gpt.text.shards import Corpora
from gpt.training.config import Config, parse_horizon, validate
from gpt.training.plan import Plan, steps_of

NEEDED: dict[str, type] = {
    "step": int, "plan": dict, "corpus": dict, "threads": int, "versions": dict, "tokenizer": dict, "state_dict": dict,
    "optimizer_states": list, "callbacks": dict,
}  # fmt: skip
# What changes in a parameter group while training; all else in it follows from the configuration.
CHANGING = (".lr", ".step")


def read_plan(file: Path, payload: dict[str, Any]) -> tuple[Config, Plan]:
    """The configuration and the plan of a run to continue; `UserError` if the checkpoint cannot be continued."""
    refuse = partial(_refusal, file)
    for key, kind in NEEDED.items():
        if key not in payload:
            raise refuse(f"it has no {key!r}")
        if not isinstance(payload[key], kind) or isinstance(payload[key], bool):
            raise refuse(f"its {key!r} is of type {type(payload[key]).__name__}, not {kind.__name__}")
    try:
        config, stored = validate(payload["config"]), payload["plan"]
    except UserError as error:
        raise refuse(f"its configuration is invalid ({error})") from None
    defaults = {"validate_every": config.trainer.validate_every, "extended_at": 0, "factor_then": 1.0}
    stored = defaults | stored  # older versions did not store them
    kinds = {field.name: field.type for field in fields(Plan)}
    if any(type(stored.get(name)) is not kind for name, kind in kinds.items()) or set(stored) != set(kinds):
        raise refuse("its plan is damaged")
    plan = Plan(**stored)
    windows = config.trainer.tokens_per_step // config.model.context_length
    numbers = (plan.total_steps, plan.micro_batch_size, plan.accumulation, plan.validate_every)
    whole = plan.micro_batch_size * plan.accumulation * config.trainer.world_size
    if min(numbers) < 1 or not plan.windows_per_step == windows == whole:
        raise refuse("its plan does not fit its configuration")
    if not 0 <= payload["step"] <= plan.total_steps:
        raise refuse(f"its step is {payload['step']} of {plan.total_steps}")
    if not (0.0 <= plan.factor_then <= 1.0 and 0 <= plan.extended_at <= payload["step"]):
        raise refuse("its plan is damaged")
    if not 1 <= payload["threads"] <= 4096:
        raise refuse(f"its number of threads is {payload['threads']}")
    if not all(isinstance(text, str) for pair in payload["versions"].items() for text in pair):
        raise refuse("its versions are not text")
    if config.trainer.precision == "fp16" and not _scales_loss(payload.get("LossScaling"), payload["step"]):
        raise refuse("the state of its loss scaling is damaged")
    if not isinstance(payload["corpus"].get("tokenizer"), dict) or "sha256" not in payload["tokenizer"]:
        raise refuse("it does not say which text and which tokens it has learnt")
    return config, plan


def _scales_loss(state: Any, step: int) -> bool:
    """Whether this can be the state of a `LossScaling` after `step` steps."""
    kinds = {"scale": float, "clean_steps": int, "skipped_steps": int}
    if not isinstance(state, dict) or {name: type(value) for name, value in state.items()} != kinds:
        return False
    within = all(0 <= state[name] <= step for name in ("clean_steps", "skipped_steps"))
    return within and 1.0 <= state["scale"] < 2.0**128


def on_devices(config: Config, plan: Plan, devices: int, num_nodes: int) -> tuple[Config, Plan]:
    """The configuration and plan of a run that continues on other numbers of devices and machines.

    Each step keeps its windows, in the same order, so the number of processes must divide them.
    """
    trainer, world_size = config.trainer, devices * num_nodes
    if world_size == trainer.world_size and devices == (trainer.devices or 1):
        return config, plan
    windows, rest = divmod(plan.windows_per_step, world_size)
    if rest:
        raise UserError(
            f"a step of this run has {plan.windows_per_step} windows, which {world_size} devices cannot share evenly: "
            "continue on a number that divides them"
        )
    size = max(size for size in range(1, min(windows, plan.micro_batch_size) + 1) if windows % size == 0)
    trainer = replace(trainer, devices=devices, num_nodes=num_nodes, micro_batch_size=str(size))
    return replace(config, trainer=trainer), replace(plan, micro_batch_size=size, accumulation=windows // size)


def require_same_text(file: Path, payload: dict[str, Any], corpora: Corpora) -> None:
    """Raise `UserError` if the text or its tokens are not those that the run began with."""
    stored = payload["corpus"] | {"tokenizer's hash": payload["tokenizer"]["sha256"]}
    present = corpora.key | {"tokenizer's hash": corpora.tokenizer.sha256}
    for key in stored:
        if stored[key] != present.get(key):
            raise UserError(
                f"{file}: the {key} was {stored[key]} when the run began and is {present.get(key)} now, so it cannot "
                f"continue: restore it, or start a new run with init_from={file}"
            )


def extended(
    config: Config, plan: Plan, payload: dict[str, Any], horizon: str, train_tokens: int
) -> tuple[Config, Plan]:
    """The configuration and plan of a run that is to train to another horizon than before.

    A horizon in seconds becomes steps at the speed of the run so far; deadline.py corrects them later. Where the rates
    have not begun to fall, nothing changes but where they will; otherwise they rise again to the schedule of the new
    horizon. Raises `UserError` if the run is already there.
    """
    step, wanted = payload["step"], parse_horizon(horizon)
    if wanted.unit == "seconds":
        clock = payload["callbacks"].get("Clock")
        seconds = clock.get("seconds") if isinstance(clock, dict) else None
        if not isinstance(seconds, float) or not 0 < seconds < math.inf:
            raise UserError(
                f"horizon={horizon}: the checkpoint does not say how fast it was: give the horizon in steps"
            )
        steps = round(step * wanted.amount / seconds)
    else:
        steps = steps_of(wanted, config.trainer.tokens_per_step, train_tokens)
    if steps <= step:
        raise UserError(f"horizon={horizon} is {steps} steps, and the run has trained {step}: give a longer horizon")
    before = [*config.earlier_horizons, f"{config.horizon} until step {step}"]
    return replace(config, horizon=horizon, earlier_horizons=before), plan.from_step(step, steps, config)


def require_like(file: Path, payload: dict[str, Any], fresh: dict[str, Any]) -> None:
    """Raise `UserError` unless a checkpoint is like `fresh`, the state of the same run at its start.

    That is, it has the same keys, types and lengths, and tensors of the same shape and precision, all finite.
    """
    for key, template in fresh.items():
        if problem := next(_differences(payload[key], template, key), None):
            if problem.endswith("has no 'squares'"):
                problem = "an older version with a different Muon optimizer saved it"
            raise _refusal(file, problem)


def _refusal(file: Path, problem: str) -> UserError:
    return UserError(f"{file}: cannot be continued: {problem}; start anew with init_from={file}")


def _differences(value: Any, template: Any, name: str) -> Iterator[str]:
    if isinstance(template, torch.Tensor):
        if not isinstance(value, torch.Tensor) or value.shape != template.shape or value.dtype != template.dtype:
            yield f"its {name} is not a tensor of {template.dtype} {tuple(template.shape)}"
        elif value.layout != torch.strided or not is_finite(value):
            yield f"its {name} is not finite"
    elif isinstance(template, dict):
        if not isinstance(value, dict):
            yield f"its {name} is of type {type(value).__name__}"
        elif missing := [key for key in template if key not in value]:
            yield f"its {name} has no {missing[0]!r}"
        else:
            for key, inner in template.items():
                yield from _differences(value[key], inner, f"{name}.{key}")
    elif isinstance(template, list):
        if not isinstance(value, list) or (template and len(value) != len(template)):
            yield f"its {name} is not a list of {len(template)}"
        else:
            for i, (own, inner) in enumerate(zip(value, template, strict=False)):
                yield from _differences(own, inner, f"{name}[{i}]")
    elif type(value) is not type(template) or (isinstance(value, float) and math.isnan(value)):
        yield f"its {name} is {value!r}"
    elif ".param_groups[" in name and not name.endswith(CHANGING) and value != template:
        yield f"its {name} is {value!r} and not {template!r}"
