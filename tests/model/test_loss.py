"""The plain loss equals numbers by hand and `F.cross_entropy`. test_chunked_loss.py compares its fast twin."""

import math

import pytest
import torch
import torch.nn.functional as F

from gpt.model.fast.chunked_loss import chunked_next_token_loss
from gpt.model.loss import IGNORE_INDEX, next_token_loss

N, C, V = 13, 7, 23


def test_hand_computed():
    """Two tokens whose probabilities are 1/4, 3/4 and 1/2, 1/2."""
    hidden = torch.tensor([[1.0, 0.0], [0.0, 1.0]], requires_grad=True)
    weight = torch.tensor([[0.0, 2.0], [math.log(3), 2.0]], requires_grad=True)
    loss = next_token_loss(hidden, weight, torch.tensor([1, 0]))
    loss.backward()
    assert loss.item() == pytest.approx((math.log(4 / 3) + math.log(2)) / 2)
    # (softmax - one_hot) / 2 is [[1/8, -1/8], [-1/4, 1/4]]
    torch.testing.assert_close(hidden.grad, torch.tensor([[-math.log(3) / 8, 0.0], [math.log(3) / 4, 0.0]]))
    torch.testing.assert_close(weight.grad, torch.tensor([[1 / 8, -1 / 4], [-1 / 8, 1 / 4]]))


@pytest.mark.parametrize("shape", [(N,), (2, 3), (2, 3, 5)])
@pytest.mark.parametrize("ignored", [slice(0), slice(None, None, 3)], ids=["none", "some"])
def test_equals_cross_entropy(shape, ignored):
    """The loss is a mean over the targets that count."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(*shape, C, generator=generator)
    weight = torch.randn(V, C, generator=generator)
    targets = torch.randint(V, shape, generator=generator)
    targets.view(-1)[ignored] = IGNORE_INDEX
    logits = torch.einsum("...c,vc->...v", hidden, weight)
    expected = (
        -logits.log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0][targets != IGNORE_INDEX].mean()
    )
    torch.testing.assert_close(next_token_loss(hidden, weight, targets), expected)


def test_bfloat16():
    """Products have the precision of the hidden states. Softmax and the result are in fp32."""
    generator = torch.Generator().manual_seed(5)
    hidden, weight = torch.randn(N, C, generator=generator).bfloat16(), torch.randn(V, C, generator=generator)
    targets = torch.randint(V, (N,), generator=generator)
    expected = F.cross_entropy((hidden @ weight.bfloat16().T).float(), targets)
    loss = next_token_loss(hidden, weight, targets)
    assert loss.dtype == torch.float32
    assert torch.equal(loss, expected)


@pytest.mark.parametrize("n", [0, N])
def test_the_loss_of_no_targets_is_zero(n):
    """Its gradients are zero too, not nan."""
    hidden, weight = torch.randn(n, C, requires_grad=True), torch.randn(V, C, requires_grad=True)
    loss = next_token_loss(hidden, weight, torch.full((n,), IGNORE_INDEX))
    loss.backward()
    assert loss.item() == 0.0
    assert not hidden.grad.any() and not weight.grad.any()


@pytest.mark.parametrize("loss", [next_token_loss, chunked_next_token_loss])
@pytest.mark.parametrize(
    ("shape", "target", "message"),
    [
        ((4,), V, "targets from 0 to 23 are out of range: -1 to 22"),
        ((4,), -2, "targets from -2 to 0 are out of range: -1 to 22"),
        ((5,), 0, "need targets"),
        ((2, 2), 0, "need targets"),
    ],
)
def test_invalid_targets_are_refused(loss, shape, target, message):
    """The error names invalid token ids, and a wrong shape."""
    targets = torch.zeros(shape, dtype=torch.long)
    targets[-1] = target
    with pytest.raises(ValueError, match=message):
        loss(torch.randn(4, C), torch.randn(V, C), targets)
