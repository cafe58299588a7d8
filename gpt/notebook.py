"""Training from Python, in a notebook or a script: `gpt.train` takes the keys of `python train.py`, without Hydra."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpt.compare import read_curves
from gpt.errors import UserError, require_choice
from gpt.exchange.loading import open_model
from gpt.files import CONFIGS, flatten, read_yaml
from gpt.hardware.device import choose_device
from gpt.sampling.language_model import LanguageModel
from gpt.training.begin import begin
from gpt.training.config.asked import Asked
from gpt.training.config.loading import validate
from gpt.training.metrics.report import report
from gpt.training.resume import resume as continue_run
from gpt.training.resume import settle_auto
from gpt.training.run.run import Run

if TYPE_CHECKING:
    from lightning import Callback
    from matplotlib.axes import Axes


@dataclass(repr=False)
class TrainedModel(LanguageModel):
    """The best model of a run so far, and the run."""

    run: Run

    @property
    def run_dir(self) -> Path:
        """The directory of the run, which `gpt.load` and every command take."""
        return self.run.directory

    def report(self) -> None:
        """Print the figures of the last validation, samples, and commands to try next."""
        report(self.run)

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
    moved; `resume="auto"` begins a run in `run_dir`, or continues the one that is there.

    Ctrl-C, or interrupting the kernel, ends the training after a step and a checkpoint.
    Raises `UserError`, a `ValueError` of one line, for a wrong setting.
    """
    single: dict[str, Any] = {"horizon": horizon, "seed": seed, "patience": patience, "init_from": init_from}
    single |= {"run_dir": run_dir, "resume": resume}
    plain = {key: str(one) if isinstance(one, Path) else one for key, one in single.items() if one is not None}
    several = {"model": model, "tokenizer": tokenizer, "data": data, "optim": optim, "trainer": trainer}
    groups: dict[str, dict[str, Any]] = {
        group: {"name": keys} if isinstance(keys, str) else dict(keys)
        for group, keys in several.items()
        if keys is not None
    }
    values: dict[str, Any] = plain | {group: _with_file(group, keys) for group, keys in groups.items()}
    if text is not None:
        path = str(text) if isinstance(text, str | Path) else [str(one) for one in text]
        groups["data"] = {"path": path} | groups.get("data", {})
        values["data"] = {"name": "text", "path": path} | values.get("data", {})
    given = {key.removesuffix(".name"): value for key, value in flatten(plain | groups).items()}
    words = {key: f"{key}={value}" for key, value in given.items()}
    asked = settle_auto(Asked(validate(values), words, groups.get("model", {}).get("name", ""), in_python=True))
    run = continue_run(asked) if asked.config.resume else begin(asked)
    if run.complete and resume != "auto":
        raise UserError(f"{resume} is complete: give a longer horizon, or open it with gpt.load({str(resume)!r})")
    if not run.complete:
        from gpt.training.fit import fit  # and so Lightning, once everything is found to be right

        with run:
            fit(run, callbacks)
    best, own = open_model(run.directory)
    device = choose_device("auto" if run.complete else run.config.trainer.device)  # perhaps of another machine
    return TrainedModel(best.to(device), own, run)


def _with_file(group: str, keys: dict[str, Any]) -> dict[str, Any]:
    """The keys of a group, over those of the file in configs/ that its name, if there is one, stands for."""
    if (name := keys.get("name")) is None:
        return keys
    known = {file.stem: file for file in sorted((CONFIGS / group).glob("*.yaml"))}
    require_choice(group, name, tuple(known))
    return (read_yaml(known[name]) or {}) | {key: value for key, value in keys.items() if key != "name"}
