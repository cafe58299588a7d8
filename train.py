"""Train a GPT: python train.py [key=value ...]. The keys and their values are in configs/."""

import sys

from gpt.console import command_line  # before what takes seconds, since gpt/__init__.py deals with Ctrl-C

# isort: split
import hydra
from omegaconf import DictConfig

from gpt.training.command import Request, ask, compose_and_run, decide, finished, reported
from gpt.training.config.loading import load_callbacks
from gpt.training.distributed.launch import as_one_of_many, launch
from gpt.training.estimate.forecast import print_plan


def train(request: Request) -> float | None:
    """Decide where the run starts, train it to its horizon, and report; returns its validation in bits per byte."""
    callbacks = load_callbacks(list(request.callbacks))
    session = decide(request)
    if session is None:  # the run to resume is complete
        return None
    session.fit(callbacks)
    if session.stopped_by:
        sys.exit(128 + session.stopped_by)
    session.report()
    return finished(request, session)


@hydra.main(version_base="1.3", config_path="configs", config_name="train")
def job(composed: DictConfig) -> float | None:
    """Do what one composed configuration asks for; returns the bits per byte, which a sweeper minimises."""
    with reported() as failure:
        request = ask(composed)
        if request.plan:
            print_plan(request.config, request.model, request.plan)
            return None
        if request.processes > 1:
            return launch(train, request, request.processes)
        return train(request)
    return failure[0]


if __name__ == "__main__":
    with command_line("train.py"), as_one_of_many():
        compose_and_run(job)
