"""A training from its configuration to its final figures, for train.py and for Python: no Hydra here.

session = Session.begin(config)  # or Session.resume("runs/NAME")
session.fit()
session.report()
"""

import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from gpt import hardware
from gpt.errors import UserError
from gpt.exchange import checkpoint
from gpt.exchange.opening import open_model
from gpt.files import write_text
from gpt.text.cache import CACHE
from gpt.text.corpus import pinned
from gpt.text.prepare import TooShortError, prepare
from gpt.text.progress_bar import write_above
from gpt.text.prompts import prompts_from
from gpt.text.shards import Corpora
from gpt.text.tokenizer import Tokenizer
from gpt.training import runs
from gpt.training.concerns import concerns, shorter_steps
from gpt.training.config import Config, parse_horizon, read, to_plain, to_yaml, validate
from gpt.training.plan import Plan, make_plan
from gpt.training.processes import leading, use_threads
from gpt.training.ranks import as_launched
from gpt.training.report import closing_lines
from gpt.training.resuming import extended, on_devices, read_plan, require_same_text

if TYPE_CHECKING:
    from lightning import Callback

# Importing Lightning takes seconds, so fitting.py and probe.py wait until the configuration has been found to be right.

MICRO_BATCH = "trainer.micro_batch_size"

Say = Callable[[str], None]


def say(line: str) -> None:
    """Print a line; training goes on even if nobody reads it any more."""
    write_above(line, sys.stdout)


def warn(line: str) -> None:
    """Print a warning."""
    write_above(f"train.py: {line}", sys.stderr)


@dataclasses.dataclass
class Start:
    """Where the weights come from: a checkpoint file, with what was read of it, or weights alone, or neither.

    `Session.fit` takes these out, so that nothing large stays referenced while training.
    """

    file: Path | None = None
    payload: dict[str, Any] | None = None
    weights: dict[str, torch.Tensor] | None = None
    threads: int | None = None  # with which the run began
    amended: bool = False  # whether `payload` has another horizon or other devices than `file`

    def take(self) -> "Start":
        taken = dataclasses.replace(self)
        self.payload = self.weights = None
        return taken


