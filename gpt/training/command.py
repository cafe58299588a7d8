"""The command line of train.py: what Hydra composes, checked, and its errors in one line each."""

import argparse
import contextlib
import json
import math
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from multiprocessing import active_children, parent_process
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from gpt.console import quote, say, warn
from gpt.errors import NonFiniteError, UserError
from gpt.exchange.loading import find_run
from gpt.files import CONFIGS
from gpt.training.checkpoints.signals import SIGNALS, SWEEP
from gpt.training.config.loading import asked_for, callbacks_of, read, unknown_key, validate
from gpt.training.config.schema import NOTES, SHAPE, Config
from gpt.training.decide import begin, new_or_resumed, resume
from gpt.training.distributed.launch import is_rank_0, ranks
from gpt.training.estimate.forecast import plan_of
from gpt.training.optim import unread_settings
from gpt.training.session import Session

PATHS = re.compile(r"(\+{0,2}(?:run_dir|resume|rerun|init_from|data\.(?:path|cache|separator)))=(.*)", re.S)
_typed: dict[str, str] = {}  # words as they were typed, by what Hydra reads
# Files in the folder of a sweep: why jobs failed, how the others ended, and that a signal has come.
FAILED, FINISHED, STOPPED = "failed", "finished", "stopped"

defaults = {key: value for key, value in asdict(Config()).items() if key not in NOTES}
ConfigStore.instance().store(name="defaults", node=defaults)


@dataclass(frozen=True)
class Request:
    """What the user asks for: a checked configuration, and what the command line says besides."""

    config: Config
    model: str  # what the name of a new run says of it
    overrides: tuple[str, ...]
    callbacks: tuple[str, ...]  # the user's, as module:name
    plan: str  # true or json, or empty

    def gives(self, pattern: str) -> list[str]:
        """The overrides whose key matches."""
        return [override for override in self.overrides if re.match(rf"\+*({pattern})=", override)]

    @property
    def processes(self) -> int:
        """How many processes this one must start, or 1: where torchrun or srun has started all, or one suffices."""
        if ranks().world_size > 1 or self.plan:
            return 1
        config = self.config
        if config.resume and config.trainer.devices is None:
            config = read(find_run(config.resume) / "config.yaml")
        return config.trainer.devices or 1 if (config.trainer.num_nodes or 1) == 1 else 1


def ask(composed: DictConfig) -> Request:
    """Check what Hydra has composed; `UserError` if it is wrong, contradicts itself, or would have no effect."""
    if (notes := os.environ.get(SWEEP)) and (Path(notes) / STOPPED).exists():
        sys.exit("the sweep was stopped before this job")
    chosen = HydraConfig.get()
    overrides, single = list(chosen.overrides.task), chosen.mode != RunMode.MULTIRUN
    config = validate(asked_for(composed, overrides))
    refuse_contradictions(config, overrides)
    plan = plan_of(composed, single)
    if config.resume == "auto":
        config = new_or_resumed(config)
    elif overrides and not plan and not config.resume and ranks().rank == 0:
        say(f"{'settings' if single else f'job {chosen.job.num}'}: {as_typed(overrides)}")
    model = "rerun" if composed.get("rerun") else chosen.runtime.choices.get("model", "")  # not of a saved composition
    return Request(config, model, tuple(overrides), tuple(callbacks_of(composed)), plan)


def decide(request: Request) -> Session | None:
    """Begin, resume or extend the run that was asked for; None if it is complete."""
    config, trainer = request.config, request.config.trainer
    if not config.resume:
        kept = [override.lstrip("+").split("=")[0].removeprefix("model.") for override in request.gives(r"model\.\w+")]
        return begin(config, request.model, kept)
    longer = request.gives("horizon") and not request.gives("run_dir")
    text = config.data.path if request.gives(r"data\.path") and not request.gives("run_dir") else None
    return resume(config.resume, config.horizon if longer else None, trainer.devices, trainer.num_nodes, text)


def refuse_contradictions(config: Config, overrides: list[str]) -> None:
    """Raise `UserError` for overrides that conflict or would have no effect."""
    with_resume = r"\+*(resume|horizon|callbacks|plan|data\.path|trainer\.devices|trainer\.num_nodes)="
    others = [override for override in overrides if not re.match(with_resume, override)]
    if config.resume not in (None, "auto") and others:
        raise UserError(
            f"resume continues a run as it was configured, and {others[0]} would change it: "
            f"start a new run from its weights with init_from={config.resume}"
        )
    shapes = [override for override in overrides if re.match(r"\+*(model=|tokenizer\b)", override)]
    if "model=auto" in overrides:
        config.require_time()
        if any(re.match(r"\+*rerun=", override) for override in overrides):
            raise UserError("model=auto does not go with rerun, which brings its own model")
        if given := [o for o in overrides if re.match(rf"\+*model\.({'|'.join(SHAPE)})=", o)]:
            raise UserError(f"{given[0]} does not go with model=auto, which chooses it: leave one of them out")
    if config.init_from and shapes:
        raise UserError(f"{shapes[0]} does not go with init_from, which brings its own model and tokenizer")
    if "experiment=finetune" in overrides and not config.init_from:
        raise UserError("experiment=finetune is for weights that have been trained: name them with init_from=PATH")
    if named := [override for override in overrides if re.match(r"\+*optim\.name=", override)]:
        raise UserError(f"{named[0]} would keep the settings of another optimizer: write optim={config.optim.name}")
    unread = unread_settings(config.optim.name)
    if idle := [o for o in overrides if o.lstrip("+").split("=")[0].removeprefix("optim.") in unread]:
        raise UserError(f"{idle[0]} has no effect with optim={config.optim.name}: its settings are in configs/optim")


