"""A rank above 0, as a process that rank 0 starts: `python -m gpt.training.helper`, with its job on standard input.

The pipe stays open while rank 0 lives. So only a running rank 0 can have a helper, and when rank 0 ends, however it
ends, the pipe closes and the helper ends as well.
"""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

from gpt import hardware
from gpt.errors import NonFiniteError, UserError, write_line
from gpt.text.tokenizer import Tokenizer
from gpt.training.callbacks import load_callbacks
from gpt.training.config import validate
from gpt.training.fitting import Fitting
from gpt.training.plan import Plan
from gpt.training.processes import Ranks, use_threads
from gpt.training.saving import CheckpointFiles
from gpt.training.session import load_corpora


def train(job: dict) -> None:
    """Train beside rank 0, whose `Session.fit` has put the job together."""
    hardware.keep_freed_memory()
    use_threads(job["threads"])
    run_dir = Path(job["run_dir"])
    config = validate(job["config"])
    given = Tokenizer.from_dict(job["tokenizer"]) if job["tokenizer"] else None
    corpora = load_corpora(config, given, say=lambda line: None)
    fitting = Fitting(config, Plan(**job["plan"]), corpora, run_dir, callbacks=load_callbacks(job["callbacks"]))
    fitting.run(Ranks(job["rank"], job["port"]), CheckpointFiles(), job["checkpoint"] and Path(job["checkpoint"]))


def end_with_rank_0() -> None:
    """Wait until the pipe from rank 0 closes, and end this process."""
    while os.read(0, 1024):
        pass
    os.kill(os.getpid(), getattr(signal, "SIGKILL", signal.SIGTERM))


def main() -> None:
    try:
        job = json.loads(sys.stdin.readline())
    except ValueError:
        write_line("gpt.training.helper: not a command: use python train.py", sys.stderr)
        sys.exit(2)
    threading.Thread(target=end_with_rank_0, daemon=True).start()
    try:
        train(job)
    except NonFiniteError:
        sys.exit(3)  # every rank sees the same gradient, and rank 0 reports it
    except KeyboardInterrupt:
        sys.exit(130)
    except UserError as error:
        write_line(f"train.py: process {job['rank']}: {error}", sys.stderr)
        sys.exit(2)
    except Exception:
        time.sleep(2)  # if rank 0 has failed, this is a consequence, and the pipe is about to close
        raise


if __name__ == "__main__":
    main()
