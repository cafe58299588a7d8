"""Next-token cross-entropy without ever holding all logits: the fast twin of `gpt.model.loss.next_token_loss`.

The logits are the largest tensor of a language model: GPT-2 makes 206 million of them on 4 x 1,024 tokens, 823 MB in
fp32, and their gradient takes as much again. This loss makes them a few rows at a time and takes their gradient while
they are at hand. It also cuts the vocabulary into slices and combines the softmax from their sums (Milakov and
Gimelshein 2018, arXiv:1805.02867): on a CPU a slice then stays in the cache from its product to its sum; on a GPU all
but a few tokens are multiplied in aligned rows.

Letters in shapes: N targets (B x T), C d_model, V vocabulary. tests/model/fast/test_chunked_loss.py holds the
twins equal.
"""

import math

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gpt.model.loss import IGNORE_INDEX, require_targets

LOGITS_CHUNK_BYTES = {"cpu": 2**26, "cuda": 2**28}  # of logits at a time, in the precision of the products
VOCAB_SLICE = 2048  # tokens of the vocabulary at a time on a CPU
ALIGNED = 64  # a GPU's matrix units want aligned rows: it takes the largest multiple of this first, then the rest


def chunked_next_token_loss(
    hidden: Tensor, head_weight: Tensor, targets: Tensor, scale: Tensor | float = 1.0
) -> Tensor:
    """`next_token_loss`, computed as many positions at a time as make `LOGITS_CHUNK_BYTES` of logits.

    Without gradients those are the logits of one slice of the vocabulary, so that each slice is converted only once.
    The result can be differentiated once. `scale`, a power of two, is what the caller will multiply it by before that:
    the gradients of the logits, which fp16 would round to zero, are computed at that scale.
    """
    require_targets(hidden, head_weight, targets)
    gradients = torch.is_grad_enabled() and (hidden.requires_grad or head_weight.requires_grad)
    return _ChunkedCrossEntropy.apply(hidden.flatten(0, -2), head_weight, targets.flatten(), scale, gradients)


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, hidden: Tensor, head_weight: Tensor, targets: Tensor, scale: Tensor | float, wants_gradients: bool
    ) -> Tensor:
        N, V, device = len(hidden), len(head_weight), hidden.device.type
        slices = vocab_slices(V, device)
        widest = V if wants_gradients else slices[0].stop
        chunks = math.ceil(N * widest * hidden.itemsize / LOGITS_CHUNK_BYTES.get(device, 2**27))
        rows = max(1, math.ceil(N / max(1, chunks)))
        # The gradients need a second pass over the slices. Until then the probabilities are kept, or on a CPU the
        # logits if those take half the memory. All chunks share one buffer: many small ones fragment 0.2 GB of memory.
        keeps_logits = device == "cpu" and len(slices) > 1 and hidden.itemsize < 4
        space = hidden.new_empty(min(rows, N) * V if keeps_logits and wants_gradients else 0)
        if wants_gradients:
            hidden_grad = torch.zeros_like(hidden, dtype=torch.float32)
            weight_grad = torch.empty_like(head_weight, memory_format=torch.contiguous_format)

        counted = targets != IGNORE_INDEX
        count = counted.sum().clamp(min=1)
        total = hidden.new_zeros((), dtype=torch.float32)
        for start in range(0, max(1, N), rows):
            chunk = slice(start, start + rows)
            h, target = hidden[chunk], targets[chunk].clamp(min=0)[:, None]  # (rows, C), (rows, 1)
            of_target, sums, waiting = torch.zeros_like(total), [], []
            for part in slices:
                place = space[len(h) * part.start : len(h) * part.stop].view(len(h), -1) if len(space) else None
                made = torch.mm(h, head_weight[part].to(h.dtype).T, out=place)  # (rows, width of the slice)
                logits = made.float()
                column, width = target - part.start, part.stop - part.start
                inside, column = (column >= 0) & (column < width), column.clamp(0, width - 1)
                of_target = of_target + logits.gather(1, column).where(inside, 0)
                highest, probabilities = logits.amax(-1), _softmax(logits)
                # The likeliest token's probability is 1 / sum(exp(logits - highest)).
                sums.append(highest - probabilities.amax(-1).log())
                if wants_gradients:
                    waiting.append((part, column, inside, made if keeps_logits else probabilities))
            of_slices = torch.stack(sums)  # (slices, rows): log(sum(exp(logits))) of each slice
            of_all = of_slices.logsumexp(0)  # (rows,)
            total += ((of_all - of_target.squeeze(1)) * counted[chunk]).sum()
            del made, logits  # with a single slice, each is as large as all that is kept
            if not wants_gradients:
                continue

            share = counted[chunk] / count * scale  # of each row in the mean
            factors = (of_slices - of_all).exp() * share
            for (part, column, inside, kept), factor in zip(waiting, factors, strict=True):
                # d loss / d logits = (softmax - one_hot) / count, here times the scale
                probabilities = _softmax(kept.float()) if keeps_logits else kept
                grad = probabilities.mul_(factor[:, None]).scatter_add_(1, column, -share[:, None] * inside)
                g = grad.to(h.dtype)
                hidden_grad[chunk].add_(g @ head_weight[part].to(h.dtype))
                if start == 0:
                    weight_grad[part] = g.T @ h
                else:
                    weight_grad[part].add_(g.T @ h)  # `+=` would also copy the slice onto itself

        ctx.scale = scale
        ctx.gradients = (hidden_grad.to(hidden.dtype), weight_grad) if wants_gradients else None
        return total / count

    @staticmethod
    @once_differentiable
    def backward(ctx, loss_grad: Tensor):
        if ctx.gradients is None:
            raise RuntimeError("the gradients of this loss went to an earlier backward pass: compute the loss again")
        # Given away, so that a tied embedding can add its gradient to the head's in place.
        (hidden_grad, weight_grad), ctx.gradients = ctx.gradients, None
        loss_grad = loss_grad / ctx.scale
        if loss_grad.device.type != "cpu" or loss_grad != 1:  # on a GPU, looking costs more than multiplying
            hidden_grad, weight_grad = hidden_grad.mul_(loss_grad), weight_grad.mul_(loss_grad)
        return hidden_grad, weight_grad, None, None, None


def vocab_slices(V: int, device: str) -> list[slice]:
    """The slices of a vocabulary whose logits are made one after another."""
    width = VOCAB_SLICE if device == "cpu" else max(V - V % ALIGNED, ALIGNED)
    return [slice(start, min(start + width, V)) for start in range(0, V, width)]


def _softmax(x: Tensor) -> Tensor:
    """Softmax, in place on a CPU: PyTorch does not promise that this works, so the tests check it."""
    return torch.softmax(x, -1, out=x if x.device.type == "cpu" else None)
