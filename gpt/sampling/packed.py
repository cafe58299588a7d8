"""A model made ready for sampling, which reads every weight once for each token and little else.

Its speed is therefore that of memory, and halving the weights doubles it, as long as the product of a matrix and a few
rows keeps up. On 2 cores that read 34 GB/s, all matrices of GPT-2 124M, in ms:

| weights | rows | `F.linear` | here                                         |
| bf16    | 1    | 16         | 11  packed once into the order oneDNN prefers |
| bf16    | 8    | 20         | 11                                           |
| int8    | 1    |            | 8   `_weight_int8pack_mm`                    |
| int8    | 8    |            | 11  as bf16, see `Int8Linear`                |
"""

import functools
import math
import shutil
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt.errors import UserError
from gpt.model.attention import KVCache
from gpt.model.transformer import GPT, TransformerBlock

LARGE = 10_000_000  # parameters; below, the operations around a product take longer than reading its weights


def choose_sampling_precision(name: str, model: GPT, training: str) -> str:
    """The precision by its name; for `auto`, bf16 for a large model where `training` would choose it, else fp32."""
    if name != "auto":
        return name
    return training if model.token_embedding.weight.device.type != "cpu" or model.num_parameters() > LARGE else "fp32"


def prepare(model: GPT, precision: str, rows: int = 1, compiled: bool = False) -> GPT:
    """Make a model on its device ready to sample `rows` texts at once, in fp32, bf16 or int8; returns the model itself.

    With bf16 and int8 the matrices change; norms, sums and, on a CPU, attention stay in fp32. `compiled`, for one text
    in bf16 or int8, takes some seconds at the first token and makes the others faster: see `CompiledBlock`.
    """
    model.eval().requires_grad_(False)
    if precision == "fp32":
        return model.float()

    def convert(linear: nn.Linear) -> nn.Module:
        if precision == "int8":
            return Int8Linear(linear, rows, compiled)
        return PackedLinear(linear.weight, linear.bias, pack=not compiled)

    model.output = convert(_head(model))
    model.token_embedding.to(torch.bfloat16)
    for block in model.blocks:
        for parent in (block.attention, block.feed_forward):
            for name, child in list(parent.named_children()):  # type: ignore[union-attr]
                if isinstance(child, nn.Linear):
                    setattr(parent, name, convert(child))
    if compiled:
        model.blocks = nn.ModuleList(CompiledBlock(block) for block in model.blocks)  # type: ignore[arg-type]
        model.output = CompiledHead(model.output)
    return model


def require_compilable(precision: str, rows: int) -> None:
    """Raise `UserError` where compiling would not help, or cannot be done."""
    if precision == "fp32":
        raise UserError("--compile does nothing for weights in fp32: add --precision bf16 or int8")
    if rows > 1:
        raise UserError(f"--compile is for a single text, and these are {rows}: leave it away")
    if not any(map(shutil.which, ("c++", "g++", "clang++"))):
        raise UserError("--compile needs a C++ compiler, such as g++: install one, or leave it away")


def _head(model: GPT) -> nn.Linear:
    """The output head as a linear map of its own."""
    with torch.device("meta"):
        head = nn.Linear(model.config.d_model, model.config.vocab_size, bias=False)
    head.weight = model.token_embedding.weight
    return head


