"""The chunked loss on a GPU: some rows of the logits at a time, over the whole vocabulary.

Reading and writing the logits takes longer than computing them. So two functions do all that is done to the logits of
a chunk. Compiled, each is one pass: it reads them in the precision of the products, computes in fp32, and the second
writes the gradient over the logits.

Letters in shapes: N targets, C d_model, V vocabulary. tests/model/fast/test_gpu_loss.py runs this on a CPU.
"""

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from gpt.model.loss import IGNORE_INDEX

VOCAB_ALIGNMENT = 64  # a GPU multiplies matrices fastest if their rows are aligned
COMPILED_CHUNK_BYTES = 2**29  # of logits, in the precision of the products
EAGER_CHUNK_BYTES = 2**27  # smaller, because eager functions also hold copies in fp32
EAGER_COPIES = 3  # at most, of a chunk in fp32


def loss_on_gpu(
    hidden: Tensor,
    head_weight: Tensor,
    targets: Tensor,
    scale: Tensor | float,
    wants_gradients: bool,
    compiled: bool = False,
) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """Return the mean cross-entropy, and its gradients for `hidden` and `head_weight` if they are wanted.

    Args:
        hidden: Hidden states (N, C).
        head_weight: The head's weight (V, C). It is rounded to the precision of `hidden` once.
        targets: Token ids (N,), or `IGNORE_INDEX`.
        scale: A factor of the gradients.
        wants_gradients: Compute gradients.
        compiled: Compile the two functions.
    """
    N, C = hidden.shape
    V = len(head_weight)
    padded_V = math.ceil(V / VOCAB_ALIGNMENT) * VOCAB_ALIGNMENT
    head = hidden.new_zeros(padded_V, C)
    head[:V] = head_weight
    rows = rows_per_chunk(N, padded_V * hidden.itemsize, compiled)
    buffer = hidden.new_empty(rows, padded_V)
    summarize, replace = _functions(compiled)

    is_counted = targets != IGNORE_INDEX
    num_counted = is_counted.sum().clamp(min=1)
    row_weights = is_counted / num_counted * scale  # (N,)
    total = hidden.new_zeros((), dtype=torch.float32)
    if wants_gradients:
        hidden_grad = torch.empty_like(hidden, memory_format=torch.contiguous_format)
        weight_grad = torch.zeros_like(head_weight, memory_format=torch.contiguous_format)
    for start in range(0, N, rows):
        chunk = slice(start, start + rows)
        h = hidden[chunk]
        target = targets[chunk].clamp(min=0)
        product = torch.mm(h, head.T, out=buffer[: len(h)])  # (rows, padded_V)
        logits = product[:, :V]
        log_sums, target_logits = summarize(logits, target)
        total += ((log_sums - target_logits) * is_counted[chunk]).sum()
        if wants_gradients:
            replace(logits, log_sums, target, row_weights[chunk])  # the padding of `product` stays zero
            torch.mm(product, head, out=hidden_grad[chunk])
            weight_grad += (product.T @ h)[:V]
    return total / num_counted, (hidden_grad, weight_grad) if wants_gradients else None


def rows_per_chunk(N: int, row_bytes: int, compiled: bool) -> int:
    """Return how many of N rows of logits are computed at once. Chunks of the same size share a compiled graph."""
    max_bytes = COMPILED_CHUNK_BYTES if compiled else EAGER_CHUNK_BYTES
    min_chunks = max(1, math.ceil(N * row_bytes / max_bytes))
    num_chunks = next((n for n in range(min_chunks, 2 * min_chunks) if N % n == 0), min_chunks)
    return max(1, math.ceil(N / num_chunks))


def summarize_logits(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return log(sum(exp(logits))) of each row, and the logit of its target, both (rows,) in fp32.

    Shapes: logits (rows, V), targets (rows,).
    """
    logits = logits.float()
    return logits.logsumexp(-1), logits.gather(-1, targets[:, None]).squeeze(-1)


def replace_by_gradient(logits: Tensor, log_sums: Tensor, targets: Tensor, row_weights: Tensor) -> None:
    """Write the gradient over the logits (rows, V): (softmax - one_hot) * row_weights.

    Shapes: log_sums from `summarize_logits`, targets and row_weights (rows,).
    """
    probabilities = (logits.float() - log_sums[:, None]).exp()
    is_target = torch.arange(logits.shape[-1], device=logits.device) == targets[:, None]
    logits.copy_((probabilities - is_target.float()) * row_weights[:, None])


@functools.cache
def _functions(compiled: bool) -> tuple[Callable[..., tuple[Tensor, Tensor]], Callable[..., None]]:
    if not compiled:
        return summarize_logits, replace_by_gradient
    return torch.compile(summarize_logits, dynamic=False), torch.compile(replace_by_gradient, dynamic=False)
