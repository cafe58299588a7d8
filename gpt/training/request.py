"""A request: what the user wants trained, as typed and checked. Its values may still be auto."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpt.data.data_config import BUILTIN_CORPORA, DataConfig
from gpt.errors import UserError
from gpt.files import flatten
from gpt.loading import find_run
from gpt.model.transformer import ModelConfig
from gpt.training import distributed
from gpt.training.config import Config, convert, load_config, parse_config, parse_horizon, with_values
from gpt.training.optim import unused_settings
from gpt.training.overrides import to_shell_words

GROUPS = ("model", "data", "tokenizer", "optim", "trainer", "experiment")
SHAPE = ("d_model", "num_layers", "num_heads")
# What a resumed run accepts.
WITH_RESUME = {"resume", "horizon", "data.path", "data.validation_path", "trainer.devices", "trainer.num_nodes"}


@dataclass(frozen=True)
class Request:
    """What the user wants trained.

    Args:
        config: The values, of which some may be auto.
        model: The name of a file in configs/model, which may be auto; empty if none was named.
        callbacks: The user's callbacks, as `module:name`.
        plan: `true` or `json` if nothing is to be trained, else empty.
        job: The keys and values by which this job of a sweep differs from the others.
        command: The command that starts this training, quoted for a shell.
        in_python: True if `gpt.train` was called, so that hints are Python calls and not commands.
    """

    config: Config
    model: str = ""
    callbacks: tuple[str, ...] = ()
    plan: str = ""
    job: str = ""
    command: str = "python train.py"
    in_python: bool = False

    @property
    def overrides(self) -> Mapping[str, Any]:
        """The keys and groups that the user set, each with its parsed value."""
        return self.config.overrides

    @property
    def num_processes(self) -> int:
        """The number of processes that this one must start; 1 if a launcher has started all, or one suffices."""
        if distributed.world_size() > 1 or self.plan:
            return 1
        devices, num_nodes = self.config.trainer.devices, self.config.trainer.num_nodes
        if self.config.resume and devices is None:
            stored = load_config(find_run(self.config.resume) / "config.yaml").trainer
            devices, num_nodes = stored.devices, num_nodes or stored.num_nodes
        return devices or 1 if num_nodes in (None, 1) else 1


def parse_request(
    values: dict[str, Any],
    overrides: Mapping[str, Any],
    *,
    model: str = "",
    job: str = "",
    command: str = "",
    is_sweep: bool = False,
    in_python: bool = False,
) -> Request:
    """Return the request that plain values describe.

    Args:
        values: Nested values, as Hydra has composed them or as `gpt.train` got them.
        overrides: The keys and groups among them that the user set, each with its value.
        model: The name of a file in configs/model, or empty.
        job: How this job of a sweep differs from the others.
        command: The command that starts this training; if empty, one that sets the same keys.
        is_sweep: True if this is a job of a sweep.
        in_python: True if `gpt.train` was called.

    Raises:
        UserError: A key or a value is wrong, contradicts another, or would have no effect.
    """
    values = {key: value for key, value in values.items() if key != "overrides"}  # of a saved composition
    callbacks = convert(values.pop("callbacks", None) or [], list[str], "callbacks")
    plan = str(values.pop("plan", None) or False).lower()
    overrides = flatten(dict(overrides))
    values["data"] = _name_data(values.get("data", {}), overrides)
    config = parse_config(values)
    config = with_values(config, {"overrides": _parse_overrides(config, overrides)})
    command = command or f"python train.py {to_shell_words(config.overrides)}".rstrip()
    request = Request(config, model, tuple(callbacks), "" if plan == "false" else plan, job, command, in_python)
    refuse_contradictions(request, is_sweep)
    return request


def _name_data(data: Any, overrides: Mapping[str, Any]) -> Any:
    """Return the keys of `data`, where `data.path` without `data` means data=text, or names a corpus of our own."""
    path = data.get("path") if isinstance(data, dict) else None  # anything else is refused later
    if not path or "data" in overrides or data.get("name", DataConfig.name) != DataConfig.name:
        return data
    if path in list(BUILTIN_CORPORA):
        return data | {"name": path, "path": None}
    return data | {"name": "text"}


def _parse_overrides(config: Config, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the overrides of a run: keys with their parsed values, groups with their names, and absolute paths."""
    settings = config.with_absolute_paths().settings()
    for key in ("run_dir", "resume", "init_from"):
        if settings[key] and os.path.exists(settings[key]):
            settings[key] = os.path.abspath(settings[key])
    known = {key: value for key, value in overrides.items() if key in settings or key in GROUPS}
    return {key: settings.get(key, value) for key, value in known.items()}


def refuse_contradictions(request: Request, is_sweep: bool = False) -> None:
    """Raise `UserError` for the first value that contradicts another, or would have no effect."""
    config, overrides = request.config, request.overrides
    if request.plan not in ("", "true", "json"):
        raise UserError(f"plan={request.plan} is not known: choose from true, json, false")
    if request.plan and (config.resume or is_sweep or distributed.world_size() > 1):
        raise UserError(f"plan={request.plan} describes one new run, in one process: leave out -m, resume and torchrun")

    if config.resume == "auto" and not config.run_dir:
        raise UserError("resume=auto continues the run in run_dir, or begins it there: add run_dir=DIR")
    changed = [key for key in overrides if key not in WITH_RESUME]
    if config.resume not in (None, "auto") and changed:
        raise UserError(
            f"resume continues a run as it was configured, and {_show(overrides, changed)} would change it: start a "
            f"new run from its weights with init_from={config.resume}"
        )
    if config.resume not in (None, "auto") and overrides.get("horizon") == "auto":
        raise UserError("horizon=auto is for a new run: to extend one, give its end, such as horizon=8000steps")

    if request.model == "auto" and config.init_from:
        raise UserError("model=auto does not go with init_from, which brings its own model: leave one of them out")
    if request.model == "auto" and (config.horizon == "auto" or parse_horizon(config.horizon).unit != "seconds"):
        raise UserError(f"model=auto needs a time limit: set horizon=10min (not {config.horizon})")
    default = ModelConfig()
    shape = [key for key in SHAPE if f"model.{key}" in overrides or getattr(config.model, key) != getattr(default, key)]
    if request.model == "auto" and shape:
        raise UserError(
            f"model.{shape[0]}={getattr(config.model, shape[0])} does not go with model=auto, which chooses it: leave "
            "one of them out"
        )

    brought = [key for key in overrides if key == "model" or key.startswith("tokenizer")]
    if config.init_from and brought:
        raise UserError(
            f"{_show(overrides, brought)} does not go with init_from, which brings its own model and tokenizer: leave "
            "it out"
        )
    if overrides.get("experiment") == "finetune" and not config.init_from:
        raise UserError("experiment=finetune is for weights that have been trained: name them with init_from=PATH")

    if "optim.name" in overrides:
        raise UserError(
            f"optim.name={config.optim.name} would keep the settings of another optimizer: write "
            f"optim={config.optim.name}"
        )
    unread = [key for key in overrides if key.removeprefix("optim.") in unused_settings(config.optim.name)]
    if unread:
        raise UserError(
            f"{_show(overrides, unread)} has no effect with optim={config.optim.name}: its settings are in "
            "configs/optim"
        )


def _show(overrides: Mapping[str, Any], keys: list[str]) -> str:
    return f"{keys[0]}={overrides[keys[0]]}"
