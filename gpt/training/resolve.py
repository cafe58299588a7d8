"""Every value that says auto, or was left open, decided in this order:

1. `for_machine`, before there is a text: devices and machines, precision, compilation.
2. `resolve`, with the text: a prepared text's tokenizer, and the prompts.
3. With model=auto, the model, and how much of the time it can use; or else the horizon, if that is auto.
4. `for_model`, for each model that is considered: the micro-batch, short windows, and the rates.
5. `with_suitable_split`, once it is known how often the text will be seen: the chance to split tokens.
"""

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

import torch

from gpt.console import say
from gpt.data.data_config import BUILTIN_CORPORA
from gpt.data.prompts import prompts_from
from gpt.data.token_dataset import TokenDataset
from gpt.data.tokenizer import TokenizerConfig
from gpt.errors import UserError
from gpt.hardware.device import DTYPES, choose_compile, choose_device, choose_precision, device_count
from gpt.hardware.memory import free_memory
from gpt.model.memory import choose_micro_batch
from gpt.model.transformer import GPTConfig, ModelConfig
from gpt.training import distributed
from gpt.training.config.advice import STEPS, suitable_split, suitable_steps
from gpt.training.config.asked import Asked
from gpt.training.config.horizon import parse_horizon
from gpt.training.config.schedule import SHORT_SEQUENCE_TOKENS, Schedule
from gpt.training.config.schema import Config

if TYPE_CHECKING:
    from gpt.training.estimate.choice import Member

AUTO_SECONDS = 600  # of training that horizon=auto takes at most, unless the least number of steps takes longer


def resolve(
    asked: Asked, config: Config, text: TokenDataset, longest: float = 0.0
) -> tuple[Config, Schedule, Sequence["Member"]]:
    """Decide every open value of `config`, which is for this machine, and note what stood in `asked` before.

    Returns the models that model=auto has weighed as well: enough of them to tell the best in `longest` seconds, too.
    """
    members: Sequence[Member] = ()
    if config.data.name == "tokens":  # with a tokenizer of its own
        config = replace(config, tokenizer=TokenizerConfig(text.tokenizer.name, text.tokenizer.vocab_size))
    if config.data.prompts is None:
        prompts = BUILTIN_CORPORA.get(config.data.name) or prompts_from(text)
        config = replace(config, data=replace(config.data, prompts=prompts))
    if asked.model == "auto":
        config, schedule, members = _with_best_model(config, text, longest)
    else:
        config = for_model(config, config.model)
        if config.horizon == "auto":
            config = _with_suitable_horizon(config, text)
        schedule = Schedule.plan(config, text.train_tokens)
    return config.as_decided_from(asked.config).anywhere(), schedule, members


# --- for this machine ---


def for_machine(config: Config) -> Config:
    """Decide devices, precision and compilation; `UserError` if this machine lacks what the configuration says."""
    devices, num_nodes = distributed.resolve_devices(config.trainer.devices, config.trainer.num_nodes)
    config = replace(config, trainer=replace(config.trainer, devices=devices, num_nodes=num_nodes))
    config.require_whole_windows()
    device = require_devices(config)
    trainer = replace(
        config.trainer,
        device=device.type,
        precision=choose_precision(config.trainer.precision, device),
        compile=str(choose_compile(config.trainer.compile, device)).lower(),
    )
    return replace(config, trainer=trainer)


def require_devices(config: Config) -> torch.device:
    """The configured device; `UserError` if this machine lacks it or has too few of it."""
    device, count = choose_device(config.trainer.device), config.trainer.devices or 1
    there = device_count(device)
    if there is not None and count > there:
        raise UserError(f"trainer.devices={count} is more than this machine has: at most {there} of {device.type}")
    if (count > 1 or config.trainer.strategy != "auto") and not torch.distributed.is_available():
        raise UserError("this PyTorch was built without torch.distributed: use one device, and no trainer.strategy")
    if device.type == "mps" and config.trainer.strategy != "auto":
        raise UserError(f"trainer.strategy={config.trainer.strategy} is not for mps, a single device: leave it out")
    return device


