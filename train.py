"""Train a GPT: python train.py [key=value ...]. The keys and their values are in configs/."""

import dataclasses
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from gpt.errors import UserError, command_line, write_line
from gpt.exchange import checkpoint, huggingface
from gpt.hardware import (
    choose_compile,
    choose_device,
    choose_micro_batch,
    choose_precision,
    is_out_of_memory,
    keep_freed_memory,
    peak_flops,
    release_memory,
    require_devices,
)
from gpt.text.corpus import pinned
from gpt.text.prepare import prepare
from gpt.text.shards import Corpora
from gpt.text.tokenizer import Tokenizer
from gpt.training import config as configuration
from gpt.training import runs
from gpt.training.config import Config, to_plain, unknown_key, validate

# Lightning takes seconds to import: lit.py and callbacks.py wait until the configuration has proved right.
if TYPE_CHECKING:
    from gpt.training.callbacks import Validation
    from gpt.training.module import GPTModule, Plan

ROOT = Path(__file__).resolve().parent
IS_MAIN = os.environ.get("LOCAL_RANK", "0") == "0"  # with several devices, one process speaks
MICRO_BATCH = "trainer.micro_batch_size"
_COMPOSED: list[tuple[DictConfig, list[str], str]] = []  # with the overrides and the model's name

ConfigStore.instance().store(name="defaults", node=to_plain(Config()))


def say(line: str) -> None:
    """Tell the user how it goes. Training goes on where nobody listens any more."""
    if IS_MAIN:
        write_line(line, sys.stdout)


def warn(line: str) -> None:
    """Tell the user on stderr what is not as expected."""
    if IS_MAIN:
        write_line(f"train.py: {line}", sys.stderr)


@hydra.main(version_base="1.3", config_path="configs", config_name="train")
def compose(composed: DictConfig) -> None:
    """Have Hydra put the configuration together; the training itself takes place outside of Hydra."""
    chosen = HydraConfig.get()
    _COMPOSED.append((composed, list(chosen.overrides.task), chosen.runtime.choices["model"]))


def run(composed: DictConfig, overrides: list[str], model_name: str) -> None:
    """Train as one composed configuration says."""
    config = validate(composed)
    keep_freed_memory()
    others = [override for override in overrides if not override.startswith("resume=")]
    if config.resume and others:
        raise UserError(
            f"resume continues a run as it was configured, and {others[0]} would change it: "
            f"start a new run from its weights with init_from={config.resume}"
        )
    if "experiment=finetune" in overrides and not config.init_from:
        raise UserError("experiment=finetune is for weights that have learnt already: name them with init_from=PATH")
    if config.resume:
        resume(config.resume)
    elif not IS_MAIN:
        begin(configuration.read(started_run() / "config.yaml"), started_run())
    elif config.init_from:
        given = [o for o in overrides if re.match(r"\+*(model|tokenizer)\b", o) and "model.dropout=" not in o]
        if given:
            raise UserError(f"{given[0]} does not go with init_from, which brings its own model and tokenizer")
        begin(config, None, f"{config.data.name}-tuned")
    else:
        begin(config, None, f"{config.data.name}-{model_name}")


def begin(config: Config, run_dir: Path | None, name: str = "") -> None:
    """Train from the first step, in a directory of this run's own or in that of a run that never got far."""
    if run_dir is None and config.run_dir:
        runs.require_empty(Path(config.run_dir))
    weights, given = None, None
    if config.init_from:
        config, weights, given = initial_weights(config)
        config.require_whole_windows()
    automatic = config.trainer.micro_batch_size == "auto"
    config = decide_hardware(config)
    config = dataclasses.replace(config, data=pinned(config.data, cache_folder(config)))
    corpora = load_corpora(config, given)

    from gpt.training.module import make_plan

    config, plan = make_plan(config, corpora, automatic, say)
    run_dir = run_dir or runs.make(config.run_dir, name, configuration.to_yaml(config))
    fit(config, plan, corpora, run_dir, weights=weights)


