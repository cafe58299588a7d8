"""Train a GPT: python train.py [key=value ...]. The keys and their values are in configs/."""

import dataclasses
import lzma
import os
import re
import sys
from datetime import datetime
from pathlib import Path

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from gpt import checkpoint
from gpt.config import Config, to_plain, unknown_key, validate
from gpt.errors import UserError, command_line
from gpt.hardware import (
    choose_compile,
    choose_device,
    choose_micro_batch,
    choose_precision,
    keep_freed_memory,
    peak_flops,
)
from gpt.shards import Shards, prepare
from gpt.tokenizer import Tokenizer, gpt2_tokenizer

ROOT = Path(__file__).resolve().parent
CACHE = ROOT / "data" / "cache"
IS_MAIN = os.environ.get("LOCAL_RANK", "0") == "0"  # with several devices, one process speaks


def say(line: str) -> None:
    if IS_MAIN:
        print(line, flush=True)


ConfigStore.instance().store(name="defaults", node=to_plain(Config()))


@hydra.main(version_base="1.3", config_path="configs", config_name="train")
def run(composed: DictConfig) -> None:
    with command_line("train.py"):  # here too, since Hydra adds lines of its own to an error that passes through it
        config = validate(composed)
        keep_freed_memory()
        chosen = HydraConfig.get()
        others = [override for override in chosen.overrides.task if not override.startswith("resume=")]
        if config.resume and others:
            raise UserError(
                f"resume continues a run as it was configured, and {others[0]} would change it: "
                f"start a new run from its weights with init_from={config.resume}"
            )
        if config.resume:
            resume(config.resume)
        else:
            start(config, model_name=chosen.runtime.choices["model"])


def start(config: Config, model_name: str) -> None:
    """Begin a new run."""
    if config.run_dir and any(Path(config.run_dir).glob("checkpoints/*.ckpt")):
        raise UserError(f"run_dir={config.run_dir} already holds a run: choose another, or continue it with resume=")
    weights, tokenizer = None, None
    if config.init_from:
        config, weights, tokenizer = initial_weights(config)
    config = decide_hardware(config)
    shards = prepare(config.data, config.tokenizer, config.model.context_length, CACHE, tokenizer, say)

    from gpt.lit import GPTModule, make_plan

    config, plan = make_plan(config, shards, say)
    module = GPTModule(config, plan, shards, checkpoint.git_commit(ROOT))
    if weights is not None:
        module.load_state_dict(weights)
    run_dir = make_run_dir(config, f"{config.data.name}-{model_name}")
    fit(module, run_dir)


def resume(path: str) -> None:
    """Continue a run from its last checkpoint, as it was configured."""
    file = checkpoint.find(path, prefer="last")
    payload = checkpoint.load(file)
    config = decide_hardware(validate(payload["config"]))
    given = Tokenizer.from_dict(payload["tokenizer"]) if "given" in payload["corpus"]["tokenizer"] else None
    shards = prepare(config.data, config.tokenizer, config.model.context_length, CACHE, given, say)
    if shards.manifest["key"] != payload["corpus"] or shards.tokenizer.sha256 != payload["tokenizer"]["sha256"]:
        raise UserError(
            f"{path}: the text or the tokenizer is no longer what the run began with, so it cannot continue"
        )

    from gpt.lit import GPTModule, Plan

    plan = Plan(**payload["plan"])
    run_dir = file.parent.parent
    if payload["step"] >= plan.total_steps:
        say(f"{run_dir} is complete: it has trained all of its {plan.total_steps} steps")
        return
    say(f"continuing {run_dir} at step {payload['step']} of {plan.total_steps}")
    fit(GPTModule(config, plan, shards, checkpoint.git_commit(ROOT)), run_dir, file, payload["threads"])


def initial_weights(config: Config) -> tuple[Config, dict, Tokenizer]:
    """The weights of `init_from` with their tokenizer, and the configuration with their model's shape."""
    path = Path(config.init_from or "")
    if (path / "config.json").is_file():
        from gpt.huggingface import load_directory

        shape, weights = load_directory(path)
        tokenizer = gpt2_tokenizer()
        if shape.vocab_size != tokenizer.vocab_size:
            raise UserError(f"{path}: a vocabulary of {shape.vocab_size}, and GPT-2's has {tokenizer.vocab_size}")
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
    if not IS_MAIN:
        return Path(os.environ["GPT_RUN_DIR"])
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
    OmegaConf.save(OmegaConf.create(to_plain(config)), run_dir / "config.yaml")
    os.environ["GPT_RUN_DIR"] = str(run_dir)
    return run_dir


def fit(module, run_dir: Path, checkpoint_file: Path | None = None, threads: int | None = None) -> None:
    """Train to the horizon, or to a signal; then say what came of it."""
    import torch

    from gpt.callbacks import CheckpointFiles, Clock, Curves, LastCheckpoint, Progress, Validation
    from gpt.lit import GPTData, build_trainer

    if threads:
        torch.set_num_threads(threads)  # sums in another order would not continue bit for bit
    config = module.config
    device = torch.device(config.trainer.device)
    say(
        f"{module.model.num_parameters():,} parameters on {device.type} in {config.trainer.precision}, "
        f"{module.plan.total_steps} steps of {config.trainer.tokens_per_step:,} tokens; writing to {run_dir}"
    )
    clock = Clock()
    curves = Curves(run_dir, clock, peak_flops(device, config.trainer.precision))
    validation = Validation(run_dir, clock, curves)
    last = LastCheckpoint(run_dir, clock, validation)
    callbacks = [clock, curves, validation, last, Progress(validation, curves)]
    trainer = build_trainer(config, module.plan, callbacks, CheckpointFiles())
    trainer.fit(module, datamodule=GPTData(module), ckpt_path=checkpoint_file, weights_only=True)
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
    return 8 * len(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME)) / len(text)


def main() -> None:
    """Compose, train; a mistake in the configuration becomes one line that names the key."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # have Hydra raise its errors instead of printing them
    try:
        run()
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(describe(error)) from None


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
