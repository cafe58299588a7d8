"""Packing a model's weights for sampling.

Sampling reads every weight once for each token, and does little else. So memory bandwidth sets the speed, and weights
of half the size double it. Multiplying a matrix by a few rows keeps up, even without bf16 in hardware. All matrices of
GPT-2 124M on two cores that read 34 GB/s, in ms:

| weights | rows | `F.linear` | this module                                |
| bf16    | 1    | 16         | 11  packed once into oneDNN's own layout   |
| bf16    | 8    | 20         | 11                                         |
| int8    | 1    |            | 8   `_weight_int8pack_mm`                  |
| int8    | 8    |            | 11  as bf16, see `Int8Linear`              |
"""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt.errors import UserError
from gpt.hardware.device import DTYPES, choose_precision
from gpt.model.fast.compiled import compile_block, compile_head
from gpt.model.transformer import GPT

MAX_ONE_THREAD_PARAMETERS = 4_000_000  # up to this size two threads are no faster than one
MAX_FP32_PARAMETERS = 10_000_000  # up to this size reading weights is not what takes the time
COMPUTE_BOUND_ROWS = 8  # from here on multiplying takes longer than reading


def choose_sampling_precision(name: str, model: GPT) -> str:
    """Resolve `auto`. On a GPU it is the same as for training; on a CPU it depends on the size of the model alone."""
    device = model.token_embedding.weight.device
    if name != "auto" or device.type != "cpu":
        return choose_precision(name, device)
    return "bf16" if model.config.num_parameters > MAX_FP32_PARAMETERS else "fp32"


def choose_threads(model: GPT, rows: int, compiled: bool) -> int:
    """Return how many threads sample `rows` texts fastest with a model, compiled or not."""
    is_small = model.config.num_parameters <= MAX_ONE_THREAD_PARAMETERS
    return 1 if is_small and rows == 1 and not compiled else torch.get_num_threads()


def pack_weights(model: GPT, precision: str, rows: int = 1, compiled: bool = False) -> GPT:
    """Prepare a model for sampling, in place, and return it. Norms, sums and, on a CPU, attention stay in fp32.

    Args:
        model: The model, already on its device.
        precision: The precision of the matrices: fp32, bf16, fp16 or int8.
        rows: How many texts to sample at once.
        compiled: Translate a block with a C compiler, for one text on a CPU. This takes a quarter of a second and makes
            every token faster: see gpt/model/fast/compiled.py.
    """
    model.eval().requires_grad_(False)
    if compiled:
        model.config.require_gpt2("--compile")
    if compiled and (model.token_embedding.weight.device.type != "cpu" or precision == "fp16"):
        raise UserError("--compile is for a CPU, and for fp32, bf16 and int8: leave it out, or set --device=cpu")
    dtype = DTYPES.get(precision, torch.bfloat16)

    def pack(weight: Tensor, bias: Tensor | None = None) -> nn.Module:
        if precision == "int8":
            return Int8Linear(weight, bias, rows, compiled)
        return PackedLinear(weight, bias, not compiled, dtype)

    model.output = pack(model.token_embedding.weight)
    model.token_embedding.to(dtype)
    for block in model.blocks:
        for parent in (block.attention, block.feed_forward):
            for name, child in list(parent.named_children()):  # type: ignore[union-attr]
                if isinstance(child, nn.Linear):
                    setattr(parent, name, pack(child.weight, child.bias))
        if compiled:
            compile_block(block)  # type: ignore[arg-type]
    if compiled:
        compile_head(model.output)
    return model


class PackedLinear(nn.Module):
    """A linear map in `dtype`. On a CPU, bfloat16 weights (out, in) have the layout that oneDNN reads fastest."""

    def __init__(self, weight: Tensor, bias: Tensor | None, pack: bool = True, dtype: torch.dtype = torch.bfloat16):
        super().__init__()
        self.dtype = dtype
        self.weight = weight.detach().to(self.dtype)
        self.bias = None if bias is None else bias.detach().to(self.dtype)
        self._is_packed = pack and self.weight.device.type == "cpu" and dtype == torch.bfloat16 and has_bf16_kernels()
        if self._is_packed:  # no other operation understands oneDNN's layout
            self.weight = torch.ops.mkldnn._reorder_linear_weight(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Map x (..., in) to (..., out)."""
        if self._is_packed:
            return torch.ops.mkldnn._linear_pointwise(x.to(self.dtype), self.weight, self.bias, "none", [], "")
        return _multiply(x.to(self.dtype), self.weight, self.bias)


@functools.cache
def has_bf16_kernels() -> bool:
    """Return True if oneDNN has products in bf16 for this CPU, and its own layout of weights for them."""
    ops = torch.ops.mkldnn
    return hasattr(ops, "_reorder_linear_weight") and ops._is_mkldnn_bf16_supported()


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return F.linear in the precision of x. Many rows are multiplied in fp32 if the CPU has no products in bf16."""
    is_slow = x.device.type == "cpu" and x.dtype == torch.bfloat16 and not has_bf16_kernels()
    if is_slow and x.numel() >= COMPUTE_BOUND_ROWS * x.shape[-1]:
        return F.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)
    return F.linear(x, weight, bias)


class Int8Linear(nn.Module):
    """A linear map whose weights (out, in) are integers from -127 to 127, with a scale for each output.

    Only weights are rounded; activations are bfloat16. The integers are stored in bfloat16 if several rows are sampled
    at once, or if no kernel reads 8-bit weights. bfloat16 holds them exactly, and multiplies many rows faster.
    """

    dtype = torch.bfloat16

    def __init__(self, weight: Tensor, bias: Tensor | None, rows: int = 1, compiled: bool = False):
        super().__init__()
        weight = weight.detach().float()
        self.scale = (weight.abs().amax(dim=1) / 127).clamp(min=1e-12).to(self.dtype)  # (out,)
        integers = (weight / self.scale[:, None]).round().clamp(-127, 127)
        self.bias = None if bias is None else bias.detach().float()
        # For other widths the single-row kernel reads past the end of the rows, since it loads full registers.
        self._has_kernel = weight.device.type == "cpu" and weight.shape[1] % 32 == 0
        self._in_bf16: PackedLinear | None = None
        if rows > 1 or not (compiled or self._has_kernel):
            self._in_bf16 = PackedLinear(integers, None)
            integers = integers[:0]
        self.weight = integers.to(torch.int8)

    def forward(self, x: Tensor) -> Tensor:
        """Map x (..., in) to (..., out) in bfloat16."""
        rows = x.flatten(0, -2).to(self.dtype)
        if self._in_bf16 is not None:
            out = self._in_bf16(rows) * self.scale.float()
        elif len(rows) == 1 and self._has_kernel:
            out = torch._weight_int8pack_mm(rows, self.weight, self.scale)
        else:  # a prompt
            out = _multiply(rows, self.weight.to(self.dtype)) * self.scale.float()
        out = out if self.bias is None else out + self.bias
        return out.to(self.dtype).view(*x.shape[:-1], -1)
