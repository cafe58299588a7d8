"""Resume a run from its newest checkpoint, perhaps to a longer horizon or on other devices."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from gpt.checkpoint import load_checkpoint
from gpt.console import format_duration, print_line, print_warning
from gpt.data.token_dataset import TokenDataset
from gpt.data.tokenizer import Tokenizer
from gpt.errors import UserError
from gpt.files import flatten
from gpt.loading import find_path
from gpt.training import distributed
from gpt.training.config import Config, load_config, parse_config, parse_horizon, with_values
from gpt.training.finalize import require_devices
from gpt.training.request import Request
from gpt.training.run_directory import RunDirectory, checkpoint_errors
from gpt.training.schedule import MAX_STEPS, Schedule
from gpt.training.start import broadcast_run, inherited_tokenizer, load_dataset, start_in_directory
from gpt.training.state import RunSpec, TrainState
from gpt.training.versions import code_version, versions

FIRST_RESUMABLE_FORMAT = 4  # of checkpoints
# config.yaml and the newest checkpoint may disagree about these, if a kill came between writing the two.
LAGGING_KEYS = {"horizon", *(f"trainer.{key}" for key in ("devices", "num_nodes", "strategy", "micro_batch_size"))}
# A repeated command with resume=auto may set these to other values.
REPEATABLE_KEYS = ("run_dir", "resume", "trainer.devices", "trainer.num_nodes")


def resolve_resume_auto(request: Request) -> Request:
    """Resolve `resume=auto`: resume the run in `run_dir` if there is one, otherwise start one there.

    Raises:
        UserError: The run there was started with other settings.
    """
    config = request.config
    if config.resume != "auto":
        return request
    file = Path(config.run_dir or "") / "config.yaml"
    if not file.exists():
        return replace(request, config=with_values(config, {"resume": None}))
    _require_same_overrides(config, load_config(file))
    values: dict[str, Any] = {"resume": config.run_dir, "init_from": None, "overrides": {}}
    return replace(request, config=with_values(config, values), model="")


def _require_same_overrides(config: Config, run: Config) -> None:
    """Raise `UserError` if a command sets other values than the command that started the run.

    If only one of them sets a key, its value is compared with the value that the other has without setting it. The
    horizon may also be the run's present one: extending a run changes it.
    """
    values = config.settings() | config.overrides
    run_values = run.settings() | run.overrides
    for key in {**config.overrides, **run.overrides}:
        value, run_value = values.get(key), run_values.get(key)
        is_open = value in ("auto", None) and key not in run.overrides
        is_present_horizon = key == "horizon" and value == run.horizon
        if key in REPEATABLE_KEYS or value == run_value or is_open or is_present_horizon:
            continue
        hint = "give the same settings as before, or another run_dir"
        if key == "horizon":
            hint = f"to train that run longer, use resume={config.run_dir} horizon={value}"
        raise UserError(
            f"resume=auto: {key}={value} here, and {run_value} in the run of run_dir={config.run_dir}: {hint}"
        )


def resume_run(request: Request) -> tuple[RunSpec, RunDirectory] | None:
    """Open the run that `resume` names, to train on from its newest checkpoint; None if nothing is left to train.

    The request may also set:

    - `horizon`: train until then, even if the run is complete.
    - `trainer.devices`, `trainer.num_nodes`: train on other devices.
    - `data.path`, `data.validation_path`: where the text is now.
    """
    return broadcast_run(lambda: _resume_run(request), request.config.trainer.device)


def _resume_run(request: Request) -> tuple[RunSpec, RunDirectory] | None:
    run = RunDirectory.open(request.config.resume or "")
    try:
        config = load_config(run.path / "config.yaml")
        newest = run.load_newest()
        if newest is None:
            print_line(f"{run.path} has no checkpoint yet: beginning at its first step")
            moved = {"horizon": request.overrides.get("horizon", config.horizon)} | _moved_text(request)
            config = on_requested_devices(with_values(config, moved), request)
            return start_in_directory(run, replace(request, config=config))
        file, checkpoint = newest
        _require_format(file, checkpoint)
        _require_same_config(config, run, file, checkpoint)
        _refuse_going_back(run, file, checkpoint, find_path(request.config.resume or ""))
        spec = _resume_from(run, file, checkpoint, request)
    except BaseException:
        run.close()
        raise
    if spec is None:
        run.close()
        return None
    return spec, run


def _resume_from(run: RunDirectory, file: Path, checkpoint: dict[str, Any], request: Request) -> RunSpec | None:
    """Return the specification of a run that resumes from its newest checkpoint; None if the run is complete."""
    with checkpoint_errors(file):
        stored = parse_config(checkpoint["config"])
        planned = Schedule(**checkpoint["schedule"])
        state = TrainState.from_checkpoint(checkpoint, planned)
        step = checkpoint["step"]
    current = state.current_schedule(planned)
    horizon = request.overrides.get("horizon", stored.horizon)
    is_extended = horizon != stored.horizon
    end = current.describe_end(stored.patience, step, state.best_step)
    if end and not is_extended:
        hint = f"to train it longer, add horizon=; init_from={run.path} starts a new run from it"
        print_line(f"{run.path} is complete: it {end}; {hint}")
        run.restore_last(file)
        return None

    config = on_requested_devices(stored, request)
    require_devices(config)
    distributed.require_processes(config.trainer.devices, config.trainer.world_size)
    _announce_devices(stored, config)
    dataset = _load_same_dataset(with_values(config, _moved_text(request)), file, checkpoint)
    total_steps = current.total_steps
    if is_extended:
        planned = extend_schedule(config, current, step, state.seconds, horizon, dataset.train_tokens)
        config = with_values(config, {"horizon": horizon})
        total_steps = planned.total_steps
        print_line(f"extending the run from horizon={stored.horizon} to {horizon}, from step {step} on")
    _warn_of_other_versions(file, checkpoint)
    end = f" of {total_steps}" if total_steps < MAX_STEPS else f", until {config.horizon} are up"
    print_line(f"continuing {run.path} at step {step}{end}")
    return RunSpec(config, planned, dataset, checkpoint=file, command=request.command)


def _moved_text(request: Request) -> dict[str, Any]:
    """Return the keys that name where the text of a run is now, if the request has them."""
    return {key: request.overrides[key] for key in ("data.path", "data.validation_path") if key in request.overrides}


# --- a longer horizon ---


def extend_schedule(
    config: Config, schedule: Schedule, step: int, seconds: float, horizon: str, train_tokens: int
) -> Schedule:
    """Return the planned schedule of a run that gets another horizon.

    If the learning rate has not begun to fall, it falls later. Otherwise it rises again to the schedule of the new
    horizon.

    Args:
        config: As the run was trained.
        schedule: The schedule so far, as the clock has decided it.
        step: The steps so far.
        seconds: The seconds of training so far.
        horizon: The new horizon.
        train_tokens: The tokens of the training text.

    Raises:
        UserError: The run is past the new horizon already.
    """
    progress = seconds / schedule.seconds if schedule.seconds else 0.0
    planned = Schedule.plan(config, train_tokens, parse_horizon(horizon))
    if planned.total_steps <= step or 0 < planned.seconds <= seconds:
        raise UserError(
            f"horizon={horizon} is behind this run, which has trained {step} steps in {format_duration(seconds)}: "
            "give a longer horizon"
        )
    # A run never goes back to short sequences, and losses on short ones are never compared with losses on full ones.
    full_length_from_step = max(step, planned.full_length_from_step)
    if schedule.full_length_from_step <= step:
        full_length_from_step = schedule.full_length_from_step
    return replace(
        planned,
        full_length_from_step=full_length_from_step,
        restart_step=step,
        restart_lr_multiplier=schedule.lr_multiplier(step, progress, config.optim),
    )


# --- other devices ---


def on_requested_devices(config: Config, request: Request) -> Config:
    """Return the configuration of a run on the devices of a request, of the launcher, or the same as before."""
    devices, num_nodes = request.config.trainer.devices, request.config.trainer.num_nodes
    if distributed.world_size() == 1:
        devices, num_nodes = devices or config.trainer.devices, num_nodes or config.trainer.num_nodes
    return with_devices(config, *distributed.resolve_devices(devices, num_nodes))


def with_devices(config: Config, devices: int, num_nodes: int) -> Config:
    """Return the configuration of a run that continues on these numbers of devices and machines.

    Each step keeps its sequences, in the same order.

    Raises:
        UserError: The number of processes does not divide the sequences of a step.
    """
    trainer, world_size = config.trainer, devices * num_nodes
    if world_size == trainer.world_size and devices == (trainer.devices or 1):
        return config
    sequences, rest = divmod(config.sequences_per_step, world_size)
    if rest:
        raise UserError(
            f"a step of this run has {config.sequences_per_step} sequences, which {world_size} devices cannot share "
            "evenly: continue on a number that divides them"
        )
    sizes = range(min(sequences, config.micro_batch_size), 0, -1)
    values = {
        "trainer.devices": devices,
        "trainer.num_nodes": num_nodes,
        "trainer.strategy": "auto" if world_size == 1 else trainer.strategy,  # one device needs none
        "trainer.micro_batch_size": next(size for size in sizes if sequences % size == 0),
    }
    return with_values(config, values)


def _announce_devices(stored: Config, config: Config) -> None:
    """Print how the devices have changed, if they have."""
    if config == stored:
        return
    old, new, unit = stored.trainer.world_size, config.trainer.world_size, "devices"
    if old == new:
        old, new, unit = stored.trainer.num_nodes or 1, config.trainer.num_nodes or 1, "machines"
    print_line(f"continuing on {new} {unit} instead of {old}: the same sequences in each step, but not the same bits")


# --- checks ---


def _require_format(file: Path, checkpoint: dict[str, Any]) -> None:
    """Raise `UserError` for a checkpoint of version 0.x: its weights can be used, its training cannot be resumed."""
    if checkpoint["format"] < FIRST_RESUMABLE_FORMAT:
        raise UserError(
            f"{file}: of format {checkpoint['format']}, whose training version 0.5.0 is the last to resume: start a "
            f"new run from its weights with init_from={file}"
        )


def _require_same_config(config: Config, run: RunDirectory, file: Path, checkpoint: dict[str, Any]) -> None:
    """Raise `UserError` if the checkpoint and config.yaml disagree about what the run does."""
    stored = flatten(checkpoint["config"])
    for key, value in config.settings().items():
        stored_value = stored.get(key, value)
        if stored_value != value and key not in LAGGING_KEYS:
            raise UserError(
                f"{run.path / 'config.yaml'} has {key}={value!r}, and {file} {stored_value!r}: a run continues as it "
                "was configured; change the first to match, if you trust the second"
            )


def _refuse_going_back(run: RunDirectory, newest: Path, checkpoint: dict[str, Any], named: Path) -> None:
    """Raise `UserError` if a checkpoint is named that is not the newest: resuming it would undo later steps."""
    if not named.is_file() or named.samefile(newest):
        return
    step, newest_step = load_checkpoint(named).get("step"), checkpoint.get("step")
    if step != newest_step:
        raise UserError(
            f"{named} is of step {step}, and the run has trained until step {newest_step}: continue it with "
            f"resume={run.path}, or start a new run from this file with init_from={named}"
        )


def _load_same_dataset(config: Config, file: Path, checkpoint: dict[str, Any]) -> TokenDataset:
    """Return the dataset that the run began with.

    If the cache is gone and another version of the tokenizers library trains another tokenizer on the same text, encode
    it with the tokenizer of the checkpoint.

    Raises:
        UserError: The text or its tokens are others.
    """
    with checkpoint_errors(file):
        tokenizer = inherited_tokenizer(checkpoint)
    dataset = load_dataset(config, tokenizer, checkpoint=checkpoint)
    is_same_text = config.data.name != "tokens" and dataset.key == checkpoint["corpus"]
    if is_same_text and dataset.tokenizer.sha256 != checkpoint["tokenizer"]["sha256"]:
        print_line(f"{file}: the tokenizers library now trains another tokenizer on this text: the run keeps its own")
        return load_dataset(config, Tokenizer.from_dict(checkpoint["tokenizer"]), checkpoint=checkpoint)
    _require_same_dataset(file, checkpoint, dataset)
    return dataset


def _require_same_dataset(file: Path, checkpoint: dict[str, Any], dataset: TokenDataset) -> None:
    """Raise `UserError` if the text or its tokens are not those that the run began with."""
    stored = checkpoint["corpus"] | {"tokenizer's hash": checkpoint["tokenizer"]["sha256"]}
    present = dataset.key | {"tokenizer's hash": dataset.tokenizer.sha256}
    for key in stored:
        if stored[key] != present.get(key):
            raise UserError(
                f"{file}: the {key} was {stored[key]} when the run began and is {present.get(key)} now, so it cannot "
                f"continue: restore it, or start a new run with init_from={file}"
            )


def _warn_of_other_versions(file: Path, checkpoint: dict[str, Any]) -> None:
    """Warn if the run was trained by other code or with other libraries: it may not continue bit for bit."""
    stored = {"commit": checkpoint.get("git_commit")} | checkpoint.get("versions", {})
    present = dict.fromkeys(stored, "a checkout") | versions() | {"commit": code_version()}
    changes = [f"{name} {value} -> {present[name]}" for name, value in stored.items() if value != present[name]]
    if changes:
        print_warning(f"{file} is of other versions, so the run may not continue bit for bit ({', '.join(changes)})")