def resume(path: str) -> None:
    """Continue a run from its newest checkpoint, or from the one that is named, as it was configured."""
    run_dir = runs.directory(path)
    if IS_MAIN:
        runs.lock(run_dir)
    found = checkpoint.load_newest(run_dir, warn) if Path(path).is_dir() else (Path(path), checkpoint.load(Path(path)))
    if found is None:
        say(f"{run_dir} has no checkpoint yet: beginning at its first step")
        begin(configuration.read(run_dir / "config.yaml"), run_dir)
        return
    file, payload = found
    needed = ("plan", "step", "corpus", "threads", "versions", "optimizer_states")
    if missing := [key for key in needed if key not in payload]:
        raise UserError(f"{file}: cannot be continued, for it has no {missing[0]!r}; start anew with init_from={file}")
    config = validate(payload["config"])
    choose_device(config.trainer.device)  # says so where this machine has none
    given = Tokenizer.from_dict(payload["tokenizer"]) if "given" in payload["corpus"]["tokenizer"] else None
    corpora = load_corpora(config, given)
    refuse_change(file, payload, corpora)

    from gpt.training.module import Plan

    plan, step, threads = Plan(**payload["plan"]), payload["step"], payload["threads"]
    if step >= plan.total_steps:
        done = f"{run_dir} is complete: it has trained all of its {plan.total_steps} steps"
        say(f"{done}; init_from={run_dir} starts a new run from it")
        return
    states = payload["optimizer_states"][0]["state"].values()
    if any("momentum" in state and "squares" not in state for state in states):
        raise UserError(f"{file}: saved by an older version, whose Muon was another; start anew with init_from={file}")
    then, now = payload["versions"], checkpoint.versions()
    if changed := [f"{name} {then[name]} -> {now.get(name)}" for name in then if then[name] != now.get(name)]:
        warn(f"perhaps not bit for bit what it would have been: other versions began it ({', '.join(changed)})")
    say(f"continuing {run_dir} at step {step} of {plan.total_steps}")
    del found, payload  # Lightning reads the file itself, and one copy in memory is enough
    fit(config, plan, corpora, run_dir, file, threads=threads)


def load_corpora(config: Config, given: Tokenizer | None) -> Corpora:
    """The prepared text; `given` is the tokenizer of a model to start from."""
    return prepare(config.data, config.tokenizer, config.model.context_length, cache_folder(config), given, say)


def cache_folder(config: Config) -> Path:
    """Where prepared text is kept."""
    return Path(config.data.cache) if config.data.cache else ROOT / "data" / "cache"


def started_run() -> Path:
    """The run directory that the first process of several has made."""
    if "GPT_RUN_DIR" not in os.environ:
        raise UserError("start with python train.py, not with a launcher of your own: it starts the other processes")
    return Path(os.environ["GPT_RUN_DIR"])


def refuse_change(file: Path, payload: dict, corpora: Corpora) -> None:
    """Raise `UserError` where the text or its tokens are no longer what the run began with."""
    stored = payload["corpus"] | {"tokenizer's hash": payload["tokenizer"]["sha256"]}
    present = corpora.key | {"tokenizer's hash": corpora.tokenizer.sha256}
    for key in stored:
        if stored[key] != present.get(key):
            raise UserError(
                f"{file}: the {key} was {stored[key]} when the run began and is {present.get(key)} now, so it cannot "
                f"continue: restore it, or start a new run with init_from={file}"
            )


def initial_weights(config: Config) -> tuple[Config, dict, Tokenizer]:
    """The weights of `init_from` with their tokenizer, and the configuration with their model's shape."""
    path = Path(config.init_from or "")
    if huggingface.is_directory(path):
        model, tokenizer = huggingface.build_model(path)
    else:
        model, tokenizer = checkpoint.build_model(checkpoint.load(checkpoint.find(path)))
    plain = to_plain(config)
    plain["model"] = {key: value for key, value in dataclasses.asdict(model.config).items() if key != "vocab_size"}
    plain["model"]["dropout"] = config.model.dropout
    plain["tokenizer"] = {"name": tokenizer.name}
    if tokenizer.name == "bpe":
        plain["tokenizer"]["vocab_size"] = tokenizer.vocab_size
    return validate(plain), model.state_dict(), tokenizer


def decide_hardware(config: Config) -> Config:
    """The configuration with what was `auto` decided for this machine."""
    device = choose_device(config.trainer.device)
    require_devices(device, config.trainer.devices)
    window = config.model.context_length * config.trainer.devices
    micro_batch = config.trainer.micro_batch_size
    if micro_batch == "auto":
        windows = config.trainer.tokens_per_step // window
        shape = config.model
        micro_batch = str(choose_micro_batch(windows, shape.context_length, shape.d_model, shape.num_layers, device))
    trainer = dataclasses.replace(
        config.trainer,
        device=device.type,
        precision=choose_precision(config.trainer.precision, device),
        compile=str(choose_compile(config.trainer.compile, device)).lower(),
        micro_batch_size=micro_batch,
    )
    return dataclasses.replace(config, trainer=trainer)


