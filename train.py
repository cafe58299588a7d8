"""Train a GPT: python train.py [key=value ...]. The keys and their values are in configs/."""

import os
import re
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from gpt.errors import NonFiniteError, UserError, command_line, write_line
from gpt.training.config import Config, refuse_large_yaml, to_plain, unknown_key, validate
from gpt.training.session import Session

ConfigStore.instance().store(name="defaults", node=to_plain(Config()))


def train(config: Config, overrides: list[str], model_name: str) -> float | None:
    """Begin or resume a run, train to the horizon and report; returns the validation loss."""
    refuse_contradictions(config, overrides)
    if config.resume:
        session = Session.resume(config.resume)
    else:
        session = Session.begin(config, f"{config.data.name}-{'tuned' if config.init_from else model_name}")
    if session is None:  # the run to resume is complete
        return None
    session.fit()
    session.report()
    return session.metrics["val_loss"]


class JobFailed(BaseException):
    """Carries an error past Hydra, which catches and reports every `Exception`, to `main`."""


@hydra.main(version_base="1.3", config_path="configs", config_name="train")
def job(composed: DictConfig) -> float | None:
    """Train as one composed configuration says; returns the validation loss, which a sweeper minimises."""
    chosen = HydraConfig.get()
    overrides = list(chosen.overrides.task)
    try:
        return train(validate(composed), overrides, chosen.runtime.choices["model"])
    except Exception as error:
        if chosen.mode != RunMode.MULTIRUN:
            raise JobFailed(error) from None
        name = f"job {chosen.job.num} ({' '.join(overrides)})"
        if isinstance(error, OSError):  # of the surroundings, such as a full disk
            raise
        if not isinstance(error, UserError | NonFiniteError):
            raise RuntimeError(f"{name} failed") from error
        write_line(f"train.py: {name}: {error}", sys.stderr)  # now, as the other jobs go on
        kind = NonFiniteError if isinstance(error, NonFiniteError) else UserError
        raise kind(f"job {chosen.job.num} of the sweep failed") from None


def main() -> None:
    """Have Hydra compose the configuration and train; with --multirun, once for each job."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # have Hydra raise its errors instead of printing them
    failure = None
    try:
        refuse_large_files(sys.argv[1:])
        if {"-m", "--multirun"} & set(sys.argv) and not any("hydra/sweeper=" in word for word in sys.argv):
            check_jobs()
        job()
    except JobFailed as failed:
        failure = failed.args[0]
    except UserError:
        raise
    except (HydraException, OmegaConfBaseException, YAMLError, ValueError) as error:
        raise UserError(describe(error)) from None
    if failure is not None:
        raise failure


# --- what is checked before a training, and how Hydra's errors read ---


def refuse_contradictions(config: Config, overrides: list[str]) -> None:
    """Raise `UserError` for overrides that conflict or would have no effect."""
    others = [override for override in overrides if not re.match(r"\+*resume=", override)]
    if config.resume and others:
        raise UserError(
            f"resume continues a run as it was configured, and {others[0]} would change it: "
            f"start a new run from its weights with init_from={config.resume}"
        )
    shapes = [o for o in overrides if re.match(r"\+*(model|tokenizer)\b", o) and "model.dropout=" not in o]
    if config.init_from and shapes:
        raise UserError(f"{shapes[0]} does not go with init_from, which brings its own model and tokenizer")
    if "experiment=finetune" in overrides and not config.init_from:
        raise UserError("experiment=finetune is for weights that have been trained: name them with init_from=PATH")
    of_muon = [o for o in overrides if re.match(r"\+*optim\.(matrix_\w+|momentum)=", o)]
    if config.optim.name != "muon" and of_muon:
        raise UserError(f"{of_muon[0]} has no effect with optim={config.optim.name}: it is a setting of optim=muon")


def refuse_large_files(arguments: list[str]) -> None:
    """Raise `UserError` if a YAML file of --config-dir would keep Hydra busy forever."""
    for i, word in enumerate(arguments):
        option, _, folder = word.partition("=")
        if option in ("--config-dir", "-cd"):
            for file in Path(folder or "".join(arguments[i + 1 : i + 2])).rglob("*.yaml"):
                refuse_large_yaml(file)


def check_jobs() -> None:
    """Raise `UserError` for the first job of a sweep whose configuration is wrong, before any job trains."""
    problems: list[str] = []

    @hydra.main(version_base="1.3", config_path="configs", config_name="train")
    def check(composed: DictConfig) -> None:
        chosen = HydraConfig.get()
        overrides = list(chosen.overrides.task)
        try:
            refuse_contradictions(validate(composed), overrides)
        except UserError as error:
            problems.append(f"job {chosen.job.num} ({' '.join(overrides)}): {error}")

    arguments = sys.argv
    with TemporaryDirectory() as folder:
        others = [word for word in arguments if not re.match(r"\+*hydra[/.]launcher", word)]
        sys.argv = [*others, f"hydra.sweep.dir={folder}"]
        try:
            check()
        finally:
            sys.argv = arguments
    if problems:
        raise UserError(problems[0])


def describe(error: Exception) -> str:
    """Condense an error of Hydra's to one line."""
    if isinstance(error, OverrideParseException):
        key, equals, value = str(error.override).partition("=")
        remedy = f"; to give the value as it stands, use quotes inside quotes: '{key}=\"{value}\"'" if equals else ""
        return f"{error.override!r} is not key=value as Hydra reads it{remedy}"
    if isinstance(error, MissingConfigException) and error.options:
        group, _, name = str(error.missing_cfg_file).rpartition("/")
        own = "; for a text of your own say data=text data.path=FILE" if group.startswith("data") else ""
        return f"{group}={name} is not known: choose from {', '.join(error.options)}{own}"
    if str(error).startswith("Config group override must be"):
        return "a group takes the name of one of its files, such as model=mini"
    if unknown := re.match(r"Could not override '([^']+)'", str(error)):
        return unknown_key(unknown[1])
    return " ".join(line.strip() for line in str(error).splitlines() if line.strip())


if __name__ == "__main__":
    with command_line("train.py"):
        main()
