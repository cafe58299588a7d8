"""The whole configuration as plain, checked objects: the root, which nests what each room defines for itself."""

import os
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from gpt.data.data_config import DataConfig
from gpt.data.tokenizer import TokenizerConfig
from gpt.errors import UserError, require_choice, require_range
from gpt.files import flatten
from gpt.model.transformer import ModelConfig
from gpt.training.config.horizon import parse_horizon
from gpt.training.optim import OptimConfig

SHAPE = ("d_model", "num_layers", "num_heads")
NOTES = ("decided", "amended")  # what the program adds to the configuration of a run
LOGGERS = ("tensorboard", "csv", "wandb", "mlflow")


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
    micro_batch_size: int | str = "auto"  # windows that go through the model at once; gradients add up over the rest
    short_window: int | None = None  # tokens of a window until 0.6 of a run; 0: whole ones; by default what suits
    activation_checkpointing: bool = False  # recompute each block's activations instead of keeping them
    deterministic: bool = False  # the same bits every time on a GPU too, where that takes longer
    log_every: int = 10
    validate_every: int = 500  # at most: a run validates at least four times
    checkpoint_every: int = 250
    checkpoint_minutes: float = 10.0  # also save after this many minutes without a checkpoint
    answer_minutes: float = 10.0  # in which each process must answer; rank 0 saves and samples while the others wait
    keep_every: int = 0  # also keep a checkpoint of every so many steps, as step-00002000.ckpt; 0 keeps none

    def __post_init__(self) -> None:
        self.compile = self.compile.lower()
        require_choice("trainer.device", self.device, ("auto", "cpu", "cuda", "mps"))
        require_choice("trainer.precision", self.precision, ("auto", "fp32", "bf16", "fp16"))
        require_choice("trainer.strategy", self.strategy, ("auto", "ddp"))
        require_choice("trainer.compile", self.compile, ("auto", "true", "false"))
        for name in ("devices", "num_nodes", "tokens_per_step", "log_every", "validate_every", "checkpoint_every"):
            if getattr(self, name) is not None:
                require_range(f"trainer.{name}", getattr(self, name), 1)
        for name in ("short_window", "keep_every"):
            require_range(f"trainer.{name}", getattr(self, name) or 0, 0, note="(off)")
        for name in ("checkpoint_minutes", "answer_minutes"):
            require_range(f"trainer.{name}", getattr(self, name), 0, above=True)
        with suppress(ValueError):
            self.micro_batch_size = int(self.micro_batch_size)
        if self.micro_batch_size != "auto" and not (
            isinstance(self.micro_batch_size, int) and self.micro_batch_size > 0
        ):
            raise UserError(
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
    seed: int = 1
    patience: int = 0  # stop after this many validations in a row without a better one; 0 never does
    logger: list[str] = field(default_factory=lambda: ["tensorboard", "csv"])  # any of LOGGERS
    run_dir: str | None = None  # where to write; by default runs/<date>_<time>_<data>-<model>
    resume: str | None = None  # a run directory to continue, last (the newest), or auto (run_dir, begun if need be)
    rerun: str | None = None  # a run directory whose configuration to start from
    init_from: str | None = None  # a run, a checkpoint, a Hugging Face GPT-2 folder or a name on the hub
    decided: dict | None = field(default_factory=dict)  # keys that the program chose, with what stood there before
    amended: list[str] = field(default_factory=list)  # what was different before a step, where a run went on otherwise

    def __post_init__(self) -> None:
        if self.horizon != "auto":
            parse_horizon(self.horizon)
        for name, seed in (("seed", self.seed), ("data.seed", self.order_seed)):
            if not 0 <= seed < 1 << 63:
                raise UserError(f"{name}={seed} is out of range: it must be at least 0 and below 2^63")
        require_range("patience", self.patience, 0, note="(off)")
        for name in self.logger:
            require_choice("logger", name, LOGGERS)
        for name in ("run_dir", "resume", "rerun", "init_from"):
            if getattr(self, name) == "":
                raise UserError(
                    f"{name}= is empty, as from a shell variable that is not set: give a path, or leave it out"
                )
            if path := getattr(self, name):
                setattr(self, name, os.path.expanduser(path))
        if not self.init_from and not self.resume:  # otherwise the context length comes from there
            self.require_whole_windows()

    def settings(self) -> dict[str, Any]:
        """All values under dotted keys, without what the program has noted beside them."""
        return flatten({name: value for name, value in asdict(self).items() if name not in NOTES})

    def as_decided_from(self, asked: "Config") -> "Config":
        """This configuration, which records what it has decided of the one that was asked for."""
        now, before = self.settings(), asked.settings()
        decided = {key: before[key] for key in before if before[key] != now[key]}
        return replace(self, decided=(asked.decided or {}) | decided)

    def anywhere(self) -> "Config":
        """This configuration with absolute paths, for whoever stands in another folder."""
        return replace(self, data=self.data.with_absolute_paths())

    def amending(self, before: "Config", step: int) -> "Config":
        """This configuration of a run, which records what it had `before`, until `step`, where that is different."""
        now, then = self.settings(), before.settings()
        changes = [f"{key}={then[key]} until step {step}" for key in then if then[key] != now[key]]
        return replace(self, amended=[*self.amended, *changes])

    @property
    def order_seed(self) -> int:
        """The seed of the order of windows; `seed` is that of everything else."""
        return self.seed if self.data.seed is None else self.data.seed

    @property
    def windows_per_step(self) -> int:
        """The windows of one optimizer step, over all devices."""
        return self.trainer.tokens_per_step // self.model.context_length

    @property
    def micro_batch_size(self) -> int:
        """The windows that go through the model at once, once that is decided."""
        assert isinstance(self.trainer.micro_batch_size, int)
        return self.trainer.micro_batch_size

    @property
    def accumulation(self) -> int:
        """The micro-batches of one optimizer step on each device, once their size is decided."""
        return self.windows_per_step // (self.micro_batch_size * self.trainer.world_size)

    @property
    def may_shrink(self) -> bool:
        """Whether the micro-batch may shrink when memory runs out, as a single process may do whose size it chose."""
        return "trainer.micro_batch_size" in (self.decided or {}) and self.trainer.world_size == 1

    def with_smaller_micro_batch(self) -> "Config":
        """The same steps in micro-batches of half the size, or of the next smaller size that divides a step.

        Raises `UserError`, about memory that has run out, if the size is 1 or not ours to choose.
        """
        size, windows = self.micro_batch_size, self.micro_batch_size * self.accumulation
        if size == 1:
            raise UserError("out of memory at trainer.micro_batch_size=1, the least: choose a smaller model")
        smaller = next(size for size in range(size // 2, 0, -1) if windows % size == 0)
        if not self.may_shrink:
            raise UserError(f"out of memory at trainer.micro_batch_size={size}: try trainer.micro_batch_size={smaller}")
        return replace(self, trainer=replace(self.trainer, micro_batch_size=smaller))

    def require_whole_windows(self) -> None:
        """Raise `UserError` if a step is not a whole number of windows, or of micro-batches, on each device."""
        context, short = self.model.context_length, self.trainer.short_window
        if short and context % short:
            raise UserError(
                f"trainer.short_window={short} does not divide model.context_length={context}: choose a divisor, or 0 "
                "for whole windows from the start"
            )
        step, least = self.trainer.tokens_per_step, context * self.trainer.world_size
        if step % least != 0:
            raise UserError(
                f"trainer.tokens_per_step={step} is not divisible by model.context_length={context} "
                f"times {self.trainer.world_size} devices: try {max(1, step // least) * least}"
            )
        windows = step // least
        if isinstance(size := self.trainer.micro_batch_size, int) and windows % size != 0:
            raise UserError(
                f"trainer.micro_batch_size={size} does not divide the {windows} windows of a "
                "step on a device: choose a divisor, or auto"
            )