class PackedLinear(nn.Module):
    """A linear map in bfloat16, its weights (out, in) on a CPU in the order in which its library reads them fastest."""

    dtype = torch.bfloat16
    scale: Tensor | None = None

    def __init__(self, weight: Tensor, bias: Tensor | None, pack: bool = True):
        super().__init__()
        self.weight = weight.detach().to(self.dtype)
        self.bias = None if bias is None else bias.detach().to(self.dtype)
        self._packed = pack and self.weight.device.type == "cpu" and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
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

    Only weights are rounded; activations are in bfloat16. Where several rows come at every token, or no kernel takes
    8-bit weights, the whole numbers are kept in bfloat16, which holds them exactly and multiplies many rows faster.
    """

    dtype = torch.bfloat16

    def __init__(self, linear: nn.Linear, rows: int = 1, compiled: bool = False):
        super().__init__()
        weight = linear.weight.detach().float()
        self.scale = (weight.abs().amax(dim=1) / 127).clamp(min=1e-12).to(self.dtype)  # (out,)
        whole = (weight / self.scale[:, None]).round().clamp(-127, 127)
        self.bias = None if linear.bias is None else linear.bias.detach().float()
        # The kernel for a single row reads past the end of rows that are not a whole number of its registers.
        self._has_kernel = weight.device.type == "cpu" and linear.in_features % 32 == 0
        self._many: PackedLinear | None = None
        if rows > 1 or not (compiled or self._has_kernel):
            self._many, whole = PackedLinear(whole, None), whole[:0]
        self.weight = whole.to(torch.int8)

    def forward(self, x: Tensor) -> Tensor:
        """Map x (..., in) to (..., out) in bfloat16."""
        rows = x.flatten(0, -2).to(self.dtype)
        if self._many is not None:
            out = self._many(rows) * self.scale.float()
        elif len(rows) == 1 and self._has_kernel:
            out = torch._weight_int8pack_mm(rows, self.weight, self.scale)
        else:  # a prompt, once
            out = F.linear(rows, self.weight.to(self.dtype)) * self.scale.float()
        out = out if self.bias is None else out + self.bias
        return out.to(self.dtype).view(*x.shape[:-1], -1)


class CompiledBlock(nn.Module):
    """A block that takes a single token of a single text through one compiled function, and all else as it always did.

    A product with one row, compiled as a multiplication and a sum, reads its weights as fast as memory gives them, and
    what stands between two products costs no calls of its own. All blocks share the function. What is compiled is kept
    on disk by PyTorch.
    """

    def __init__(self, block: TransformerBlock):
        super().__init__()
        self.block = block
        attention, feed_forward = block.attention, block.feed_forward
        self._places = torch.arange(len(attention.mask), device=attention.mask.device)
        linears = (attention.W_qkv, attention.out_proj, feed_forward.expand, feed_forward.contract)
        self._weights = (_norm_of(block.norm1), _norm_of(block.norm2), *map(_map_of, linears))

    @property
    def attention(self) -> nn.Module:
        return self.block.attention

    @property
    def feed_forward(self) -> nn.Module:
        return self.block.feed_forward

    def forward(self, x: Tensor, cache: KVCache | None = None, blocked: Tensor | None = None) -> Tensor:
        # An empty and a full cache would be cases of their own for the compiler.
        if cache is None or x.numel() != x.shape[-1] or not 0 < cache.length < cache.capacity - 1:
            return self.block(x, cache, blocked)
        places = self._places[: cache.length + 1]
        torch._dynamo.mark_dynamic(places, 0, min=2, max=cache.capacity - 1)
        cache.length += 1
        return _compiled(_token)(x, places, cache.keys, cache.values, *self._weights)


class CompiledHead(nn.Module):
    """The output head, whose product with a single row is compiled."""

    def __init__(self, linear: nn.Module):
        super().__init__()
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        if x.numel() != x.shape[-1]:
            return self.linear(x)
        return _compiled(_apply)(x.flatten(), _map_of(self.linear)).view(*x.shape[:-1], -1)


Map = tuple[Tensor, Tensor | None, Tensor | None]  # weight (out, in), scale (out,), bias (out,)
Norm = tuple[Tensor, Tensor]  # gain, bias


def _map_of(linear) -> Map:
    return linear.weight, linear.scale, linear.bias


def _norm_of(norm: nn.LayerNorm) -> Norm:
    return norm.weight, norm.bias


def _apply(x: Tensor, linear: Map) -> Tensor:
    weight, scale, bias = linear
    half = len(weight) // 2  # two rows at once, whose sums need not wait for each other
    rows = [part for part in (weight[:half], weight[half : 2 * half], weight[2 * half :]) if len(part)]
    out = torch.cat([(part.float() * x.float()).sum(-1) for part in rows])
    out = out if scale is None else out * scale.float()
    return out if bias is None else out + bias.float()


def _token(
    row: Tensor, places: Tensor, keys: Tensor, values: Tensor, norm1: Norm, norm2: Norm, qkv: Map, out_proj: Map,
    expand: Map, contract: Map,
) -> Tensor:  # fmt: skip
    """A block's output (1, 1, C) for one token (1, 1, C) that comes to stand in the last of `places` (S,) of the cache.

    The cache's keys and values (1, H, capacity, D) get the token's own.
    """
    _, H, _, D = keys.shape
    S, x = len(places), row.flatten()
    query, key, value = _apply(F.layer_norm(x, x.shape, *norm1), qkv).view(3, 1, H, 1, D).to(keys.dtype)
    keys.index_copy_(2, places[-1:], key)
    values.index_copy_(2, places[-1:], value)
    scores = (query * keys[:, :, :S]).sum(-1, keepdim=True)  # (1, H, S, 1)
    context = (torch.softmax(scores / math.sqrt(D), dim=2) * values[:, :, :S]).sum(2)  # (1, H, D)
    x = x + _apply(context.flatten(), out_proj)
    inner = F.gelu(_apply(F.layer_norm(x, x.shape, *norm2), expand), approximate="tanh")
    return (x + _apply(inner, contract)).view_as(row)


@functools.cache
def _compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    # Without the threshold a norm is computed anew within every row of the product that follows it.
    options = {"realize_opcount_threshold": 6, "cpp.enable_floating_point_contract_flag": "fast"}
    return torch.compile(function, dynamic=False, options=options)  # type: ignore[arg-type]
