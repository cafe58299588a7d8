"""Next-token cross-entropy that never holds all logits at once.

The logits are the largest tensor of a language model: GPT-2 on 4 x 1024 tokens makes 206 million of them, 823 MB in
fp32 and as much again for their gradient. Here they are made, used and dropped a few hundred rows at a time, and their
gradient is taken on the spot, while they are still at hand. On a CPU the products with the head are made over slices of
the vocabulary, whose results are still in the cache when they are converted or added up.

Letters in shapes: N targets (B x T), C d_model, V vocabulary.
"""

import math

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

IGNORE = -1  # a target that does not count
CHUNK_LOGITS = {"cpu": 2**24, "cuda": 2**27}  # logits at a time: 64 MB in fp32, and twice 512 MB
SLICE = {"cpu": 2048}  # tokens of the vocabulary at a time; elsewhere all of it


def next_token_loss(hidden: Tensor, head_weight: Tensor, targets: Tensor, rows: int | None = None) -> Tensor:
    """Mean cross-entropy, in nats per target, of the logits hidden @ head_weight^T.

    Shapes: hidden (..., C), head_weight (V, C), targets (...) of token ids, `IGNORE` where a position does not count.
    `rows` is how many positions are taken at a time; by default as many as keep a chunk of logits small.
    Products are in the precision of `hidden`; softmax and sums are in fp32, and so is the scalar it returns,
    which can be differentiated once.
    """
    device = hidden.device.type
    if rows is None:
        chunks = math.ceil(targets.numel() * head_weight.shape[0] / CHUNK_LOGITS.get(device, 2**26))
        rows = max(1, math.ceil(targets.numel() / max(1, chunks)))
    gradients = torch.is_grad_enabled() and (hidden.requires_grad or head_weight.requires_grad)
    return _ChunkedCrossEntropy.apply(hidden.flatten(0, -2), head_weight, targets.flatten(), rows, gradients)


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden: Tensor, head_weight: Tensor, targets: Tensor, rows: int, wants_gradients: bool) -> Tensor:
        V, width = len(head_weight), SLICE.get(hidden.device.type, len(head_weight))
        slices = [slice(start, start + width) for start in range(0, V, width)]
        if wants_gradients:
            hidden_grad = torch.zeros_like(hidden, dtype=torch.float32)
            weight_grad = torch.zeros_like(head_weight)
        counted = targets != IGNORE
        count = counted.sum().clamp(min=1)
        total = hidden.new_zeros((), dtype=torch.float32)
        # One for all chunks. On a CPU softmax works in place (the tests watch over it); elsewhere nobody promises it.
        space = hidden.new_empty(min(rows, len(hidden)), V, dtype=torch.float32)
        results = space if space.device.type == "cpu" else torch.empty_like(space)

        for start in range(0, len(hidden), rows):
            chunk = slice(start, start + rows)
            h, target = hidden[chunk], targets[chunk].clamp(min=0)[:, None]
            logits = space[: len(h)]
            for part in slices:
                logits[:, part] = h @ head_weight[part].to(h.dtype).T
            of_target, highest = logits.gather(1, target), logits.amax(-1, keepdim=True)
            probabilities = torch.softmax(logits, -1, out=results[: len(h)])
            # The likeliest token's probability is 1 / sum(exp(logits - highest)).
            losses = highest - of_target - probabilities.amax(-1, keepdim=True).log()
            total += (losses.squeeze(1) * counted[chunk]).sum()
            if wants_gradients:
                # d loss / d logits = (softmax - one_hot) / count
                share = (counted[chunk] / count)[:, None]
                grad = probabilities.mul_(share).scatter_add_(1, target, -share)
                for part in slices:
                    g = grad[:, part].to(h.dtype)
                    hidden_grad[chunk].add_(g @ head_weight[part].to(h.dtype))
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
