"""Loss scaling for fp16. Without it, fp16 rounds gradients below 6e-8 to zero.

The loss is multiplied by a scale before the backward pass, and the gradient is divided by it afterwards. If a gradient
overflows, its step is skipped and the scale is halved. The scale doubles after 2,000 steps without an overflow. See
Micikevicius et al. 2018, "Mixed Precision Training" (arXiv:1710.03740), section 3.2.
"""

from typing import Any

import torch
from torch import Tensor


class LossScale:
    """The scale of the loss, and the number of skipped steps.

    A skipped step changes neither weights nor optimizer. It counts as a step of the schedule, and its sequences are not
    repeated.
    """

    def __init__(self, device: str):
        self._scaler = torch.amp.GradScaler(device)
        self.skipped = False  # True if the last step was skipped
        self.skipped_steps = 0  # in the whole run
        self.history = ""  # for the message of an error

    def value_on(self, device: torch.device) -> Tensor:
        """Return the current scale as a scalar tensor on `device`."""
        return self._scaler.scale(torch.ones((), device=device))

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return the loss multiplied by the scale."""
        return self._scaler.scale(loss)

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by the scale."""
        self._scaler.unscale_(optimizer)

    def update(self, skipped: bool) -> bool:
        """Update the scale after a step. Return False if a gradient overflows although the scale is already 1."""
        last_scale = self._scaler.get_scale()
        self.history = f"\n  at a loss scale of {last_scale:g}, with {self.skipped_steps} steps skipped so far"
        self._scaler.update()
        self.skipped = skipped
        self.skipped_steps += skipped
        return not skipped or 1 <= self._scaler.get_scale() < last_scale

    def state_dict(self) -> dict[str, Any]:
        return self._scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any], skipped_steps: int) -> None:
        self._scaler.load_state_dict(state)
        self.skipped_steps = skipped_steps
