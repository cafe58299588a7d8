"""A linear map that learns in fp32 and multiplies in bfloat16 or float16.

bfloat16 keeps eight bits of a weight. An update is often smaller than the last bit, and would be lost. So the weights
stay in fp32, and are rounded when they multiply: Micikevicius et al. 2018, "Mixed Precision Training"
(arXiv:1710.03740), section 3.1.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt.model.fast.operations import recast_linear

MIN_RECAST_ELEMENTS = 2**18  # in larger matrices, rounding again is cheaper than keeping the rounded copy


class Linear(nn.Linear):
    """A linear map in the precision of its weights, or in `compute_dtype` if that is set.

    Maps (..., in_features), in any precision, to (..., out_features).
    """

    compute_dtype: torch.dtype | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The precision of products and results."""
        return self.compute_dtype or self.weight.dtype

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.dtype)
        if self.dtype == self.weight.dtype:
            return F.linear(x, self.weight, self.bias)
        if x.device.type == "cpu" and self.weight.numel() >= MIN_RECAST_ELEMENTS:
            return recast_linear(x, self.weight, self.bias)
        return F.linear(x, self.weight.to(self.dtype), None if self.bias is None else self.bias.to(self.dtype))
