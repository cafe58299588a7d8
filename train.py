"""Train a GPT: python train.py [key=value ...]. The keys and their values are in configs/."""

import sys

from gpt.console import clean_exit  # first, so that Ctrl-C ends the slow imports below without a traceback

# isort: split
import hydra
from omegaconf import DictConfig

from gpt.files import CONFIGS
from gpt.training.callbacks import load_callbacks
from gpt.training.cli import compose_and_run, one_line_errors, parse_composition, print_settings
from gpt.training.distributed import distributed_errors
from gpt.training.forecast import print_plan
from gpt.training.launch import launch
from gpt.training.report import print_brief_report, print_report
from gpt.training.request import Request
from gpt.training.resume import resolve_resume_auto, resume_run
from gpt.training.start import start_run


def train(request: Request) -> float | None:
    """Start or resume a run, train it to its horizon, and print a report. Return its loss in bits per byte."""
    callbacks = load_callbacks(request.callbacks)
    started = resume_run(request) if request.config.resume else start_run(request)
    if started is None:  # the run is complete
        return None
    from gpt.training.loop import run_training  # imports Lightning, which takes seconds: only after all checks

    spec, run = started
    with run:
        result = run_training(spec, run, callbacks)
    if result.stop_signal:
        sys.exit(128 + result.stop_signal)
    if request.job:
        print_brief_report(run.path, result)
    else:
        print_report(spec, run.path, result)
    return result.metrics["val_bits_per_byte"]


@hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name="train")
def job(composed: DictConfig) -> float | None:
    """Run one job, as Hydra composed it. Return its bits per byte, which a sweeper minimizes."""
    with one_line_errors():
        request = resolve_resume_auto(parse_composition(composed))
        print_settings(request)
        if request.plan:
            load_callbacks(request.callbacks)
            print_plan(request)
            return None
        if request.num_processes > 1:
            return launch(train, request, request.num_processes)
        return train(request)


if __name__ == "__main__":
    with clean_exit("train.py"), distributed_errors():
        compose_and_run(job)
