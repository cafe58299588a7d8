"""A linear map that learns in fp32 and multiplies in bfloat16.

An update is often smaller than the last of the eight bits that bfloat16 keeps of a weight, and would be lost in it, so
the weights themselves stay in fp32: Micikevicius et al. 2018, "Mixed Precision Training" (arXiv:1710.03740), section
3.1. They are rounded when they multiply. A second time for the backward pass, which costs GPT-2 124M 15 ms of a step of
2.5 s on two cores and saves 170 MB of it: rounded weights kept until then would be another copy of all matrices.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


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
        return _RoundedLinear.apply(x, self.weight, self.bias, self.dtype)


class _RoundedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        rounded = x.to(dtype)
        ctx.save_for_backward(rounded, weight)
        ctx.x_dtype, ctx.has_bias = x.dtype, bias is not None
        return F.linear(rounded, weight.to(dtype), None if bias is None else bias.to(dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        x, weight = ctx.saved_tensors
        rows, grad_rows = x.flatten(0, -2), grad.flatten(0, -2)
        x_grad = (grad @ weight.to(grad.dtype)).to(ctx.x_dtype)
        weight_grad = (grad_rows.T @ rows).to(weight.dtype)
        bias_grad = grad_rows.sum(0, dtype=weight.dtype) if ctx.has_bias else None
        return x_grad, weight_grad, bias_grad, None
