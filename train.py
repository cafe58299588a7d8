"""Train a GPT: python train.py [key=value ...]. The keys and their values are in configs/."""

import dataclasses
import fcntl
import lzma
import os
import re
import sys
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from gpt import checkpoint, huggingface
from gpt.config import Config, to_plain, unknown_key, validate
from gpt.errors import UserError, command_line
from gpt.hardware import (
    choose_compile,
    choose_device,
    choose_micro_batch,
    choose_precision,
    is_out_of_memory,
    keep_freed_memory,
    peak_flops,
    release_memory,
)
from gpt.shards import Shards, prepare
from gpt.tokenizer import Tokenizer

if TYPE_CHECKING:
    from gpt.lit import Plan

ROOT = Path(__file__).resolve().parent
IS_MAIN = os.environ.get("LOCAL_RANK", "0") == "0"  # with several devices, one process speaks


def cache(config: Config) -> Path:
    """Where prepared text is kept."""
    return Path(config.data.cache) if config.data.cache else ROOT / "data" / "cache"


_COMPOSED: list[tuple[DictConfig, list[str], str]] = []  # with the overrides and the model's name
_LOCKS: list[TextIO] = []  # open as long as the process lives


def say(line: str) -> None:
    if IS_MAIN:
        print(line, flush=True)


def warn(line: str) -> None:
    if IS_MAIN:
        print(f"train.py: {line}", file=sys.stderr, flush=True)


def started_run() -> Path:
    """The run directory that the first process of several has made."""
    if "GPT_RUN_DIR" not in os.environ:
        raise UserError("start with python train.py, not with a launcher of your own: it starts the other processes")
    return Path(os.environ["GPT_RUN_DIR"])


ConfigStore.instance().store(name="defaults", node=to_plain(Config()))


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
    if config.resume:
        resume(config.resume)
    else:
        start(config, model_name)


def start(config: Config, model_name: str) -> None:
    """Begin a new run."""
    if not IS_MAIN:
        begin(stored_config(started_run()), started_run())
        return
    taken = Path(config.run_dir or "")
    if config.run_dir and ((taken / "config.yaml").exists() or any(taken.glob("checkpoints/*.ckpt"))):
        raise UserError(f"run_dir={config.run_dir} already holds a run: choose another, or continue it with resume=")
    begin(config, None, f"{config.data.name}-{model_name}")


def begin(config: Config, run_dir: Path | None, name: str = "") -> None:
    """Train from the first step, in a directory of this run's own or in that of a run that never got far."""
    weights, given = None, None
    if config.init_from:
        config, weights, given = initial_weights(config)
    automatic = config.trainer.micro_batch_size == "auto"
    config = decide_hardware(config)
    shards = prepare(config.data, config.tokenizer, config.model.context_length, cache(config), given, say)

    from gpt.lit import make_plan

    config, plan = make_plan(config, shards, automatic, say)
    run_dir = run_dir or make_run_dir(config, name)
    fit(config, plan, shards, run_dir, weights=weights)


def resume(path: str) -> None:
    """Continue a run from its newest checkpoint, as it was configured."""
    run_dir = checkpoint.run_directory(path)
    lock(run_dir)
    found = checkpoint.load_newest(run_dir, warn) if Path(path).is_dir() else (Path(path), checkpoint.load(Path(path)))
    if found is None:
        say(f"{run_dir} has no checkpoint yet: beginning at its first step")
        begin(stored_config(run_dir), run_dir)
        return
    file, payload = found
    config = validate(payload["config"])
    given = Tokenizer.from_dict(payload["tokenizer"]) if "given" in payload["corpus"]["tokenizer"] else None
    shards = prepare(config.data, config.tokenizer, config.model.context_length, cache(config), given, say)
    refuse_change(file, payload, shards)

    from gpt.lit import Plan

    plan = Plan(**payload["plan"])
    if payload["step"] >= plan.total_steps:
        say(f"{run_dir} is complete: it has trained all of its {plan.total_steps} steps")
        return
    say(f"continuing {run_dir} at step {payload['step']} of {plan.total_steps}")
    fit(config, plan, shards, run_dir, file, threads=payload["threads"])


def refuse_change(file: Path, payload: dict, shards: Shards) -> None:
    """Raise `UserError` where the text or its tokens are no longer what the run began with."""
    stored = payload["corpus"] | {"tokenizer's hash": payload["tokenizer"]["sha256"]}
    present = shards.manifest["key"] | {"tokenizer's hash": shards.tokenizer.sha256}
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
        shape, weights = huggingface.load_directory(path)
        tokenizer = huggingface.its_tokenizer(path, shape)
        model = {key: value for key, value in dataclasses.asdict(shape).items() if key != "vocab_size"}
    else:
        payload = checkpoint.load(checkpoint.find(path))
        weights, tokenizer = payload["state_dict"], Tokenizer.from_dict(payload["tokenizer"])
        model = payload["config"]["model"]
    plain = to_plain(config)
    plain["model"] = model | {"dropout": config.model.dropout}
    return validate(plain), weights, tokenizer


def decide_hardware(config: Config) -> Config:
    """The configuration with what was `auto` decided for this machine."""
    device = choose_device(config.trainer.device)
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


