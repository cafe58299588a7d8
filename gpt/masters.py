"""Training in bfloat16: the matrices that compute are copies, and behind them stand the fp32 weights that learn.

An update is often smaller than the last of the eight bits that bfloat16 keeps of a weight, and would be lost in it:
Micikevicius et al. 2018, "Mixed Precision Training" (arXiv:1710.03740), section 3.1. Copies made once a step also save
the casts that autocast makes for each micro-batch, and the gradients of them.
"""

import torch
from torch import Tensor, nn

from gpt.model import GPT


class MasterWeights(nn.Module):
    """What the optimizer adjusts of a model whose blocks compute in `dtype`; in fp32 that is the model's own weights.

    A step is: backward, `collect_gradients` (both once for each micro-batch), the optimizer's step on `trained`,
    `publish`.
    """

    def __init__(self, model: GPT, dtype: torch.dtype):
        super().__init__()
        weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
        model.compute_in(dtype)
        copied = {name: p for name, p in model.named_parameters() if p.dtype != weights[name].dtype}
        self._model = [model]  # in a list, so that its parameters are not this module's
        self._copies = list(copied.values())
        self._names = list(copied)
        self._masters = nn.ParameterList(nn.Parameter(weights[name], requires_grad=False) for name in copied)

    @property
    def trained(self) -> dict[str, Tensor]:
        """The fp32 weights under the model's names for them, in the model's order."""
        return dict(self._model[0].named_parameters()) | dict(zip(self._names, self._masters, strict=True))

    def collect_gradients(self) -> None:
        """Add the gradients of a backward pass to those of the fp32 weights, in fp32."""
        for master, copy in zip(self._masters, self._copies, strict=True):
            if copy.grad is None:
                continue
            if master.grad is None:
                master.grad = copy.grad.to(master.dtype)
            else:
                master.grad += copy.grad
            copy.grad = None

    def average_gradients(self, reduce) -> None:
        """Have `reduce` average the gradients collected so far over several processes."""
        for master in self._masters:
            if master.grad is not None:
                master.grad = reduce(master.grad)

    @torch.no_grad()
    def publish(self) -> None:
        """Let the model compute with what the weights have become."""
        if self._copies:
            torch._foreach_copy_(self._copies, list(self._masters))  # type: ignore[arg-type]

    @torch.no_grad()
    def load(self, weights: dict[str, Tensor]) -> None:
        """Take weights under the model's names for them."""
        self._model[0].load_state_dict(weights)
        for name, master in zip(self._names, self._masters, strict=True):
            master.copy_(weights[name])
