"""Validation: the score of a model on the whole validation text, shared out among the ranks."""

import torch
from lightning import Trainer
from torch import Tensor

from gpt.model.loss import IGNORE
from gpt.sampling.scoring import Score, score, tokens_at_once
from gpt.text.batches import validation_batches
from gpt.text.prepared import PreparedText
from gpt.training.module import GPTModule


def score_on_all_ranks(trainer: Trainer, module: GPTModule, source: PreparedText) -> Score:
    """Score the validation text of one corpus, in windows as long as those of the last step.

    Every rank must call this, and gets the score of all of it.
    """
    T = module.window
    size = max(1, tokens_at_once(module.model, trainer.world_size) // T)
    batches = validation_batches(source.validation, size, T, IGNORE)
    mine = (batch for i, batch in enumerate(batches) if i % trainer.world_size == trainer.global_rank)
    part = score(module.model, mine, source.manifest["splits"]["validation"]["bytes"])
    if trainer.world_size == 1:
        return part
    totals = torch.tensor([part.nats, part.tokens], dtype=torch.float64, device=module.device)
    totals = trainer.strategy.reduce(totals, reduce_op="sum")
    assert isinstance(totals, Tensor)
    return Score(float(totals[0]), int(totals[1]), part.bytes)