# --- Hydra ---

# Hydra adds an option whose help is no string but an object that prints itself, which argparse refuses to look into
# from Python 3.14 on: "badly formed help string". hydra-core 1.3.8 still does; its main branch no longer.
argparse.HelpFormatter._get_help_string = lambda self, action: str(action.help)  # type: ignore[method-assign]


class JobFailed(BaseException):
    """Carries an error past Hydra, which catches and reports every `Exception`, to `compose_and_run`."""


@contextlib.contextmanager
def reported() -> Iterator[list[float]]:
    """Run a job so that its error reaches the user; yields the list for the result that a sweeper minimises.

    A job of a sweep that fails is noted, and counts as infinitely bad, so that the other jobs go on. So does one that a
    signal stops in a process of its own, where joblib would otherwise kill the others before they are saved.
    """
    chosen = HydraConfig.get()
    result: list[float] = []
    try:
        yield result
    except (SystemExit, KeyboardInterrupt):
        if parent_process() is None:
            raise
        result[:] = [math.inf]
    except Exception as error:
        if chosen.mode != RunMode.MULTIRUN:
            raise JobFailed(error) from None
        result[:] = [_note_failure(f"job {chosen.job.num} ({' '.join(chosen.overrides.task)})", error)]


def finished(request: Request, session: Session) -> float:
    """Return a run's bits per byte; for a job of a sweep, note them with what was asked for."""
    bits = session.metrics["val_bits_per_byte"]
    if SWEEP in os.environ and is_rank_0():
        again = [override for override in request.overrides if override not in request.gives("run_dir")]
        with contextlib.suppress(OSError):  # on a machine that does not share the folder
            _note(FINISHED, json.dumps([bits, str(session.run_dir), again]))
    return bits


def compose_and_run(job: Callable[[], Any]) -> None:
    """Have Hydra compose the configuration and run the job; with --multirun, once for each job of the sweep."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # have Hydra raise its errors instead of printing them
    failure = None
    try:
        sys.argv[1:] = _for_hydra(sys.argv[1:])
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


def _for_hydra(words: list[str]) -> list[str]:
    """The command line as Hydra reads it: options first, then overrides, with names of files as they stand."""
    for word in get_args_parser().parse_known_args(words)[1]:
        if word.startswith("--"):
            raise UserError(f"{word}: keys are written key=value, such as seed=3; see --help for the options there are")
    typed, words = words, [PATHS.sub(_quoted, word) for word in words]
    _typed.update(zip(words, typed, strict=True))
    return sorted(words, key=lambda word: "=" in word and not word.startswith("-"))


def _quoted(override: re.Match) -> str:
    """A key and its path in the quotes that Hydra's grammar asks for, alone, in a list, or in a sweep over several."""

    def quoted(text: str) -> str:
        return "'" + re.sub(r"(\\*)('|$)", lambda found: found[1] * 2 + "\\" * len(found[2]) + found[2], text) + "'"

    def all_quoted(paths: str) -> str:
        return ",".join(quoted(os.path.expanduser(path.strip())) for path in paths.split(","))

    key, value = override.groups()
    if re.fullmatch(r"(['\"].*|\w+\(.*\)|null|)", value, re.S) and not os.path.exists(value):
        return override[0]  # in quotes already, or one of Hydra's functions
    if key.endswith("separator") or os.path.exists(value):
        return f"{key}={quoted(value)}"
    if listed := re.fullmatch(r"\[(.*)\]", value, re.S):
        return override[0] if re.search("['\"]", value) else f"{key}=[{all_quoted(listed[1])}]"
    if {"-m", "--multirun"} & set(sys.argv):
        return f"{key}={all_quoted(value)}"
    several = "," in value and key.endswith("data.path")  # which Hydra explains
    return override[0] if several else f"{key}={quoted(os.path.expanduser(value))}"


def as_typed(overrides: Iterable[str]) -> str:
    """Overrides as words for a shell, without the quotes that Hydra's grammar asks for."""
    return " ".join(quote(_typed.get(override, override)) for override in overrides)


