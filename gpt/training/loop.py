"""The training loop as Lightning runs it: one long epoch whose position follows from the step alone.

All that is set in Lightning's private state is set here; pyproject.toml pins its version for this reason.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from lightning import Trainer
from torch import Tensor

from gpt.text.batches import training_batch
from gpt.training.module import GPTModule


class TrainBatches:
    """The micro-batches of a whole run, from the current step on: (inputs, targets), each (B, T).

    A thread makes the next one while the model works on the current one.
    """

    def __init__(self, module: GPTModule):
        self._module = module

    def __len__(self) -> int:
        return self._module.schedule.total_steps * self._module.schedule.accumulation

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        schedule = self._module.schedule
        begin = self._module.global_step * schedule.accumulation
        with ThreadPoolExecutor(1) as reader:
            following = reader.submit(self._make, begin)
            while begin < len(self):
                batch, begin = following.result(), begin + 1
                following = reader.submit(self._make, begin)
                yield batch

    def _make(self, micro_step: int) -> tuple[Tensor, Tensor]:
        """This rank's share of a micro-step."""
        module, size = self._module, self._module.schedule.micro_batch_size
        idx, targets = make_batch(module, (micro_step * module.trainer.world_size + module.global_rank) * size)
        # From other memory, a copy to the GPU would wait for all that the GPU has still to do.
        return (idx.pin_memory(), targets.pin_memory()) if module.device.type == "cuda" else (idx, targets)

    def state_dict(self) -> dict:
        """Nothing: the position is the trainer's step. Lightning treats a loader with these methods as resumable."""
        return {}

    def load_state_dict(self, state: dict) -> None:
        """Do nothing, as there is no state."""


def make_batch(module: GPTModule, first: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets, each (B, T), of one micro-batch: the windows of the run from number `first` on."""
    tokens = [source.train for source in module.corpora.sources]
    config, size = module.config, module.schedule.micro_batch_size
    return training_batch(tokens, module.corpora.shares, config.order_seed, first, size, config.model.context_length)


def state_at(trainer: Trainer, step: int, accumulation: int) -> dict[str, Any]:
    """The state of Lightning's loops after `step` steps of `accumulation` micro-batches, for a checkpoint.

    Its counters follow from the step alone. A checkpoint lies between two steps, so training goes on at the first
    micro-batch of a step, however many micro-batches a step had when it was saved.
    """
    state = trainer.fit_loop.state_dict()
    optimizer = state["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]
    for progress, count in (
        (state["epoch_loop.batch_progress"], step * accumulation),
        (optimizer["step"], step),
        (optimizer["zero_grad"], step),
    ):
        for kind in ("total", "current"):
            progress[kind] = dict.fromkeys(progress[kind], count)
    for kind in ("total", "current"):
        state["epoch_progress"][kind] |= {"ready": 1, "started": 1}
    state["epoch_loop.state_dict"]["_batches_that_stepped"] = step
    return {"fit_loop": state}


def leave_signals(trainer: Trainer) -> None:
    """Have Lightning forget a SIGTERM that came in before our own handlers were in place; they decide about it."""
    trainer._signal_connector.received_sigterm = False