# --- for the model ---


def for_model(config: Config, model: ModelConfig) -> Config:
    """The configuration with this model, and with what follows from it where that was left open."""
    trainer = config.trainer
    if trainer.micro_batch_size == "auto":
        size = choose_micro_batch(
            GPTConfig(**asdict(model)),  # with GPT-2's vocabulary, whatever the text's: the least that fits
            trainer.tokens_per_step // (model.context_length * trainer.world_size),
            free_memory(torch.device(trainer.device)),
            DTYPES[trainer.precision],
            trainer.device,
            checkpointing=trainer.activation_checkpointing,
        )
        trainer = replace(trainer, micro_batch_size=size)
        # Noted already, since it may shrink when it is timed.
        config = replace(config, decided=(config.decided or {}) | {"trainer.micro_batch_size": "auto"})
    if trainer.short_window is None:
        suits = (
            model.context_length == 2 * SHORT_SEQUENCE_TOKENS and not config.init_from
        )  # no other context was measured
        trainer = replace(trainer, short_window=SHORT_SEQUENCE_TOKENS if suits else 0)
    return replace(config, model=model, trainer=trainer, optim=config.optim.for_model(model))


def with_suitable_split(config: Config, schedule: Schedule, text: TokenDataset) -> Config:
    """Set the chance to split tokens, if it was left open, to what suits a horizon in steps; 0 for trained weights."""
    if config.data.bpe_dropout is not None:
        return config
    chance = 0.0 if config.init_from else suitable_split(config, schedule, text)
    decided = (config.decided or {}) | {"data.bpe_dropout": None}
    return replace(config, data=replace(config.data, bpe_dropout=chance), decided=decided)


def _with_suitable_horizon(config: Config, text: TokenDataset) -> Config:
    """Set the horizon to the steps that suit the text, within what this machine trains in `AUTO_SECONDS`."""
    steps = suitable_steps(config, text)
    config = replace(config, horizon=f"{steps}steps")
    if steps > STEPS:
        from gpt.training.estimate.timing import measure  # imports Lightning

        _, seconds = measure(config, Schedule.plan(config, text.train_tokens), text, at_most=1.0)
        steps = max(STEPS, min(steps, int(AUTO_SECONDS / seconds)))
    say(f"horizon={steps}steps suits this text and this machine")
    return replace(config, horizon=f"{steps}steps")


def _with_best_model(config: Config, text: TokenDataset, longest: float) -> tuple[Config, Schedule, Sequence["Member"]]:
    """Choose, for model=auto, the model that learns most of the text within the horizon, a time, or part of it."""
    from gpt.training.estimate.choice import announcement, best, choose  # imports Lightning

    def decided(member: ModelConfig) -> tuple[Config, Schedule]:
        context = max(member.context_length, config.model.context_length)
        model = replace(member, context_length=context, dropout=config.model.dropout, qkv_bias=config.model.qkv_bias)
        tokens = config.trainer.tokens_per_step // config.model.context_length * context  # as many windows
        trainer = replace(config.trainer, tokens_per_step=tokens, short_window=config.trainer.short_window or 0)
        made = for_model(replace(config, trainer=trainer), model)
        return made, Schedule.plan(made, text.train_tokens)

    seconds = parse_horizon(config.horizon).amount
    members = choose(decided, text, seconds, longest)
    say(announcement(members, seconds, text))
    chosen = best(members, seconds)
    bits, useful = chosen.reached(seconds)
    horizon = config.horizon if useful == seconds else f"{useful}s"
    schedule = replace(chosen.schedule, seconds=parse_horizon(horizon).amount, expected_bits=bits)
    return replace(chosen.config, horizon=horizon), schedule, members
