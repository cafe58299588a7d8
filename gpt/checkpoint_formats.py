"""Configurations of earlier versions, read as what they meant then. A key that comes or goes gets a line here."""

from typing import Any

ADDED_KEYS: dict[str, Any] = {  # keys that came later: what the code did before
    "overrides": {},  # not recorded
    "trainer.answer_minutes": 10.0,
    "data.separator": None,
    "data.encoding": "utf-8",
    "data.bpe_dropout": 0.0,
    "trainer.short_sequences": 0,
    "data.validation_path": None,
}
RENAMED = {"trainer.short_window": "trainer.short_sequences"}
GONE: dict[str, dict[Any, Any] | None] = {  # keys that went, which drops them, or values: what these are called now
    "trainer.strategy": {"fsdp": "auto"},
    "rerun": None,
    "decided": None,
    "amended": None,
}


def upgrade_config(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration of a run of any earlier version, nested, as this one would have written it."""
    config = {key: dict(value) if isinstance(value, dict) else value for key, value in config.items()}
    for old, name in RENAMED.items():
        group, key = _place(config, old)
        if key in group:
            group[name.rpartition(".")[2]] = group.pop(key)
    for name, value in ADDED_KEYS.items():
        group, key = _place(config, name)
        group.setdefault(key, value)
    for name, values in GONE.items():
        group, key = _place(config, name)
        if key in group:
            value = group.pop(key)
            group |= {} if values is None else {key: values.get(value, value)}
    return config


def _place(config: dict[str, Any], name: str) -> tuple[dict[str, Any], str]:
    """Where a dotted key stands: its group, and its name there."""
    group, _, key = name.rpartition(".")
    inner = config.get(group) if group else config
    return (inner if isinstance(inner, dict) else {}), key
