"""The configuration of a run: its dataclasses, and how to read it from plain values, a checkpoint or config.yaml."""

import contextlib
import dataclasses
import difflib
import json
import os
import re
import typing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import UnionType
from typing import Any

import yaml

from gpt.checkpoint_formats import RENAMED_KEYS, upgrade_config
from gpt.data.chunking import replace_surrogates
from gpt.data.data_config import DataConfig
from gpt.data.tokenizer import TokenizerConfig
from gpt.errors import UserError, require_choice, require_range
from gpt.files import flatten, read_yaml
from gpt.model.transformer import ModelConfig
from gpt.training.optim import OptimConfig
from gpt.training.versions import code_version

LOGGERS = ("tensorboard", "csv", "wandb", "mlflow")
REPLACED_KEYS = RENAMED_KEYS | {  # keys and choices of 0.5 -> what to use today
    "data=prepared": "data=tokens data.path=DIR",
    "rerun": "the first line of the run's command.txt, with changes appended",
}


# --- the training horizon: when a run ends ---

HORIZON_FACTORS = {None: 1, "k": 10**3, "M": 10**6, "B": 10**9, "s": 1, "min": 60, "h": 3600}
HORIZON_PATTERN = re.compile(r"(\d+(?:\.\d+)?)\s*(?:(k|M|B)?\s*(step|token)s?|(epoch)s?|(s|min|h))")


@dataclass(frozen=True)
class Horizon:
    """How long a run trains: an amount of `steps`, `tokens`, `epochs` or `seconds`."""

    amount: float
    unit: str


def parse_horizon(text: str) -> Horizon:
    """Return a horizon from text such as `2000steps`, `100Mtokens`, `3epochs`, `90s`, `3min` or `2h`.

    Raises:
        UserError: The text is no horizon.
    """
    match = HORIZON_PATTERN.fullmatch(text.strip())
    if not match or not 0 < float(match[1]) < 1e15:
        raise UserError(
            f"horizon={text!r} is not a horizon: give auto, or a number above 0 and a unit, such as 2000steps, "
            "100Mtokens, 3epochs, 90s, 3min or 2h"
        )
    amount = float(match[1]) * HORIZON_FACTORS[match[2] or match[5]]
    return Horizon(amount, f"{match[3] or match[4] or 'second'}s")


# --- dataclasses ---


