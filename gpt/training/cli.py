"""The command line of train.py: Hydra composes it, a request is parsed from it, and each error is one line."""

import argparse
import contextlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from tempfile import TemporaryDirectory
from typing import Any

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from gpt.console import print_line, print_warning, shell_quote
from gpt.errors import NonFiniteError, UserError
from gpt.files import CONFIGS
from gpt.training import distributed
from gpt.training.config import DROPPED, Config, describe_unknown_key
from gpt.training.overrides import is_sweep, original_spelling, quote_for_hydra
from gpt.training.request import Request, parse_request

defaults = {key: value for key, value in asdict(Config()).items() if key != "overrides"}
ConfigStore.instance().store(name="defaults", node=defaults)

# Hydra adds an option whose help is no string but an object that prints itself, which argparse refuses to look into
# from Python 3.14 on: "badly formed help string". hydra-core 1.3.8 still does; its main branch no longer.
argparse.HelpFormatter._get_help_string = lambda self, action: str(action.help)  # type: ignore[method-assign]


def parse_composition(composed: DictConfig) -> Request:
    """Return the request of one job, as Hydra has composed it.

    Raises:
        UserError: A key or a value is wrong, contradicts another, or would have no effect.
    """
    job = HydraConfig.get()
    is_job = job.mode == RunMode.MULTIRUN
    words = job.overrides.task if is_job else sys.argv[1:]
    return parse_request(
        to_plain_values(composed),
        parse_overrides(list(job.overrides.task)),
        model=job.runtime.choices.get("model", ""),  # a saved composition has no choices
        job=job.job.override_dirname if is_job else "",
        command=f"{distributed.launch_command()} {original_spelling(words)}".rstrip(),
        is_sweep=is_job,
    )


def parse_overrides(words: list[str]) -> dict[str, Any]:
    """Return the keys and groups that overrides set, each with its value."""
    overrides = OverridesParser.create().parse_overrides(words)
    return {str(override.key_or_group): override.value() for override in overrides}


def to_plain_values(composed: DictConfig) -> dict[str, Any]:
    """Return what Hydra has composed as plain values, with every interpolation resolved."""
    try:
        values: Any = OmegaConf.to_container(composed, resolve=True)
    except OmegaConfBaseException as error:
        raise UserError(f"{error.full_key}: {str(error).splitlines()[0]}") from None
    if isinstance(values.get("experiment"), dict):
        raise UserError("an experiment file must begin with the line: # @package _global_")
    return values


def print_settings(request: Request) -> None:
    """Print the overrides of a new run, and in a sweep the number of its job."""
    job = HydraConfig.get()
    if not (request.plan or request.config.resume) and job.overrides.task and distributed.is_main_process():
        label = f"job {job.job.num}" if job.mode == RunMode.MULTIRUN else "settings"
        print_line(f"{label}: {original_spelling(job.overrides.task)}")


class JobFailed(BaseException):
    """Carries an error past Hydra, which catches and reports every `Exception`, to `compose_and_run`."""


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """Run a job so that Hydra prints none of its errors. In a sweep, print which job failed."""
    chosen = HydraConfig.get()
    try:
        yield
    except SystemExit as ended:
        if chosen.mode != RunMode.MULTIRUN or int(ended.code or 0) > 128:  # by a signal, for the whole sweep
            raise
        print_warning(f"job {chosen.job.num} ({' '.join(chosen.overrides.task)}): its processes have failed")
        raise UserError("a job of the sweep has failed") from None
    except Exception as error:
        if chosen.mode != RunMode.MULTIRUN:
            raise JobFailed(error) from None
        if isinstance(error, UserError | NonFiniteError | OSError):
            print_warning(" ".join(f"job {chosen.job.num} ({' '.join(chosen.overrides.task)}): {error}".split()))
        raise


def parse_arguments(words: list[str]) -> list[str]:
    """Return a command line as Hydra takes it; `UserError` for an option that does not exist."""
    for word in get_args_parser().parse_known_args(words)[1]:
        if word.startswith("--"):
            raise UserError(f"{word}: keys are written key=value, such as seed=3; see --help for the options there are")
    return quote_for_hydra(words)


