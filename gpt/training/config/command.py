"""The command line of train.py: what Hydra composes, checked, and each error in one line."""

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
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from gpt.console import say, warn
from gpt.errors import NonFiniteError, UserError
from gpt.files import CONFIGS
from gpt.training import distributed
from gpt.training.config.asked import Asked
from gpt.training.config.loading import callbacks_of, composed_values, validate
from gpt.training.config.schema import NOTES, Config
from gpt.training.config.words import as_typed, describe, for_hydra, given_by, is_sweep
from gpt.training.resume import resolve_resume_auto

defaults = {key: value for key, value in asdict(Config()).items() if key not in NOTES}
ConfigStore.instance().store(name="defaults", node=defaults)

# Hydra adds an option whose help is no string but an object that prints itself, which argparse refuses to look into
# from Python 3.14 on: "badly formed help string". hydra-core 1.3.8 still does; its main branch no longer.
argparse.HelpFormatter._get_help_string = lambda self, action: str(action.help)  # type: ignore[method-assign]


def ask(composed: DictConfig) -> Asked:
    """Check what Hydra has composed; `UserError` if it is wrong, contradicts itself, or would have no effect."""
    asked = resolve_resume_auto(_checked(composed))
    chosen = HydraConfig.get()
    if not (asked.plan or asked.config.resume) and chosen.overrides.task and distributed.is_main_process():
        job = f"job {chosen.job.num}" if chosen.mode == RunMode.MULTIRUN else "settings"
        say(f"{job}: {as_typed(chosen.overrides.task)}")
    return asked


def _checked(composed: DictConfig) -> Asked:
    chosen = HydraConfig.get()
    given = given_by(list(chosen.overrides.task))
    plan = str(composed.get("plan") or False).lower()
    if plan not in ("true", "json", "false"):
        raise UserError(f"plan={plan} is not known: choose from true, json, false")
    if plan != "false" and (composed.get("resume") or chosen.mode == RunMode.MULTIRUN or distributed.world_size() > 1):
        raise UserError(f"plan={plan} describes one new run, in one process: leave out -m, resume and torchrun")
    model = "rerun" if composed.get("rerun") else chosen.runtime.choices.get("model", "")  # not of a saved composition
    config = validate(composed_values(composed, list(given)))
    job = chosen.job.override_dirname if chosen.mode == RunMode.MULTIRUN else ""
    return Asked(config, given, model, tuple(callbacks_of(composed)), "" if plan == "false" else plan, job)


class JobFailed(BaseException):
    """Carries an error past Hydra, which catches and reports every `Exception`, to `compose_and_run`."""


@contextlib.contextmanager
def in_one_line() -> Iterator[None]:
    """Run a job so that Hydra reports no error of it. In a sweep, with which Hydra goes on, say which job failed."""
    chosen = HydraConfig.get()
    try:
        yield
    except SystemExit as ended:
        if chosen.mode != RunMode.MULTIRUN or int(ended.code or 0) > 128:  # by a signal, for the whole sweep
            raise
        warn(f"job {chosen.job.num} ({' '.join(chosen.overrides.task)}): its processes have failed")
        raise UserError("a job of the sweep has failed") from None
    except Exception as error:
        if chosen.mode != RunMode.MULTIRUN:
            raise JobFailed(error) from None
        if isinstance(error, UserError | NonFiniteError | OSError):
            warn(" ".join(f"job {chosen.job.num} ({' '.join(chosen.overrides.task)}): {error}".split()))
        raise


def compose_and_run(job: Callable[[], Any]) -> None:
    """Have Hydra compose the configuration and run the job; with --multirun, once for each job of the sweep."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # have Hydra raise its errors instead of printing them
    failure = None
    try:
        sys.argv[1:] = for_hydra(sys.argv[1:])
        if is_sweep():
            if distributed.world_size() > 1:
                raise UserError(
                    f"{distributed.world_size()} processes were started, and a sweep is one: use python train.py -m, "
                    "with trainer.devices for several devices"
                )
            sys.argv[1:] = [*sys.argv[1:], naming_jobs(sys.argv[1:])]
            if not any("hydra/sweeper=" in word for word in sys.argv):
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


def naming_jobs(words: list[str]) -> str:
    """An override that has Hydra name the jobs of a sweep, as `override_dirname`, by those keys alone that vary."""
    overrides = OverridesParser.create().parse_overrides([word for word in words if re.match("[^-]+=", word)])
    fixed = [one.get_key_element() for one in overrides if not one.is_sweep_override()]
    return f"hydra.job.config.override_dirname.exclude_keys={json.dumps(fixed)}"


def check_jobs() -> None:
    """Raise `UserError` for a sweep without jobs, or its first job whose configuration is wrong, before any trains."""
    jobs: list[list[str]] = []

    @hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name="train")
    def check(composed: DictConfig) -> None:
        chosen = HydraConfig.get()
        jobs.append(list(chosen.overrides.task))
        try:
            _checked(composed)
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
