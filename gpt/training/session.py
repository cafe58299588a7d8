"""A training that has been decided: fit it, and report its figures. No Hydra here.

session = begin(config)  # or resume("runs/NAME"), both of gpt.training.decide
session.fit()
session.report()
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from gpt.console import say, warn
from gpt.exchange.loading import open_model
from gpt.hardware.memory import is_out_of_memory, keep_freed_memory, release_memory
from gpt.text.prepared import Corpora
from gpt.text.tokenizer import Tokenizer
from gpt.training.config.advice import shorter_steps
from gpt.training.config.schedule import Schedule
from gpt.training.config.schema import Config
from gpt.training.distributed.launch import is_rank_0, unchanged_environment
from gpt.training.metrics.report import closing_lines, resuming
from gpt.training.run.run import Run

if TYPE_CHECKING:
    from lightning import Callback

    from gpt.training.estimate.choice import Member

# Importing Lightning takes seconds, so trainer.py waits until the configuration has been found to be right.


@dataclass(repr=False)
class Session:
    """A run that is ready to train: what it learns from, for how long, where it starts and where it writes."""

    config: Config
    schedule: Schedule
    corpora: Corpora
    run: Run | None = None
    weights: dict[str, Any] | None = None  # to start from, with their tokenizer
    tokenizer: Tokenizer | None = None
    threads: int | None = None  # with which the run began
    amended: bool = False  # whether the run goes on with another configuration than that of its checkpoint
    metrics: dict[str, Any] = field(default_factory=dict)  # of the last validation: see docs/runs.md for each key
    samples: list[str] = field(default_factory=list)  # of the last validation
    stopped_by: int = 0  # the signal that ended the training early
    members: "Sequence[Member]" = ()  # that model=auto has weighed
    in_python: bool = False  # whether to suggest calls, as to who has called `gpt.train`, and not commands

    @property
    def run_dir(self) -> Path:
        """The directory of the run."""
        assert self.run is not None
        return self.run.directory

    def fit(self, callbacks: Sequence["Callback"] = ()) -> None:
        """Train to the horizon, with smaller micro-batches if memory runs out and they may be chosen.

        `callbacks` are Lightning's; with several devices, every process must have the same. A stop signal, as from
        Ctrl-C, ends the training after a step and a checkpoint; `stopped_by` then is its number.
        """
        assert self.run is not None
        keep_freed_memory()
        with self.run:
            while True:
                try:
                    with unchanged_environment():
                        self._fit_once(self.run, callbacks)
                    return
                except Exception as error:
                    if not is_out_of_memory(error):
                        raise
                self._shrink(self.run)

    def _shrink(self, run: Run) -> None:
        """Go on with smaller micro-batches after memory has run out."""
        size = self.schedule.micro_batch_size
        self.schedule = self.schedule.with_smaller_micro_batch()
        smaller = self.schedule.micro_batch_size
        warn(f"out of memory at trainer.micro_batch_size={size}: going on with {smaller} and as many tokens a step")
        release_memory()
        run.read_newest()  # saved on the way out, unless it failed within an update
        trainer = replace(self.config.trainer, micro_batch_size=str(smaller))
        if run.payload is not None and run.payload["step"]:
            self.config = self.config.amend("trainer.micro_batch_size", run.payload["step"], self.config)
        elif run.payload is None and self.config.init_from:
            self.weights = open_model(self.config.init_from)[0].state_dict()
        self.config = replace(self.config, trainer=trainer)

    def _fit_once(self, run: Run, callbacks: Sequence["Callback"]) -> None:
        from gpt.training.trainer import Training

        if self.threads:
            torch.set_num_threads(self.threads)
            os.environ["OMP_NUM_THREADS"] = str(self.threads)  # or else Lightning changes it
        training = Training(self.config, self.schedule, self.corpora, run, self.weights, self.amended, callbacks)
        self.weights = None  # nothing large stays referenced while training
        trainer = self.config.trainer
        horizon = f"{self.config.horizon} in steps" if self.schedule.seconds else f"{self.schedule.total_steps} steps"
        if is_rank_0():
            say(
                f"{training.module.model.config.num_parameters:,} parameters on {trainer.device} "
                f"in {trainer.precision}, {horizon} of {trainer.tokens_per_step:,} tokens; writing to {run.directory}"
            )
        try:
            training.run()
        finally:
            self.schedule = training.module.schedule  # which knows its steps now, if the horizon is a time
        self.metrics, self.samples = training.metrics.latest, training.samples.latest
        self.stopped_by = training.checkpoints.stopped_by
        if self.stopped_by and is_rank_0():
            step = training.module.global_step
            say(f"stopped at step {step}; continue with: {resuming(self.run_dir, self.in_python)}")
        if training.early.step and is_rank_0():
            why = f", as a callback asked; to go on regardless: {resuming(self.run_dir, self.in_python)}"
            if training.early.by_patience:
                best = training.validation.best_step
                why = (
                    f": no improvement in the last {self.config.patience} validations (best at step {best}). The "
                    f"learning rates were still falling: a shorter run, such as "
                    f"horizon={shorter_steps(self.config, self.corpora, best)}steps, will probably do better"
                )
            say(f"stopped early at step {training.early.step}{why}")

    def report(self) -> None:
        """Print the final figures, samples, and commands to try next."""
        if not is_rank_0():
            return
        if not self.metrics:
            say(f"nothing to report before the first validation, at step {self.schedule.validate_every}")
            return
        if self.stopped_by:
            say("as of the last validation:")
        prompt = ((self.config.data.prompts or [""])[-1].splitlines() or [""])[0]
        shorter = shorter_steps(self.config, self.corpora, self.metrics["best_step"])
        longer = f"{2 * self.schedule.seconds:g}s" if self.schedule.seconds else f"{2 * self.metrics['steps']}steps"
        if self.metrics["steps"] < self.schedule.total_steps:
            longer = ""
        ended = self.metrics, self.samples, prompt, shorter, longer, self.run_dir, self.in_python
        for line in closing_lines(*ended):
            say(line)