def fit(
    config: Config,
    plan: "Plan",
    corpora: Corpora,
    run_dir: Path,
    file: Path | None = None,
    weights: dict | None = None,
    threads: int | None = None,
) -> None:
    """Train to the horizon from a checkpoint file, from weights or from scratch; using less memory if need be."""
    import torch

    if threads:
        torch.set_num_threads(threads)  # sums in another order would not continue bit for bit
    os.environ["GPT_RUN_DIR"] = str(run_dir)
    while True:
        try:
            train(config, plan, corpora, run_dir, file, weights)
            return
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            if plan.micro_batch_size == 1:
                raise UserError(f"out of memory at {MICRO_BATCH}=1, the least: choose a smaller model") from None
            size, plan = plan.micro_batch_size, plan.with_smaller_micro_batch()
            if not plan.automatic or config.trainer.devices > 1:
                remedy = f"try {MICRO_BATCH}={plan.micro_batch_size}"
                raise UserError(f"out of memory at {MICRO_BATCH}={size}: {remedy}") from None
            smaller = f"going on with {plan.micro_batch_size} and as many tokens a step"
            warn(f"out of memory at {MICRO_BATCH}={size}: {smaller}")
        release_memory()
        newest = checkpoint.load_newest(run_dir, warn)  # saved on the way out, unless it went wrong in an update
        file = newest[0] if newest else None
        del newest


def train(
    config: Config, plan: "Plan", corpora: Corpora, run_dir: Path, file: Path | None, weights: dict | None
) -> None:
    """Train to the horizon or to a signal, and say what came of it."""
    import torch

    from gpt.training.callbacks import CheckpointFiles, Clock, Curves, Journal, LastCheckpoint, Progress, Validation
    from gpt.training.module import GPTData, GPTModule, build_trainer

    module = GPTModule(config, plan, corpora, checkpoint.git_commit(ROOT))
    if weights is not None:
        module.load_state_dict(weights)
    device = torch.device(config.trainer.device)
    say(
        f"{module.model.num_parameters():,} parameters on {device.type} in {config.trainer.precision}, "
        f"{plan.total_steps} steps of {config.trainer.tokens_per_step:,} tokens; writing to {run_dir}"
    )
    clock = Clock()
    curves = Curves(run_dir, clock, peak_flops(device, config.trainer.precision))
    validation = Validation(run_dir, clock, curves)
    last = LastCheckpoint(run_dir, clock, validation)
    callbacks = [clock, curves, Journal(run_dir, curves), validation, last, Progress(validation, curves)]
    trainer = build_trainer(config, plan, callbacks, CheckpointFiles())
    try:
        trainer.fit(module, datamodule=GPTData(module), ckpt_path=file, weights_only=True)
    finally:
        last.close()
        curves.close()
    if last.stopped_by:
        say(f"stopped at step {trainer.global_step}; continue with: python train.py resume={run_dir}")
        sys.exit(128 + last.stopped_by)
    if trainer.is_global_zero:
        report(module, validation, run_dir)


def report(module: "GPTModule", validation: "Validation", run_dir: Path) -> None:
    """The final figures, where the run is, and what to do with it."""
    import numpy as np

    from gpt.sampling.scoring import xz_bits_per_byte

    facts = validation.metrics(module, module.plan.total_steps)
    tokenizer = module.corpora.tokenizer
    ids = np.concatenate([source.validation[:] for source in module.corpora.sources])
    text = tokenizer.decode_bytes(ids[ids != tokenizer.end_of_text].tolist())
    say(
        f"trained {facts['steps']} steps, {facts['tokens']:,} tokens ({facts['epochs']:.2f} epochs) in "
        f"{facts['train_seconds']:.1f} s, {facts['tokens_per_second']:,.0f} tokens/s, "
        f"{facts['peak_memory_bytes'] / 2**30:.2f} GiB at peak\n"
        f"validation on {len(text):,} bytes: {facts['val_loss']:.4f} nats per token, "
        f"{facts['val_nats_per_byte']:.4f} nats per byte, {facts['val_bits_per_byte']:.4f} bits per byte "
        f"(xz -9e: {xz_bits_per_byte(text):.4f})"
    )
    for name, figures in facts.get("mix", {}).items():
        say(f"of it {name}: {figures['epochs']:.2f} epochs, {figures['val_bits_per_byte']:.4f} bits per byte")
    if validation.best_step != facts["steps"]:
        say(f"validation was best at step {validation.best_step}; best.ckpt is the model of that step")
    say(
        f"\nthe run:    {run_dir}\n"
        f'sample it:  python generate.py --checkpoint {run_dir} --prompt "{(module.config.data.prompts or [""])[-1]}"\n'
        f"its curves: tensorboard --logdir {run_dir.parent}"
    )


def main() -> None:
    """Compose and train; with --multirun, one training after the other."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # have Hydra raise its errors instead of printing them
    try:
        compose()
    except (HydraException, OmegaConfBaseException, YAMLError, ValueError) as error:
        raise UserError(describe(error)) from None
    for composed, overrides, model_name in _COMPOSED:
        run(composed, overrides, model_name)


def describe(error: Exception) -> str:
    """One line for what Hydra says in several."""
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
