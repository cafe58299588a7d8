"""Train a GPT: python train.py [key=value ...]. The keys and their values are in configs/."""

import os
import re
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from gpt.errors import UserError, command_line
from gpt.training.callbacks import load_callbacks
from gpt.training.config import (
    Config,
    callbacks_of,
    keys_of,
    refuse_large_yaml,
    to_plain,
    unknown_key,
    validate,
    with_rerun,
)
from gpt.training.following import follow
from gpt.training.forecast import plan_of, print_plan
from gpt.training.habits import quoted, rewritten
from gpt.training.processes import lead_or_follow
from gpt.training.requeue import begin_or_continue
from gpt.training.runs import text_name
from gpt.training.session import Session, say
from gpt.training.sweeps import failing_at_the_end, note_failure

ConfigStore.instance().store(name="defaults", node=to_plain(Config()))


def train(config: Config, overrides: list[str], model_name: str, names: list[str]) -> float | None:
    """Begin or resume a run, train to the horizon and report; returns the last validation in bits per byte.

    `names` lists the user's callbacks as module:name.
    """
    callbacks = load_callbacks(names)
    longer = config.resume != "auto" and any(re.match(r"\+*horizon=", override) for override in overrides)
    if config.resume == "auto":
        config = begin_or_continue(config)
    if config.resume:
        trainer = config.trainer
        session = Session.resume(config.resume, config.horizon if longer else None, trainer.devices, trainer.num_nodes)
    else:
        session = Session.begin(config, f"{text_name(config.data)}-{'tuned' if config.init_from else model_name}")
    if session is None:  # the run to resume is complete
        return None
    session.fit(callbacks, names)
    session.report()
    return session.metrics["val_bits_per_byte"]


class JobFailed(BaseException):
    """Carries an error past Hydra, which catches and reports every `Exception`, to `main`."""


@hydra.main(version_base="1.3", config_path="configs", config_name="train")
def job(composed: DictConfig) -> float | None:
    """Train as one composed configuration says; returns the bits per byte, which a sweeper minimises."""
    chosen = HydraConfig.get()
    overrides, single = list(chosen.overrides.task), chosen.mode != RunMode.MULTIRUN
    try:
        config = validate(with_rerun(composed, overrides))
        refuse_contradictions(config, overrides)
        if asked := plan_of(composed, overrides, single):
            print_plan(config, asked)
            return None
        if overrides and config.resume in (None, "auto"):
            say(f"{'settings' if single else f'job {chosen.job.num}'}: {' '.join(overrides)}")
        model_name = "rerun" if composed.get("rerun") else chosen.runtime.choices["model"]
        return train(config, overrides, model_name, callbacks_of(composed, overrides))
    except Exception as error:
        if single:
            raise JobFailed(error) from None
        return note_failure(f"job {chosen.job.num} ({' '.join(overrides)})", error)


def main() -> None:
    """Have Hydra compose the configuration and train; with --multirun, once for each job."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # have Hydra raise its errors instead of printing them
    failure = None
    try:
        sys.argv[1:] = rewritten(sys.argv[1:], get_args_parser().parse_known_args()[1], keys_of(Config))
        refuse_large_files(sys.argv[1:])
        if {"-m", "--multirun"} & set(sys.argv):
            if not any("hydra/sweeper=" in word for word in sys.argv):
                check_jobs()
            with failing_at_the_end() as override:
                sys.argv.append(override)
                job()
        else:
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
    with_resume = r"\+*(resume|horizon|callbacks|plan|trainer\.devices|trainer\.num_nodes)="
    others = [override for override in overrides if not re.match(with_resume, override)]
    if config.resume not in (None, "auto") and others:
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
    """Raise `UserError` for a sweep without jobs, or its first job whose configuration is wrong, before any trains."""
    problems: list[str] = []
    jobs: list[list[str]] = []

    @hydra.main(version_base="1.3", config_path="configs", config_name="train")
    def check(composed: DictConfig) -> None:
        chosen = HydraConfig.get()
        overrides = list(chosen.overrides.task)
        try:
            jobs.append(overrides)
            plan_of(composed, overrides, single=False)
            refuse_contradictions(validate(with_rerun(composed, overrides)), overrides)
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
    if not jobs:
        raise UserError("the sweep has no jobs: one of its ranges or globs is empty")


def describe(error: Exception) -> str:
    """Condense an error of Hydra's to one line."""
    several = re.match(r"Ambiguous value for argument '(.*)'", str(error))
    if isinstance(error, OverrideParseException) or several:
        override = several[1] if several else str(getattr(error, "override", ""))
        what = "is not key=value as Hydra reads it"
        if several:
            what = "has several values: add -m to train with each, or brackets for a list"
        remedy = f"; to give the value as it stands, use quotes inside quotes: {quoted(override)}"
        return f"{override!r} {what}{remedy if '=' in override else ''}"
    if isinstance(error, MissingConfigException) and error.options:
        group, _, name = str(error.missing_cfg_file).rpartition("/")
        own = "; for a text of your own say data=text data.path=FILE" if group.startswith("data") else ""
        return f"{group}={name} is not known: choose from {', '.join(error.options)}{own}"
    if str(error).startswith("Config group override must be"):
        return "a group takes the name of one of its files, such as model=mini"
    if "@experiment." in str(error):
        return "an experiment file must begin with the line: # @package _global_"
    if unknown := re.match(r"Could not override '([^']+)'", str(error)):
        return unknown_key(unknown[1])
    return " ".join(line.strip() for line in str(error).splitlines() if line.strip())


if __name__ == "__main__":
    with command_line("train.py"):
        lead_or_follow(main, follow)