def check_jobs() -> None:
    """Raise `UserError` for a sweep without jobs, or its first job whose configuration is wrong, before any trains."""
    jobs: list[list[str]] = []

    @hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name="train")
    def check(composed: DictConfig) -> None:
        chosen = HydraConfig.get()
        overrides = list(chosen.overrides.task)
        try:
            jobs.append(overrides)
            plan_of(composed, single=False)
            refuse_contradictions(validate(asked_for(composed, overrides)), overrides)
        except UserError as error:
            raise JobFailed(UserError(f"job {chosen.job.num} ({' '.join(overrides)}): {error}")) from None

    arguments = sys.argv
    with TemporaryDirectory() as folder:
        others = [word for word in arguments if not re.match(r"\+*hydra[/.]launcher", word)]
        sys.argv = [*others, f"hydra.sweep.dir={folder}"]
        try:
            check()
        finally:
            sys.argv = arguments
    if not jobs:
        raise UserError("the sweep has no jobs: one of its ranges or globs is empty")


@contextlib.contextmanager
def failing_at_the_end() -> Iterator[str]:
    """Yield the override that lets the jobs of a sweep note how they ended; name the best, and raise if one failed.

    A signal stops jobs in processes of joblib's after their step, and lets no other begin. Their launcher would kill
    those that are still saving, if the signal ended it.
    """
    signals: list[int] = []

    def stop(number: int, frame) -> None:
        if signals:
            sys.exit(128 + number)
        signals.append(number)
        (Path(folder) / STOPPED).touch()
        if number != signal.SIGINT:  # which a terminal sends to all of them
            for process in active_children():
                os.kill(process.pid or 0, number)

    if ranks().world_size > 1:
        raise UserError(
            f"{ranks().world_size} processes were started, and a sweep is one: use python train.py -m, with "
            "trainer.devices for several devices"
        )
    with TemporaryDirectory() as folder:
        for number in SIGNALS if "hydra/launcher=joblib" in sys.argv else ():
            signal.signal(number, stop)
        yield f"++hydra.job.env_set.{SWEEP}={Path(folder).as_posix()}"
        failed, ended = (
            file.read_text(encoding="utf-8").splitlines() if file.exists() else []
            for file in (Path(folder) / FAILED, Path(folder) / FINISHED)
        )
    if ended:
        bits, run_dir, overrides = min(map(json.loads, ended))
        own = get_args_parser().parse_known_args(sys.argv)[0].config_dir
        words = ["python", "train.py", *(["--config-dir", own] if own else []), *overrides]
        say(f"\nbest of {len(ended)} jobs: {bits:.4f} bits per byte in {run_dir}")
        say(f"train it again: {as_typed(words)}")
    if signals:
        sys.exit(128 + signals[0])
    if failed:
        raise UserError(f"{len(failed)} of the sweep's jobs failed; the first was {failed[0]}")


def _note_failure(job: str, error: Exception) -> float:
    """Report why a job failed; returns infinity, so that the sweeper can continue."""
    if not isinstance(error, UserError | NonFiniteError | OSError):
        traceback.print_exception(error)
    line = " ".join(f"{job}: {error}".split())
    warn(line)
    try:
        _note(FAILED, line)
    except (OSError, KeyError):  # on a machine that does not share the folder; Hydra carries the error back
        raise UserError(line) from None
    return math.inf


def _note(name: str, line: str) -> None:
    """Add a line to a file in the folder of the sweep."""
    with (Path(os.environ[SWEEP]) / name).open("a", encoding="utf-8") as file:
        print(line, file=file)


def describe(error: Exception) -> str:
    """Condense an error of Hydra's to one line."""
    several = re.match(r"Ambiguous value for argument '(.*)'", str(error))
    if isinstance(error, OverrideParseException) or several:
        override = several[1] if several else str(getattr(error, "override", ""))
        what = "is not key=value as Hydra reads it"
        if several:
            what = "has several values: add -m to train with each, or brackets for a list"
        remedy = "; to give the value as it stands, use quotes inside quotes, as in 'data.path=\"a,b.txt\"'"
        if "=" not in override:
            remedy = f": to train on it, write data.path={override}" if os.path.exists(override) else ""
        return f"{override!r} {what}{remedy}"
    if isinstance(error, MissingConfigException) and error.options:
        group, _, name = str(error.missing_cfg_file).rpartition("/")
        own = {"data": "; for a text of your own say data.path=FILE", "tokenizer": "; byte comes closest to characters"}
        return f"{group}={name} is not known: choose from {', '.join(error.options)}{own.get(group, '')}"
    if str(error).startswith("Config group override must be"):
        return "a group takes the name of one of its files, such as model=mini"
    if "@experiment." in str(error):
        return "an experiment file must begin with the line: # @package _global_"
    if unknown := re.match(r"Could not override '([^']+)'", str(error)):
        return unknown_key(unknown[1])
    return " ".join(line.strip() for line in str(error).splitlines() if line.strip())
