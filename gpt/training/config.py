"""The whole configuration as plain, checked objects: the root, which nests what each wing defines for itself."""

import dataclasses
import difflib
import os
import re
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException
from yaml import YAMLError

from gpt.errors import UserError, require_choice
from gpt.model.transformer import ModelConfig
from gpt.text.corpus import DataConfig
from gpt.text.tokenizer import TokenizerConfig
from gpt.training import runs
from gpt.training.habits import advice
from gpt.training.optim import OptimConfig

LARGEST_YAML = 100_000  # values in a file
LOGGERS = ("tensorboard", "csv", "wandb", "mlflow")
_GAP = "\ufdd0"  # a code point that is no character and never will be
_SECONDS = {"s": 1, "min": 60, "h": 3600}
_THOUSANDS = {"": 1, "k": 10**3, "M": 10**6, "B": 10**9}
_HORIZON = re.compile(r"(\d+(?:\.\d+)?)\s*(?:(k|M|B)?\s*(steps?|tokens?)|(epochs?)|(s|min|h))")


@dataclass(frozen=True)
class Horizon:
    """How long a run trains: an amount of `steps`, `tokens`, `epochs` or `seconds`."""

    amount: float
    unit: str


def parse_horizon(text: str) -> Horizon:
    """Read a horizon such as `2000steps`, `100Mtokens`, `3epochs`, `90s`, `3min` or `2h`; else raise `ValueError`."""
    match = _HORIZON.fullmatch(text.strip())
    if not match or not 0 < float(match[1]) < 1e15:
        raise ValueError(
            f"horizon={text!r} is not a horizon: give a number above 0 and a unit, such as "
            "2000steps, 100Mtokens, 3epochs, 90s, 3min or 2h"
        )
    if match[5]:
        return Horizon(float(match[1]) * _SECONDS[match[5]], "seconds")
    if match[4]:
        return Horizon(float(match[1]), "epochs")
    amount = float(match[1]) * _THOUSANDS[match[2] or ""]
    return Horizon(amount, match[3].rstrip("s") + "s")


@dataclass
class TrainerConfig:
    """Where and how to train. Intervals are in optimizer steps."""

    device: str = "auto"  # auto, cpu, cuda or mps
    devices: int | None = None  # on each machine; by default 1, or as many as torchrun or srun has started
    num_nodes: int | None = None  # machines; by default 1, or as many as torchrun or srun has started
    precision: str = "auto"  # auto, fp32, bf16 or fp16
    strategy: str = "auto"  # auto, ddp or fsdp; auto means ddp with several devices
    compile: str = "auto"  # auto, true or false
    tokens_per_step: int = 1024  # of one optimizer step, over all devices
    micro_batch_size: str = "auto"  # windows that go through the model at once; gradients accumulate over the rest
    activation_checkpointing: bool = False  # recompute each block's activations instead of keeping them
    deterministic: bool = False  # the same bits every time on a GPU too, where that takes longer
    log_every: int = 10
    validate_every: int = 500  # at most: a run validates at least four times
    checkpoint_every: int = 250
    checkpoint_minutes: float = 10.0  # also save after this many minutes without a checkpoint
    keep_every: int = 0  # also keep a checkpoint of every so many steps, as step-00002000.ckpt; 0 keeps none

    def __post_init__(self) -> None:
        require_choice("trainer.device", self.device, ("auto", "cpu", "cuda", "mps"))
        require_choice("trainer.precision", self.precision, ("auto", "fp32", "bf16", "fp16"))
        require_choice("trainer.strategy", self.strategy, ("auto", "ddp", "fsdp"))
        self.compile = self.compile.lower()
        require_choice("trainer.compile", self.compile, ("auto", "true", "false"))
        for name in ("devices", "num_nodes", "tokens_per_step", "log_every", "validate_every", "checkpoint_every"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"trainer.{name}={getattr(self, name)} is out of range: it must be at least 1")
        if self.keep_every < 0:
            raise ValueError(f"trainer.keep_every={self.keep_every} is out of range: it must be at least 0 (off)")
        if not self.checkpoint_minutes > 0:
            raise ValueError(
                f"trainer.checkpoint_minutes={self.checkpoint_minutes} is out of range: it must be above 0"
            )
        if self.micro_batch_size != "auto" and not re.fullmatch(r"[1-9]\d*", self.micro_batch_size):
            raise ValueError(
                f"trainer.micro_batch_size={self.micro_batch_size} is out of range: it must be auto or at least 1"
            )

    @property
    def world_size(self) -> int:
        """The number of processes, one for each device of each machine."""
        return (self.devices or 1) * (self.num_nodes or 1)


