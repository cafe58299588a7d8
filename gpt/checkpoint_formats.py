"""Upgrade configurations of earlier versions. When a configuration key is added or removed, add a line here."""

from typing import Any

ADDED_KEYS: dict[str, Any] = {  # with the value that earlier versions used
    "overrides": {},  # earlier versions did not record them
    "trainer.answer_minutes": 10.0,
    "data.separator": None,
    "data.encoding": "utf-8",
    "data.bpe_dropout": 0.0,
    "trainer.short_sequences": 0,
    "data.validation_path": None,
}
RENAMED_KEYS = {"trainer.short_window": "trainer.short_sequences"}
REMOVED_KEYS = ("rerun", "decided", "amended")


def upgrade_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the nested configuration of a run of any earlier version as this version would write it."""
    config = {key: dict(value) if isinstance(value, dict) else value for key, value in config.items()}
    for old_name, name in RENAMED_KEYS.items():
        group, old_key = _find_group(config, old_name)
        if old_key in group:
            group[name.rpartition(".")[2]] = group.pop(old_key)
    for name, value in ADDED_KEYS.items():
        group, key = _find_group(config, name)
        group.setdefault(key, value)
    for key in REMOVED_KEYS:
        config.pop(key, None)
    trainer, key = _find_group(config, "trainer.strategy")
    if trainer.get(key) == "fsdp":  # this strategy was removed
        trainer[key] = "auto"
    return config


def _find_group(config: dict[str, Any], name: str) -> tuple[dict[str, Any], str]:
    """Return the group that holds a dotted key, empty if there is none, and the key's name in the group."""
    group_name, _, key = name.rpartition(".")
    group = config.get(group_name) if group_name else config
    return (group if isinstance(group, dict) else {}), key
