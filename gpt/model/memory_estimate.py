"""Estimate the memory of training, and how many sequences fit, before anything is built.

Letters: B sequences at once, T tokens of each, C d_model, L layers, V vocabulary.
"""

import math

import torch

from gpt.model.fast.chunked_loss import CPU_CHUNK_BYTES, VOCAB_SLICE
from gpt.model.fast.gpu_loss import EAGER_COPIES, rows_per_chunk
from gpt.model.fast.operations import prefers_fused_kernel
from gpt.model.linear import MIN_RECAST_ELEMENTS
from gpt.model.transformer import GPTConfig

MAX_CPU_TOKENS = 4096  # in a micro-batch: more tokens at once are no faster on a CPU
TRAINING_BYTES_PER_PARAMETER = 16  # weight, gradient and AdamW's two moments, each in fp32


def activation_bytes(
    shape: GPTConfig, micro_batch_size: int, dtype: torch.dtype, device: str, checkpointing: bool = False
) -> float:
    """Return the bytes of the blocks' activations, and of the logits and their gradients.

    Args:
        shape: The shape of the model.
        micro_batch_size: B, the number of sequences that go through the model at once.
        dtype: The precision of products.
        device: The device's type, such as "cpu".
        checkpointing: Whether each block keeps only its input and computes the rest again.
    """
    B, T, C, L, V = micro_batch_size, shape.context_length, shape.d_model, shape.num_layers, shape.vocab_size
    costs = shape.costs()
    on_cpu = device == "cpu"
    has_dropout = shape.dropout > 0
    size = dtype.itemsize
    tokens = B * T

    # Bytes per token that autograd keeps in a block. tests/model/test_memory_estimate.py counts them.
    scores = size * shape.num_heads * T
    block: float = 4 * costs.kept_in_fp32 + size * costs.kept_in_dtype
    if prefers_fused_kernel(device, dtype, T, is_training=True):
        block += 3 * scores * (on_cpu and has_dropout)
    else:
        computed = 0.75 if T > 256 else 1  # `split_query_attention` skips a quarter of the scores
        block += C * size * has_dropout + computed * scores * (1 + 2 * has_dropout)
    block += 2 * C * size * has_dropout
    kept = L * 4 * C + block if checkpointing else L * block
    # A small matrix, and on a GPU any, is kept in the precision of the products, too.
    rounded = sum(n for n in costs.linear_weights if size < 4 and (not on_cpu or n < MIN_RECAST_ELEMENTS))
    temporary = C * (16 + 8 * size) + 2 * scores  # the gradients of one block, and its scores
    activations = tokens * (kept + temporary) + L * rounded * size

    if on_cpu:  # a chunk of rows of the logits is kept; one slice of the vocabulary at a time is computed in fp32
        rows = tokens / math.ceil(tokens * V * size / CPU_CHUNK_BYTES)
        logits = rows * (V * size + min(V, VOCAB_SLICE) * 4)
    else:  # eager functions take at least as much as compiled ones
        logits = rows_per_chunk(tokens, V * size, compiled=False) * V * (size + 4 * EAGER_COPIES) + V * C * size
    gradients = tokens * C * (4 + 2 * size) + 4 * V * C
    return activations + logits + gradients


def choose_micro_batch(
    shape: GPTConfig,
    num_sequences: int,
    free_bytes: float,
    dtype: torch.dtype,
    device: str,
    *,
    checkpointing: bool = False,
) -> int:
    """Return the largest micro-batch size that divides a step's sequences and fits into memory; at least 1.

    Activations and logits may take half of the memory that weights, gradients and AdamW's state leave.

    Args:
        shape: The shape of the model.
        num_sequences: The sequences of a step on this device.
        free_bytes: The free memory of the device.
        dtype: The precision of products.
        device: The device's type, such as "cpu".
        checkpointing: Whether activations are recomputed.
    """
    budget = (free_bytes - TRAINING_BYTES_PER_PARAMETER * shape.num_parameters) / 2
    limit = num_sequences
    if device == "cpu":
        limit = min(limit, max(1, MAX_CPU_TOKENS // shape.context_length))
    for size in range(limit, 1, -1):
        if num_sequences % size == 0 and activation_bytes(shape, size, dtype, device, checkpointing) <= budget:
            return size
    return 1