class Session:
    """A run that is ready to train: what it learns from, for how long, where it starts and where it writes."""

    def __init__(
        self, config: Config, plan: Plan, corpora: Corpora, given: Tokenizer | None, run_dir: Path, start: Start
    ):
        self.config, self.plan, self.corpora, self.run_dir = config, plan, corpora, run_dir
        self._given, self._start = given, start
        self.metrics: dict[str, Any] = {}  # of the last validation: see the README for each key
        self._samples: list[str] = []  # of the last validation

    @classmethod
    def begin(cls, config: Config, name: str = "run", run_dir: Path | None = None) -> "Session":
        """Prepare a new run, below runs/ with `name` in its name unless `config.run_dir` names its directory.

        `run_dir` is the directory of a run that was stopped before its first checkpoint.
        """
        require_loggers(config)
        if run_dir is None and config.run_dir:
            runs.require_empty(Path(config.run_dir))
        config, plan, corpora, given, start = prepared(config)
        if parse_horizon(config.horizon).unit == "seconds":
            plan, seconds = measured(config, plan, corpora, given)
            config, plan = for_seconds(config, plan, seconds)
            each = f"at {seconds * 1000:.1f} ms each as measured just now"
            say(f"horizon={config.horizon}: {plan.total_steps} steps, {each}")
        for line in concerns(config, plan, corpora):
            warn(line)
        run_dir = run_dir or runs.make(config.run_dir, name, to_yaml(config))
        return cls(config, plan, corpora, given, run_dir, start)

    @classmethod
    def resume(
        cls, path: str, horizon: str | None = None, devices: int | None = None, num_nodes: int | None = None
    ) -> "Session | None":
        """Prepare to continue a run from its newest checkpoint or the named one; None if it is complete.

        With `horizon`, the run trains until then, whether it is complete or not. `devices` and `num_nodes`, or what
        torchrun or srun has started, may differ from before.
        """
        run_dir = runs.directory(path)
        runs.lock(run_dir)
        found = runs.load_newest(run_dir, warn)
        if found is None:
            say(f"{run_dir} has no checkpoint yet: beginning at its first step")
            config = read(run_dir / "config.yaml")
            if horizon:
                config = dataclasses.replace(config, horizon=horizon)
            numbers = as_launched(devices, num_nodes, config.trainer)
            config, _ = on_devices(config, make_plan(config, 1, False), *numbers)
            write_text(run_dir / "config.yaml", to_yaml(config))
            return cls.begin(config, run_dir=run_dir)
        file, payload = found
        _refuse_going_back(Path(path), run_dir, file, payload.get("step"))
        stored, plan = read_plan(file, payload)
        config, plan = on_devices(stored, plan, *as_launched(devices, num_nodes, stored.trainer))
        require_devices(config)
        if config != stored:
            then, now = stored.trainer.world_size, config.trainer.world_size
            say(f"continuing on {now} devices instead of {then}: the same windows in each step, but not the same bits")
        require_loggers(config)
        given = Tokenizer.from_dict(payload["tokenizer"]) if "given" in payload["corpus"]["tokenizer"] else None
        corpora = load_corpora(config, given)
        require_same_text(file, payload, corpora)
        if horizon and horizon != config.horizon:
            before, (config, plan) = plan, extended(config, plan, payload, horizon, corpora.train_tokens)
            say(f"extending the run from {before.total_steps} steps to {plan.total_steps}")
        if config != stored:
            payload |= {"config": to_plain(config), "plan": dataclasses.asdict(plan)}
        ended = f"has trained all of its {plan.total_steps} steps" if payload["step"] == plan.total_steps else ""
        if not ended and _has_stopped_early(config, plan, payload):
            ended = f"stopped early at step {payload['step']}, by patience={config.patience}"
        if ended:
            runs.make_last(run_dir, file)
            longer = f"to train it longer, add horizon=; init_from={run_dir} starts a new run from it"
            say(f"{run_dir} is complete: it {ended}; {longer}")
            return None
        _warn_of_versions(payload)
        say(f"continuing {run_dir} at step {payload['step']} of {plan.total_steps}")
        threads = payload["threads"] if config.trainer.world_size == stored.trainer.world_size else None
        start = Start(file, payload, threads=threads, amended=config != stored)
        return cls(config, plan, corpora, given, run_dir, start)

    def fit(self, callbacks: Sequence["Callback"] = (), names: Sequence[str] = ()) -> None:
        """Train to the horizon, with smaller micro-batches if memory runs out and they may be chosen.

        `callbacks` are Lightning's, and `names` the `module:name` of each, by which other ranks import them. A stop
        signal ends the training after a step and a checkpoint, with `SystemExit` and the exit code 128 + signal.
        """
        if callbacks and not names and self.config.trainer.world_size > 1:
            raise UserError(
                f"trainer.devices={self.config.trainer.devices}: callbacks must exist in every process: give `fit` the "
                "module:name of each as well, or train on one device"
            )
        hardware.keep_freed_memory()
        while True:
            try:
                self._fit_once(callbacks, names)
                return
            except Exception as error:
                if not hardware.is_out_of_memory(error):
                    raise
                self._use_less_memory()
            hardware.release_memory()
            newest = runs.load_newest(self.run_dir, warn)  # saved on the way out, unless it failed within an update
            if newest is not None:
                self._start.file, self._start.payload = newest
            elif self.config.init_from:
                self._start.weights = open_model(self.config.init_from)[0].state_dict()
            del newest

    def _fit_once(self, callbacks: Sequence["Callback"], names: Sequence[str]) -> None:
        start, trainer = self._start.take(), self.config.trainer
        with leading(trainer.world_size) as leader:
            from gpt.training.fitting import Fitting
            from gpt.training.saving import CheckpointFiles

            use_threads(start.threads)
            files = CheckpointFiles(start.payload)
            fitting = Fitting(self.config, self.plan, self.corpora, self.run_dir, start.weights, callbacks)
            if start.file and start.payload:
                fitting.require_like(start.file, start.payload)
                if start.amended:
                    start.file = runs.amend(self.run_dir, start.payload, to_yaml(self.config))
            start.payload = start.weights = None
            say(
                f"{fitting.module.model.num_parameters():,} parameters on {trainer.device} in {trainer.precision}, "
                f"{self.plan.total_steps} steps of {trainer.tokens_per_step:,} tokens; writing to {self.run_dir}"
            )
            try:
                job = _job(self.config, self.plan, self.corpora, self._given, start.threads)
                leader.send(job | self._place(start.file) | {"callbacks": list(names)})
                leader.connect(trainer.device)
                fitting.run(leader.ranks, files, start.file)
            finally:  # a deadline may have changed them
                self.config, self.plan = fitting.module.config, fitting.module.plan
        if fitting.last.stopped_by:
            say(f"stopped at step {fitting.module.global_step}; continue with: python train.py resume={self.run_dir}")
            sys.exit(128 + fitting.last.stopped_by)
        self.metrics, self._samples = fitting.metrics.latest, fitting.samples.latest
        if step := fitting.early.step:
            stopped = f"stopped early at step {step} of {self.plan.total_steps}"
            if fitting.early.by_patience:
                best = fitting.validation.best_step
                shorter = f"horizon={shorter_steps(self.config, self.corpora, best)}steps"
                say(
                    f"{stopped}: no improvement in the last {self.config.patience} validations (best at step {best}). "
                    f"The learning rates were still falling: a shorter run, such as {shorter}, will probably do better"
                )
            else:
                say(f"{stopped}, as a callback asked; to go on regardless: python train.py resume={self.run_dir}")

    def _place(self, file: Path | None) -> dict[str, str | None]:
        """Where the run is, for the other processes."""
        return {
            "run_dir": str(self.run_dir.absolute()),
            "config.yaml": (self.run_dir / "config.yaml").read_text(encoding="utf-8", errors="replace"),
            "checkpoint": str(file.absolute()) if file else None,
        }

    def _use_less_memory(self) -> None:
        """Take half the micro-batch, or raise `UserError` if that is not ours to decide."""
        size = self.plan.micro_batch_size
        if size == 1 or not self.plan.automatic or self.config.trainer.world_size > 1:
            raise UserError(out_of_memory(self.plan)) from None
        plan = self.plan.with_smaller_micro_batch()
        smaller = f"going on with {plan.micro_batch_size} and as many tokens a step"
        warn(f"out of memory at {MICRO_BATCH}={size}: {smaller}")
        self.plan = plan

    def report(self) -> None:
        """Print the final figures, samples, and commands to try next."""
        prompt = ((self.config.data.prompts or [""])[-1].splitlines() or [""])[0]
        shorter = shorter_steps(self.config, self.corpora, self.metrics["best_step"])
        for line in closing_lines(self.metrics, self._samples, prompt, self.plan.total_steps, shorter, self.run_dir):
            say(line)


