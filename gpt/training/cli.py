"""The command line of train.py: Hydra composes it, `parse_request` checks it, and each error is one line."""

import argparse
import contextlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
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
from gpt.training.config import REPLACED_KEYS, Config, describe_unknown_key
from gpt.training.overrides import is_multirun, original_spelling, quote_for_hydra
from gpt.training.request import Request, parse_request

# Hydra registers the defaults of all keys, so that any key can be set without a plus.
_defaults = {key: value for key, value in asdict(Config()).items() if key != "overrides"}
ConfigStore.instance().store(name="defaults", node=_defaults)

# The help of an option of hydra-core 1.3.8 is not a string but an object that prints itself. From Python 3.14 on,
# argparse refuses it: "badly formed help string". Hydra's main branch has mended this.
argparse.HelpFormatter._get_help_string = lambda self, action: str(action.help)  # type: ignore[method-assign]

QUOTES_HINT = "use quotes inside quotes, as in 'data.path=\"a,b.txt\"'"
EXPERIMENT_HINT = "an experiment file must begin with the line: # @package _global_"


def compose_and_run(job: Callable[[], Any]) -> None:
    """Let Hydra compose the configuration and run the job; with --multirun, once for each job of the sweep."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises its errors instead of printing them
    failure = None
    try:
        sys.argv[1:] = parse_arguments(sys.argv[1:])
        if is_multirun():
            prepare_sweep()
        job()
    except JobFailed as failed:
        failure = failed.args[0]
    except UserError:
        raise
    except (HydraException, OmegaConfBaseException, YAMLError, ValueError) as error:
        raise UserError(describe_hydra_error(error)) from None
    if failure is not None:
        raise failure


def parse_arguments(words: list[str]) -> list[str]:
    """Return a command line for Hydra; raise `UserError` for an option that does not exist."""
    for word in get_args_parser().parse_known_args(words)[1]:
        if word.startswith("--"):
            raise UserError(f"{word}: keys are written key=value, such as seed=3; see --help for the options there are")
    return quote_for_hydra(words)


def parse_composition(composed: DictConfig) -> Request:
    """Return the request of one job, as Hydra composed it.

    Raises:
        UserError: A key or a value is wrong, contradicts another, or would have no effect.
    """
    job, is_sweep = HydraConfig.get(), _is_sweep_job()
    words = job.overrides.task if is_sweep else sys.argv[1:]
    request = parse_request(
        to_plain_values(composed),
        parse_overrides(list(job.overrides.task)),
        model=job.runtime.choices.get("model", ""),  # a saved composition has no choices
        job=job.job.override_dirname if is_sweep else "",
        command=f"{distributed.launch_command()} {original_spelling(words)}".rstrip(),
    )
    if request.plan and is_sweep:
        raise UserError(f"plan={request.plan} describes one new run: leave out -m")
    return request


def parse_overrides(words: list[str]) -> dict[str, Any]:
    """Return the keys and groups that overrides set, each with its value."""
    overrides = OverridesParser.create().parse_overrides(words)
    return {str(override.key_or_group): override.value() for override in overrides}


def to_plain_values(composed: DictConfig) -> dict[str, Any]:
    """Return what Hydra composed as plain values, with every interpolation resolved."""
    try:
        values: Any = OmegaConf.to_container(composed, resolve=True)
    except OmegaConfBaseException as error:
        raise UserError(f"{error.full_key}: {str(error).splitlines()[0]}") from None
    if isinstance(values.get("experiment"), dict):
        raise UserError(EXPERIMENT_HINT)
    return values


def print_settings(request: Request) -> None:
    """Print the overrides of a new run, and in a sweep the number of its job."""
    job = HydraConfig.get()
    if not (request.plan or request.config.resume) and job.overrides.task and distributed.is_main_process():
        label = f"job {job.job.num}" if _is_sweep_job() else "settings"
        print_line(f"{label}: {original_spelling(job.overrides.task)}")


# --- sweeps ---


class JobFailed(BaseException):
    """Carries an error to `compose_and_run`. Hydra would catch and report any `Exception` on the way."""


def _is_sweep_job() -> bool:
    """Return True if Hydra runs the present job as one of a sweep."""
    return HydraConfig.get().mode == RunMode.MULTIRUN


def _job_name() -> str:
    job = HydraConfig.get()
    return f"job {job.job.num} ({' '.join(job.overrides.task)})"


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """Run a job so that Hydra prints none of its errors. In a sweep, print which job failed."""
    try:
        yield
    except SystemExit as error:
        is_signal = int(error.code or 0) > 128  # it ends the whole sweep
        if is_signal or not _is_sweep_job():
            raise
        print_warning(f"{_job_name()}: its processes have failed")
        raise UserError("a job of the sweep has failed") from None
    except Exception as error:
        if not _is_sweep_job():
            raise JobFailed(error) from None
        if isinstance(error, UserError | NonFiniteError | OSError):
            print_warning(" ".join(f"{_job_name()}: {error}".split()))
        raise


def prepare_sweep() -> None:
    """Name the jobs of a sweep in the command line, and check all jobs before the first one trains."""
    world_size = distributed.world_size()
    if world_size > 1:
        raise UserError(
            f"{world_size} processes were started, and a sweep needs one: use python train.py -m, with "
            "trainer.devices for several devices"
        )
    sys.argv.append(name_jobs(sys.argv[1:]))
    if not any("hydra/sweeper=" in word for word in sys.argv):
        check_jobs()


def name_jobs(words: list[str]) -> str:
    """Return an override with which Hydra's `override_dirname` names the jobs of a sweep by the keys that vary."""
    overrides = OverridesParser.create().parse_overrides([word for word in words if re.match("[^-]+=", word)])
    fixed_keys = [override.get_key_element() for override in overrides if not override.is_sweep_override()]
    return f"hydra.job.config.override_dirname.exclude_keys={json.dumps(fixed_keys)}"