@dataclass
class Config:
    """The complete configuration. The defaults of `python train.py` are in configs/train.yaml."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    horizon: str = "4000steps"
    earlier_horizons: list[str] = field(default_factory=list)  # of a run that was extended; not to be set
    seed: int = 1
    patience: int = 0  # stop after this many validations in a row without a better one; 0 never does
    logger: list[str] = field(default_factory=lambda: ["tensorboard", "csv"])  # any of LOGGERS
    run_dir: str | None = None  # where to write; by default runs/<date>_<time>_<data>-<model>
    resume: str | None = None  # a run directory to continue, or auto: the one in run_dir, or begin it there
    rerun: str | None = None  # a run directory whose configuration to start from
    init_from: str | None = None  # a run, a checkpoint, a Hugging Face GPT-2 folder or a name on the hub

    def __post_init__(self) -> None:
        parse_horizon(self.horizon)
        if not 0 <= self.seed < 1 << 63:
            raise ValueError(f"seed={self.seed} is out of range: it must be at least 0 and below 2^63")
        if self.patience < 0:
            raise ValueError(f"patience={self.patience} is out of range: it must be at least 0 (off)")
        for name in self.logger:
            require_choice("logger", name, LOGGERS)
        if len(set(self.logger)) < len(self.logger):
            raise ValueError(f"logger={self.logger} lists a logger twice")
        for name in ("run_dir", "resume", "rerun", "init_from"):
            if getattr(self, name) == "":
                raise ValueError(
                    f"{name}= is empty, as from a shell variable that is not set: give a path, or leave it out"
                )
            if path := getattr(self, name):
                setattr(self, name, os.path.expanduser(path))
        if self.resume not in (None, "auto") and self.init_from:
            raise ValueError("resume and init_from exclude each other: continue a run, or start a new one from it")
        if self.trainer.strategy == "fsdp":
            if self.optim.name == "muon":
                raise UserError(
                    "trainer.strategy=fsdp splits every matrix among the devices, and Muon needs whole ones: "
                    "add optim=adamw"
                )
            if self.trainer.devices == self.trainer.num_nodes == 1:
                raise UserError(
                    "trainer.strategy=fsdp splits the model among several devices, and there is 1: leave it out; "
                    "trainer.activation_checkpointing=true or a smaller trainer.micro_batch_size takes less memory"
                )
            if self.trainer.device == "cpu" and self.trainer.compile == "true":
                raise UserError(
                    "trainer.compile=true makes one graph of all blocks on a CPU, and trainer.strategy=fsdp gathers "
                    "them one by one: leave one of the two out"
                )
        if not self.init_from and self.resume in (None, "auto"):  # otherwise the context length comes from there
            self.require_whole_windows()

    def require_whole_windows(self) -> None:
        """Raise `UserError` if a step is not a whole number of windows, or of micro-batches, on each device."""
        step, least = self.trainer.tokens_per_step, self.model.context_length * self.trainer.world_size
        if step % least != 0:
            raise UserError(
                f"trainer.tokens_per_step={step} is not divisible by model.context_length={self.model.context_length} "
                f"times {self.trainer.world_size} devices: try {max(1, step // least) * least}"
            )
        windows = step // least
        if self.trainer.micro_batch_size != "auto" and windows % int(self.trainer.micro_batch_size) != 0:
            raise UserError(
                f"trainer.micro_batch_size={self.trainer.micro_batch_size} does not divide the {windows} windows of a "
                "step on a device: choose a divisor, or auto"
            )


def validate(composed: DictConfig | dict) -> Config:
    """Check a configuration; `UserError` names the key that is wrong.

    One that Hydra composed has its interpolations resolved. A dictionary, as checkpoints and config.yaml store it, is
    taken literally: nothing in it can read the environment.
    """
    try:
        hydra = isinstance(composed, DictConfig)
        plain = OmegaConf.to_container(composed, resolve=True) if hydra else composed
        if not isinstance(plain, dict):
            raise UserError(f"the configuration is of type {type(plain).__name__}, not a dictionary")
        if hydra:
            plain.pop("callbacks", None)  # see callbacks_of
            plain.pop("plan", None)  # see forecast.py
        plain = _literal(plain)
        if isinstance(plain.get("experiment"), dict):
            raise UserError("an experiment file must begin with the line: # @package _global_")
        if theirs := advice(plain, keys_of(Config)):
            raise UserError(theirs)
        merged = OmegaConf.merge(OmegaConf.structured(Config), _whole_floats_to_ints(plain, Config))
        config = OmegaConf.to_object(merged)
    except UserError:
        raise
    except ConfigKeyError as error:
        raise UserError(unknown_key(str(error.full_key))) from None
    except OmegaConfBaseException as error:
        reason = str(error).splitlines()[0]
        key = getattr(error, "full_key", None)
        raise UserError(f"{key}: {reason}" if key else reason) from None
    except ValueError as error:
        raise UserError(str(error)) from None
    assert isinstance(config, Config)
    return _close_gaps(config)


def with_rerun(composed: DictConfig, overrides: list[str]) -> DictConfig | dict:
    """The configuration of the run `rerun`, if it is given, with the keys and groups that `overrides` name.

    Left out is where that run wrote, and how it was resumed or extended. What was `auto` stays as it was decided, for
    the same bits, unless an override invalidates it.
    """
    if not composed.get("rerun"):
        return composed
    given: Any = OmegaConf.to_container(composed, resolve=True)
    given.pop("callbacks", None)
    given.pop("plan", None)
    if given["resume"]:
        raise UserError("resume and rerun exclude each other: continue a run, or start the same one again")
    config = to_plain(read(runs.directory(str(given["rerun"])) / "config.yaml"))
    config |= {"run_dir": None, "resume": None, "earlier_horizons": []}
    names = [override.lstrip("+~").split("=")[0] for override in overrides]
    if "experiment" in names:
        raise UserError("experiment and rerun exclude each other: rerun brings every setting; add single keys to it")
    if "trainer.device" in names:
        config["trainer"] |= {"precision": "auto", "compile": "auto"}
    if any(re.match(r"model|trainer\.(device|tokens_per_step)", name) for name in names):
        config["trainer"]["micro_batch_size"] = "auto"
    if "data.path" in names:
        config["data"] |= {"revision": None, "prompts": None}  # both were of the other text
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


def callbacks_of(composed: DictConfig, overrides: list[str]) -> list[str]:
    """The `module:name` strings of `callbacks`, which only the command line may give.

    It is no key of `Config`, so no run stores it, and no stored configuration can have anything imported.
    """
    given = composed.get("callbacks") or OmegaConf.create([])
    if given and not any(re.match(r"\+*callbacks=", override) for override in overrides):
        raise UserError(f"callbacks={given} in a configuration file: name callbacks on the command line")
    names = list(given) if isinstance(given, ListConfig) else [given]
    if not all(isinstance(name, str) for name in names):
        raise UserError(f"callbacks={given} is not a list of names: give callbacks='[\"module:name\"]'")
    return names


def read(path: Path) -> Config:
    """Read the config.yaml of a run; `UserError` if it holds no configuration."""
    refuse_large_yaml(path)
    try:
        stored = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, YAMLError) as error:
        raise UserError(f"{path}: cannot be read ({' '.join(str(error).split())})") from None
    if not isinstance(stored, dict) or "model" not in stored:
        raise UserError(f"{path}: holds no configuration of a run")
    return validate(stored)


def refuse_large_yaml(path: Path) -> None:
    """Raise `UserError` if a YAML file would be large once its aliases are expanded."""
    sizes: dict[int, int] = {}

    def size(node: yaml.Node | None) -> int:
        if node is None or isinstance(node, yaml.ScalarNode):
            return 1
        if id(node) not in sizes:
            sizes[id(node)] = LARGEST_YAML  # of an alias within itself
            inner = [part for pair in node.value for part in (pair if isinstance(pair, tuple) else (pair,))]
            sizes[id(node)] = 1 + sum(map(size, inner))
        return sizes[id(node)]

    try:
        with path.open(encoding="utf-8") as stream:
            large = size(yaml.compose(stream, yaml.SafeLoader)) >= LARGEST_YAML
    except (OSError, ValueError, YAMLError, RecursionError):
        return  # the reader reports that
    if large:
        raise UserError(f"{path}: has more than {LARGEST_YAML:,} values once its aliases are expanded; shorten it")


def to_yaml(config: Config) -> str:
    """Write the configuration in the form that `read` reads."""
    return yaml.safe_dump(to_plain(config), sort_keys=False, allow_unicode=True)


def to_plain(config: Config) -> dict[str, Any]:
    """The configuration as dictionaries, lists, strings and numbers, for YAML files and checkpoints."""
    return dataclasses.asdict(config)


def unknown_key(key: str) -> str:
    """One line about a key that does not exist, suggesting the nearest that does."""
    near = difflib.get_close_matches(key, keys_of(Config), n=1, cutoff=0.75)
    if not near:  # the right name in the wrong place
        near = [known for known in keys_of(Config) if known.split(".")[-1] == key.split(".")[-1]][:1]
    return f"there is no key {key!r}" + (
        f"; did you mean {near[0]!r}?" if near else "; see configs/ for the keys there are"
    )


def _literal(value: Any) -> Any:
    """The same value with `_GAP` in every string that OmegaConf would take for a reference or a missing value."""
    if isinstance(value, dict):
        return {key: _literal(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_literal(inner) for inner in value]
    return value.replace("${", f"${_GAP}{{").replace("???", f"?{_GAP}??") if isinstance(value, str) else value


def _close_gaps(value: Any) -> Any:
    """Undo `_literal` in a configuration, in place where it is nested."""
    if dataclasses.is_dataclass(value):
        for name, inner in vars(value).items():
            setattr(value, name, _close_gaps(inner))
    if isinstance(value, list):
        return [_close_gaps(inner) for inner in value]
    return value.replace(_GAP, "") if isinstance(value, str) else value


def keys_of(kind: type, prefix: str = "") -> list[str]:
    """Every key of a configuration, with dots: `optim.lr`."""
    keys = []
    for name, hint in typing.get_type_hints(kind).items():
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            keys += keys_of(hint, f"{prefix}{name}.")
        else:
            keys.append(prefix + name)
    return keys


def _whole_floats_to_ints(values: dict, kind: type) -> dict:
    """Turn whole floats into integers where those are expected, since YAML reads 1e3 as a float."""
    hints = typing.get_type_hints(kind)
    result = dict(values)
    for name, value in values.items():
        hint = hints.get(name)
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            if not isinstance(value, dict):
                raise UserError(f"{name}={value!r} stands where keys such as {name}.{keys_of(hint)[0]} belong")
            result[name] = _whole_floats_to_ints(value, hint)
        elif hint is int and isinstance(value, float) and value.is_integer():
            result[name] = int(value)
        elif hint == list[str] and isinstance(value, str):  # logger=csv
            result[name] = [value]
    return result
