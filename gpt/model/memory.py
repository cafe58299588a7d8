"""The memory that training takes, by what it is for: arithmetic on a model's shape, before anything is built.

Letters: B windows at once, T tokens of each, C d_model, H heads, L layers, V vocabulary, N parameters.
"""

import math

import torch

from gpt.model.fast.loss import CHUNK_BYTES, SLICE
from gpt.model.fast.operations import prefers_fused_kernel
from gpt.model.linear import ROUND_AGAIN_FROM
from gpt.model.transformer import GPTConfig


def training_memory(
    shape: GPTConfig,
    micro_batch: int,
    dtype: torch.dtype,
    device: str,
    *,
    optimizer_state: float,
    update: float = 0.0,
    checkpointing: bool = False,
    accumulates: bool = True,
    processes: int = 1,
    sharded: bool = False,
) -> dict[str, float]:
    """The bytes on each device by what they are for; `peak` is the most at once. The process itself is not counted.

    `dtype` is that of the products; `optimizer_state` and `update` are what the optimizer holds for the whole model,
    always and during an update; `accumulates` a step of several micro-batches; `sharded` weights, gradients and state
    that the processes share.
    """
    T, L, N = shape.context_length, shape.num_layers, shape.num_parameters
    split = processes if sharded else 1
    buckets = 4 * N if processes > 1 and not sharded else 0  # in which gradients are exchanged
    weights, gradients, state = 4 * N / split + L * T * T, 4 * N / split + buckets, optimizer_state / split
    activations, logits = activation_bytes(shape, micro_batch, dtype, device, checkpointing)
    # A CPU's allocator rarely finds room for an update where activations were; a GPU's peak is counted without gaps.
    if device == "cpu":
        most = gradients + activations + logits + update
    else:
        most = max((gradients if accumulates else buckets) + activations + logits, gradients + update)
    parts = {"weights": weights, "gradients": gradients, "optimizer_state": state, "update": update}
    return parts | {"activations": activations, "logits": logits, "peak": weights + state + most}


def activation_bytes(
    shape: GPTConfig, micro_batch: int, dtype: torch.dtype, device: str, checkpointing: bool = False
) -> tuple[float, float]:
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
    rounded = [n * C * C for n in (1, 3, 4, 4) if size < 4 and (not on_cpu or n * C * C < ROUND_AGAIN_FROM)]
    passing = C * (16 + 8 * size) + 2 * scores  # gradients of the block at hand, and scores on their way
    activations = tokens * (kept + passing) + L * sum(rounded) * size

    # Of the logits, a chunk of rows is kept, and a slice of the vocabulary is at work in fp32.
    width = min(V, SLICE) if on_cpu else V
    rows = tokens / math.ceil(tokens * V * size / CHUNK_BYTES.get(device, 2**27))
    logits = rows * (V * size + width * (4 if on_cpu else 8)) + tokens * C * (4 + 2 * size) + 4 * V * C
    return activations, logits


def choose_micro_batch(
    shape: GPTConfig,
    windows: int,
    free: float,
    dtype: torch.dtype,
    device: str,
    *,
    checkpointing: bool = False,
    shards: int = 1,
) -> int:
    """Choose how many of a step's `windows` go through the model at once: the most that divides them and fits.

    Activations and logits may take half of what is left of the `free` bytes beside weights, gradients and AdamW's
    state, which are split into `shards`. On a CPU, more than 4,096 tokens at once are no faster.
    """
    room = (free - 16 * shape.num_parameters / shards) / 2
    most = windows if device != "cpu" else min(windows, max(1, 4096 // shape.context_length))
    sizes = (size for size in range(most, 1, -1) if windows % size == 0)
    return next((B for B in sizes if sum(activation_bytes(shape, B, dtype, device, checkpointing)) <= room), 1)
