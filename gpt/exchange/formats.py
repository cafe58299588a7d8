"""What earlier versions of this project wrote, read as what it meant then: runs continue with every later version.

Whoever adds a key to `Config`, or takes one away, adds a line here.
"""

import math
from typing import Any

CAME: dict[str, Any] = {  # keys that came later: what the code did before
    "decided": None,  # not recorded
    "amended": [],
    "trainer.answer_minutes": 10.0,
    "data.separator": None,
    "data.encoding": "utf-8",
    "data.bpe_dropout": 0.0,
    "trainer.short_window": 0,
}
DECIDED: dict[str, dict[str, Any]] = {  # of these, what the same command says today without them
    "data.bpe_dropout": {"data.bpe_dropout": None},
    "trainer.short_window": {"trainer.short_window": None, "model.context_length": 256},  # of mini, which had 128
}
# The callbacks of ours whose states a checkpoint held up to format 2.
_CALLBACKS = (
    *("Clock", "Validation", "Curves", "Metrics", "MemorisingWarning", "ExplosionWarning"),
    *("UserCurves", "Journal"),
)
GONE: dict[str, dict[Any, Any] | None] = {  # keys that went, which drops them, or values: what these are called now
    "trainer.strategy": {"fsdp": "auto"},
}


def upgraded(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration of a run of any earlier version, nested, as this one would have written it."""
    config = {key: dict(value) if isinstance(value, dict) else value for key, value in config.items()}
    for name, value in CAME.items():
        group, key = _place(config, name)
        if name in DECIDED and key not in group and config["decided"] is not None:
            config["decided"] = config["decided"] | DECIDED[name]
        group.setdefault(key, value)
    for name, values in GONE.items():
        group, key = _place(config, name)
        if key in group:
            value = group.pop(key)
            group |= {} if values is None else {key: values.get(value, value)}
    return config


def upgraded_checkpoint(payload: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint of any earlier format as this version writes it."""
    config = upgraded(payload["config"])
    if payload["format"] > 2 or not isinstance(schedule := payload.get("schedule"), dict):
        return payload | {"config": config}
    # The schedule held the micro-batch as well, and every callback of ours a state of its own.
    trainer, decided = config.get("trainer"), config.get("decided") or {}
    if isinstance(trainer, dict) and "micro_batch_size" in schedule:
        trainer["micro_batch_size"] = schedule["micro_batch_size"]
    if schedule.get("automatic"):
        config["decided"] = decided | {"trainer.micro_batch_size": "auto"}
    moved = ("windows_per_step", "micro_batch_size", "accumulation", "automatic")
    schedule = {name: value for name, value in schedule.items() if name not in moved}
    callbacks = dict(payload.get("callbacks") or {})
    own = {name: callbacks.pop(name, {}) for name in _CALLBACKS}
    curves, memorising, exploding = (own[name] for name in ("Curves", "MemorisingWarning", "ExplosionWarning"))
    scaling = payload.get("LossScaling") or {}
    state = own["Clock"] | own["Validation"] | curves
    state |= {"loss": curves.get("loss"), "passed_at": own["Metrics"], "worse": memorising.get("worse", 0)}
    best = memorising.get("train_loss", -math.inf)
    state |= {"loss_at_best": None if best == -math.inf else best}
    state |= {name: exploding.get(name, math.inf) for name in ("course", "lowest")}
    state |= {"near": exploding.get("good", 0), "high": exploding.get("high", 0)}
    state |= {"logged": own["UserCurves"], "sizes": own["Journal"]}
    state |= {"loss_scale": scaling.get("scaler", {}), "skipped_steps": scaling.get("skipped_steps", 0)}
    return payload | {"config": config, "schedule": schedule, "state": state, "callbacks": callbacks}


def _place(config: dict[str, Any], name: str) -> tuple[dict[str, Any], str]:
    """Where a dotted key stands: its group, and its name there."""
    group, _, key = name.rpartition(".")
    inner = config.get(group) if group else config
    return (inner if isinstance(inner, dict) else {}), key
