"""The memory that training takes, and how many windows fit: arithmetic on a model's shape, before anything is built.

Letters: B windows at once, T tokens of each, C d_model, L layers, V vocabulary.
"""

import math

import torch

from gpt.model.fast.chunked_loss import LOGITS_CHUNK_BYTES, VOCAB_SLICE
from gpt.model.fast.operations import prefers_fused_kernel
from gpt.model.linear import MIN_RECAST_ELEMENTS
from gpt.model.transformer import GPTConfig


def activation_bytes(
    shape: GPTConfig, micro_batch: int, dtype: torch.dtype, device: str, checkpointing: bool = False
) -> float:
    """The bytes of the blocks' activations, and of the logits and their gradients, for `micro_batch` windows."""
    T, C, L, V = shape.context_length, shape.d_model, shape.num_layers, shape.vocab_size
    on_cpu, drops, size, tokens = device == "cpu", shape.dropout > 0, dtype.itemsize, micro_batch * shape.context_length

    # What autograd keeps of a token in a block: the residual stream and its sum in fp32; then in `size` bytes each
    # half's input and context, queries, keys, values, and the feed-forward part. tests/model/test_memory.py counts.
    scores = size * shape.num_heads * T
    block: float
    if prefers_fused_kernel(torch.empty(T, 0, dtype=dtype, device="cpu" if on_cpu else "meta", requires_grad=True)):
        block = C * (8 + 14 * size) + 3 * scores * (on_cpu and drops)
    else:  # a long window in two halves, of which the early one has half the scores
        block = C * (8 + (14 + drops) * size) + (0.75 if T > 256 else 1) * scores * (1 + 2 * drops)
    block += 2 * C * size * drops
    kept = L * 4 * C + block if checkpointing else L * block
    rounded = [n * C * C for n in (1, 3, 4, 4) if size < 4 and (not on_cpu or n * C * C < MIN_RECAST_ELEMENTS)]
    passing = C * (16 + 8 * size) + 2 * scores  # gradients of the block at hand, and scores on their way
    activations = tokens * (kept + passing) + L * sum(rounded) * size

    # Of the logits, a chunk of rows is kept, and a slice of the vocabulary is at work in fp32.
    width = min(V, VOCAB_SLICE) if on_cpu else V
    rows = tokens / math.ceil(tokens * V * size / LOGITS_CHUNK_BYTES.get(device, 2**27))
    logits = rows * (V * size + width * (4 if on_cpu else 8)) + tokens * C * (4 + 2 * size) + 4 * V * C
    return activations + logits


def choose_micro_batch(
    shape: GPTConfig,
    windows: int,
    free: float,
    dtype: torch.dtype,
    device: str,
    *,
    checkpointing: bool = False,
) -> int:
    """Choose how many of a step's `windows` go through the model at once: the most that divides them and fits.

    Activations and logits may take half of what is left of the `free` bytes beside weights, gradients and AdamW's
    state. On a CPU, more than 4,096 tokens at once are no faster.
    """
    room = (free - 16 * shape.num_parameters) / 2
    most = windows if device != "cpu" else min(windows, max(1, 4096 // shape.context_length))
    sizes = (size for size in range(most, 1, -1) if windows % size == 0)
    return next((B for B in sizes if activation_bytes(shape, B, dtype, device, checkpointing) <= room), 1)
