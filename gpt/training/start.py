"""Start a run: find its initial weights, prepare its dataset, make every value final, and create its directory."""

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from gpt.console import print_line, print_warning
from gpt.data.dataset_cache import DEFAULT_CACHE
from gpt.data.mixture import integer_weights, source_names
from gpt.data.prepare import TooShortError, prepare
from gpt.data.token_dataset import TokenDataset, find_cached_dataset
from gpt.data.tokenizer import Tokenizer, TokenizerConfig
from gpt.errors import UserError
from gpt.loading import find_checkpoint, open_model
from gpt.model.transformer import GPTConfig, ModelConfig
from gpt.training import distributed
from gpt.training.advice import compare_tokenizers, list_warnings
from gpt.training.config import Config
from gpt.training.finalize import Machine, check_machine, finalize, require_devices
from gpt.training.request import Request
from gpt.training.run_directory import RunDirectory, require_empty, text_name
from gpt.training.state import RunSpec

MAX_JOB_CHARS = 80  # of the varying keys of a sweep, in a run's name


def start_run(request: Request) -> tuple[RunSpec, RunDirectory]:
    """Prepare a new run, and create its directory: `run_dir`, or one below runs/ named after its text and its model."""
    started = broadcast_run(lambda: start_in_directory(None, request), request.config.trainer.device)
    assert started is not None
    return started


def start_in_directory(run: RunDirectory | None, request: Request) -> tuple[RunSpec, RunDirectory]:
    """Prepare a run that begins at its first step, in a new directory or in that of a run without a checkpoint."""
    config = request.config
    distributed.require_processes(config.trainer.devices, config.trainer.world_size)
    if run is None and config.run_dir:
        require_empty(Path(config.run_dir))
    spec = plan_run(request)
    if run is not None:
        return replace(spec, command=request.command), run
    return spec, RunDirectory.create(spec.config.run_dir, _run_name(request), spec.config, request.command)


def plan_run(request: Request) -> RunSpec:
    """Return the specification of a new run, without a directory. Print warnings about its settings."""
    request, machine, dataset, initial_weights = open_dataset(request)
    config, schedule, num_steps = finalize(request, machine, dataset)
    if initial_weights is not None:
        print_line(compare_tokenizers(dataset))
    for line in list_warnings(config, replace(schedule, total_steps=num_steps), dataset):
        print_warning(line)
    return RunSpec(config, schedule, dataset, initial_weights=initial_weights)


def _run_name(request: Request) -> str:
    """Return the name of a run: its text, its model or the model's shape, and what varies in a sweep."""
    model, shape = request.model, request.config.model
    if request.config.init_from:
        model = "tuned"
    elif not model:
        model = "mini" if shape == ModelConfig() else f"{shape.num_layers}x{shape.d_model}"
    job = f"_{request.job[:MAX_JOB_CHARS]}" if request.job else ""
    return f"{text_name(request.config.data)}-{model}{job}"


# --- the weights and the text ---


def open_dataset(request: Request) -> tuple[Request, Machine, TokenDataset, Path | None]:
    """Prepare the text of a new run, after everything that can be checked without it.

    Returns:
        The request, with the shape and the tokenizer of the initial weights if there are any; what the run uses of the
        machine; the dataset; and the file of the initial weights.
    """
    initial_weights, tokenizer = None, None
    if request.config.init_from:
        initial_weights = find_checkpoint(request.config.init_from)
        model, tokenizer = open_model(initial_weights)
        request = replace(request, config=_with_shape_of(model.config, tokenizer, request))
        del model  # to free memory while text is prepared; training opens it again
    machine = check_machine(request)
    return request, machine, load_dataset(request.config, tokenizer), initial_weights


def _with_shape_of(model: GPTConfig, tokenizer: Tokenizer, request: Request) -> Config:
    """Return the configuration with the shape and the tokenizer of a model.

    Raises:
        UserError: An override of `model` does not fit its weights.
    """
    config = request.config
    overridden = [key.removeprefix("model.") for key in request.overrides if key.startswith("model.")]
    values = {key: getattr(config.model, key) for key in ("dropout", *overridden)}
    shape = {key: value for key, value in asdict(model).items() if key != "vocab_size"} | values
    if GPTConfig(**shape, vocab_size=model.vocab_size).num_parameters != model.num_parameters:
        changes = " ".join(f"model.{key}={values[key]}" for key in overridden)
        raise UserError(f"{changes}: the weights of init_from={config.init_from} have other shapes: leave it out")
    vocab_size = tokenizer.vocab_size if tokenizer.name == "bpe" else TokenizerConfig.vocab_size
    return replace(config, model=ModelConfig(**shape), tokenizer=TokenizerConfig(tokenizer.name, vocab_size))