@dataclass
class TrainerConfig:
    """Where and how to train. Intervals are in optimizer steps."""

    device: str = "auto"  # auto, cpu, cuda or mps
    devices: int | None = None  # on each machine; by default 1, or as many as a launcher such as torchrun has started
    num_nodes: int | None = None  # machines; by default 1, or as many as a launcher has started
    precision: str = "auto"  # auto, fp32, bf16 or fp16
    strategy: str = "auto"  # auto or ddp; auto means ddp with several devices
    compile: str = "auto"  # auto, true or false
    tokens_per_step: int = 1024  # of one optimizer step, over all devices
    micro_batch_size: int | str = "auto"  # sequences that go through the model at once; gradients accumulate
    short_sequences: int | None = None  # tokens of a sequence in the first 0.6 of a run; 0: full length; null: auto
    activation_checkpointing: bool = False  # recompute each block's activations instead of keeping them
    deterministic: bool = False  # the same bits every time on a GPU too; slower there
    log_every: int = 10
    validate_every: int = 500  # or more often: a run of four or more steps validates at least four times
    checkpoint_every: int = 250
    checkpoint_minutes: float = 10.0  # also save after this many minutes without a checkpoint
    answer_minutes: float = 10.0  # timeout between processes: rank 0 saves and samples while the others wait
    keep_every: int = 0  # every so many steps, also keep a checkpoint as step-00002000.ckpt; 0 keeps none

    def __post_init__(self) -> None:
        self.compile = self.compile.lower()
        require_choice("trainer.device", self.device, ("auto", "cpu", "cuda", "mps"))
        require_choice("trainer.precision", self.precision, ("auto", "fp32", "bf16", "fp16"))
        require_choice("trainer.strategy", self.strategy, ("auto", "ddp"))
        require_choice("trainer.compile", self.compile, ("auto", "true", "false"))
        for name in ("devices", "num_nodes", "tokens_per_step", "log_every", "validate_every", "checkpoint_every"):
            if getattr(self, name) is not None:
                require_range(f"trainer.{name}", getattr(self, name), 1)
        for name in ("short_sequences", "keep_every"):
            require_range(f"trainer.{name}", getattr(self, name) or 0, 0, note="(off)")
        for name in ("checkpoint_minutes", "answer_minutes"):
            require_range(f"trainer.{name}", getattr(self, name), 0, above=True)
        with contextlib.suppress(ValueError):
            self.micro_batch_size = int(self.micro_batch_size)
        size = self.micro_batch_size
        if size != "auto" and not (isinstance(size, int) and size > 0):
            raise UserError(f"trainer.micro_batch_size={size} is out of range: it must be auto or at least 1")

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
    seed: int = 1
    patience: int = 0  # stop after this many validations in a row without a better one; 0: never
    logger: list[str] = field(default_factory=lambda: ["tensorboard", "csv"])  # any of LOGGERS
    run_dir: str | None = None  # where to write; by default runs/<date>_<time>_<data>-<model>
    resume: str | None = None  # a run to resume, last (the newest run), or auto (resume run_dir, or start it)
    init_from: str | None = None  # a run, a checkpoint, a Hugging Face GPT-2 folder or a name on the hub
    overrides: dict[str, Any] = field(default_factory=dict)  # keys that the user set -> values, with absolute paths

    def __post_init__(self) -> None:
        if self.horizon != "auto":
            parse_horizon(self.horizon)
        for name, seed in (("seed", self.seed), ("data.seed", self.order_seed)):
            if not 0 <= seed < 1 << 63:
                raise UserError(f"{name}={seed} is out of range: it must be at least 0 and below 2^63")
        require_range("patience", self.patience, 0, note="(off)")
        for name in self.logger:
            require_choice("logger", name, LOGGERS)
        for name in ("run_dir", "resume", "init_from"):
            if getattr(self, name) == "":
                raise UserError(f"{name}= is empty, perhaps from an unset shell variable: give a path, or leave it out")
            if path := getattr(self, name):
                setattr(self, name, os.path.expanduser(path))
        if not self.init_from and not self.resume:  # they determine the context length
            self.require_whole_sequences()

    def settings(self) -> dict[str, Any]:
        """Return all values under dotted keys, without the overrides."""
        return flatten({name: value for name, value in asdict(self).items() if name != "overrides"})

    def with_absolute_paths(self) -> "Config":
        """Return this configuration with absolute paths, which are the same from every working directory."""
        return replace(self, data=self.data.with_absolute_paths())

    @property
    def order_seed(self) -> int:
        """The seed of the order of sequences. Everything else uses `seed`."""
        return self.seed if self.data.seed is None else self.data.seed

    @property
    def sequences_per_step(self) -> int:
        """The sequences of one optimizer step, over all devices."""
        return self.trainer.tokens_per_step // self.model.context_length

    @property
    def micro_batch_size(self) -> int:
        """The sequences that go through the model at once, in a final configuration."""
        assert isinstance(self.trainer.micro_batch_size, int)
        return self.trainer.micro_batch_size

    @property
    def accumulation_steps(self) -> int:
        """The micro-batches of one optimizer step on each device, in a final configuration."""
        return self.sequences_per_step // (self.micro_batch_size * self.trainer.world_size)

    @property
    def can_shrink_micro_batch(self) -> bool:
        """Return True if the micro-batch may shrink when memory runs out: one process, and the user set no size."""
        return self.overrides.get("trainer.micro_batch_size", "auto") == "auto" and self.trainer.world_size == 1

    def with_smaller_micro_batch(self) -> "Config":
        """Return the same steps in micro-batches of half the size, or of the next smaller size that divides a step.

        Raises:
            UserError: Memory has run out, and the size is 1 or was set by the user.
        """
        size, sequences = self.micro_batch_size, self.micro_batch_size * self.accumulation_steps
        if size == 1:
            raise UserError("out of memory at trainer.micro_batch_size=1, the smallest: choose a smaller model")
        smaller = next(size for size in range(size // 2, 0, -1) if sequences % size == 0)
        if not self.can_shrink_micro_batch:
            raise UserError(f"out of memory at trainer.micro_batch_size={size}: try trainer.micro_batch_size={smaller}")
        return with_values(self, {"trainer.micro_batch_size": smaller})

    def require_whole_sequences(self) -> None:
        """Raise `UserError` if a step is not a whole number of sequences, or of micro-batches, on each device."""
        trainer, context = self.trainer, self.model.context_length
        short, tokens, size = trainer.short_sequences, trainer.tokens_per_step, trainer.micro_batch_size
        if short and context % short:
            raise UserError(
                f"trainer.short_sequences={short} does not divide model.context_length={context}: choose a divisor, or "
                "0 for full length from the start"
            )
        min_tokens = context * trainer.world_size
        if tokens % min_tokens != 0:
            raise UserError(
                f"trainer.tokens_per_step={tokens} is not divisible by model.context_length={context} times "
                f"{trainer.world_size} devices: try {max(1, tokens // min_tokens) * min_tokens}"
            )
        sequences = tokens // min_tokens
        if isinstance(size, int) and sequences % size != 0:
            raise UserError(
                f"trainer.micro_batch_size={size} does not divide the {sequences} sequences of a step on a device: "
                "choose a divisor, or auto"
            )


def with_values(config: Config, values: dict[str, Any]) -> Config:
    """Return a configuration with other values under dotted keys. It is checked like any other."""
    groups: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        group, _, name = key.rpartition(".")
        groups.setdefault(group, {})[name] = value
    changes = groups.pop("", {})
    changes |= {group: replace(getattr(config, group), **keys) for group, keys in groups.items()}
    return replace(config, **changes)


# --- reading and writing ---


def parse_config(values: Any) -> Config:
    """Return the configuration that nested plain values describe.

    Values are taken literally: no text in a checkpoint or a config.yaml can read the environment.

    Raises:
        UserError: A key or a value is wrong.
    """
    config = _build(Config, values)
    for key, value in flatten(asdict(config)).items():
        text = " ".join(map(str, value)) if isinstance(value, list) else str(value)
        if replace_surrogates(text) != text:
            raise UserError(f"{key}={value!r} has bytes that are not UTF-8: give it another name")
    return config


def _build(cls: Any, values: Any, prefix: str = "") -> Any:
    """Return a dataclass made from a dictionary. Its values are converted to the types of the fields."""
    hints = typing.get_type_hints(cls)
    if not isinstance(values, dict):
        key = prefix.rstrip(".") or "the configuration"
        raise UserError(f"{key}={values!r} is not a group of keys such as {prefix}{next(iter(hints))}")
    unknown_keys = [f"{prefix}{key}" for key in values if key not in hints]
    if unknown_keys:
        raise UserError("; ".join(map(describe_unknown_key, unknown_keys)))
    return cls(**{name: convert(value, hints[name], f"{prefix}{name}") for name, value in values.items()})


def convert(value: Any, hint: Any, key: str) -> Any:
    """Return a value as the type of its key, such as 1e3 as an int, true as a string, csv as a list of one."""
    types = typing.get_args(hint) if isinstance(hint, UnionType) else (hint,)
    cls = types[0]
    origin = typing.get_origin(cls)
    if cls is Any or type(value) in types or (origin is dict and type(value) is dict):
        return value
    if origin is list and value is not None:
        items = value if isinstance(value, list) else [value]
        return [convert(item, typing.get_args(cls)[0], f"{key}[{i}]") for i, item in enumerate(items)]
    if dataclasses.is_dataclass(cls):
        return _build(cls, value, f"{key}.")
    if cls is str and isinstance(value, bool | int | float):
        return str(value)
    if cls is bool and str(value).lower() in ("true", "false"):
        return str(value).lower() == "true"
    if cls in (int, float) and isinstance(value, int | float | str) and not isinstance(value, bool):
        with contextlib.suppress(ValueError, OverflowError):
            if isinstance(value, str) or cls(value) == value:
                return cls(value)
    raise UserError(f"{key}={value!r} is not of type {cls.__name__}")


def describe_unknown_key(key: str) -> str:
    """Return one line about a key that does not exist: what replaces it, or the nearest key that exists."""
    if key in REPLACED_KEYS:
        return f"there is no key {key!r} since version 1.0: use {REPLACED_KEYS[key]}"
    keys = list(Config().settings())
    last_part = key.split(".")[-1]
    matches = difflib.get_close_matches(key, keys, n=1, cutoff=0.75)
    matches = matches or [known for known in keys if known.split(".")[-1] == last_part]  # in another group
    hint = f"did you mean {matches[0]!r}?" if matches else "see docs/configuration.md for the keys there are"
    return f"there is no key {key!r}; {hint}"


def load_config(path: Path) -> Config:
    """Return the configuration in a run's config.yaml; raise `UserError` if the file holds none."""
    stored = read_yaml(path)
    if not isinstance(stored, dict) or "model" not in stored:
        raise UserError(f"{path}: holds no configuration of a run")
    try:
        return parse_config(upgrade_config(stored))
    except UserError as error:
        raise UserError(
            f"{path}: {error} (the run is of {_written_by(path.parent)}, and this is {code_version()})"
        ) from None


def _written_by(directory: Path) -> str:
    """Return the version of the code that wrote the metrics of a run, if they can be read."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return str(json.loads((directory / "metrics.json").read_text(encoding="utf-8"))["git_commit"])
    return "other code"


def config_to_yaml(config: Config) -> str:
    """Return the text of config.yaml."""
    return yaml.safe_dump(asdict(config), sort_keys=False, allow_unicode=True)
