"""Next-token cross-entropy that makes the logits a part at a time, and drops them again.

The logits are the largest tensor of a language model: GPT-2 on 4 x 1024 tokens makes 206 million of them, 823 MB in
fp32 and as much again for their gradient. Here they are made for some rows at a time, and their gradient is taken
on the spot, while they are still at hand. The vocabulary is cut into slices as well, and softmax put together from
their sums (Milakov and Gimelshein 2018, arXiv:1805.02867): on a CPU so that a slice stays in the cache from its product
to its sum, on a GPU so that all but a few tokens are multiplied in rows that are aligned.

Letters in shapes: N targets (B x T), C d_model, V vocabulary.
"""

import math

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

IGNORE = -1  # a target that does not count
CHUNK_BYTES = {"cpu": 2**26, "cuda": 2**28}  # of logits at a time, in the precision of the products
SLICE = 2048  # tokens of the vocabulary at a time on a CPU
ALIGNED = 64  # on a GPU the most that are a multiple of this, then the rest: its matrix units want aligned rows


def next_token_loss(hidden: Tensor, head_weight: Tensor, targets: Tensor, rows: int | None = None) -> Tensor:
    """Mean cross-entropy, in nats per target, of the logits hidden @ head_weight^T.

    Shapes: hidden (..., C), head_weight (V, C), targets (...) of token ids, `IGNORE` where a position does not count.
    `rows` is how many positions are taken at a time: by default as many as make at most `CHUNK_BYTES` of logits.
    Products are in the precision of `hidden`; softmax and sums are in fp32, and so is the scalar it returns, which can
    be differentiated once.
    `ValueError` for shapes that differ, too few rows and, on a CPU, token ids that are none.
    """
    if hidden.shape[:-1] != targets.shape:
        raise ValueError(f"hidden states {tuple(hidden.shape)} need targets {tuple(hidden.shape[:-1])}, one for each")
    if rows is not None and rows < 1:
        raise ValueError(f"rows={rows} is out of range: it must be at least 1")
    if targets.device.type == "cpu" and targets.numel():  # elsewhere looking would wait for the device
        least, most = (int(extreme) for extreme in targets.aminmax())
        if least < IGNORE or most >= len(head_weight):
            raise ValueError(f"targets from {least} to {most} are out of range: {IGNORE} to {len(head_weight) - 1}")
    gradients = torch.is_grad_enabled() and (hidden.requires_grad or head_weight.requires_grad)
    return _ChunkedCrossEntropy.apply(hidden.flatten(0, -2), head_weight, targets.flatten(), rows, gradients)


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, hidden: Tensor, head_weight: Tensor, targets: Tensor, rows: int | None, wants_gradients: bool
    ) -> Tensor:
        N, V, device = len(hidden), len(head_weight), hidden.device.type
        slices = _slices(V, device)
        if rows is None:
            chunks = math.ceil(N * V * hidden.itemsize / CHUNK_BYTES.get(device, 2**27))
            rows = max(1, math.ceil(N / max(1, chunks)))
        # Between the two passes over the slices the probabilities wait; but where they would take twice the memory on a
        # CPU, the logits. One memory for those of all chunks: many small ones leave holes of 0.2 GB behind.
        keeps_logits = device == "cpu" and len(slices) > 1 and hidden.itemsize < 4
        space = hidden.new_empty(min(rows, N) * V if keeps_logits and wants_gradients else 0)
        if wants_gradients:
            hidden_grad = torch.zeros_like(hidden, dtype=torch.float32)
            weight_grad = torch.empty_like(head_weight, memory_format=torch.contiguous_format)

        counted = targets != IGNORE
        count = counted.sum().clamp(min=1)
        total = hidden.new_zeros((), dtype=torch.float32)
        for start in range(0, max(1, N), rows):
            chunk = slice(start, start + rows)
            h, target = hidden[chunk], targets[chunk].clamp(min=0)[:, None]
            of_target, sums, waiting = torch.zeros_like(total), [], []
            for part in slices:
                place = space[len(h) * part.start : len(h) * part.stop].view(len(h), -1) if len(space) else None
                made = torch.mm(h, head_weight[part].to(h.dtype).T, out=place)
                logits = made.float()
                column, inside = _within(part, target)
                of_target = of_target + logits.gather(1, column).where(inside, 0)
                highest, probabilities = logits.amax(-1), _softmax(logits)
                # The likeliest token's probability is 1 / sum(exp(logits - highest)).
                sums.append(highest - probabilities.amax(-1).log())
                if wants_gradients:
                    waiting.append((part, column, inside, made if keeps_logits else probabilities))
            of_slices = torch.stack(sums)  # (slices, rows): the logarithm of each slice's sum of exp(logits)
            of_all = of_slices.logsumexp(0)
            total += ((of_all - of_target.squeeze(1)) * counted[chunk]).sum()
            del made, logits  # of a single slice as large as all that waits
            if not wants_gradients:
                continue

            share = counted[chunk] / count  # of each row in the mean
            scales = (of_slices - of_all).exp() * share
            for (part, column, inside, kept), scale in zip(waiting, scales, strict=True):
                # d loss / d logits = (softmax - one_hot) / count
                probabilities = _softmax(kept.float()) if keeps_logits else kept
                grad = probabilities.mul_(scale[:, None]).scatter_add_(1, column, -share[:, None] * inside)
                g = grad.to(h.dtype)
                hidden_grad[chunk].add_(g @ head_weight[part].to(h.dtype))
                if start == 0:
                    weight_grad[part] = g.T @ h
                else:
                    weight_grad[part].add_(g.T @ h)  # `+=` would copy the slice onto itself as well

        ctx.gradients = (hidden_grad.to(hidden.dtype), weight_grad) if wants_gradients else None
        return total / count

    @staticmethod
    @once_differentiable
    def backward(ctx, loss_grad: Tensor):
        if ctx.gradients is None:
            raise RuntimeError("the gradients of this loss went to an earlier backward pass: compute the loss again")
        # Given away, so that the gradient of a tied embedding can be added to that of the head where it stands.
        (hidden_grad, weight_grad), ctx.gradients = ctx.gradients, None
        if loss_grad.device.type != "cpu" or loss_grad != 1:  # on a GPU looking would cost more than multiplying
            hidden_grad, weight_grad = hidden_grad.mul_(loss_grad), weight_grad.mul_(loss_grad)
        return hidden_grad, weight_grad, None, None, None


def _slices(V: int, device: str) -> list[slice]:
    width = SLICE if device == "cpu" else max(V - V % ALIGNED, ALIGNED)
    return [slice(start, min(start + width, V)) for start in range(0, V, width)]


def _softmax(x: Tensor) -> Tensor:
    """On a CPU in place, which PyTorch does not promise: the tests watch over it."""
    return torch.softmax(x, -1, out=x if x.device.type == "cpu" else None)


def _within(part: slice, target: Tensor) -> tuple[Tensor, Tensor]:
    """The column of each target in a slice of the vocabulary, and whether it is in there at all."""
    column, width = target - part.start, part.stop - part.start
    return column.clamp(0, width - 1), (column >= 0) & (column < width)
