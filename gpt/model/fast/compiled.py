"""A compiled twin of `TransformerBlock` for one token of one text, and of the output head.

The twin is gpt/model/fast/one_token.c. It reads weights as fast as memory delivers them.
tests/model/fast/test_compiled.py compares it with the plain block.
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
DTYPE_NUMBERS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}  # as in the source


@functools.cache
def _library() -> ctypes.CDLL:
    """Compile the twin for this processor, in a quarter of a second. `UserError` if that fails."""
    compiler = next(filter(None, map(shutil.which, ("gcc", "cc", "clang"))), None)
    if compiler is None:
        raise UserError("--compile needs a C compiler, such as gcc: install one, or leave it out")
    processor = "-mcpu=native" if platform.machine() in ("arm64", "aarch64") else "-march=native"
    flags = [processor, "-O3", "-ffast-math", "-fno-finite-math-only", "-fPIC", *shlex.split(os.getenv("CFLAGS", ""))]
    first_error: Exception | None = None
    for thread_flags in (["-fopenmp"], []):
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            try:
                compiled, library = f"{folder}/one_token.o", f"{folder}/one_token.so"
                compile_command = [compiler, *flags, *thread_flags, "-c", str(SOURCE), "-o", compiled]
                link_command = [compiler, "-shared", compiled, "-o", library, "-lm"]
                for command in (compile_command, link_command):
                    subprocess.run(command, check=True, capture_output=True, text=True)
                return ctypes.CDLL(library)  # it shares PyTorch's OpenMP and threads
            except (subprocess.CalledProcessError, OSError) as error:
                first_error = first_error or error
    lines = str(getattr(first_error, "stderr", first_error)).strip().splitlines() or [""]
    raise UserError(f"--compile does not work with {compiler} ({lines[-1]}): leave it out")


class _Addresses:
    """The addresses of tensors, as an argument for C. It keeps the tensors alive. None becomes NULL."""

    def __init__(self, *tensors: Tensor | None):
        self._tensors = [None if tensor is None else tensor.contiguous() for tensor in tensors]
        pointers = [None if tensor is None else tensor.data_ptr() for tensor in self._tensors]
        self._as_parameter_ = (ctypes.c_void_p * len(pointers))(*pointers)  # ctypes passes this attribute


def compile_block(block: TransformerBlock) -> None:
    """Let a block compute a single token of a single text in one compiled function. Other input is unchanged."""
    plain_forward = block.forward
    library = _library()
    attention, feed_forward = block.attention, block.feed_forward
    linears: list[Any] = [attention.W_qkv, attention.out_proj, feed_forward.expand, feed_forward.contract]
    tensors: list[Any] = [block.norm1.weight, block.norm1.bias, block.norm2.weight, block.norm2.bias]
    for linear in linears:
        tensors += _stored_tensors(linear)
    weights = _Addresses(*tensors)
    C, H = block.norm1.weight.numel(), attention.num_heads
    dtype = DTYPE_NUMBERS[linears[0].weight.dtype]
    scratch = torch.empty(8 * C)

    def forward(x: Tensor, cache: KVCache | None = None, mask: Tensor | None = None) -> Tensor:
        if cache is None or x.numel() != C or not 0 < cache.length < cache.capacity:
            return plain_forward(x, cache, mask)
        cache.length += 1
        out = x.to(torch.float32, copy=True)
        state = [ctypes.c_void_p(t.data_ptr()) for t in (out, scratch, cache.keys, cache.values) if t is not None]
        library.transform(weights, dtype, *state, cache.length, cache.capacity, C, H)
        return out

    block.forward = forward  # type: ignore[method-assign]


def compile_head(head: Any) -> None:
    """Let the output head compute the logits of a single row in a compiled product."""
    plain_forward = head.forward
    library = _library()
    weights = _Addresses(*_stored_tensors(head))
    V, C = head.weight.shape
    dtype = DTYPE_NUMBERS[head.weight.dtype]

    def forward(x: Tensor) -> Tensor:
        if x.numel() != C:
            return plain_forward(x)
        row, logits = x.to(torch.float32), torch.empty(*x.shape[:-1], V)
        library.head(weights, dtype, ctypes.c_void_p(row.data_ptr()), ctypes.c_void_p(logits.data_ptr()), V, C)
        return logits

    head.forward = forward


def _stored_tensors(linear: Any) -> list[Tensor | None]:
    """Return a linear map's weight as stored, and in fp32 the scale of integers and the bias. They may be None."""
    in_fp32 = [getattr(linear, "scale", None), linear.bias]
    return [linear.weight, *(None if tensor is None else tensor.float() for tensor in in_fp32)]
