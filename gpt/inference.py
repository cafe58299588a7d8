"""A model made ready for sampling, which reads every weight once for each token and little else.

Its speed is therefore that of memory, and halving the weights doubles it, as long as the product of a matrix and a few
rows keeps up. On 2 cores that read 34 GB/s, all matrices of GPT-2 124M, in ms:

| weights | rows | `F.linear` | here                                         |
| bf16    | 1    | 16         | 11  packed once into the order oneDNN prefers |
| bf16    | 8    | 20         | 11                                           |
| int8    | 1    |            | 8   `_weight_int8pack_mm`                    |
| int8    | 8    |            | 11  as bf16, see `Int8Linear`                |
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt.model import GPT

LARGE = 10_000_000  # parameters; below, the operations around a product take longer than reading its weights


def choose_sampling_precision(name: str, model: GPT, training: str) -> str:
    """The precision by its name; for `auto`, bf16 for a large model where `training` would choose it, else fp32."""
    if name != "auto":
        return name
    return training if model.token_embedding.weight.device.type != "cpu" or model.num_parameters() > LARGE else "fp32"


def prepare(model: GPT, precision: str, rows: int = 1) -> GPT:
    """Make a model on its device ready to sample `rows` texts at once, in fp32, bf16 or int8; returns the model itself.

    With bf16 and int8 the matrices change; norms, sums and, on a CPU, attention stay in fp32.
    """
    model.eval().requires_grad_(False)
    if precision == "fp32":
        return model.float()

    def convert(linear: nn.Linear) -> nn.Module:
        return Int8Linear(linear, rows) if precision == "int8" else PackedLinear(linear.weight, linear.bias)

    model.output = convert(_head(model))
    model.token_embedding.to(torch.bfloat16)
    for block in model.blocks:
        for parent in (block.attention, block.feed_forward):
            for name, child in list(parent.named_children()):  # type: ignore[union-attr]
                if isinstance(child, nn.Linear):
                    setattr(parent, name, convert(child))
    return model


def _head(model: GPT) -> nn.Linear:
    """The output head as a linear map of its own."""
    with torch.device("meta"):
        head = nn.Linear(model.config.d_model, model.config.vocab_size, bias=False)
    head.weight = model.token_embedding.weight
    return head


class PackedLinear(nn.Module):
    """A linear map in bfloat16, its weights (out, in) on a CPU in the order in which its library reads them fastest."""

    dtype = torch.bfloat16

    def __init__(self, weight: Tensor, bias: Tensor | None):
        super().__init__()
        self.weight = weight.detach().to(self.dtype)
        self.bias = None if bias is None else bias.detach().to(self.dtype)
        self._packed = self.weight.device.type == "cpu" and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        self._packed = self._packed and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        if self._packed:  # an order of oneDNN's own, which no other operation understands
            self.weight = torch.ops.mkldnn._reorder_linear_weight(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Map x (..., in) to (..., out) in bfloat16."""
        if self._packed:
            return torch.ops.mkldnn._linear_pointwise(x.to(self.dtype), self.weight, self.bias, "none", [], "")
        return F.linear(x.to(self.dtype), self.weight, self.bias)


class Int8Linear(nn.Module):
    """A linear map whose weights (out, in) are whole numbers from -127 to 127, with a scale for each output.

    Only weights are rounded; activations are in bfloat16. Where several rows come at every token the whole numbers are
    kept in bfloat16, which holds them exactly and multiplies many rows faster.
    """

    dtype = torch.bfloat16

    def __init__(self, linear: nn.Linear, rows: int = 1):
        super().__init__()
        weight = linear.weight.detach().float()
        self.scale = (weight.abs().amax(dim=1) / 127).clamp(min=1e-12).to(self.dtype)  # (out,)
        whole = (weight / self.scale[:, None]).round().clamp(-127, 127)
        self.bias = None if linear.bias is None else linear.bias.detach().float()
        self._many: PackedLinear | None = None
        # The kernel for a single row reads past the end of rows that are not a whole number of its registers.
        if rows > 1 or weight.device.type != "cpu" or linear.in_features % 32 != 0:
            self._many, whole = PackedLinear(whole, None), whole[:0]
        self.weight = whole.to(torch.int8)

    def forward(self, x: Tensor) -> Tensor:
        """Map x (..., in) to (..., out) in bfloat16."""
        rows = x.flatten(0, -2).to(self.dtype)
        if self._many is not None:
            out = self._many(rows) * self.scale.float()
        elif len(rows) == 1:
            out = torch._weight_int8pack_mm(rows, self.weight, self.scale)
        else:  # a prompt, once
            out = F.linear(rows, self.weight.to(self.dtype)) * self.scale.float()
        out = out if self.bias is None else out + self.bias
        return out.to(self.dtype).view(*x.shape[:-1], -1)
