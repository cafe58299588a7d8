"""A new run: the weights that it starts from, if any, its text, what was left open, and its directory."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from gpt.console import say, warn
from gpt.errors import UserError
from gpt.exchange.loading import open_model
from gpt.model.transformer import GPTConfig, ModelConfig
from gpt.text.cache import CACHE
from gpt.text.prepare.mixture import names_of, shares_of
from gpt.text.prepare.prepare import TooShortError, prepare
from gpt.text.prepared import Corpora, find_prepared
from gpt.text.tokenizer import Tokenizer
from gpt.training.config.advice import fit_of_tokenizer, warnings
from gpt.training.config.asked import Asked
from gpt.training.config.loading import validate
from gpt.training.config.schema import Config
from gpt.training.distributed.launch import connect, on_all_ranks, ranks, require_processes
from gpt.training.resolve import for_machine, require_devices, resolve, with_suitable_split
from gpt.training.run.run import Run, require_empty, text_name

MOST_VARIES = 80  # characters of a run's name that say how it differs in a sweep


def begin(asked: Asked) -> Run:
    """Make a new run in `run_dir`, or below runs/ under a name of its text and its model; rank 0 decides for all."""
    return for_all_ranks(lambda: begin_in(None, asked))


def begin_in(run: Run | None, asked: Asked) -> Run:
    """Begin at the first step, in a new directory, or in that of a run that has no checkpoint yet."""
    config = asked.config
    require_processes(config.trainer.devices, config.trainer.world_size)
    if run is None and config.run_dir:
        require_empty(Path(config.run_dir))
    config, text, weights = open_text(asked)
    config, schedule, _ = resolve(asked, config, text)
    in_steps = schedule  # even where the horizon is a time
    if schedule.seconds:
        from gpt.training.estimate import timing  # imports Lightning

        _, in_steps, _ = timing.in_steps(config, schedule, text, at_most=1.0)
    config = with_suitable_split(config, in_steps, text)
    if weights is not None:
        say(fit_of_tokenizer(text))
    for line in warnings(config, in_steps, text):
        warn(line)
    run = run or Run.create(config.run_dir, _name(asked), config)
    run.config, run.schedule, run.text, run.weights, run.in_python = config, schedule, text, weights, asked.in_python
    return run


def _name(asked: Asked) -> str:
    """What a run is called: the name of its text, that of its model, or else its shape, and what varies in a sweep."""
    model, shape = asked.model, asked.config.model
    if asked.config.init_from:
        model = "tuned"
    elif not model:
        model = "mini" if shape == ModelConfig() else f"{shape.num_layers}x{shape.d_model}"
    return f"{text_name(asked.config.data)}-{model}{'_' * bool(asked.job)}{asked.job[:MOST_VARIES]}"


# --- the weights and the text ---


def open_text(asked: Asked) -> tuple[Config, Corpora, dict[str, torch.Tensor] | None]:
    """Open the weights to start from, if any, which bring shape and tokenizer, and prepare the text.

    The configuration that is returned first is for this machine, and with that shape.
    """
    config, weights, tokenizer = asked.config, None, None
    if config.init_from:
        model, tokenizer = open_model(config.init_from)
        config, weights = _with_shape_of(model.config, tokenizer, asked), model.state_dict()
    config = for_machine(config)
    return config, load_text(config, tokenizer), weights


def _with_shape_of(model: GPTConfig, tokenizer: Tokenizer, asked: Asked) -> Config:
    """The configuration with the shape and the tokenizer of a model; keys of `model` that were given must fit it."""
    own = [key.removeprefix("model.") for key in asked.given if key.startswith("model.")]
    given = {key: getattr(asked.config.model, key) for key in ("dropout", *own)}
    shape = {key: value for key, value in asdict(model).items() if key != "vocab_size"} | given
    if GPTConfig(**shape, vocab_size=model.vocab_size).num_parameters != model.num_parameters:
        changed = " ".join(f"model.{key}={given[key]}" for key in own)
        init_from = asked.config.init_from
        raise UserError(f"{changed}: the weights of init_from={init_from} have other shapes: leave it out")
    of_bpe = {"vocab_size": tokenizer.vocab_size} if tokenizer.name == "bpe" else {}
    return validate(asdict(asked.config) | {"model": shape, "tokenizer": {"name": tokenizer.name} | of_bpe})


def load_text(
    config: Config, tokenizer: Tokenizer | None = None, quiet: bool = False, record: dict[str, Any] | None = None
) -> Corpora:
    """The prepared text of a configuration; `tokenizer` is that of a model to start from.

    With `record`, what a checkpoint says of both, the cache does without the text itself where it has it prepared.
    """
    context, tell = config.model.context_length, (lambda line: None) if quiet else say
    cache = Path(config.data.cache or CACHE)
    try:
        return prepare(config.data, tokenizer or config.tokenizer, context, cache, tell)
    except TooShortError as error:
        longest = error.longest_context
        both = f"model.context_length={longest} trainer.tokens_per_step={8 * longest}"
        remedy = f", or set {both} or less" if longest else ""
        raise UserError(f"{error}{remedy}") from None
    except UserError as error:
        if record is None or config.data.name == "prepared":
            raise
        if not (found := find_prepared(record, Tokenizer.from_dict(record["tokenizer"]), cache)):
            raise UserError(f"{error}; if the text is elsewhere now, add data.path=FILE") from None
        tell(f"{error}: going on with the prepared text in {cache}")
        return Corpora(tuple(found), names_of(config.data), shares_of(config.data))


def given_tokenizer(record: dict[str, Any]) -> Tokenizer | None:
    """The tokenizer of a run that did not make its own, but took that of the weights it started from."""
    return Tokenizer.from_dict(record["tokenizer"]) if "given" in record["corpus"]["tokenizer"] else None


# --- on every rank ---


def for_all_ranks(make: Callable[[], Run]) -> Run:
    """Have rank 0 make a run, and tell the others what they need of it; each reads text and checkpoint itself."""
    connect()
    made = on_all_ranks(lambda: make() if ranks().rank == 0 else None)
    try:
        told: list[Any] = [None, None]
        if made is not None:
            told[0] = made.for_others()
            told[1] = made.text and {"corpus": made.text.key, "tokenizer": made.text.tokenizer.to_dict()}
        if ranks().world_size > 1:
            torch.distributed.broadcast_object_list(told, 0)
        return on_all_ranks(lambda: made or _follow(*told))
    except BaseException:
        if made is not None:
            made.close()
        raise


def _follow(run: Run, record: dict[str, Any] | None) -> Run:
    """Open on another rank the text of the run that rank 0 has made."""
    if record is None:  # it is complete
        return run
    require_devices(run.config)
    run.text = load_text(run.config, given_tokenizer(record), quiet=True, record=record)
    if {"corpus": run.text.key, "tokenizer": run.text.tokenizer.to_dict()} != record:
        raise UserError("the text is not the same as for process 0: copy it to this machine")
    if not (run.directory / "config.yaml").is_file():
        raise UserError(f"{run.directory}: is not on this machine: all machines must share the folder")
    return run
