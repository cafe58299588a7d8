"""The micro-batches of a run. Each is a pure function of its number, so there is no loader state to save."""

from collections.abc import Iterator

from torch import Tensor, distributed

from gpt.data.batches import training_batch, validation_batches
from gpt.data.token_dataset import TokenDataset
from gpt.model.loss import IGNORE_INDEX
from gpt.training.config import Config
from gpt.training.schedule import Schedule
from gpt.training.state import RunSpec

Batch = tuple[Tensor, Tensor]  # inputs and targets, each (B, T)


def sequence_length(config: Config, schedule: Schedule, step: int) -> int:
    """Return T, the number of tokens in a sequence, for the step after `step` others."""
    is_short = schedule.uses_short_sequences(step)
    return (is_short and config.trainer.short_sequences) or config.model.context_length


def micro_batch(config: Config, dataset: TokenDataset, number: int, sequence_length: int) -> Batch:
    """Return the inputs and targets, each (B, T), of a micro-batch.

    Args:
        config: The final configuration.
        dataset: The token ids to train on.
        number: The number of the micro-batch, counted over all steps and ranks.
        sequence_length: T. With half the length, B is twice as large, so the number of tokens stays the same.
    """
    batch_size = config.micro_batch_size * (config.model.context_length // sequence_length)
    tokens = [source.train for source in dataset.sources]
    return training_batch(tokens, dataset.weights, config.order_seed, number * batch_size, batch_size, sequence_length)


def read_micro_batches(
    config: Config, dataset: TokenDataset, step: int, sequence_length: int, rank: int = 0, pin: bool = False
) -> list[Batch]:
    """Return this rank's micro-batches for the step after `step` others.

    Args:
        config: The final configuration.
        dataset: The token ids to train on.
        step: The number of steps before this one.
        sequence_length: T, the number of tokens in a sequence.
        rank: Micro-batch i of the step goes to rank i % world_size.
        pin: Copy the batches into pinned memory. Copies to a GPU from other memory wait until the GPU is idle.
    """
    first = step * config.accumulation_steps
    numbers = [(first + i) * config.trainer.world_size + rank for i in range(config.accumulation_steps)]
    batches = [micro_batch(config, dataset, number, sequence_length) for number in numbers]
    if pin:
        return [(idx.pin_memory(), targets.pin_memory()) for idx, targets in batches]
    return batches


class TrainBatches:
    """All micro-batches of this rank, for `lightning.Trainer.fit`.

    Lightning's checkpoints store how many were taken, so a resumed run continues with the next one. With a DataLoader,
    a resumed run would start at the first batch, and several processes would shuffle the order.
    """

    def __init__(self, spec: RunSpec):
        self._spec = spec
        self._num_taken = 0

    def __len__(self) -> int:
        return self._spec.schedule.total_steps * self._spec.config.accumulation_steps

    def __iter__(self) -> Iterator[Batch]:
        config, schedule = self._spec.config, self._spec.schedule
        has_group = distributed.is_available() and distributed.is_initialized()
        rank = distributed.get_rank() if has_group else 0
        while self._num_taken < len(self):
            step = self._num_taken // config.accumulation_steps
            number = self._num_taken * config.trainer.world_size + rank
            self._num_taken += 1
            yield micro_batch(config, self._spec.dataset, number, sequence_length(config, schedule, step))

    def state_dict(self) -> dict[str, int]:
        return {"num_taken": self._num_taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._num_taken = state["num_taken"]


class ValidationBatches:
    """The whole validation text as inputs and targets, each (B, T), for `lightning.Trainer.fit`.

    Padding targets are `IGNORE_INDEX`. Every rank gets all batches.
    """

    def __init__(self, spec: RunSpec):
        self._spec = spec

    def __iter__(self) -> Iterator[Batch]:
        T, B = self._spec.config.model.context_length, self._spec.config.micro_batch_size
        for source in self._spec.dataset.sources:
            yield from validation_batches(source.validation, B, T, IGNORE_INDEX)
