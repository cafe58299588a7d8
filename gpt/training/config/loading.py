"""From what a user, Hydra or a file gives to a checked `Config`, and back to plain values."""

import contextlib
import dataclasses
import difflib
import json
import re
import typing
from pathlib import Path
from types import UnionType
from typing import Any

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from gpt.console import warn
from gpt.data.chunking import replace_surrogates
from gpt.data.data_config import BUILTIN_CORPORA, DataConfig
from gpt.errors import UserError
from gpt.exchange.formats import upgraded
from gpt.exchange.loading import find_run
from gpt.files import ASSETS, flatten, read_yaml
from gpt.training.config.schema import Config
from gpt.training.versions import code

REASONS = {  # other keys from which a decision followed
    "data.bpe_dropout": ("data.path", "horizon", "trainer.tokens_per_step", "init_from"),
    "trainer.short_window": ("model.context_length", "init_from"),
}
OTHER_TRAINERS = ASSETS / "other_trainers.yaml"  # what to write for their keys


def validate(values: DictConfig | dict) -> Config:
    """Check a configuration, of nested dictionaries or as Hydra composed it; `UserError` names the key that is wrong.

    Only what Hydra composed is interpolated: a dictionary, as checkpoints and config.yaml store it, is taken literally,
    so that nothing in it can read the environment.
    """
    plain = _resolved(values) if isinstance(values, DictConfig) else values
    config = _build(Config, plain)
    for key, value in flatten(dataclasses.asdict(config)).items():
        if replace_surrogates(given := " ".join(map(str, value)) if isinstance(value, list) else str(value)) != given:
            raise UserError(f"{key}={value!r} has bytes that are not UTF-8: give it another name")
    return config


def _resolved(composed: DictConfig) -> Any:
    """What Hydra composed as plain values, without the keys that are for train.py alone."""
    try:
        plain: Any = OmegaConf.to_container(composed, resolve=True)
    except OmegaConfBaseException as error:
        raise UserError(f"{error.full_key}: {str(error).splitlines()[0]}") from None
    if isinstance(plain.get("experiment"), dict):
        raise UserError("an experiment file must begin with the line: # @package _global_")
    return {key: value for key, value in plain.items() if key not in ("callbacks", "plan")}


def _build(kind: Any, values: Any, prefix: str = "") -> Any:
    """Make a dataclass from a dictionary, whose values must have the types of its fields or stand for one."""
    hints = typing.get_type_hints(kind)
    if not isinstance(values, dict):
        key = prefix.rstrip(".") or "the configuration"
        raise UserError(f"{key}={values!r} stands where keys such as {prefix}{next(iter(hints))} belong")
    if unknown := [f"{prefix}{key}" for key in values if key not in hints]:
        raise UserError("; ".join(map(unknown_key, unknown)))
    return kind(**{name: _converted(value, hints[name], f"{prefix}{name}") for name, value in values.items()})


def _converted(value: Any, hint: Any, key: str) -> Any:
    """Return a value as the type that its key has: 1e3 as an int, true as a string, csv as a list of one."""
    kinds = typing.get_args(hint) if isinstance(hint, UnionType) else (hint,)
    kind = kinds[0]
    if kind is Any or type(value) in kinds:
        return value
    if typing.get_origin(kind) is list and value is not None:
        items = value if isinstance(value, list) else [value]
        return [_converted(item, typing.get_args(kind)[0], f"{key}[{i}]") for i, item in enumerate(items)]
    if dataclasses.is_dataclass(kind):
        return _build(kind, value, f"{key}.")
    if kind is str and isinstance(value, bool | int | float):
        return str(value)
    if kind is bool and str(value).lower() in ("true", "false"):
        return str(value).lower() == "true"
    if kind in (int, float) and isinstance(value, int | float | str) and not isinstance(value, bool):
        with contextlib.suppress(ValueError, OverflowError):
            if isinstance(value, str) or kind(value) == value:
                return kind(value)
    raise UserError(f"{key}={value!r} is not of type {kind.__name__}")