def make_run_dir(config: Config, name: str) -> Path:
    """A new directory that no other run has, with the resolved configuration in it."""
    wanted = Path(config.run_dir) if config.run_dir else Path("runs") / f"{datetime.now():%Y-%m-%d_%H-%M-%S}_{name}"
    run_dir, number = wanted, 2
    while True:
        try:
            run_dir.mkdir(parents=True, exist_ok=config.run_dir is not None)
            break
        except FileExistsError:
            run_dir, number = wanted.with_name(f"{wanted.name}-{number}"), number + 1
        except OSError as error:
            raise UserError(f"run_dir={run_dir}: cannot be made ({error.strerror})") from None
    lock(run_dir)
    checkpoint.write_text(run_dir / "config.yaml", OmegaConf.to_yaml(OmegaConf.create(to_plain(config))))
    return run_dir


def stored_config(run_dir: Path) -> Config:
    """The resolved configuration of a run."""
    stored = OmegaConf.load(run_dir / "config.yaml")
    assert isinstance(stored, DictConfig)
    return validate(stored)


def lock(run_dir: Path) -> None:
    """Hold a run directory until this process ends, however it does; refuse one that another process holds."""
    if not IS_MAIN:
        return
    file = (run_dir / ".lock").open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        raise UserError(f"{run_dir}: process {file.read().strip()} is training in it: wait, or stop that one") from None
    file.truncate(0)
    file.write(f"{os.getpid()}\n")
    file.flush()
    _LOCKS.append(file)


def fit(
    config: Config,
    plan: "Plan",
    shards: Shards,
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
            train(config, plan, shards, run_dir, file, weights)
            return
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            key, size = "trainer.micro_batch_size", plan.micro_batch_size
            if size == 1:
                raise UserError(f"out of memory at {key}=1, the least: choose a smaller model or context") from None
            plan = plan.with_smaller_micro_batch()
            if not plan.automatic or config.trainer.devices > 1:
                raise UserError(f"out of memory at {key}={size}: try {key}={plan.micro_batch_size}") from None
            warn(f"out of memory at {key}={size}: going on with {plan.micro_batch_size} and as many tokens a step")
        release_memory()
        newest = checkpoint.load_newest(run_dir, warn)  # saved on the way out, unless it went wrong in an update
        file = newest[0] if newest else None


def train(config: Config, plan: "Plan", shards: Shards, run_dir: Path, file: Path | None, weights: dict | None) -> None:
    """Train to the horizon or to a signal, and say what came of it."""
    import torch

    from gpt.callbacks import CheckpointFiles, Clock, Curves, Journal, LastCheckpoint, Progress, Validation
    from gpt.lit import GPTData, GPTModule, build_trainer

    module = GPTModule(config, plan, shards, checkpoint.git_commit(ROOT))
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


def report(module, validation, run_dir: Path) -> None:
    """The final figures, where the run is, and what to do with it."""
    facts = validation.metrics(module, module.plan.total_steps)
    manifest = module.shards.manifest["splits"]["validation"]
    print(
        f"trained {facts['steps']} steps, {facts['tokens']:,} tokens ({facts['epochs']:.2f} epochs) in "
        f"{facts['train_seconds']:.1f} s, {facts['tokens_per_second']:,.0f} tokens/s, "
        f"{facts['peak_memory_bytes'] / 2**30:.2f} GiB at peak\n"
        f"validation on {manifest['bytes']:,} bytes: {facts['val_loss']:.4f} nats per token, "
        f"{facts['val_nats_per_byte']:.4f} nats per byte, {facts['val_bits_per_byte']:.4f} bits per byte "
        f"(xz -9e: {xz_bits_per_byte(module.shards):.4f})"
    )
    if validation.best_step != facts["steps"]:
        print(f"validation was best at step {validation.best_step}; best.ckpt is the model of that step")
    print(
        f"\nthe run:    {run_dir}\n"
        f'sample it:  python generate.py --checkpoint {run_dir} --prompt "{module.config.data.prompts[-1]}"\n'
        f"its curves: tensorboard --logdir {run_dir.parent}"
    )


def xz_bits_per_byte(shards: Shards) -> float:
    """What a strong general-purpose compressor makes of the validation text alone: a mark to beat."""
    ids = shards.validation[shards.validation != shards.tokenizer.end_of_text]
    text = shards.tokenizer.decode_bytes(ids.tolist())
    # As xz does where it knows the size: a dictionary no larger than the text, which saves 700 MB for a small one.
    method = {"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": max(4096, len(text))}
    return 8 * len(lzma.compress(text, filters=[method])) / len(text)


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
        return (
            f"{error.override!r} is not key=value; a value with = or spaces in it needs quotes inside quotes: 'k=\"v\"'"
        )
    if isinstance(error, MissingConfigException) and error.options:
        group, _, name = str(error.missing_cfg_file).rpartition("/")
        return f"{group}={name} is not known: choose from {', '.join(error.options)}"
    if unknown := re.match(r"Could not override '([^']+)'", str(error)):
        return unknown_key(unknown[1])
    return " ".join(line.strip() for line in str(error).splitlines() if line.strip())


if __name__ == "__main__":
    with command_line("train.py"):
        main()
