"""A linear map that learns in fp32 and multiplies in bfloat16.

An update is often smaller than the last of the eight bits that bfloat16 keeps of a weight, and would be lost in it, so
the weights themselves stay in fp32, and are rounded when they multiply: Micikevicius et al. 2018, "Mixed Precision
Training" (arXiv:1710.03740), section 3.1.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

LARGE = 2**18  # numbers in a matrix


class Linear(nn.Linear):
    """A linear map that works in the precision of its weights, or in `compute_dtype` where that is set.

    Maps (..., in_features), of whatever precision, to (..., out_features).
    """

    compute_dtype: torch.dtype | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The precision of products and results."""
        return self.compute_dtype or self.weight.dtype

    def forward(self, x: Tensor) -> Tensor:
        if self.dtype == self.weight.dtype:
            return F.linear(x.to(self.dtype), self.weight, self.bias)
        if x.device.type == "cpu" and self.weight.numel() >= LARGE:
            return _RoundedTwice.apply(x.to(self.dtype), self.weight, self.bias)
        return F.linear(x.to(self.dtype), *_rounded(self.weight, self.bias, self.dtype))


class _RoundedTwice(torch.autograd.Function):
    """F.linear in the precision of x, for which the weights are rounded once more in the backward pass.

    Autograd would keep the rounded ones until then: for GPT-2 124M another 170 MB, where rounding them again costs
    15 ms of a step of 2.5 s on two cores. For small matrices the function itself would cost more: 2 to 4% of the mini
    model's step.
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        return F.linear(x, *_rounded(weight, bias, x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        x, weight = ctx.saved_tensors
        rows, grad_rows = x.flatten(0, -2), grad.flatten(0, -2)
        weight_grad = (grad_rows.T @ rows).to(weight.dtype)
        bias_grad = grad_rows.sum(0).to(weight.dtype) if ctx.has_bias else None
        return grad @ weight.to(grad.dtype), weight_grad, bias_grad


def _rounded(weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    return weight.to(dtype), None if bias is None else bias.to(dtype)