def unknown_key(key: str) -> str:
    """One line about a key that does not exist: what other trainers mean by it, or the nearest that does."""
    last = key.split(".")[-1]
    for ours, theirs in read_yaml(OTHER_TRAINERS).items():
        if last in theirs.split():
            return f"there is no key {key!r}: write {ours}"
    keys = list(flatten(dataclasses.asdict(Config())))
    near = difflib.get_close_matches(key, keys, n=1, cutoff=0.75)
    near = near or [known for known in keys if known.split(".")[-1] == last]  # the right name in the wrong place
    return f"there is no key {key!r}; " + (
        f"did you mean {near[0]!r}?" if near else "see configs/ for the keys there are"
    )


def read(path: Path) -> Config:
    """Read the config.yaml of a run; `UserError` if it holds no configuration."""
    stored = read_yaml(path)
    if not isinstance(stored, dict) or "model" not in stored:
        raise UserError(f"{path}: holds no configuration of a run")
    try:
        return validate(upgraded(stored))
    except UserError as error:
        raise UserError(f"{path}: {error} (the run is of {_written_by(path.parent)}, and this is {code()})") from None


def _written_by(directory: Path) -> str:
    """The code that wrote the metrics of a run, as far as they can be read."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return str(json.loads((directory / "metrics.json").read_text(encoding="utf-8"))["git_commit"])
    return "other code"


def to_yaml(config: Config) -> str:
    """Write the configuration in the form that `read` reads."""
    return yaml.safe_dump(dataclasses.asdict(config), sort_keys=False, allow_unicode=True)


# --- what only the command line may say ---


def composed_values(composed: DictConfig, names: list[str]) -> dict:
    """What Hydra composed, or the run that `rerun` names with the keys and groups of these names as given.

    `data.path` without `data` means data=text.
    """
    config = _resolved(composed)
    if config.get("rerun"):
        config = _repeated(config, names)
    path = (config.get("data") or {}).get("path")
    if path and "data" not in names and config["data"].get("name") == DataConfig.name:
        config["data"] |= {"name": path, "path": None} if path in list(BUILTIN_CORPORA) else {"name": "text"}
    return config


def _repeated(given: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """The configuration of the run that `rerun` names, with the keys and groups of these names as given.

    What was `auto` stays as it was decided, for the same bits, unless an override invalidates it.
    """
    if "experiment" in names:
        raise UserError("experiment and rerun exclude each other: rerun brings every setting; add single keys to it")
    config = dataclasses.asdict(read(find_run(str(given["rerun"])) / "config.yaml"))
    if config["amended"]:
        warn(f"{given['rerun']} went on otherwise than it began ({', '.join(config['amended'])}): not the same bits")
    decided = {key: was for key, was in (config["decided"] or {}).items() if not _is_named(key, names)}
    config |= {"run_dir": None, "resume": None, "amended": [], "decided": decided}
    if "trainer.device" in names:
        config["trainer"] |= {"precision": "auto", "compile": "auto"}
    if any(re.match(r"model|trainer\.(device|tokens_per_step)", name) for name in names):
        config["trainer"]["micro_batch_size"] = "auto"
    if "data.path" in names:
        config["data"]["prompts"] = None  # which were of the other text
    for decision, reasons in REASONS.items():
        if decision in decided and any(_is_named(reason, names) for reason in reasons):
            group, key = decision.split(".")
            config[group][key] = None
    for name in names:
        *groups, key = name.split(".")
        source, target = given, config
        for group in groups:
            source, target = source[group], target.setdefault(group, {})
        if key in source:
            target[key] = source[key]
        else:
            target.pop(key, None)
    return config | {"rerun": None}


def _is_named(key: str, names: list[str]) -> bool:
    """Whether a key is one of the names, or in a group that is."""
    return any(key == name or key.startswith(f"{name}.") for name in names)


def callbacks_of(composed: DictConfig) -> list[str]:
    """The `module:name` strings of `callbacks`: no key of `Config`, so that no run stores them, or brings its own."""
    given = composed.get("callbacks") or []
    return _converted(list(given) if isinstance(given, ListConfig) else given, list[str], "callbacks")
