"""Continuing a run: from its newest checkpoint, perhaps to a longer horizon or on other devices."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from gpt.console import duration, say, warn
from gpt.errors import UserError
from gpt.exchange import checkpoint
from gpt.exchange.loading import find_path
from gpt.text.prepared import Corpora
from gpt.training.begin import begin_in, for_all_ranks, given_tokenizer, load_text
from gpt.training.config.asked import Asked
from gpt.training.config.horizon import parse_horizon
from gpt.training.config.loading import read, validate
from gpt.training.config.schedule import MOST_STEPS, Schedule
from gpt.training.config.schema import Config
from gpt.training.distributed.launch import as_launched, ranks, require_processes
from gpt.training.resolve import require_devices
from gpt.training.run.code import code, versions
from gpt.training.run.run import Run

MAY_DIFFER = ("run_dir", "resume", "trainer.devices", "trainer.num_nodes")  # when resume=auto repeats a command


def settle_auto(asked: Asked) -> Asked:
    """Decide `resume=auto`: go on with the run in `run_dir` if there is one, or else begin one there.

    Raises `UserError` if there is no `run_dir`, or if the run in it was asked for with other settings.
    """
    config = asked.config
    if config.resume != "auto":
        return asked
    if not config.run_dir:
        raise UserError("resume=auto continues the run in run_dir, or begins it there: add run_dir=DIR")
    file = Path(config.run_dir) / "config.yaml"
    if not file.exists():
        return replace(asked, config=replace(config, resume=None))
    run = read(file)
    stored, wanted = run.settings(), config.anywhere().settings()
    before = stored | (run.decided or {})
    for key, value in wanted.items() if run.decided is not None else ():
        began_with = any(line.startswith(f"{key}={value} until step ") for line in run.amended)
        if key in MAY_DIFFER or value in (stored[key], before[key], "auto") or began_with:
            continue
        remedy = "give the same settings as before, or another run_dir"
        if key == "horizon":
            remedy = f"to train that run longer, use resume={config.run_dir} horizon={value}"
        where = f"{stored[key]} in the run of run_dir={config.run_dir}"
        raise UserError(f"resume=auto: {key}={value} here, and {where}: {remedy}")
    return replace(asked, config=replace(config, resume=config.run_dir, init_from=None), given={}, model="")


def resume(asked: Asked) -> Run:
    """Open the run that `resume` names, to go on from its newest checkpoint; rank 0 decides for all.

    What may be given is a `horizon`, until which it trains whether it is complete or not, `trainer.devices` and
    `trainer.num_nodes`, and `data.path`, which is where its text is now.
    """
    return for_all_ranks(lambda: _resume(asked))


def _resume(asked: Asked) -> Run:
    horizon = asked.config.horizon if "horizon" in asked.given else ""
    if horizon == "auto":
        raise UserError("horizon=auto is for a new run: to extend one, say until when, such as horizon=8000steps")
    run = Run.open(asked.config.resume or "")
    run.in_python = asked.in_python
    try:
        if run.payload is None:
            say(f"{run.directory} has no checkpoint yet: beginning at its first step")
            return begin_in(run, replace(asked, config=_changed(run.config, asked, horizon), given={}))
        _refuse_going_back(run, find_path(asked.config.resume or ""))
        _go_on(run, asked, horizon)
    except BaseException:
        run.close()
        raise
    if run.complete:
        run.close()
    return run


def _changed(config: Config, asked: Asked, horizon: str) -> Config:
    """The configuration of a run without a checkpoint, with the given changes."""
    data = asked.config.data if "data.path" in asked.given else config.data
    config = replace(config, horizon=horizon or config.horizon, data=replace(config.data, path=data.path))
    return on_devices(config, *_devices(asked, config))


def _go_on(run: Run, asked: Asked, horizon: str) -> None:
    """Prepare a held run to continue from its checkpoint, or mark it as complete."""
    payload, file = run.payload, run.file
    assert payload is not None and file is not None
    with run.restoring():
        stored, schedule, tokenizer = (
            validate(payload["config"]),
            Schedule(**payload["schedule"]),
            given_tokenizer(payload),
        )
        step, seconds, best_step = payload["step"], payload["state"]["seconds"], payload["state"]["best_step"]
    run.config, run.schedule = stored, schedule
    if horizon in ("", stored.horizon) and (ended := schedule.ended(stored.patience, step, best_step)):
        longer = f"to train it longer, add horizon=; init_from={run.directory} starts a new run from it"
        say(f"{run.directory} is complete: it {ended}; {longer}")
        run.make_last()
        run.complete = True
        return
    config = on_devices(stored, *_devices(asked, stored))
    require_devices(config)
    require_processes(config.trainer.devices, config.trainer.world_size)
    if config != stored:
        then, now, what = stored.trainer.world_size, config.trainer.world_size, "devices"
        if then == now:
            then, now, what = stored.trainer.num_nodes or 1, config.trainer.num_nodes or 1, "machines"
        say(f"continuing on {now} {what} instead of {then}: the same windows in each step, but not the same bits")
    moved = asked.config.data.path if "data.path" in asked.given else config.data.path
    run.text = load_text(replace(config, data=replace(config.data, path=moved)), tokenizer, record=payload)
    _require_same_text(file, payload, run.text)
    if horizon not in ("", stored.horizon):
        config, schedule = extend(config, schedule, step, seconds, horizon, run.text.train_tokens)
        say(f"extending the run from horizon={stored.horizon} to {horizon}, from step {step} on")
    run.config, run.schedule = config.amending(stored, step), schedule
    began = {"commit": payload.get("git_commit")} | payload.get("versions", {})
    today = dict.fromkeys(began, "a checkout") | versions() | {"commit": code()}
    if changed := [f"{name} {then} -> {today[name]}" for name, then in began.items() if then != today[name]]:
        warn(f"{file} is of other versions, so the run may not continue bit for bit ({', '.join(changed)})")
    of = f" of {schedule.total_steps}" if schedule.total_steps < MOST_STEPS else f", until {config.horizon} are up"
    say(f"continuing {run.directory} at step {step}{of}")


def _devices(asked: Asked, stored: Config) -> tuple[int, int]:
    """The devices per machine, and the machines, on which to continue: as given, as launched, or as before."""
    devices, num_nodes = asked.config.trainer.devices, asked.config.trainer.num_nodes
    if ranks().world_size == 1:
        devices, num_nodes = devices or stored.trainer.devices, num_nodes or stored.trainer.num_nodes
    return as_launched(devices, num_nodes)


def on_devices(config: Config, devices: int, num_nodes: int) -> Config:
    """The configuration of a run that continues with these numbers of devices and machines.

    Each step keeps its windows, in the same order, so the number of processes must divide them.
    """
    trainer, world_size = config.trainer, devices * num_nodes
    if world_size == trainer.world_size and devices == (trainer.devices or 1):
        return config
    windows, rest = divmod(config.windows_per_step, world_size)
    if rest:
        raise UserError(
            f"a step of this run has {config.windows_per_step} windows, which {world_size} devices cannot share "
            "evenly: continue on a number that divides them"
        )
    size = max(size for size in range(1, min(windows, config.micro_batch_size) + 1) if windows % size == 0)
    strategy = "auto" if world_size == 1 else trainer.strategy  # one device has nothing to split
    trainer = replace(trainer, devices=devices, num_nodes=num_nodes, strategy=strategy, micro_batch_size=size)
    return replace(config, trainer=trainer)


def extend(
    config: Config, schedule: Schedule, step: int, seconds: float, horizon: str, train_tokens: int
) -> tuple[Config, Schedule]:
    """Give a run another horizon, after `step` steps and `seconds`; `UserError` if it is already there.

    Where the rates have not begun to fall, nothing changes but where they will; otherwise they rise again to the
    schedule of the new horizon.
    """
    share = seconds / schedule.seconds if schedule.seconds else 0.0
    factor = schedule.rate_factor(step, share, config.optim)
    before, schedule = schedule, Schedule.of(config, train_tokens, parse_horizon(horizon))
    if schedule.total_steps <= step or 0 < schedule.seconds <= seconds:
        raise UserError(
            f"horizon={horizon} is behind this run, which has trained {step} steps in {duration(seconds)}: give a "
            "longer horizon"
        )
    # Once whole, windows remain so; and best.ckpt of short ones is never weighed against whole ones.
    whole_from = before.whole_from if before.whole_from <= step else max(step, schedule.whole_from)
    schedule = replace(schedule, whole_from=whole_from, extended_at=step, factor_then=factor)
    return replace(config, horizon=horizon), schedule


def _require_same_text(file: Path, payload: dict[str, Any], text: Corpora) -> None:
    """Raise `UserError` if the text or its tokens are not those that the run began with."""
    stored = payload["corpus"] | {"tokenizer's hash": payload["tokenizer"]["sha256"]}
    present = text.key | {"tokenizer's hash": text.tokenizer.sha256}
    for key in stored:
        if stored[key] != present.get(key):
            raise UserError(
                f"{file}: the {key} was {stored[key]} when the run began and is {present.get(key)} now, so it cannot "
                f"continue: restore it, or start a new run with init_from={file}"
            )


def _refuse_going_back(run: Run, named: Path) -> None:
    """Raise `UserError` if a checkpoint is named that is not the newest: continuing it would undo later steps."""
    assert run.payload is not None and run.file is not None
    if not named.is_file() or named.samefile(run.file):
        return
    if (step := checkpoint.load(named).get("step")) != (newest := run.payload.get("step")):
        raise UserError(
            f"{named} is of step {step}, and the run has gone on to step {newest}: continue it with "
            f"resume={run.directory}, or start a new run from this file with init_from={named}"
        )