def load_dataset(
    config: Config,
    tokenizer: Tokenizer | None = None,
    quiet: bool = False,
    checkpoint: dict[str, Any] | None = None,
) -> TokenDataset:
    """Return the dataset of a configuration.

    Args:
        config: Names the text.
        tokenizer: The tokenizer of the model to start from, if any.
        quiet: Print nothing.
        checkpoint: If the cache already holds the dataset described in it, the source files are not needed.
    """
    context_length = config.model.context_length
    on_progress = (lambda line: None) if quiet else print_line
    cache = Path(config.data.cache or DEFAULT_CACHE)
    try:
        return prepare(config.data, tokenizer or config.tokenizer, context_length, cache, on_progress)
    except TooShortError as error:
        longest = error.longest_context
        settings = f"model.context_length={longest} trainer.tokens_per_step={8 * longest}"
        hint = f", or set {settings} or less" if longest else ""
        raise UserError(f"{error}{hint}") from None
    except UserError as error:
        if checkpoint is None or config.data.name == "tokens":
            raise
        sources = find_cached_dataset(checkpoint, Tokenizer.from_dict(checkpoint["tokenizer"]), cache)
        if not sources:
            raise UserError(f"{error}; if the text is elsewhere now, add data.path=FILE") from None
        on_progress(f"{error}: continuing with the prepared text in {cache}")
        return TokenDataset(tuple(sources), source_names(config.data), integer_weights(config.data))


def inherited_tokenizer(checkpoint: dict[str, Any]) -> Tokenizer | None:
    """Return the tokenizer of a run that took it from its initial weights; None if the run trained its own."""
    is_inherited = "given" in checkpoint["corpus"]["tokenizer"]
    return Tokenizer.from_dict(checkpoint["tokenizer"]) if is_inherited else None


# --- all ranks ---


def broadcast_run(
    prepare: Callable[[], tuple[RunSpec, RunDirectory] | None], device: str
) -> tuple[RunSpec, RunDirectory] | None:
    """Call `prepare` on rank 0, and open the same run on the other ranks, which read text and checkpoint themselves.

    `device` is the requested one. Return None on every rank if `prepare` does: the run is complete.
    """
    distributed.init_process_group(device)
    started = distributed.run_on_all_ranks(lambda: prepare() if distributed.is_main_process() else None)
    try:
        description = distributed.broadcast(started and _describe_run(*started))
        if description is None:
            return None
        return distributed.run_on_all_ranks(lambda: started or _open_on_rank(*description))
    except BaseException:
        if started is not None:
            started[1].close()
        raise


def _describe_run(spec: RunSpec, run: RunDirectory) -> tuple[dict[str, Any], dict[str, Any], Path]:
    """Return what other ranks need: the specification without the dataset, the dataset's identity, the path."""
    fields = {
        "config": spec.config,
        "schedule": spec.schedule,
        "checkpoint": spec.checkpoint and spec.checkpoint.absolute(),
        "initial_weights": spec.initial_weights and spec.initial_weights.absolute(),
        "command": spec.command,
    }
    return fields, _dataset_identity(spec.dataset), run.path.absolute()


def _dataset_identity(dataset: TokenDataset) -> dict[str, Any]:
    """Return what a checkpoint records about a dataset."""
    return {"corpus": dataset.key, "tokenizer": dataset.tokenizer.to_dict()}


def _open_on_rank(fields: dict[str, Any], identity: dict[str, Any], path: Path) -> tuple[RunSpec, RunDirectory]:
    """Open on this rank the run that rank 0 has prepared."""
    config = fields["config"]
    require_devices(config)
    dataset = load_dataset(config, inherited_tokenizer(identity), quiet=True, checkpoint=identity)
    if _dataset_identity(dataset) != identity:
        raise UserError("the text is not the same as for process 0: copy it to this machine")
    if not (path / "config.yaml").is_file():
        raise UserError(f"{path}: is not on this machine: all machines must share the folder")
    return RunSpec(dataset=dataset, **fields), RunDirectory(path)
