"""Where a run starts and how it will go: new, resumed, or extended. Each way returns the same `Session`.

Rank 0 decides, and the other processes of the training hear of it.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from gpt.console import say, warn
from gpt.errors import UserError
from gpt.exchange import checkpoint
from gpt.exchange.loading import find_path, open_model
from gpt.hardware.device import DTYPES, choose_compile, choose_device, choose_precision, device_count
from gpt.hardware.memory import free_memory
from gpt.model.memory import choose_micro_batch
from gpt.model.transformer import GPTConfig, ModelConfig
from gpt.text.analysis.prompts import prompts_from
from gpt.text.cache import CACHE
from gpt.text.corpus.config import ONE_WORD
from gpt.text.corpus.mixture import names_of, shares_of
from gpt.text.prepare.prepare import TooShortError, prepare
from gpt.text.prepared import Corpora, find_prepared
from gpt.text.tokenizer import Tokenizer, TokenizerConfig
from gpt.training.checkpoints.resuming import on_devices, require_same_text, restoring, with_horizon
from gpt.training.config.advice import STEPS, suitable_steps, warnings
from gpt.training.config.loading import read, validate
from gpt.training.config.schedule import MOST_STEPS, Schedule, parse_horizon
from gpt.training.config.schema import Config
from gpt.training.distributed.launch import as_launched, connect, on_all_ranks, ranks
from gpt.training.run.code import code, versions
from gpt.training.run.run import Run, require_empty, text_name
from gpt.training.session import Session

AUTO_SECONDS = 600  # of training that horizon=auto takes at most, unless the least number of steps takes longer
MAY_DIFFER = ("run_dir", "resume", "trainer.devices", "trainer.num_nodes")  # when resume=auto repeats a command


def begin(config: Config, name: str = "", kept: Sequence[str] = ()) -> Session:
    """Prepare a new run in `config.run_dir`, or below runs/ under a name of its text and of `name`, the model's.

    `kept` lists the keys of `model` that hold although `init_from` brings a model: its weights must fit them.
    """
    session = _agreed(lambda: new(config, name, kept))
    assert session is not None
    return session


def resume(
    path: str,
    horizon: str | None = None,
    devices: int | None = None,
    num_nodes: int | None = None,
    text: Any = None,
) -> Session | None:
    """Prepare to continue a run from its newest checkpoint or the named one; None if it is complete.

    With `horizon`, the run trains until then, whether it is complete or not. `devices` and `num_nodes`, or what
    torchrun or srun has started, may differ from before. `text` is where its text is now, if that has moved.
    """
    return _agreed(lambda: resumed(path, horizon, devices, num_nodes, text))


def _agreed(make: Callable[[], Session | None]) -> Session | None:
    """Have rank 0 make a session, and each other rank follow it."""
    connect()
    made = on_all_ranks(lambda: make() if ranks().rank == 0 else None)
    if ranks().world_size == 1:
        return made
    told: list[Any] = [None, None]
    if made is not None:  # what the others need to know: the text, the weights and the checkpoint each reads itself
        assert made.run is not None
        told[0] = replace(made, corpora=None, weights=None, run=made.run.for_others())  # type: ignore[arg-type]
        told[1] = {"corpus": made.corpora.key, "tokenizer": made.corpora.tokenizer.to_dict()}
    torch.distributed.broadcast_object_list(told, 0)
    return on_all_ranks(lambda: made or _followed(*told)) if told[0] else None


def _followed(session: Session, text: dict[str, Any]) -> Session:
    """The session that rank 0 has made, on another rank."""
    require_devices(session.config)
    session.corpora = load_corpora(session.config, session.tokenizer, quiet=True, record=text)
    if {"corpus": session.corpora.key, "tokenizer": session.corpora.tokenizer.to_dict()} != text:
        raise UserError("the text is not the same as for process 0: copy it to this machine")
    if not (session.run_dir / "config.yaml").is_file():
        raise UserError(f"{session.run_dir}: is not on this machine: all machines must share the folder")
    return session


# --- new ---


def new(config: Config, name: str, kept: Sequence[str] = (), run: Run | None = None) -> Session:
    """A run from its first step; `run` is one that was stopped before its first checkpoint."""
    require_processes(config)
    session = prepared(config, name, kept, run)
    schedule = session.schedule
    if schedule.seconds and not session.members:
        from gpt.training.estimate.timing import in_steps  # imports Lightning

        schedule, _ = in_steps(session.config, schedule, session.corpora, at_most=1.0)
    for line in warnings(session.config, schedule, session.corpora):
        warn(line)
    session.run = run or Run.create(config.run_dir, _run_name(config, name), session.config)
    return session


def _run_name(config: Config, model: str) -> str:
    """What a run is called: the name of its text, and that of its model, or else its shape."""
    if config.init_from:
        model = "tuned"
    elif not model:
        shape = config.model
        model = "mini" if shape == ModelConfig() else f"{shape.num_layers}x{shape.d_model}"
    return f"{text_name(config.data)}-{model}"


def prepared(
    config: Config, name: str, kept: Sequence[str] = (), run: Run | None = None, longest: float = 0.0
) -> Session:
    """Decide everything that was left open, and prepare the text; the session has no directory yet.

    `name` is that of the model; auto is chosen, from what members learn in the horizon's time, or in `longest` seconds.
    """
    if name == "auto":
        config.require_time()
    if run is None and config.run_dir:
        require_empty(Path(config.run_dir))
    asked = config
    weights = tokenizer = None
    if config.init_from:
        config, weights, tokenizer = _with_weights(config, kept)
    automatic = "auto" in (config.trainer.micro_batch_size, (config.decided or {}).get("trainer.micro_batch_size"))
    given = config
    config = decide_hardware(config)
    corpora = load_corpora(config, tokenizer)
    if config.data.name == "prepared":  # with a tokenizer of its own
        how = TokenizerConfig(corpora.tokenizer.name, corpora.tokenizer.vocab_size)
        config, given = replace(config, tokenizer=how), replace(given, tokenizer=how)
    if config.data.prompts is None:
        prompts = ONE_WORD.get(config.data.name) or prompts_from(corpora)
        config = replace(config, data=replace(config.data, prompts=prompts))
    if config.horizon == "auto":
        config = _with_suitable_horizon(config, corpora, automatic)
    if name == "auto":
        session = _chosen(replace(given, data=config.data), corpora, automatic, longest)
    else:
        schedule = make_schedule(config, corpora.train_tokens, automatic)
        session = Session(config, schedule, corpora, weights=weights, tokenizer=tokenizer)
    session.config = session.config.as_decided_from(asked).anywhere()
    return session


def _chosen(config: Config, corpora: Corpora, automatic: bool, longest: float) -> Session:
    """The session of the model that learns most of a text in the time that the horizon gives."""
    from gpt.training.estimate.choice import announcement, best, choose  # imports Lightning

    def decided(member: ModelConfig) -> tuple[Config, Schedule]:
        context = max(member.context_length, config.model.context_length)
        model = replace(member, context_length=context, dropout=config.model.dropout, qkv_bias=config.model.qkv_bias)
        tokens = config.trainer.tokens_per_step // config.model.context_length * context  # as many windows
        made = decide_hardware(replace(config, model=model, trainer=replace(config.trainer, tokens_per_step=tokens)))
        return made, make_schedule(made, corpora.train_tokens, automatic)

    seconds = parse_horizon(config.horizon).amount
    members = choose(decided, corpora, seconds, longest)
    say(announcement(members, seconds, corpora))
    chosen = best(members, seconds)
    bits, useful = chosen.reached(seconds)
    horizon = config.horizon if useful == seconds else f"{useful}s"
    schedule = replace(chosen.schedule, seconds=parse_horizon(horizon).amount, expected_bits=bits)
    return Session(replace(chosen.config, horizon=horizon), schedule, corpora, members=members)


def _with_suitable_horizon(config: Config, corpora: Corpora, automatic: bool) -> Config:
    """The configuration with the steps that suit the text, or that this machine trains in `AUTO_SECONDS`, if fewer."""
    steps = suitable_steps(config, corpora)
    config = replace(config, horizon=f"{steps}steps")
    if steps > STEPS:
        from gpt.training.estimate.timing import measure  # imports Lightning

        schedule = make_schedule(config, corpora.train_tokens, automatic)
        _, seconds = measure(config, schedule, corpora, at_most=1.0)
        steps = max(STEPS, min(steps, int(AUTO_SECONDS / seconds)))
    say(f"horizon={steps}steps suits this text and this machine")
    return replace(config, horizon=f"{steps}steps")


def make_schedule(config: Config, train_tokens: int, automatic: bool) -> Schedule:
    """The schedule of a run on `train_tokens` tokens, whose micro-batch is decided, and was chosen if `automatic`."""
    trainer = config.trainer
    windows, size = trainer.tokens_per_step // config.model.context_length, int(trainer.micro_batch_size)
    accumulation = windows // (size * trainer.world_size)
    schedule = Schedule(windows, size, accumulation, automatic and trainer.world_size == 1)
    return schedule.until(parse_horizon(config.horizon), trainer.tokens_per_step, train_tokens, trainer.validate_every)


def _with_weights(config: Config, kept: Sequence[str]) -> tuple[Config, dict[str, torch.Tensor], Tokenizer]:
    """The configuration with the shape of the model to start from, its weights, and its tokenizer."""
    model, tokenizer = open_model(config.init_from or "")
    plain, given = asdict(config), {key: getattr(config.model, key) for key in ("dropout", *kept)}
    shape = {key: value for key, value in asdict(model.config).items() if key != "vocab_size"} | given
    vocab_size = tokenizer.vocab_size
    if GPTConfig(**shape, vocab_size=vocab_size).num_parameters != model.config.num_parameters:
        changed = " ".join(f"model.{key}={value}" for key, value in given.items() if key in kept)
        raise UserError(f"{changed}: the weights of init_from={config.init_from} have other shapes: leave it out")
    plain |= {"model": shape, "tokenizer": {"name": tokenizer.name}}
    if tokenizer.name == "bpe":
        plain["tokenizer"]["vocab_size"] = vocab_size
    return validate(plain), model.state_dict(), tokenizer


def load_corpora(
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


def decide_hardware(config: Config) -> Config:
    """The configuration with everything that was left open decided for this machine, and the rates for its model."""
    devices, num_nodes = as_launched(config.trainer.devices, config.trainer.num_nodes)
    config = replace(config, trainer=replace(config.trainer, devices=devices, num_nodes=num_nodes))
    config.require_whole_windows()
    device = require_devices(config)
    window = config.model.context_length * config.trainer.world_size
    precision, micro_batch = choose_precision(config.trainer.precision, device), config.trainer.micro_batch_size
    if micro_batch == "auto":
        most = choose_micro_batch(
            GPTConfig(**asdict(config.model)),  # with GPT-2's vocabulary: the text's own is not known yet
            config.trainer.tokens_per_step // window,
            free_memory(device),
            DTYPES[precision],
            device.type,
            checkpointing=config.trainer.activation_checkpointing,
        )
        micro_batch = str(most)
    trainer = replace(
        config.trainer,
        device=device.type,
        precision=precision,
        compile=str(choose_compile(config.trainer.compile, device)).lower(),
        micro_batch_size=micro_batch,
    )
    return replace(config, trainer=trainer, optim=config.optim.for_model(config.model))


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


def require_processes(config: Config) -> None:
    """Raise `UserError` if a training would have fewer processes than its configuration says; a plan needs one."""
    if config.trainer.world_size > ranks().world_size:
        count = config.trainer.devices
        raise UserError(
            f"trainer.devices={count} takes {count} processes, and this is one: use python train.py, or start this "
            f"program with torchrun --nproc-per-node={count}"
        )


# --- resumed and extended ---


def resumed(path: str, horizon: str | None, devices: int | None, num_nodes: int | None, text: Any) -> Session | None:
    """A run from its newest checkpoint on, until `horizon` if that is given; None if it is complete."""
    if horizon == "auto":
        raise UserError("horizon=auto is for a new run: to extend one, say until when, such as horizon=8000steps")
    run = Run.open(path)
    try:
        session = _continued(run, find_path(path), horizon, devices, num_nodes, text)
    except BaseException:
        run.close()
        raise
    if session is None:
        run.close()
    return session


def _continued(
    run: Run, named: Path, horizon: str | None, devices: int | None, num_nodes: int | None, text: Any
) -> Session | None:
    """The session of a run that is held, and was named by a path; None if it is complete."""
    run_dir, file, payload = run.directory, run.file, run.payload
    if file is None or payload is None:
        say(f"{run_dir} has no checkpoint yet: beginning at its first step")
        return _begun_again(run, horizon, devices, num_nodes)
    _refuse_going_back(named, run_dir, file, payload.get("step"))
    with restoring(file):
        stored, schedule = validate(payload["config"]), Schedule(**payload["schedule"])
        own = "given" in payload["corpus"]["tokenizer"]
        tokenizer = Tokenizer.from_dict(payload["tokenizer"]) if own else None
        step, threads, callbacks = payload["step"], payload["threads"], payload["callbacks"]
        best_step, seconds = callbacks["Validation"]["best_step"], callbacks["Clock"]["seconds"]
    config, schedule = on_devices(stored, schedule, *_numbers(devices, num_nodes, stored))
    require_devices(config)
    require_processes(config)
    if config != stored:
        then, now = stored.trainer.world_size, config.trainer.world_size
        say(f"continuing on {now} devices instead of {then}: the same windows in each step, but not the same bits")
        config = config.amend("trainer.devices", step, stored)
    there = config if text is None else replace(config, data=replace(config.data, path=text))
    corpora = load_corpora(there, tokenizer, record=payload)
    require_same_text(file, payload, corpora)
    if horizon and horizon != config.horizon:
        config, schedule = with_horizon(config, schedule, step, seconds, horizon, corpora.train_tokens)
        config = config.amend("horizon", step, stored)
        say(f"extending the run from horizon={stored.horizon} to {horizon}, from step {step} on")
    ended = ""
    if step == schedule.total_steps:
        ended = f"has trained all of its {step} steps"
    elif schedule.out_of_patience(config.patience, step, best_step):
        ended = f"stopped early at step {step}, by patience={config.patience}"
    if ended:
        run.make_last()
        longer = f"to train it longer, add horizon=; init_from={run_dir} starts a new run from it"
        say(f"{run_dir} is complete: it {ended}; {longer}")
        return None
    began = {"commit": payload.get("git_commit")} | payload.get("versions", {})
    today = dict.fromkeys(began, "a checkout") | versions() | {"commit": code()}
    if changed := [f"{name} {then} -> {today[name]}" for name, then in began.items() if then != today[name]]:
        warn(f"{file} is of other versions, so the run may not continue bit for bit ({', '.join(changed)})")
    of = f" of {schedule.total_steps}" if schedule.total_steps < MOST_STEPS else f", until {config.horizon} are up"
    say(f"continuing {run_dir} at step {step}{of}")
    if config.trainer.world_size != stored.trainer.world_size:
        threads = None
    amended = config != stored
    return Session(config, schedule, corpora, run, tokenizer=tokenizer, threads=threads, amended=amended)


def _numbers(devices: int | None, num_nodes: int | None, stored: Config) -> tuple[int, int]:
    """The devices of each machine, and the machines, on which a run continues: as given, as launched, or as before."""
    if ranks().world_size == 1:
        devices, num_nodes = devices or stored.trainer.devices, num_nodes or stored.trainer.num_nodes
    return as_launched(devices, num_nodes)


def _begun_again(run: Run, horizon: str | None, devices: int | None, num_nodes: int | None) -> Session:
    """A run that was stopped before its first checkpoint."""
    config = replace(run.config, horizon=horizon or run.config.horizon)
    config, _ = on_devices(config, make_schedule(config, 1, False), *_numbers(devices, num_nodes, config))
    return new(config, "", run=run)


def _refuse_going_back(named: Path, run_dir: Path, newest: Path, newest_step: object) -> None:
    """Raise `UserError` if a checkpoint is named that is not the newest: continuing it would undo later steps."""
    if not named.is_file() or named.samefile(newest):
        return
    if (step := checkpoint.load(named).get("step")) != newest_step:
        raise UserError(
            f"{named} is of step {step}, and the run has gone on to step {newest_step}: continue it with "
            f"resume={run_dir}, or start a new run from this file with init_from={named}"
        )


def new_or_resumed(config: Config) -> Config:
    """Decide `resume=auto`: the run in `run_dir` if there is one, else None, so that a new one begins there.

    Raises `UserError` if there is no `run_dir`, or if the run in it was asked for with other settings.
    """
    if not config.run_dir:
        raise UserError("resume=auto continues the run in run_dir, or begins it there: add run_dir=DIR")
    file = Path(config.run_dir) / "config.yaml"
    if not file.exists():
        return replace(config, resume=None)
    run = read(file)
    stored, asked = run.settings(), config.anywhere().settings()
    before = stored | (run.decided or {})
    for key in asked if run.decided is not None else ():
        if key not in MAY_DIFFER and asked[key] not in (stored[key], before[key], "auto"):
            remedy = "give the same settings as before, or another run_dir"
            if key == "horizon":
                remedy = f"to train that run longer, use resume={config.run_dir} horizon={asked[key]}"
            where = f"{stored[key]} in the run of run_dir={config.run_dir}"
            raise UserError(f"resume=auto: {key}={asked[key]} here, and {where}: {remedy}")
    return replace(config, resume=config.run_dir, init_from=None)