def compose_and_run(job: Callable[[], Any]) -> None:
    """Have Hydra compose the configuration and run the job; with --multirun, once for each job of the sweep."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # have Hydra raise its errors instead of printing them
    failure = None
    try:
        sys.argv[1:] = parse_arguments(sys.argv[1:])
        if is_sweep():
            if distributed.world_size() > 1:
                raise UserError(
                    f"{distributed.world_size()} processes were started, and a sweep is one: use python train.py -m, "
                    "with trainer.devices for several devices"
                )
            sys.argv[1:] = [*sys.argv[1:], name_jobs(sys.argv[1:])]
            if not any("hydra/sweeper=" in word for word in sys.argv):
                check_jobs()
        job()
    except JobFailed as failed:
        failure = failed.args[0]
    except UserError:
        raise
    except (HydraException, OmegaConfBaseException, YAMLError, ValueError) as error:
        raise UserError(describe_hydra_error(error)) from None
    if failure is not None:
        raise failure


def name_jobs(words: list[str]) -> str:
    """Return an override with which Hydra's `override_dirname` names the jobs of a sweep by the keys that vary."""
    overrides = OverridesParser.create().parse_overrides([word for word in words if re.match("[^-]+=", word)])
    fixed = [one.get_key_element() for one in overrides if not one.is_sweep_override()]
    return f"hydra.job.config.override_dirname.exclude_keys={json.dumps(fixed)}"


def check_jobs() -> None:
    """Check all jobs of a sweep before the first one trains.

    Raises:
        UserError: There are no jobs, or the configuration of one is wrong.
    """
    jobs: list[list[str]] = []

    @hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name="train")
    def check(composed: DictConfig) -> None:
        chosen = HydraConfig.get()
        jobs.append(list(chosen.overrides.task))
        try:
            parse_composition(composed)
        except UserError as error:
            raise JobFailed(UserError(f"job {chosen.job.num} ({' '.join(jobs[-1])}): {error}")) from None

    arguments = sys.argv
    with TemporaryDirectory() as folder:
        others = [word for word in arguments if not word.lstrip("+").startswith(("hydra/launcher", "hydra.launcher"))]
        sys.argv = [*others, f"hydra.sweep.dir={folder}"]
        try:
            check()
        finally:
            sys.argv = arguments
    if not jobs:
        raise UserError("the sweep has no jobs: one of its ranges or globs is empty")


def describe_hydra_error(error: Exception) -> str:
    """Return an error of Hydra in one line."""
    several = re.match(r"Ambiguous value for argument '(.*)'", str(error))
    if isinstance(error, OverrideParseException) or several:
        override = several[1] if several else str(getattr(error, "override", ""))
        what = "is not key=value as Hydra reads it"
        if several:
            what = "has several values: add -m to train with each, or brackets for a list"
        hint = "; to give the value as it stands, use quotes inside quotes, as in 'data.path=\"a,b.txt\"'"
        if "=" not in override:
            hint = f": to train on it, write data.path={override}" if os.path.exists(override) else ""
        return f"{override!r} {what}{hint}"
    if isinstance(error, MissingConfigException) and error.options:
        group, _, name = str(error.missing_cfg_file).rpartition("/")
        if group.startswith("data/"):  # a path
            group, _, name = str(error.missing_cfg_file).partition("/")
        if hint := DROPPED.get(f"{group}={name}"):
            return f"there is no {group}={name} since version 1.0: use {hint}"
        file = shell_quote(name) if os.path.exists(name) else "FILE"
        own = {
            "data": f"; for a text of your own say data.path={file}",
            "tokenizer": "; byte comes closest to characters",
        }
        return f"{group}={name} is not known: choose from {', '.join(error.options)}{own.get(group, '')}"
    if str(error).startswith("Config group override must be"):
        return "a group takes the name of one of its files, such as model=mini"
    if "@experiment." in str(error):
        return "an experiment file must begin with the line: # @package _global_"
    if unknown := re.match(r"Could not override '([^']+)'", str(error)):
        return describe_unknown_key(unknown[1])
    return " ".join(line.strip() for line in str(error).splitlines() if line.strip())
