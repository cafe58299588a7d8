"""How much a step changes each layer's weights, relative to their size."""

import torch
from lightning import Trainer
from torch import Tensor

from gpt.training.callbacks.base import StepCallback
from gpt.training.metrics.curves import Curves
from gpt.training.module import GPTModule

ROWS = 64  # of the largest matrix, at most: enough for a few per cent, and next to nothing to copy


class UpdateRatios(StepCallback):
    """Writes the norm of a step's change to a layer's matrices over the norm of these matrices, at each log point.

    It is measured on every n-th row, which is all that is copied before the step. There is no point where weights
    are split among devices, or where fp16 skips the step.
    """

    def __init__(self, curves: Curves):
        self._curves = curves
        self._before: Tensor | None = None  # between the two hooks of a log point

    def on_before_optimizer_step(self, trainer: Trainer, module: GPTModule, optimizer) -> None:  # type: ignore[override]
        due = module.schedule.due(trainer.global_step + 1, module.config.trainer.log_every)
        if due and self._curves.writing and module.config.logger and module.config.trainer.strategy != "fsdp":
            self._before = _rows(module)

    def on_step_end(self, trainer: Trainer, module: GPTModule, step: int) -> None:
        before, self._before = self._before, None
        if before is None or (module.loss_scaling is not None and module.loss_scaling.skipped):
            return
        ratios = ((_rows(module) - before).norm(dim=1) / before.norm(dim=1)).tolist()
        self._curves.write({f"weights/update_ratio/layer_{i}": ratio for i, ratio in enumerate(ratios, start=1)}, step)


@torch.no_grad()
def _rows(module: GPTModule) -> Tensor:
    """A copy of every n-th row of the matrices of each layer, which all have the same shapes: (layers, weights)."""
    matrices = [p for block in module.model.blocks for p in block.parameters() if p.dim() == 2]
    every = -(-max(map(len, matrices)) // ROWS)  # the same of each matrix, so that each has its share
    return torch.cat([p[::every].flatten() for p in matrices]).view(len(module.model.blocks), -1)
