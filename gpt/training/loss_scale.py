"""Loss scaling, without which most gradients would be zero in fp16: it holds nothing smaller than 6e-8.

The loss is multiplied by a scale before the backward pass, and the gradient divided by it afterwards. A gradient that
overflows skips its step and halves the scale, which doubles again after 2,000 steps without: Micikevicius et al. 2018,
"Mixed Precision Training" (arXiv:1710.03740), section 3.2.
"""

from typing import Any

import torch
from lightning.pytorch.plugins import Precision
from torch import Tensor

from gpt.errors import NonFiniteError


class LossScaling(Precision):
    """Has Lightning train with a scaled loss, around the guard of `GPTModule.on_before_optimizer_step`.

    What the guard refuses is skipped: weights and optimizer stay as they are, while the step counts, so that rates and
    the order of windows go on. `NonFiniteError` if the gradient is not finite even at a scale of 1.
    """

    def __init__(self, device: str):
        self._scaler = torch.amp.GradScaler(device)
        self.skipped = False  # whether the last step was
        self.skipped_steps = 0  # of the whole run

    def scale(self, device: torch.device) -> Tensor:
        """The current scale, a scalar on `device`."""
        return self._scaler.scale(torch.ones((), device=device))

    def pre_backward(self, tensor: Tensor, module) -> Tensor:
        return self._scaler.scale(tensor)

    def _after_closure(self, model, optimizer) -> None:
        self._scaler.unscale_(optimizer)
        super()._after_closure(model, optimizer)  # runs the guard

    def optimizer_step(self, optimizer, model, closure, **kwargs) -> Any:  # type: ignore[override]
        self.skipped = False
        try:
            result = super().optimizer_step(optimizer, model, closure, **kwargs)
            self._scaler.update()
            return result
        except NonFiniteError as error:
            before = self._scaler.get_scale()
            self._scaler.update()
            after = self._scaler.get_scale()
            if not 1 <= after < before:
                history = f"at a loss scale of {before:g}, with {self.skipped_steps} steps skipped so far"
                raise NonFiniteError(f"{error}\n  {history}") from None
            self.skipped = True
            self.skipped_steps += 1

    def state_dict(self) -> dict[str, Any]:
        return {"scaler": self._scaler.state_dict(), "skipped_steps": self.skipped_steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._scaler.load_state_dict(state_dict["scaler"])
        self.skipped_steps = state_dict["skipped_steps"]
