"""A rank above 0: it does what rank 0 asks, and ends with it. `python -m gpt.training.following`."""

import signal
import sys
import traceback
from pathlib import Path
from socket import gethostname
from typing import Any

from gpt import hardware
from gpt.errors import NonFiniteError, UserError
from gpt.text.tokenizer import Tokenizer
from gpt.training import signals
from gpt.training.callbacks import load_callbacks
from gpt.training.config import Config, validate
from gpt.training.plan import Plan
from gpt.training.processes import Follower, lead_or_follow, use_threads
from gpt.training.session import load_corpora, out_of_memory, require_devices, text_key


def follow(rank_0: Follower) -> int:
    """Do each job of rank 0's until the end; returns the exit code that rank 0 has told."""
    signals.quiet = True  # rank 0 tells what happens
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # and decides when all end
    hardware.keep_freed_memory()
    while "end" not in (job := rank_0.jobs.get()):
        config, plan = validate(job["config"]), Plan(**job["plan"])
        try:
            take_part(rank_0, config, plan, job)
        except NonFiniteError:
            pass  # every rank sees the same gradient, and rank 0 reports it
        except UserError as error:
            rank_0.report(str(error))
        except Exception as error:
            if hardware.is_out_of_memory(error):
                rank_0.report(out_of_memory(plan))
            elif not rank_0.ended.wait(2.0):  # otherwise it is a consequence
                traceback.print_exception(error)
                return 1
    return job["end"]


def take_part(rank_0: Follower, config: Config, plan: Plan, job: dict[str, Any]) -> None:
    """Train, or measure a step, together with rank 0."""
    require_devices(config)
    use_threads(job["threads"])
    corpora = load_corpora(config, job["tokenizer"] and Tokenizer.from_dict(job["tokenizer"]), say=lambda line: None)
    if text_key(corpora) != job["text"]:
        raise UserError(f"the text on {gethostname()} is not the same as for process 0: copy it there")
    if "run_dir" not in job:
        from gpt.training.probe import measure

        rank_0.connect(config.trainer.device)
        measure(config, plan, corpora, rank_0.ranks)
        return
    from gpt.training.fitting import Fitting
    from gpt.training.saving import CheckpointFiles

    run_dir, file = Path(job["run_dir"]), Path(job["run_dir"]) / "config.yaml"
    if not file.is_file() or file.read_text(encoding="utf-8", errors="replace") != job["config.yaml"]:
        raise UserError(f"{run_dir}: on {gethostname()} this run is not there: all machines must share the folder")
    fitting = Fitting(config, plan, corpora, run_dir, callbacks=load_callbacks(job["callbacks"]))
    rank_0.connect(config.trainer.device)
    fitting.run(rank_0.ranks, CheckpointFiles(), job["checkpoint"] and Path(job["checkpoint"]))


if __name__ == "__main__":
    try:
        lead_or_follow(lambda: sys.exit("gpt.training.following: not a command: use python train.py"), follow)
    except UserError:  # rank 0, which has started this process, is gone
        sys.exit(1)
