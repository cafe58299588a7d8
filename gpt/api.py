"""Training from Python, in a notebook or a script: `gpt.train` takes the keys of `python train.py`, without Hydra."""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpt.console import print_line
from gpt.errors import UserError, require_choice, summarize_error
from gpt.files import CONFIGS, flatten, read_yaml
from gpt.hardware.device import choose_device
from gpt.loading import find_run, open_model
from gpt.sampling.language_model import LanguageModel
from gpt.training.callbacks import check_callbacks
from gpt.training.report import report
from gpt.training.request import Request, parse_request
from gpt.training.resume import resolve_resume_auto, resume_run
from gpt.training.start import start_run
from gpt.training.state import Result, RunSpec

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(repr=False)
class TrainedModel(LanguageModel):
    """The best model of a run so far, and the run."""

    run_dir: Path  # the directory of the run, which `gpt.load` and every command take
    spec: RunSpec | None = None  # what was trained; None if nothing was left to train
    result: Result | None = None  # how that ended

    def report(self) -> None:
        """Print the figures of the last validation, samples, and commands to try next."""
        if self.spec is None or self.result is None:
            print_line(f"nothing was left to train; the figures are in {self.run_dir / 'metrics.json'}")
        else:
            report(self.spec, self.run_dir, self.result)

    def plot(self) -> "Axes":
        """Draw training and validation loss, in nats per token, over the steps so far; needs matplotlib."""
        try:
            import matplotlib.pyplot as plt
        except ImportError:
            raise UserError("plot() needs a package that is not installed: pip install matplotlib") from None
        axes: Axes = plt.subplots(figsize=(8, 3.5), layout="constrained")[1]
        curves = read_curves(self.run_dir)
        for tag in ("train/loss", "val/loss"):
            if tag in curves:
                axes.plot(*zip(*curves[tag], strict=True), label=tag)
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
    callbacks: Sequence[Any] = (),
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
    check_callbacks(callbacks)
    request = make_request(
        text,
        horizon=horizon,
        seed=seed,
        model=model,
        tokenizer=tokenizer,
        data=data,
        optim=optim,
        trainer=trainer,
        patience=patience,
        init_from=init_from,
        run_dir=run_dir,
        resume=resume,
    )
    started = resume_run(request) if request.config.resume else start_run(request)
    if started is None:
        if resume != "auto":
            raise UserError(f"{resume} is complete: give a longer horizon, or open it with gpt.load({str(resume)!r})")
        run_path = find_run(request.config.resume or "")
        best, own_tokenizer = open_model(run_path)
        return TrainedModel(best.to(choose_device("auto")), own_tokenizer, run_path)
    from gpt.training.loop import run_training  # imports Lightning, which takes seconds: only once all is checked

    spec, run = started
    with run:
        result = run_training(spec, run, callbacks)
    best, own_tokenizer = open_model(run.path)
    return TrainedModel(best.to(spec.config.trainer.device), own_tokenizer, run.path, spec, result)


def read_curves(run_dir: Path) -> dict[str, list[tuple[int, float]]]:
    """Return the (step, value) points of each curve in metrics.csv; none without that file."""
    curves: dict[str, list[tuple[int, float]]] = {}
    file = run_dir / "metrics.csv"
    if file.is_file():
        try:
            with file.open(encoding="utf-8", newline="") as stream:
                for row in csv.DictReader(stream):
                    curves.setdefault(row["tag"], []).append((int(row["step"]), float(row["value"])))
        except (OSError, ValueError, KeyError, TypeError, csv.Error) as error:
            raise UserError(f"{file}: damaged ({summarize_error(error)}): move it away") from None
    return curves


def make_request(text: str | Path | Sequence[str | Path] | None = None, **settings: Any) -> Request:
    """Return the checked request of a call of `train`, whose parameters these are; None leaves a setting out."""
    settings = {key: value for key, value in settings.items() if value is not None}
    plain = {key: str(value) if isinstance(value, Path) else value for key, value in settings.items()}
    groups: dict[str, dict[str, Any]] = {
        group: {"name": keys} if isinstance(keys := plain.pop(group), str) else dict(keys)
        for group in ("model", "tokenizer", "data", "optim", "trainer")
        if group in plain
    }
    if text is not None:
        path = str(text) if isinstance(text, str | Path) else [str(file) for file in text]
        groups["data"] = {"path": path} | groups.get("data", {})
    values = plain | {group: _with_file(group, keys) for group, keys in groups.items()}
    overrides = {key.removesuffix(".name"): value for key, value in flatten(plain | groups).items()}
    model_name = groups.get("model", {}).get("name", "")
    return resolve_resume_auto(parse_request(values, overrides, model=model_name, in_python=True))


def _with_file(group: str, keys: dict[str, Any]) -> dict[str, Any]:
    """The keys of a group, over those of the file in configs/ that its name, if there is one, stands for."""
    if (name := keys.get("name")) is None:
        return keys
    known = {file.stem: file for file in sorted((CONFIGS / group).glob("*.yaml"))}
    require_choice(group, name, tuple(known))
    return (read_yaml(known[name]) or {}) | {key: value for key, value in keys.items() if key != "name"}
