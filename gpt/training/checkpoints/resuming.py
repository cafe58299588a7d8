"""Whether and how a checkpoint can be continued."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpt.console import duration
from gpt.errors import UserError, reason
from gpt.hardware.memory import is_out_of_memory
from gpt.text.prepared import Corpora
from gpt.training.config.schedule import Schedule, parse_horizon
from gpt.training.config.schema import Config


@contextlib.contextmanager
def restoring(file: Path) -> Iterator[None]:
    """Turn whatever goes wrong while a checkpoint is being restored into one line."""
    try:
        yield
    except (KeyError, TypeError, AttributeError, IndexError, ValueError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise
        raise UserError(f"{file}: cannot be continued: {reason(error)}; start anew with init_from={file}") from None


def on_devices(config: Config, schedule: Schedule, devices: int, num_nodes: int) -> tuple[Config, Schedule]:
    """The configuration and schedule of a run that continues on other numbers of devices and machines.

    Each step keeps its windows, in the same order, so the number of processes must divide them.
    """
    trainer, world_size = config.trainer, devices * num_nodes
    if world_size == trainer.world_size and devices == (trainer.devices or 1):
        return config, schedule
    windows, rest = divmod(schedule.windows_per_step, world_size)
    if rest:
        raise UserError(
            f"a step of this run has {schedule.windows_per_step} windows, which {world_size} devices cannot share "
            "evenly: continue on a number that divides them"
        )
    size = max(size for size in range(1, min(windows, schedule.micro_batch_size) + 1) if windows % size == 0)
    strategy = "auto" if world_size == 1 else trainer.strategy  # one device has nothing to split
    trainer = replace(trainer, devices=devices, num_nodes=num_nodes, strategy=strategy, micro_batch_size=str(size))
    schedule = replace(schedule, micro_batch_size=size, accumulation=windows // size, automatic=False)
    return replace(config, trainer=trainer), schedule


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


def with_horizon(
    config: Config, schedule: Schedule, step: int, seconds: float, horizon: str, train_tokens: int
) -> tuple[Config, Schedule]:
    """The configuration and schedule of a run that is to train to another horizon, after `step` steps and `seconds`.

    Where the rates have not begun to fall, nothing changes but where they will; otherwise they rise again to the
    schedule of the new horizon. Raises `UserError` if the run is already there.
    """
    settings, share = config.trainer, seconds / schedule.seconds if schedule.seconds else 0.0
    factor = schedule.rate_factor(step, share, config.optim)
    schedule = schedule.until(parse_horizon(horizon), settings.tokens_per_step, train_tokens, settings.validate_every)
    if schedule.total_steps <= step or 0 < schedule.seconds <= seconds:
        raise UserError(
            f"horizon={horizon} is behind this run, which has trained {step} steps in {duration(seconds)}: give a "
            "longer horizon"
        )
    return replace(config, horizon=horizon), replace(schedule, extended_at=step, factor_then=factor, expected_bits=0.0)
