"""A request: what the user wants trained, as typed and checked. Some values may still be auto."""

import os
from collections.abc import Callable, Mapping
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

CONFIG_GROUPS = ("model", "data", "tokenizer", "optim", "trainer", "experiment")
SHAPE_KEYS = ("d_model", "num_layers", "num_heads")
RESUME_KEYS = {"resume", "horizon", "data.path", "data.validation_path", "trainer.devices", "trainer.num_nodes"}


@dataclass(frozen=True)
class Request:
    """What the user wants trained.

    Args:
        config: The values; some may be auto.
        model: The name of a file in configs/model, which may be auto; empty if none was named.
        callbacks: The user's callbacks, as `module:name`.
        plan: `true` or `json` for a dry run, otherwise empty.
        job: In a sweep, the keys and values that vary, for the run's name; otherwise empty.
        command: The command that starts this training, quoted for a shell.
    """

    config: Config
    model: str = ""
    callbacks: tuple[str, ...] = ()
    plan: str = ""
    job: str = ""
    command: str = "python train.py"

    @property
    def overrides(self) -> Mapping[str, Any]:
        """The keys and groups that the user set, each with its parsed value."""
        return self.config.overrides

    @property
    def num_processes(self) -> int:
        """The number of processes to start; 1 if a launcher has started all, or one suffices."""
        if distributed.world_size() > 1 or self.plan:
            return 1
        devices, num_nodes = self.config.trainer.devices, self.config.trainer.num_nodes
        if self.config.resume and devices is None:
            stored = load_config(find_run(self.config.resume) / "config.yaml").trainer
            devices, num_nodes = stored.devices, num_nodes or stored.num_nodes
        return devices or 1 if num_nodes in (None, 1) else 1


def parse_request(
    values: dict[str, Any], overrides: Mapping[str, Any], *, model: str = "", job: str = "", command: str = ""
) -> Request:
    """Return the request that plain values describe.

    Args:
        values: Nested values, as Hydra composed them or as `gpt.train` got them.
        overrides: The keys and groups among them that the user set, each with its value.
        model: The name of a file in configs/model, or empty.
        job: In a sweep, the keys and values that vary.
        command: The command that starts this training; if empty, one that sets the same keys.

    Raises:
        UserError: A key or a value is wrong, contradicts another, or would have no effect.
    """
    values = {key: value for key, value in values.items() if key != "overrides"}  # a saved config.yaml has them
    callbacks = convert(values.pop("callbacks", None) or [], list[str], "callbacks")
    plan = str(values.pop("plan", None) or False).lower()
    overrides = flatten(dict(overrides))
    values["data"] = _name_data(values.get("data", {}), overrides)
    config = parse_config(values)
    config = with_values(config, {"overrides": _resolve_overrides(config, overrides)})
    command = command or f"python train.py {to_shell_words(config.overrides)}".rstrip()
    request = Request(config, model, tuple(callbacks), "" if plan == "false" else plan, job, command)
    refuse_contradictions(request)
    return request


def _name_data(data: Any, overrides: Mapping[str, Any]) -> Any:
    """Return the keys of `data`. Without `data`, `data.path` means data=text, or names a built-in corpus."""
    path = data.get("path") if isinstance(data, dict) else None  # `parse_config` refuses anything but a dictionary
    if not path or "data" in overrides or data.get("name", DataConfig.name) != DataConfig.name:
        return data
    if path in list(BUILTIN_CORPORA):
        return data | {"name": path, "path": None}
    return data | {"name": "text"}


def _resolve_overrides(config: Config, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the overrides of a run: keys with their parsed values, groups with their names, and absolute paths."""
    settings = config.with_absolute_paths().settings()
    for key in ("run_dir", "resume", "init_from"):
        if settings[key] and os.path.exists(settings[key]):
            settings[key] = os.path.abspath(settings[key])
    return {
        key: settings.get(key, value) for key, value in overrides.items() if key in settings or key in CONFIG_GROUPS
    }


def refuse_contradictions(request: Request) -> None:
    """Raise `UserError` for the first value that contradicts another, or belongs to another optimizer or tokenizer."""
    config, overrides = request.config, request.overrides

    def find_override(is_match: Callable[[str], bool]) -> str:
        """Return the first override that matches, as `key=value`, or an empty string."""
        return next((f"{key}={value}" for key, value in overrides.items() if is_match(key)), "")

    if request.plan not in ("", "true", "json"):
        raise UserError(f"plan={request.plan} is not known: choose from true, json, false")
    if request.plan and (config.resume or distributed.world_size() > 1):
        raise UserError(f"plan={request.plan} describes one new run, in one process: leave out resume and torchrun")

    if config.resume == "auto" and not config.run_dir:
        raise UserError("resume=auto resumes the run in run_dir, or starts one there: add run_dir=DIR")
    if config.resume not in (None, "auto"):
        if change := find_override(lambda key: key not in RESUME_KEYS):
            raise UserError(
                f"resume continues a run as it was configured, and {change} would change it: start a new run from its "
                f"weights with init_from={config.resume}"
            )
        if overrides.get("horizon") == "auto":
            raise UserError("horizon=auto is for a new run: to extend one, give its end, such as horizon=8000steps")

    if request.model == "auto":
        if config.init_from:
            raise UserError("model=auto does not go with init_from, which brings its own model: leave one of them out")
        if config.horizon == "auto" or parse_horizon(config.horizon).unit != "seconds":
            raise UserError(f"model=auto needs a time limit: set horizon=10min (not horizon={config.horizon})")
        default = ModelConfig()
        for key in SHAPE_KEYS:
            value = getattr(config.model, key)
            if f"model.{key}" in overrides or value != getattr(default, key):
                raise UserError(
                    f"model.{key}={value} does not go with model=auto, which chooses it: leave one of them out"
                )

    if config.init_from:
        if override := find_override(lambda key: key == "model" or key.startswith("tokenizer")):
            raise UserError(
                f"{override} does not go with init_from, which brings its own model and tokenizer: leave it out"
            )
    elif overrides.get("experiment") == "finetune":
        raise UserError("experiment=finetune is for weights that have been trained: name them with init_from=PATH")

    optimizer = config.optim.name
    if "optim.name" in overrides:
        raise UserError(f"optim.name={optimizer} would keep the settings of another optimizer: write optim={optimizer}")
    if override := find_override(lambda key: key.removeprefix("optim.") in unused_settings(optimizer)):
        raise UserError(f"{override} has no effect with optim={optimizer}: its settings are in configs/optim")
