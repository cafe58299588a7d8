"""Resuming a run: from its newest checkpoint, perhaps to a longer horizon or on other devices."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from gpt.checkpoint import load_checkpoint
from gpt.console import format_duration, print_line, print_warning
from gpt.data.token_dataset import TokenDataset
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
# What may differ between config.yaml and the newest checkpoint, if a kill came between writing the two.
MAY_LAG = {"horizon", *(f"trainer.{name}" for name in ("devices", "num_nodes", "strategy", "micro_batch_size"))}
MAY_DIFFER = ("run_dir", "resume", "trainer.devices", "trainer.num_nodes")  # when resume=auto repeats a command


def resolve_resume_auto(request: Request) -> Request:
    """Resolve `resume=auto`: continue the run in `run_dir` if there is one, otherwise begin one there.

    Raises:
        UserError: The run there was started with other settings.
    """
    config = request.config
    file = Path(config.run_dir or "") / "config.yaml"
    if config.resume != "auto":
        return request
    if not file.exists():
        return replace(request, config=with_values(config, {"resume": None}))
    _require_same_overrides(config, load_config(file))
    values: dict[str, Any] = {"resume": config.run_dir, "init_from": None, "overrides": {}}
    return replace(request, config=with_values(config, values), model="")


def _require_same_overrides(config: Config, run: Config) -> None:
    """Raise `UserError` if a command sets other values than the command that started the run.

    A key that only one of them sets is compared with the other's value of it. The horizon may also be the run's own:
    it changes if the run is extended.
    """
    values = config.settings() | config.overrides
    run_values = run.settings() | run.overrides
    for key in {**config.overrides, **run.overrides}:
        value, run_value = values.get(key), run_values.get(key)
        is_open = value in ("auto", None) and key not in run.overrides
        is_current_horizon = key == "horizon" and value == run.horizon
        if key in MAY_DIFFER or value == run_value or is_open or is_current_horizon:
            continue
        hint = "give the same settings as before, or another run_dir"
        if key == "horizon":
            hint = f"to train that run longer, use resume={config.run_dir} horizon={value}"
        raise UserError(
            f"resume=auto: {key}={value} here, and {run_value} in the run of run_dir={config.run_dir}: {hint}"
        )


def resume_run(request: Request) -> tuple[RunSpec, RunDirectory] | None:
    """Open the run that `resume` names, to continue from its newest checkpoint; None if nothing is left to train.

    A request may bring a `horizon`, until which it trains whether it is complete or not, `trainer.devices`,
    `trainer.num_nodes`, and `data.path`, which is where its text is now. Rank 0 decides for all.
    """
    return broadcast_run(lambda: _resume_run(request))


def _resume_run(request: Request) -> tuple[RunSpec, RunDirectory] | None:
    horizon = request.config.horizon if "horizon" in request.overrides else ""
    run = RunDirectory.open(request.config.resume or "")
    try:
        config = load_config(run.path / "config.yaml")
        newest = run.load_newest()
        if newest is None:
            print_line(f"{run.path} has no checkpoint yet: beginning at its first step")
            return start_in_directory(run, replace(request, config=_changed(config, request, horizon)))
        file, checkpoint = newest
        _require_format(file, checkpoint)
        _require_same_config(config, run, file, checkpoint)
        _refuse_going_back(run, file, checkpoint, find_path(request.config.resume or ""))
        spec = _continue(run, file, checkpoint, request, horizon)
    except BaseException:
        run.close()
        raise
    if spec is None:
        run.close()
        return None
    return spec, run


def _changed(config: Config, request: Request, horizon: str) -> Config:
    """Return the configuration of a run without a checkpoint, with the requested changes."""
    config = with_values(config, {"horizon": horizon or config.horizon} | _moved_text(request))
    return with_devices(config, *_devices(request, config))


def _moved_text(request: Request) -> dict[str, Any]:
    """Return the keys that name where the text of a run is now, if the request has them."""
    return {key: request.overrides[key] for key in ("data.path", "data.validation_path") if key in request.overrides}


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
        if stored_value != value and key not in MAY_LAG:
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


def _continue(
    run: RunDirectory, file: Path, checkpoint: dict[str, Any], request: Request, horizon: str
) -> RunSpec | None:
    """Return how a run continues from its newest checkpoint; None if it is complete."""
    with checkpoint_errors(file):
        stored = parse_config(checkpoint["config"])
        schedule = Schedule(**checkpoint["schedule"])
        state = TrainState.from_checkpoint(checkpoint, schedule)
        tokenizer = inherited_tokenizer(checkpoint)
        step = checkpoint["step"]
    end = state.current_schedule(schedule).describe_end(stored.patience, step, state.best_step)
    if horizon in ("", stored.horizon) and end:
        hint = f"to train it longer, add horizon=; init_from={run.path} starts a new run from it"
        print_line(f"{run.path} is complete: it {end}; {hint}")
        run.restore_last(file)
        return None
    config = with_devices(stored, *_devices(request, stored))
    require_devices(config)
    distributed.require_processes(config.trainer.devices, config.trainer.world_size)
    if config != stored:
        _announce_devices(stored, config)
    dataset = load_dataset(with_values(config, _moved_text(request)), tokenizer, checkpoint=checkpoint)
    _require_same_dataset(file, checkpoint, dataset)
    if horizon not in ("", stored.horizon):
        config, schedule = extend(
            config, state.current_schedule(schedule), step, state.seconds, horizon, dataset.train_tokens
        )
        print_line(f"extending the run from horizon={stored.horizon} to {horizon}, from step {step} on")
    _warn_of_other_versions(file, checkpoint)
    total_steps = (
        state.current_schedule(schedule).total_steps if horizon in ("", stored.horizon) else schedule.total_steps
    )
    end = f" of {total_steps}" if total_steps < MAX_STEPS else f", until {config.horizon} are up"
    print_line(f"continuing {run.path} at step {step}{end}")
    return RunSpec(config, schedule, dataset, checkpoint=file, command=request.command, in_python=request.in_python)


def _announce_devices(stored: Config, config: Config) -> None:
    before, after, unit = stored.trainer.world_size, config.trainer.world_size, "devices"
    if before == after:
        before, after, unit = stored.trainer.num_nodes or 1, config.trainer.num_nodes or 1, "machines"
    print_line(
        f"continuing on {after} {unit} instead of {before}: the same sequences in each step, but not the same bits"
    )


def _warn_of_other_versions(file: Path, checkpoint: dict[str, Any]) -> None:
    """Warn if the run was trained by other code or with other libraries: it may not continue bit for bit."""
    before = {"commit": checkpoint.get("git_commit")} | checkpoint.get("versions", {})
    now = dict.fromkeys(before, "a checkout") | versions() | {"commit": code_version()}
    if changed := [f"{name} {value} -> {now[name]}" for name, value in before.items() if value != now[name]]:
        print_warning(f"{file} is of other versions, so the run may not continue bit for bit ({', '.join(changed)})")


def _devices(request: Request, stored: Config) -> tuple[int, int]:
    """Return the devices per machine, and the machines, to continue on: as given, as launched, or as before."""
    devices, num_nodes = request.config.trainer.devices, request.config.trainer.num_nodes
    if distributed.world_size() == 1:
        devices, num_nodes = devices or stored.trainer.devices, num_nodes or stored.trainer.num_nodes
    return distributed.resolve_devices(devices, num_nodes)


def with_devices(config: Config, devices: int, num_nodes: int) -> Config:
    """Return the configuration of a run that continues on these numbers of devices and machines.

    Each step keeps its sequences, in the same order, so the number of processes must divide them.
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
    values = {
        "trainer.devices": devices,
        "trainer.num_nodes": num_nodes,
        "trainer.strategy": "auto" if world_size == 1 else trainer.strategy,  # one device has nothing to split
        "trainer.micro_batch_size": max(
            size for size in range(1, min(sequences, config.micro_batch_size) + 1) if sequences % size == 0
        ),
    }
    return with_values(config, values)


def extend(
    config: Config, schedule: Schedule, step: int, seconds: float, horizon: str, train_tokens: int
) -> tuple[Config, Schedule]:
    """Return the configuration and the schedule of a run that gets another horizon.

    If the learning rate has not begun to fall, only the place where it will changes. Otherwise it rises again to the
    schedule of the new horizon.

    Args:
        config: As the run was trained.
        schedule: Likewise, with what the clock has decided.
        step: The steps so far.
        seconds: The seconds of training so far.
        horizon: The new horizon.
        train_tokens: The tokens of the training text.

    Raises:
        UserError: The run is past the new horizon already.
    """
    progress = seconds / schedule.seconds if schedule.seconds else 0.0
    multiplier = schedule.lr_multiplier(step, progress, config.optim)
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
    planned = replace(
        planned, full_length_from_step=full_length_from_step, restart_step=step, restart_lr_multiplier=multiplier
    )
    return with_values(config, {"horizon": horizon}), planned


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
