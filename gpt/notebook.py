"""Training from Python, in a notebook or a script: `gpt.train` takes the keys of `python train.py`, without Hydra."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpt.compare import read_curves
from gpt.errors import UserError, require_choice
from gpt.exchange.loading import open_model
from gpt.files import CONFIGS, read_yaml
from gpt.sampling.language_model import LanguageModel
from gpt.training.config.loading import validate
from gpt.training.decide import begin
from gpt.training.decide import resume as continued
from gpt.training.session import Session

if TYPE_CHECKING:
    from lightning import Callback
    from matplotlib.axes import Axes


@dataclass(repr=False)
class TrainedModel(LanguageModel):
    """The best model of a run so far, and the run."""

    session: Session

    @property
    def run_dir(self) -> Path:
        """The directory of the run, which `gpt.load` and every command take."""
        return self.session.run_dir

    def report(self) -> None:
        """Print the figures of the last validation, samples, and commands to try next."""
        self.session.report()

    def plot(self) -> "Axes":
        """Draw training and validation loss, in nats per token, over the steps so far; needs matplotlib."""
        try:
            import matplotlib.pyplot as plt
        except ImportError:
            raise UserError("plot() needs a package that is not installed: pip install matplotlib") from None
        axes: Axes = plt.subplots(figsize=(8, 3.5), layout="constrained")[1]
        for tag, points in read_curves(self.run_dir, ("train/loss", "val/loss")).items():
            axes.plot(*zip(*points, strict=True), label=tag) if points else None
        axes.set(xlabel="step", ylabel="nats per token")
        axes.legend()
        return axes

    def resume(self, horizon: str | None = None) -> "TrainedModel":
        """Go on with a run that was stopped; with `horizon`, until then, whether it is complete or not."""
        return train(resume=self.run_dir, horizon=horizon)


def train(
    text: str | Path | Sequence[str | Path] | None = None,
    *,
    horizon: str | None = None,
    seed: int | None = None,
    model: str | dict[str, Any] | None = None,
    tokenizer: str | dict[str, Any] | None = None,
    data: str | dict[str, Any] | None = None,
    optim: str | dict[str, Any] | None = None,
    trainer: dict[str, Any] | None = None,
    patience: int | None = None,
    init_from: str | Path | None = None,
    run_dir: str | Path | None = None,
    resume: str | Path | None = None,
    callbacks: Sequence["Callback"] = (),
) -> TrainedModel:
    """Train as `python train.py` does, and open the best model of the run.

    `text` is what `data.path` takes: a file, a folder, a glob, a URL or a list of these; by default the documentation
    of this Python. `horizon` is a length such as "2000steps", "3epochs" or "3min". `optim="adamw"` and
    `model={"num_layers": 6}` stand for `optim=adamw` and `model.num_layers=6`, and so do the other groups of keys
    (docs/configuration.md). `resume` continues a run, to which only `horizon` may be added, and `text` if that has
    moved.

    Ctrl-C, or interrupting the kernel, ends the training after a step and a checkpoint.
    Raises `UserError`, a `ValueError` of one line, for a wrong setting.
    """
    given: dict[str, Any] = {"seed": seed, "patience": patience, "init_from": init_from, "run_dir": run_dir}
    groups = {"model": model, "tokenizer": tokenizer, "data": data, "optim": optim, "trainer": trainer}
    given |= {group: _settings(group, keys) for group, keys in groups.items() if keys is not None}
    values: dict[str, Any] = {
        key: str(one) if isinstance(one, Path) else one for key, one in given.items() if one is not None
    }
    path = str(text) if isinstance(text, str | Path) else text and [str(one) for one in text]
    if path is not None and resume is None:
        values["data"] = {"name": "text", "path": path} | values.get("data", {})
    session: Session | None
    if resume is None:
        config = validate(values | ({"horizon": horizon} if horizon else {}))
        session = begin(config, model if isinstance(model, str) else "", kept=list(values.get("model", {})))
    elif values:
        first = next(iter(values))
        raise UserError(
            f"resume continues a run as it was, and {first} would change it: start a new one with init_from"
        )
    elif not (session := continued(str(resume), horizon, text=path)):
        raise UserError(f"{resume} is complete: give a longer horizon, or open it with gpt.load({str(resume)!r})")
    session.in_python = True
    session.fit(callbacks)
    best, own = open_model(session.run_dir)
    return TrainedModel(best.to(session.config.trainer.device), own, session)


def _settings(group: str, given: str | dict[str, Any]) -> dict[str, Any]:
    """The keys of a group: those of the file in configs/ that is named, if any, and those that are given."""
    keys = {"name": given} if isinstance(given, str) else given
    if (name := keys.get("name")) is None:
        return keys
    known = {file.stem: file for file in sorted((CONFIGS / group).glob("*.yaml"))}
    require_choice(group, name, tuple(known))
    return read_yaml(known[name]) | ({} if isinstance(given, str) else given)
