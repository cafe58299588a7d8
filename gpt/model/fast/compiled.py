"""A compiled twin of `TransformerBlock` for one token of one text, and of the output head.

The twin is gpt/model/fast/one_token.c. It reads weights as fast as memory delivers them, and calls nothing between two
products. tests/model/fast/test_compiled.py holds it equal to the plain block.
"""

import ctypes
import functools
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpt.errors import UserError
from gpt.model.attention import KVCache
from gpt.model.transformer import TransformerBlock

SOURCE = Path(__file__).with_name("one_token.c")
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}  # as the source counts them


@functools.cache
def _library() -> ctypes.CDLL:
    """The twin, compiled for this processor in a quarter of a second; `UserError` where that does not work."""
    compiler = next(filter(None, map(shutil.which, ("gcc", "cc", "clang"))), None)
    if compiler is None:
        raise UserError("--compile needs a C compiler, such as gcc: install one, or leave it out")
    processor = "-mcpu=native" if platform.machine() in ("arm64", "aarch64") else "-march=native"
    flags = [processor, "-O3", "-ffast-math", "-fno-finite-math-only", "-fPIC", *shlex.split(os.getenv("CFLAGS", ""))]
    problem: Exception | None = None
    for threads in (["-fopenmp"], []):
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            try:
                compiled, library = f"{folder}/one_token.o", f"{folder}/one_token.so"
                translate = [compiler, *flags, *threads, "-c", str(SOURCE), "-o", compiled]
                link = [compiler, "-shared", compiled, "-o", library, "-lm"]
                for command in (translate, link):
                    subprocess.run(command, check=True, capture_output=True, text=True)
                return ctypes.CDLL(library)  # OpenMP is PyTorch's own, which is loaded already: they share its threads
            except (subprocess.CalledProcessError, OSError) as error:
                problem = problem or error
    lines = str(getattr(problem, "stderr", problem)).strip().splitlines() or [""]
    raise UserError(f"--compile does not work with {compiler} ({lines[-1]}): leave it out")


class _Addresses:
    """The addresses of tensors, as C takes them; they live as long as it does. None becomes NULL."""

    def __init__(self, *tensors: Tensor | None):
        self._tensors = [None if tensor is None else tensor.contiguous() for tensor in tensors]
        pointers = [None if tensor is None else tensor.data_ptr() for tensor in self._tensors]
        self._as_parameter_ = (ctypes.c_void_p * len(pointers))(*pointers)  # what ctypes looks for


def compile_block(block: TransformerBlock) -> None:
    """Make a block handle a single token of a single text in one compiled function, and anything else as before."""
    plain, attention, feed_forward, library = block.forward, block.attention, block.feed_forward, _library()
    maps: list[Any] = [attention.W_qkv, attention.out_proj, feed_forward.expand, feed_forward.contract]
    norms = (tensor for norm in (block.norm1, block.norm2) for tensor in (norm.weight, norm.bias))
    weights = _Addresses(*norms, *(tensor for linear in maps for tensor in _tensors_of(linear)))
    C, H, kind = block.norm1.weight.numel(), attention.num_heads, KINDS[maps[0].weight.dtype]
    scratch = torch.empty(8 * C)

    def forward(x: Tensor, cache: KVCache | None = None, blocked: Tensor | None = None) -> Tensor:
        if cache is None or x.numel() != C or not 0 < cache.length < cache.capacity:
            return plain(x, cache, blocked)
        cache.length += 1
        out = x.to(torch.float32, copy=True)
        state = [ctypes.c_void_p(t.data_ptr()) for t in (out, scratch, cache.keys, cache.values) if t is not None]
        library.transform(weights, kind, *state, cache.length, cache.capacity, C, H)
        return out

    block.forward = forward  # type: ignore[method-assign]


def compile_head(head: Any) -> None:
    """Make the output head compute the logits of a single row in a compiled product."""
    plain, weights, library = head.forward, _Addresses(*_tensors_of(head)), _library()
    (V, C), kind = head.weight.shape, KINDS[head.weight.dtype]

    def forward(x: Tensor) -> Tensor:
        if x.numel() != C:
            return plain(x)
        row, logits = x.to(torch.float32), torch.empty(*x.shape[:-1], V)
        library.head(weights, kind, ctypes.c_void_p(row.data_ptr()), ctypes.c_void_p(logits.data_ptr()), V, C)
        return logits

    head.forward = forward


def _tensors_of(linear: Any) -> tuple[Tensor | None, ...]:
    """The weight of a linear map as it is stored, and in fp32 the scale of integers and the bias, or None."""
    others = (getattr(linear, "scale", None), linear.bias)
    return linear.weight, *(None if tensor is None else tensor.float() for tensor in others)