def _job(
    config: Config, plan: Plan, corpora: Corpora, given: Tokenizer | None, threads: int | None = None
) -> dict[str, Any]:
    """What the other processes need to know for training, or for measuring a step: see following.py."""
    return {
        "config": to_plain(config),
        "plan": dataclasses.asdict(plan),
        "tokenizer": given and given.to_dict(),
        "text": text_key(corpora),
        "threads": threads,
    }


def text_key(corpora: Corpora) -> str:
    """What identifies a text and its tokens."""
    return json.dumps([corpora.key, corpora.tokenizer.sha256], sort_keys=True)


def out_of_memory(plan: Plan) -> str:
    """A line about a micro-batch that does not fit, and what to do."""
    size = plan.micro_batch_size
    if size == 1:
        return f"out of memory at {MICRO_BATCH}=1, the least: choose a smaller model"
    smaller = plan.with_smaller_micro_batch().micro_batch_size
    return f"out of memory at {MICRO_BATCH}={size}: try {MICRO_BATCH}={smaller}"


def require_loggers(config: Config) -> None:
    """Raise `UserError` if a logger needs a package that is not installed."""
    for name in {"wandb", "mlflow"}.intersection(config.logger):
        if find_spec(name) is None:
            raise UserError(f"logger={name} needs a package that is not installed: pip install {name}")


def load_corpora(config: Config, given: Tokenizer | None = None, say: Say = say) -> Corpora:
    """The prepared text of a configuration; `given` is the tokenizer of a model to start from."""
    context = config.model.context_length
    try:
        return prepare(config.data, config.tokenizer, context, _cache(config), given, say)
    except TooShortError as error:
        remedy = f", or set model.context_length={error.longest_context} or less" if error.longest_context else ""
        raise UserError(f"{error}{remedy}") from None


def _cache(config: Config) -> Path:
    return Path(config.data.cache) if config.data.cache else CACHE


def decide_hardware(config: Config) -> Config:
    """The configuration with everything that was `auto` decided for this machine."""
    devices, num_nodes = as_launched(config.trainer.devices, config.trainer.num_nodes)
    config = dataclasses.replace(
        config, trainer=dataclasses.replace(config.trainer, devices=devices, num_nodes=num_nodes)
    )
    config.require_whole_windows()
    device = require_devices(config)
    window = config.model.context_length * config.trainer.world_size
    micro_batch = config.trainer.micro_batch_size
    if micro_batch == "auto":
        windows, shape = config.trainer.tokens_per_step // window, config.model
        most = hardware.choose_micro_batch(windows, shape.context_length, shape.d_model, shape.num_layers, device)
        micro_batch = str(most)
    trainer = dataclasses.replace(
        config.trainer,
        device=device.type,
        precision=hardware.choose_precision(config.trainer.precision, device),
        compile=str(hardware.choose_compile(config.trainer.compile, device)).lower(),
        micro_batch_size=micro_batch,
    )
    return dataclasses.replace(config, trainer=trainer)


