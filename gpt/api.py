"""Train from Python, in a notebook or a script. `gpt.train` takes the keys of `python train.py`, without Hydra."""

import csv
import io
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpt.console import print_line
from gpt.errors import UserError, require_choice, summarize_error
from gpt.files import CONFIGS, flatten, read_yaml
from gpt.hardware.device import choose_device, default_settings
from gpt.loading import find_run, open_model
from gpt.sampling.language_model import LanguageModel
from gpt.training.callbacks import check_callbacks
from gpt.training.report import print_report, tensorboard_command
from gpt.training.request import Request, parse_request
from gpt.training.resume import resolve_resume_auto, resume_run
from gpt.training.start import start_run
from gpt.training.state import Result, RunSpec

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(repr=False)
class TrainedModel(LanguageModel):
    """The best model of a run, and the run.

    Args:
        run_dir: The directory of the run. `gpt.load` and every command take it.
        spec: The resolved run; None if no training was left to do.
        result: How the training ended; None if no training was left to do.
    """

    run_dir: Path
    spec: RunSpec | None = None
    result: Result | None = None

    def report(self) -> None:
        """Print the figures of the last validation, samples, and commands to try next."""
        if self.spec is None or self.result is None:
            print_line(f"nothing was left to train; the figures are in {self.run_dir / 'metrics.json'}")
        else:
            print_report(self.spec, self.run_dir, self.result, next_calls)

    def plot(self) -> "Axes":
        """Plot training and validation loss in nats per token; needs matplotlib."""
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
        """Resume a run that was stopped. With `horizon`, train until then, even if the run is complete."""
        return train(resume=self.run_dir, horizon=horizon)


@default_settings()
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

    Args:
        text: `data.path`: a file, a folder, a glob, a URL or a list of these. The default is Python's documentation.
        horizon: When the run ends, such as "2000steps", "3epochs" or "3min".
        seed, patience, init_from, run_dir: Keys of the configuration (docs/configuration.md).
        model, tokenizer, data, optim, trainer: Groups of keys: `optim="adamw"` is `optim=adamw` on the command line,
            and `model={"num_layers": 6}` is `model.num_layers=6`.
        resume: A run to resume. Only `horizon` may be added, and `text` if the text has moved. "auto" resumes the run
            in `run_dir`, or starts one if there is none.
        callbacks: Objects with hooks (docs/experiments.md).

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
        best_model, run_tokenizer = open_model(run_path)
        return TrainedModel(best_model.to(choose_device("auto")), run_tokenizer, run_path)
    from gpt.training.loop import run_training  # Lightning takes seconds to import: first check everything

    spec, run = started
    with run:
        result = run_training(spec, run, callbacks)
    if result.stop_reason in ("signal", "callback"):
        print_line(f"in Python: gpt.train(resume={str(run.path)!r})")
    best_model, run_tokenizer = open_model(run.path)
    return TrainedModel(best_model.to(spec.config.trainer.device), run_tokenizer, run.path, spec, result)


def next_calls(run_dir: Path, prompt: str, shorter: str, longer: str) -> Iterator[tuple[str, str]]:
    """Yield what to try next, as `gpt.training.report.next_commands` does, but as calls."""
    run = repr(str(run_dir))
    yield "sample it", f"print(gpt.load({run}).generate({prompt!r}))"
    yield "see why", f"gpt.load({run}).insight({prompt!r}).save('page.html')"
    yield "its curves", tensorboard_command(run_dir)
    if shorter:
        yield "run shorter", f"gpt.train(..., horizon={shorter!r})"
    else:
        yield "train longer" if longer else "continue", f"lm.resume({f'horizon={longer!r}' if longer else ''})"


def read_curves(run_dir: Path) -> dict[str, list[tuple[int, float]]]:
    """Return the (step, value) points of each curve in metrics.csv; no curves without that file."""
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
    """Return the checked request of a call of `train`. The settings are its arguments; None leaves one out."""
    keys: dict[str, Any] = {}
    groups: dict[str, dict[str, Any]] = {}
    for name, value in settings.items():
        if value is None:
            continue
        value = _to_plain(value)
        if name not in ("model", "tokenizer", "data", "optim", "trainer"):
            keys[name] = value
        elif isinstance(value, str | dict):
            groups[name] = {"name": value} if isinstance(value, str) else value
        else:
            raise UserError(f"{name}={value!r:.100} is neither a name nor a dictionary of keys: see gpt.train")
    if text is not None:
        groups["data"] = {"path": _to_paths(text)} | groups.get("data", {})
    values = keys | {group: _add_file(group, group_keys) for group, group_keys in groups.items()}
    overrides = {key.removesuffix(".name"): value for key, value in flatten(keys | groups).items()}
    model_name = groups.get("model", {}).get("name", "")
    return resolve_resume_auto(parse_request(values, overrides, model=model_name))


def _to_plain(value: Any) -> Any:
    """Return a value with lists for tuples, strings for paths, and Python's own numbers for NumPy's and PyTorch's."""
    if isinstance(value, dict):
        return {key: _to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_to_plain(item) for item in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return value.tolist() if hasattr(value, "tolist") else value


def _to_paths(text: Any) -> str | list[str]:
    """Return the path or the list of paths that `text` of `gpt.train` is; `UserError` if it is anything else."""
    value = _to_plain(text)
    if isinstance(value, str) and value:
        return value
    is_iterable = isinstance(value, Iterable) and not isinstance(value, str | bytes | dict | io.IOBase)
    paths = [_to_plain(item) for item in value] if is_iterable else []
    if paths and all(isinstance(path, str) for path in paths):
        return paths
    raise UserError(f"text={text!r:.100} is neither a path nor a list of paths: leave it out for the default text")


def _add_file(group: str, keys: dict[str, Any]) -> dict[str, Any]:
    """Return a group's keys. If one is `name`, the file of that name in configs/ gives the defaults of the others."""
    if keys.get("name") is None:
        return keys
    files = {file.stem: file for file in sorted((CONFIGS / group).glob("*.yaml"))}
    require_choice(group, keys["name"], tuple(files))
    defaults = read_yaml(files[keys["name"]]) or {}
    return defaults | {key: value for key, value in keys.items() if key != "name"}
