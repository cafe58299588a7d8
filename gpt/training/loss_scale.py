"""Loss scaling, without which most gradients would be zero in fp16: it holds nothing smaller than 6e-8.

The loss is multiplied by a scale before the backward pass, and the gradient divided by it afterwards. A gradient that
overflows skips its step and halves the scale, which doubles again after 2,000 steps without: Micikevicius et al. 2018,
"Mixed Precision Training" (arXiv:1710.03740), section 3.2.
"""

from typing import Any

import torch
from torch import Tensor


class LossScale:
    """The scale of the loss, and the steps that were skipped.

    A skipped step leaves weights and optimizer as they are, but counts, so that rates and the order of windows go on.
    """

    def __init__(self, device: str):
        self._scaler = torch.amp.GradScaler(device)
        self.skipped = False  # whether the last step was
        self.skipped_steps = 0  # of the whole run
        self.history = ""  # for an error

    def of(self, device: torch.device) -> Tensor:
        """The current scale, a scalar on `device`."""
        return self._scaler.scale(torch.ones((), device=device))

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss to start the backward pass from."""
        return self._scaler.scale(loss)

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by the scale."""
        self._scaler.unscale_(optimizer)

    def adapt(self, skipped: bool) -> bool:
        """Adapt the scale to what became of a step; False if no smaller scale is left for a gradient that overflows."""
        before = self._scaler.get_scale()
        self.history = f"\n  at a loss scale of {before:g}, with {self.skipped_steps} steps skipped so far"
        self._scaler.update()
        self.skipped = skipped
        self.skipped_steps += skipped
        return not skipped or 1 <= self._scaler.get_scale() < before

    def state_dict(self) -> dict[str, Any]:
        return self._scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any], skipped_steps: int) -> None:
        self._scaler.load_state_dict(state)
        self.skipped_steps = skipped_steps
