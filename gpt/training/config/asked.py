"""What a user asks for: a checked configuration and the keys that were given, which must not contradict each other."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from gpt.errors import UserError
from gpt.exchange.loading import find_run
from gpt.model.transformer import ModelConfig
from gpt.training import distributed
from gpt.training.config.horizon import parse_horizon
from gpt.training.config.loading import read
from gpt.training.config.schema import SHAPE, Config
from gpt.training.optim import unread_settings

# What may be said of a run that goes on.
WITH_RESUME = {"resume", "horizon", "callbacks", "plan", "data.path", "data.validation_path"}
WITH_RESUME |= {"trainer.devices", "trainer.num_nodes"}


@dataclass(frozen=True)
class Asked:
    """A request, in which values may still say auto. `UserError` if it contradicts itself, or part has no effect."""

    config: Config
    given: Mapping[str, str] = field(default_factory=dict)  # keys and groups, each with the words that gave it
    model: str = ""  # the name of a file in configs/model, which may be auto; rerun if another run brings the model
    callbacks: tuple[str, ...] = ()  # the user's, as module:name
    plan: str = ""  # true or json, if nothing is to be trained
    job: str = ""  # what varies between the jobs of a sweep, as of this one
    in_python: bool = False  # whether to suggest calls, as to who has called `gpt.train`, and not commands

    def __post_init__(self) -> None:
        for offends, refusal in RULES:
            if words := offends(self):
                raise UserError(refusal.format(words=words, config=self.config))

    def first_of(self, wanted: Callable[[str], bool]) -> str:
        """The words of the first given key that is wanted; empty if there is none."""
        return next((words for key, words in self.given.items() if wanted(key)), "")

    @property
    def processes(self) -> int:
        """How many processes this one must start, or 1: where a launcher has started all, or one suffices."""
        if distributed.world_size() > 1 or self.plan:
            return 1
        devices, num_nodes = self.config.trainer.devices, self.config.trainer.num_nodes
        if self.config.resume and devices is None:
            stored = read(find_run(self.config.resume) / "config.yaml").trainer
            devices, num_nodes = stored.devices, num_nodes or stored.num_nodes
        return devices or 1 if num_nodes in (None, 1) else 1


def _changes_run(asked: Asked) -> str:
    goes_on = asked.config.resume not in (None, "auto")
    return asked.first_of(lambda key: key not in WITH_RESUME) if goes_on else ""


def _shapes_choice(asked: Asked) -> str:
    if asked.model != "auto":
        return ""
    shape, mini = asked.config.model, ModelConfig()
    in_file = [f"model.{key}={getattr(shape, key)}" for key in SHAPE if getattr(shape, key) != getattr(mini, key)]
    return asked.first_of(lambda key: key.removeprefix("model.") in SHAPE) or next(iter(in_file), "")


def _is_no_time(asked: Asked) -> bool:
    horizon = asked.config.horizon
    return asked.model == "auto" and (horizon == "auto" or parse_horizon(horizon).unit != "seconds")


# Which words offend, or whether something does, and what to say of it.
RULES: tuple[tuple[Callable[[Asked], object], str], ...] = (
    (
        _changes_run,
        "resume continues a run as it was configured, and {words} would change it: start a new run from its weights "
        "with init_from={config.resume}",
    ),
    (
        lambda asked: asked.model == "auto" and asked.config.init_from,
        "model=auto does not go with init_from, which brings its own model",
    ),
    (
        _is_no_time,
        "model=auto weighs models by what they learn in a time, and horizon={config.horizon} is none: give one, such "
        "as horizon=10min",
    ),
    (
        lambda asked: asked.model == "rerun" and asked.given.get("model") == "model=auto",
        "model=auto does not go with rerun, which brings its own model",
    ),
    (_shapes_choice, "{words} does not go with model=auto, which chooses it: leave one of them out"),
    (
        lambda asked: (
            asked.config.init_from and asked.first_of(lambda key: key == "model" or key.startswith("tokenizer"))
        ),
        "{words} does not go with init_from, which brings its own model and tokenizer",
    ),
    (
        lambda asked: asked.given.get("experiment") == "experiment=finetune" and not asked.config.init_from,
        "experiment=finetune is for weights that have been trained: name them with init_from=PATH",
    ),
    (
        lambda asked: asked.given.get("optim.name", ""),
        "{words} would keep the settings of another optimizer: write optim={config.optim.name}",
    ),
    (
        lambda asked: asked.first_of(
            lambda key: key.removeprefix("optim.") in unread_settings(asked.config.optim.name)
        ),
        "{words} has no effect with optim={config.optim.name}: its settings are in configs/optim",
    ),
)
