"""Next-token cross-entropy without ever holding all logits: the fast twin of `gpt.model.loss.next_token_loss`.

The logits are the largest tensor of a language model. GPT-2 computes 206 million of them on 4 x 1,024 tokens: 823 MB in
fp32, and their gradient takes as much again. This loss computes a few rows at a time, and their gradient with them.

On a CPU it also cuts the vocabulary into slices, and combines the softmax from their sums (Milakov and Gimelshein
2018, arXiv:1805.02867). A slice then stays in the cache until it is summed. On a GPU, gpu_loss.py computes the loss.

Letters in shapes: N targets (B x T), C d_model, V vocabulary. tests/model/fast/test_chunked_loss.py compares the twins.
"""

import math

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gpt.model.fast.gpu_loss import loss_on_gpu
from gpt.model.loss import IGNORE_INDEX, require_targets

CPU_CHUNK_BYTES = 2**26  # of logits, in the precision of the products
VOCAB_SLICE = 2048  # tokens of the vocabulary


def chunked_next_token_loss(
    hidden: Tensor, head_weight: Tensor, targets: Tensor, scale: Tensor | float = 1.0, compiled: bool = False
) -> Tensor:
    """Return `next_token_loss`, computed in chunks of rows. The result can be differentiated once.

    Args:
        hidden: Hidden states (..., C).
        head_weight: The head's weight (V, C).
        targets: Token ids (...), or `IGNORE_INDEX`.
        scale: A power of two by which the caller multiplies the loss before differentiating. The gradients of the
            logits are computed at this scale: fp16 would round them to zero.
        compiled: On a GPU, compile what is not a matrix product.
    """
    require_targets(hidden, head_weight, targets)
    wants_gradients = torch.is_grad_enabled() and (hidden.requires_grad or head_weight.requires_grad)
    rows = hidden.flatten(0, -2)
    return _ChunkedCrossEntropy.apply(rows, head_weight, targets.flatten(), scale, wants_gradients, compiled)


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        hidden: Tensor,
        head_weight: Tensor,
        targets: Tensor,
        scale: Tensor | float,
        wants_gradients: bool,
        compiled: bool,
    ) -> Tensor:
        ctx.scale = scale
        if hidden.device.type == "cpu":
            loss, ctx.gradients = _loss_on_cpu(hidden, head_weight, targets, scale, wants_gradients)
        else:
            loss, ctx.gradients = loss_on_gpu(hidden, head_weight, targets, scale, wants_gradients, compiled)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx, loss_grad: Tensor):
        if ctx.gradients is None:
            raise RuntimeError("the gradients of this loss went to an earlier backward pass: compute the loss again")
        hidden_grad, weight_grad = ctx.gradients
        ctx.gradients = None  # the caller owns them: a tied embedding adds its gradient to the head's in place
        loss_grad = loss_grad / ctx.scale
        if loss_grad.device.type != "cpu" or loss_grad != 1:  # a GPU multiplies faster than it compares
            hidden_grad.mul_(loss_grad)
            weight_grad.mul_(loss_grad)
        return hidden_grad, weight_grad, None, None, None, None


def _loss_on_cpu(
    hidden: Tensor, head_weight: Tensor, targets: Tensor, scale: Tensor | float, wants_gradients: bool
) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """Return the mean loss, and its gradients for `hidden` (N, C) and `head_weight` (V, C) if they are wanted.

    Without gradients a chunk holds one slice of the vocabulary.
    """
    N, V = len(hidden), len(head_weight)
    slices = [slice(start, min(start + VOCAB_SLICE, V)) for start in range(0, V, VOCAB_SLICE)]
    chunk_width = V if wants_gradients else slices[0].stop
    num_chunks = math.ceil(N * chunk_width * hidden.itemsize / CPU_CHUNK_BYTES)
    rows = max(1, math.ceil(N / max(1, num_chunks)))
    # The gradients need a second pass over the slices. Until then the probabilities are kept, or the logits if they
    # take half the memory. All chunks share one buffer: many small ones fragment 0.2 GB of memory.
    keeps_logits = len(slices) > 1 and hidden.itemsize < 4
    buffer = hidden.new_empty(min(rows, N) * V if keeps_logits and wants_gradients else 0)
    if wants_gradients:
        hidden_grad = torch.zeros_like(hidden, dtype=torch.float32)
        weight_grad = torch.empty_like(head_weight, memory_format=torch.contiguous_format)

    counts = targets != IGNORE_INDEX
    num_counted = counts.sum().clamp(min=1)
    total = hidden.new_zeros((), dtype=torch.float32)
    for start in range(0, max(1, N), rows):
        chunk = slice(start, start + rows)
        h = hidden[chunk]  # (rows, C)
        target = targets[chunk].clamp(min=0)[:, None]  # (rows, 1)
        target_logits = torch.zeros_like(total)
        slice_sums: list[Tensor] = []
        stored: list[tuple] = []  # for the second pass, of each slice
        for part in slices:
            out = buffer[len(h) * part.start : len(h) * part.stop].view(len(h), -1) if len(buffer) else None
            product = torch.mm(h, head_weight[part].to(h.dtype).T, out=out)  # (rows, width of the slice)
            logits = product.float()
            width = part.stop - part.start
            column = target - part.start
            is_inside = (column >= 0) & (column < width)
            column = column.clamp(0, width - 1)
            target_logits = target_logits + logits.gather(1, column).where(is_inside, 0)
            max_logits = logits.amax(-1)
            probabilities = _softmax(logits)  # in place
            # The most likely token's probability is 1 / sum(exp(logits - max_logits)).
            slice_sums.append(max_logits - probabilities.amax(-1).log())
            if wants_gradients:
                stored.append((part, column, is_inside, product if keeps_logits else probabilities))
        log_sums = torch.stack(slice_sums)  # (slices, rows): log(sum(exp(logits))) of each slice
        log_sum = log_sums.logsumexp(0)  # (rows,)
        total += ((log_sum - target_logits.squeeze(1)) * counts[chunk]).sum()
        del product, logits  # with a single slice, each is as large as everything that is kept
        if not wants_gradients:
            continue

        row_weights = counts[chunk] / num_counted * scale  # of each row in the mean
        factors = (log_sums - log_sum).exp() * row_weights
        for (part, column, is_inside, tensor), factor in zip(stored, factors, strict=True):
            # d loss / d logits = (softmax - one_hot) / count, times the scale
            probabilities = _softmax(tensor.float()) if keeps_logits else tensor
            grad = probabilities.mul_(factor[:, None]).scatter_add_(1, column, -row_weights[:, None] * is_inside)
            g = grad.to(h.dtype)
            hidden_grad[chunk].add_(g @ head_weight[part].to(h.dtype))
            if start == 0:
                weight_grad[part] = g.T @ h
            else:
                weight_grad[part].add_(g.T @ h)  # `+=` would also copy the slice onto itself

    gradients = (hidden_grad.to(hidden.dtype), weight_grad) if wants_gradients else None
    return total / num_counted, gradients


def _softmax(x: Tensor) -> Tensor:
    """Return the softmax, in place. PyTorch does not document that this works, so the tests check it."""
    return torch.softmax(x, -1, out=x)
