"""resume=auto: one command that begins a run or continues it, however often a job queue repeats it."""

from dataclasses import replace
from pathlib import Path

from gpt.errors import UserError
from gpt.training.config import Config, parse_horizon, read, to_plain
from gpt.training.habits import leaves

UNLIKE = ("run_dir", "resume", "earlier_horizons", "trainer.devices", "trainer.num_nodes")  # which may differ


def begin_or_continue(config: Config) -> Config:
    """Decide `resume`: the run in `run_dir`, or None if it is still to begin.

    Raises `UserError` if there is no `run_dir`, or if the run in it was configured differently.
    """
    if not config.run_dir:
        raise UserError("resume=auto continues the run in run_dir, or begins it there: add run_dir=DIR")
    file = Path(config.run_dir) / "config.yaml"
    if not file.exists():
        return replace(config, resume=None)
    stored = leaves(to_plain(read(file)))
    timed = parse_horizon(config.horizon).unit == "seconds"
    for key, value in leaves(to_plain(config)).items():
        decided = value == "auto" or (value is None and key in ("data.prompts", "data.revision"))
        decided |= timed and key == "horizon"  # by the run, as it began: the time became steps
        brought = config.init_from and key.startswith(("model.", "tokenizer.")) and key != "model.dropout"
        if value != stored[key] and not (decided or brought or key in UNLIKE):
            remedy = "give the same settings as before, or another run_dir"
            if key == "horizon":
                remedy = f"to train that run longer, use resume={config.run_dir} horizon={value}"
            where = f"{stored[key]} in the run of run_dir={config.run_dir}"
            raise UserError(f"resume=auto: {key}={value} here, and {where}: {remedy}")
    return replace(config, resume=config.run_dir, init_from=None)
