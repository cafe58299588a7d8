"""The guard against gradients that are not finite: what it reports, and how it checks without making a GPU wait."""

import math
from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from gpt.errors import NonFiniteError
from gpt.training.plan import Plan

REMEDY = "the last checkpoint is intact: start a new run from it with init_from= and lower rates"


def broken_step(step: int, loss: float, plan: Plan, seed: int, consequence: str, norms: str = "") -> NonFiniteError:
    """The error for a gradient that is not finite, in the step that follows `step` earlier ones."""
    first, end = step * plan.windows_per_step, (step + 1) * plan.windows_per_step
    return NonFiniteError(
        f"step {step + 1}: the gradient is not finite, so {consequence} (loss {loss:.4g}; windows {first} to {end - 1} "
        f"of the order of seed {seed}); {REMEDY}{norms}"
    )


def norms_by_layer(parameters: Iterable[tuple[str, nn.Parameter]]) -> str:
    """The norm of each layer's gradient, in one line."""
    squares: dict[str, float] = defaultdict(float)
    for name, p in parameters:
        if p.grad is not None:
            layer = ".".join(name.split(".")[:2]) if name.startswith("blocks.") else name.split(".")[0]
            # The root adds up the parts of a sharded gradient: the sum alone is this rank's.
            squares[layer] += float(p.grad.float().square().sum().sqrt()) ** 2
    return ", ".join(f"{layer} {math.sqrt(square):.3g}" for layer, square in squares.items())


class LateGuard:
    """Checks the norm of each gradient one step late: the twin of the check in `GPTModule.on_before_optimizer_step`.

    To look at a number, the host waits until the GPU has computed it, and then the GPU waits for the host. So the
    number is copied while both go on, and looked at in the next step. By then the gradient has reached the weights:
    whoever is about to use or save them calls `settle` first.
    """

    def __init__(self, plan: Plan, seed: int):
        self._plan, self._seed = plan, seed
        self._unread: tuple[int, Tensor, torch.cuda.Event | None] | None = None

    def watch(self, step: int, loss: Tensor, norm: Tensor) -> None:
        """Check the step before, and take the loss and the norm (scalars) of the one that follows `step` others."""
        self.settle()
        numbers = torch.stack([loss, norm]).to("cpu", non_blocking=True)
        arrived = torch.cuda.Event() if norm.is_cuda else None
        if arrived is not None:
            arrived.record()
        self._unread = step, numbers, arrived

    def settle(self) -> None:
        """Raise `NonFiniteError` if the gradient of the last step was not finite; waits for that step's."""
        if self._unread is None:
            return
        (step, numbers, arrived), self._unread = self._unread, None
        if arrived is not None:
            arrived.synchronize()
        loss, norm = numbers.tolist()
        if not math.isfinite(norm):
            raise broken_step(step, loss, self._plan, self._seed, "nothing was saved after it")