def require_devices(config: Config) -> torch.device:
    """The configured device; `UserError` if this machine lacks it or has too few of it."""
    device, count = hardware.choose_device(config.trainer.device), config.trainer.devices or 1
    there = hardware.device_count(device)
    if there is not None and count > there:
        raise UserError(f"trainer.devices={count} is more than this machine has: at most {there} of {device.type}")
    if (count > 1 or config.trainer.strategy != "auto") and not torch.distributed.is_available():
        raise UserError("this PyTorch was built without torch.distributed: use one device, and no trainer.strategy")
    if device.type == "mps" and config.trainer.strategy != "auto":
        raise UserError(f"trainer.strategy={config.trainer.strategy} is not for mps, a single device: leave it out")
    return device


def _with_weights(config: Config) -> tuple[Config, dict[str, torch.Tensor], Tokenizer]:
    """The configuration with the shape of the model to start from, that model's weights, and its tokenizer."""
    model, tokenizer = open_model(config.init_from or "")
    plain = to_plain(config)
    plain["model"] = {key: value for key, value in dataclasses.asdict(model.config).items() if key != "vocab_size"}
    plain["model"]["dropout"] = config.model.dropout
    plain["tokenizer"] = {"name": tokenizer.name}
    if tokenizer.name == "bpe":
        plain["tokenizer"]["vocab_size"] = tokenizer.vocab_size
    return validate(plain), model.state_dict(), tokenizer


def prepared(config: Config) -> tuple[Config, Plan, Corpora, Tokenizer | None, Start]:
    """Decide everything that was left open, and prepare the text; the plan of a time is still to be measured."""
    start, given = Start(), None
    if config.init_from:
        config, start.weights, given = _with_weights(config)
    automatic = config.trainer.micro_batch_size == "auto"
    config = decide_hardware(config)
    config = dataclasses.replace(config, data=pinned(config.data, _cache(config)))
    corpora = load_corpora(config, given)
    if config.data.prompts is None:
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, prompts=prompts_from(corpora)))
    return config, make_plan(config, corpora.train_tokens, automatic), corpora, given, start


def measured(config: Config, plan: Plan, corpora: Corpora, given: Tokenizer | None) -> tuple[Plan, float]:
    """The seconds that a step takes, and the plan with a micro-batch that fits into memory."""
    hardware.keep_freed_memory()  # as `fit` does
    try:
        with leading(config.trainer.world_size) as leader:
            from gpt.training.probe import measure

            leader.send(_job(config, plan, corpora, given))
            leader.connect(config.trainer.device)
            return measure(config, plan, corpora, leader.ranks)
    except Exception as error:
        if not hardware.is_out_of_memory(error):
            raise
        remedy = f"choose less than {MICRO_BATCH}={plan.micro_batch_size}, or a smaller model"
        raise UserError(f"out of memory while timing a step: {remedy}") from None


def for_seconds(config: Config, plan: Plan, seconds: float) -> tuple[Config, Plan]:
    """Plan the steps of a horizon in seconds, of `seconds` each; deadline.py corrects them later."""
    steps = max(1, round(parse_horizon(config.horizon).amount / seconds))
    trainer = dataclasses.replace(config.trainer, micro_batch_size=str(plan.micro_batch_size))
    return dataclasses.replace(config, trainer=trainer), plan.for_steps(steps, trainer.validate_every)


def _refuse_going_back(named: Path, run_dir: Path, newest: Path, newest_step: object) -> None:
    """Raise `UserError` if a checkpoint is named that is not the newest: continuing it would undo later steps."""
    if not named.is_file() or named.samefile(newest):
        return
    if (step := checkpoint.load(named).get("step")) != newest_step:
        raise UserError(
            f"{named} is of step {step}, and the run has gone on to step {newest_step}: continue it with "
            f"resume={run_dir}, or start a new run from this file with init_from={named}"
        )


def _has_stopped_early(config: Config, plan: Plan, payload: dict[str, Any]) -> bool:
    from gpt.training.early_stop import out_of_patience

    state = payload["callbacks"].get("Validation")  # checked as a whole later
    best_step = state.get("best_step") if isinstance(state, dict) else None
    return type(best_step) is int and out_of_patience(config.patience, plan, payload["step"], best_step)


def _warn_of_versions(payload: dict[str, Any]) -> None:
    from gpt.training.record import versions

    then, now = payload["versions"], versions()
    if changed := [f"{name} {then[name]} -> {now.get(name)}" for name in then if then[name] != now.get(name)]:
        warn(f"this run began with other versions, so it may not continue bit for bit ({', '.join(changed)})")
