"""Train a GPT: python train.py [key=value ...]. The keys and their values are in configs/."""

import sys

from gpt.console import command_line  # before what takes seconds, since gpt/__init__.py deals with Ctrl-C

# isort: split
import hydra
from omegaconf import DictConfig

from gpt.training.begin import begin
from gpt.training.config.asked import Asked
from gpt.training.config.command import ask, compose_and_run, in_one_line
from gpt.training.config.loading import load_callbacks
from gpt.training.distributed.launch import as_one_of_many, launch
from gpt.training.estimate.forecast import print_plan
from gpt.training.metrics.report import report
from gpt.training.resume import resume


def train(asked: Asked) -> float | None:
    """Begin or resume a run, train it to its horizon, and report; returns its validation in bits per byte."""
    callbacks = load_callbacks(asked.callbacks)
    run = resume(asked) if asked.config.resume else begin(asked)
    if run.complete:
        return None
    from gpt.training.fit import fit  # and so Lightning, which takes seconds, once everything is found to be right

    with run:
        fit(run, callbacks)
    if run.stopped_by:
        sys.exit(128 + run.stopped_by)
    report(run, brief=bool(asked.job))
    return run.metrics["val_bits_per_byte"]


@hydra.main(version_base="1.3", config_path="configs", config_name="train")
def job(composed: DictConfig) -> float | None:
    """Do what one composed configuration asks for; returns the bits per byte, which a sweeper minimises."""
    with in_one_line():
        asked = ask(composed)
        if asked.plan:
            load_callbacks(asked.callbacks)
            print_plan(asked)
            return None
        if asked.processes > 1:
            return launch(train, asked, asked.processes)
        return train(asked)


if __name__ == "__main__":
    with command_line("train.py"), as_one_of_many():
        compose_and_run(job)
