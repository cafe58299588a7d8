"""From a request to final values: what the machine determines, and then every other value that is still auto."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

import torch

from gpt.console import print_line
from gpt.data.data_config import BUILTIN_CORPORA
from gpt.data.prompts import extract_prompts
from gpt.data.token_dataset import TokenDataset
from gpt.errors import UserError
from gpt.hardware.device import DTYPES, choose_compile, choose_device, choose_precision, device_count
from gpt.hardware.memory import free_memory
from gpt.model.memory_estimate import choose_micro_batch
from gpt.model.transformer import GPTConfig, ModelConfig
from gpt.training import distributed
from gpt.training.advice import MIN_SUGGESTED_STEPS, suggest_bpe_dropout, suggest_steps
from gpt.training.config import Config, parse_horizon, with_values
from gpt.training.request import Request
from gpt.training.schedule import SHORT_SEQUENCE_TOKENS, Schedule

if TYPE_CHECKING:
    from gpt.training.auto_model import Candidate

AUTO_HORIZON_SECONDS = 600  # horizon=auto trains no longer, unless `MIN_SUGGESTED_STEPS` take longer


@dataclass(frozen=True)
class Machine:
    """What a run uses of this machine."""

    device: str  # cpu, cuda or mps
    devices: int  # on each machine
    num_nodes: int
    precision: str  # fp32, bf16 or fp16
    compile: str  # true or false


def check_machine(request: Request) -> Machine:
    """Return what the request uses of this machine. It is called before any work on text.

    Raises:
        UserError: The machine lacks a device or a capability, or a step is not a whole number of sequences.
    """
    trainer = request.config.trainer
    devices, num_nodes = distributed.resolve_devices(trainer.devices, trainer.num_nodes)
    config = with_values(request.config, {"trainer.devices": devices, "trainer.num_nodes": num_nodes})
    config.require_whole_sequences()
    device = require_devices(config)
    return Machine(
        device.type,
        devices,
        num_nodes,
        precision=choose_precision(trainer.precision, device),
        compile=str(choose_compile(trainer.compile, device)).lower(),
    )


def require_devices(config: Config) -> torch.device:
    """Return the configured device; raise `UserError` if this machine lacks it or has too few.

    With several processes, each takes its own GPU from now on.
    """
    device, count = choose_device(config.trainer.device), config.trainer.devices or 1
    available = device_count(device)
    if available is not None and count > available:
        raise UserError(f"trainer.devices={count} is more than this machine has: at most {available} of {device.type}")
    if device.type == "cuda" and distributed.world_size() > 1:
        torch.cuda.set_device(distributed.local_rank())
    if (count > 1 or config.trainer.strategy != "auto") and not torch.distributed.is_available():
        raise UserError("this PyTorch was built without torch.distributed: use one device, and no trainer.strategy")
    if device.type == "mps" and config.trainer.strategy != "auto":
        raise UserError(f"trainer.strategy={config.trainer.strategy} is not for mps, a single device: leave it out")
    return device


def finalize(
    request: Request, machine: Machine, dataset: TokenDataset, candidates: Sequence["Candidate"] = ()
) -> tuple[Config, Schedule, int]:
    """Return the final configuration, in which only `trainer.strategy` may be auto, and the planned schedule.

    Values that the user left open are set in this order:

    1. `trainer.device`, `devices`, `num_nodes`, `precision`, `compile`: as `check_machine` returned them.
    2. `tokenizer`, for token files: as the files were written.
    3. `data.prompts`: those of a built-in corpus, or words of the validation text.
    4. `model=auto`: the candidate that learns most in the time; then `horizon`, if more time would only memorize.
    5. For the model, in `finalize_model`: `trainer.micro_batch_size` by free memory, `trainer.short_sequences` by the
       context length, `optim.lr` and `optim.matrix_lr` by depth and width.
    6. `horizon=auto`: the steps that suit the size of the text, as far as they fit into ten minutes.
    7. `data.bpe_dropout`: by how often the text is seen.
    8. Paths of `data`: absolute.

    Args:
        request: What the user wants trained, with the shape of the initial weights if there are any.
        machine: What `check_machine` returned.
        dataset: The dataset of the request.
        candidates: For model=auto, what `find_candidates` returned; if empty, it is called here.

    Returns:
        The configuration, the schedule, and the number of steps. For a time horizon, that number is an estimate.
    """
    config = apply_machine(request, machine, dataset)
    if config.data.prompts is None:
        config = with_values(
            config, {"data.prompts": BUILTIN_CORPORA.get(config.data.name) or extract_prompts(dataset)}
        )
    if request.model == "auto":
        candidates = candidates or find_candidates(request, machine, dataset)
        config, schedule = _with_best_model(config, dataset, candidates)
    else:
        config = finalize_model(config, config.model)
        if config.horizon == "auto":
            config = _with_suitable_horizon(config, dataset)
        schedule = Schedule.plan(config, dataset.train_tokens)
    num_steps = schedule.total_steps
    if schedule.seconds:
        from gpt.training import timing  # imports Lightning

        _, schedule_in_steps, _ = timing.plan_in_steps(config, schedule, dataset, max_seconds=1.0)
        num_steps = schedule_in_steps.total_steps
    if config.data.bpe_dropout is None:
        probability = 0.0 if config.init_from else suggest_bpe_dropout(config, num_steps, dataset)
        config = with_values(config, {"data.bpe_dropout": probability})
    return config.with_absolute_paths(), schedule, num_steps


def apply_machine(request: Request, machine: Machine, dataset: TokenDataset) -> Config:
    """Return the configuration with the values that the machine, or token files, determine."""
    config = with_values(request.config, {f"trainer.{key}": value for key, value in asdict(machine).items()})
    if config.data.name == "tokens":  # they come with their tokenizer
        tokenizer = dataset.tokenizer
        config = with_values(config, {"tokenizer.name": tokenizer.name, "tokenizer.vocab_size": tokenizer.vocab_size})
    return config


def finalize_model(config: Config, model: ModelConfig) -> Config:
    """Return the configuration with this model, and set the open values that depend on it."""
    trainer = config.trainer
    values: dict[str, object] = {"model": model, "optim": config.optim.for_model(model)}
    if trainer.micro_batch_size == "auto":
        values["trainer.micro_batch_size"] = choose_micro_batch(
            GPTConfig(**asdict(model)),  # with GPT-2's large vocabulary for every text, so that the size is safe
            trainer.tokens_per_step // (model.context_length * trainer.world_size),
            free_memory(torch.device(trainer.device)),
            DTYPES[trainer.precision],
            trainer.device,
            checkpointing=trainer.activation_checkpointing,
        )
    if trainer.short_sequences is None:  # their benefit was measured only for this context length and random weights
        is_measured = model.context_length == 2 * SHORT_SEQUENCE_TOKENS and not config.init_from
        values["trainer.short_sequences"] = SHORT_SEQUENCE_TOKENS if is_measured else 0
    return with_values(config, values)


def find_candidates(
    request: Request, machine: Machine, dataset: TokenDataset, max_seconds: float = 0.0
) -> Sequence["Candidate"]:
    """Return the candidates of model=auto, each with its predicted loss.

    Args:
        request: A request with model=auto.
        machine: What `check_machine` returned.
        dataset: The dataset of the request.
        max_seconds: Time enough candidates to pick the best for this time too.
    """
    from gpt.training.auto_model import time_candidates  # imports Lightning

    config = apply_machine(request, machine, dataset)

    def finalize_candidate(model: ModelConfig) -> tuple[Config, Schedule]:
        context_length = max(model.context_length, config.model.context_length)
        sizes = {key: getattr(model, key) for key in ("d_model", "num_layers", "num_heads")}
        model = replace(config.model, context_length=context_length, **sizes)
        num_sequences = config.trainer.tokens_per_step // config.model.context_length
        values = {
            "model": model,
            "trainer.tokens_per_step": num_sequences * context_length,
            "trainer.short_sequences": config.trainer.short_sequences or 0,
        }
        final = finalize_model(with_values(config, values), model)
        return final, Schedule.plan(final, dataset.train_tokens)

    return time_candidates(finalize_candidate, dataset, parse_horizon(config.horizon).amount, max_seconds)


def _with_best_model(
    config: Config, dataset: TokenDataset, candidates: Sequence["Candidate"]
) -> tuple[Config, Schedule]:
    """Return the configuration and the schedule of the candidate that learns most within the horizon."""
    from gpt.training.auto_model import describe_choice, pick_best  # imports Lightning

    seconds = parse_horizon(config.horizon).amount
    print_line(describe_choice(candidates, seconds, dataset))
    candidate = pick_best(candidates, seconds)
    bits_per_byte, useful_seconds = candidate.predict(seconds)
    horizon = config.horizon if useful_seconds == seconds else f"{useful_seconds}s"
    schedule = replace(candidate.schedule, seconds=parse_horizon(horizon).amount, expected_bits=bits_per_byte)
    return with_values(candidate.config, {"horizon": horizon, "data": config.data}), schedule


def _with_suitable_horizon(config: Config, dataset: TokenDataset) -> Config:
    """Return the configuration with the steps that suit the text, as far as they fit into `AUTO_HORIZON_SECONDS`."""
    steps = suggest_steps(config, dataset)
    config = with_values(config, {"horizon": f"{steps}steps"})
    if steps > MIN_SUGGESTED_STEPS:
        from gpt.training.timing import measure_step  # imports Lightning

        schedule = Schedule.plan(config, dataset.train_tokens)
        _, step_seconds = measure_step(config, schedule, dataset, max_seconds=1.0)
        steps = max(MIN_SUGGESTED_STEPS, min(steps, int(AUTO_HORIZON_SECONDS / step_seconds)))
    print_line(f"horizon={steps}steps suits this text and this machine")
    return with_values(config, {"horizon": f"{steps}steps"})
