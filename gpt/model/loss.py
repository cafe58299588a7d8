"""Next-token cross-entropy, written plainly. Training uses its fast twin in gpt/model/fast/chunked_loss.py.

Letters in shapes: N targets (B x T), C d_model, V vocabulary.
"""

import torch.nn.functional as F
from torch import Tensor

IGNORE_INDEX = -1  # a target that does not count


def next_token_loss(hidden: Tensor, head_weight: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy, in nats per target, of the logits hidden @ head_weight^T.

    Shapes: hidden (..., C), head_weight (V, C), targets (...) of token ids, `IGNORE_INDEX` where a position does not
    count. Products use the precision of `hidden`. Softmax, sums and the returned scalar are fp32. The loss is zero if
    no position counts.
    `ValueError` if the shapes differ or, on a CPU, a token id is invalid.
    """
    require_targets(hidden, head_weight, targets)
    logits = F.linear(hidden.flatten(0, -2), head_weight.to(hidden.dtype)).float()  # (N, V)
    targets = targets.flatten()  # (N,)
    count = (targets != IGNORE_INDEX).sum().clamp(min=1)
    return F.cross_entropy(logits, targets, ignore_index=IGNORE_INDEX, reduction="sum") / count


def require_targets(hidden: Tensor, head_weight: Tensor, targets: Tensor) -> None:
    """Raise `ValueError` unless each hidden state has one target, and each target is a token id or `IGNORE_INDEX`."""
    if hidden.shape[:-1] != targets.shape:
        raise ValueError(f"hidden states {tuple(hidden.shape)} need targets {tuple(hidden.shape[:-1])}, one for each")
    if targets.device.type == "cpu" and targets.numel():  # other devices would have to finish their work first
        low, high = (int(extreme) for extreme in targets.aminmax())
        if low < IGNORE_INDEX or high >= len(head_weight):
            raise ValueError(f"targets from {low} to {high} are out of range: {IGNORE_INDEX} to {len(head_weight) - 1}")