def check_jobs() -> None:
    """Check the configurations of all jobs of a sweep.

    Raises:
        UserError: There are no jobs, or the configuration of one is wrong.
    """
    num_jobs = 0

    @hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name="train")
    def check(composed: DictConfig) -> None:
        nonlocal num_jobs
        num_jobs += 1
        try:
            parse_composition(composed)
        except UserError as error:
            raise JobFailed(UserError(f"{_job_name()}: {error}")) from None

    arguments = sys.argv
    with TemporaryDirectory() as folder:
        is_launcher = re.compile(r"\+*hydra[/.]launcher")
        sys.argv = [word for word in arguments if not is_launcher.match(word)] + [f"hydra.sweep.dir={folder}"]
        try:
            check()
        finally:
            sys.argv = arguments
    if num_jobs == 0:
        raise UserError("the sweep has no jobs: one of its ranges or globs is empty")


# --- Hydra's errors in one line ---


def describe_hydra_error(error: Exception) -> str:
    """Return an error of Hydra in one line, with a hint where there is one."""
    message = str(error)
    if ambiguous := re.match(r"Ambiguous value for argument '(.*)'", message):
        problem = "has several values: add -m to train with each, or brackets for a list"
        return f"{ambiguous[1]!r} {problem}; to give the value as it stands, {QUOTES_HINT}"
    if isinstance(error, OverrideParseException):
        override = str(getattr(error, "override", ""))
        hint = f"; to give the value as it stands, {QUOTES_HINT}"
        if "=" not in override:
            hint = f": to train on it, write data.path={override}" if os.path.exists(override) else ""
        return f"{override!r} is not key=value as Hydra reads it{hint}"
    if isinstance(error, MissingConfigException) and error.options:
        return _describe_unknown_choice(str(error.missing_cfg_file), error.options)
    if message.startswith("Config group override must be"):
        return "a group takes the name of one of its files, such as model=mini"
    if "@experiment." in message:
        return EXPERIMENT_HINT
    if unknown := re.match(r"Could not override '([^']+)'", message):
        return describe_unknown_key(unknown[1])
    return " ".join(line.strip() for line in message.splitlines() if line.strip())


def _describe_unknown_choice(file: str, options: Sequence[str]) -> str:
    """Return one line about a group that has no such file: `file` is GROUP/NAME."""
    group, _, name = file.rpartition("/")
    if file.startswith("data/"):  # the name may be a path
        group, _, name = file.partition("/")
    if replacement := REPLACED_KEYS.get(f"{group}={name}"):
        return f"there is no {group}={name} since version 1.0: use {replacement}"
    path = shell_quote(name) if os.path.exists(name) else "FILE"
    hints = {
        "data": f"; for your own text use data.path={path}",
        "tokenizer": "; byte is the closest to characters",
    }
    return f"{group}={name} is not known: choose from {', '.join(options)}{hints.get(group, '')}"
