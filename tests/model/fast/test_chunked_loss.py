"""The chunked loss equals its plain twin and `F.cross_entropy`, in less memory."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gpt.model.fast import chunked_loss as module
from gpt.model.fast.chunked_loss import chunked_next_token_loss
from gpt.model.loss import IGNORE_INDEX, next_token_loss

N, C, V = 13, 7, 23


class Recorder(TorchDispatchMode):
    """Records the size of the largest tensor that any operation returns, and the type of each matrix product."""

    def __init__(self):
        super().__init__()
        self.largest, self.products = 0, []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        if operation.overloadpacket is torch.ops.aten.mm:
            self.products.append(args[0].dtype)
        for value in result if isinstance(result, tuple | list) else [result]:
            if isinstance(value, Tensor):
                self.largest = max(self.largest, value.numel())
        return result


def make_problem(ignored: slice = slice(0), n: int = N, v: int = V) -> tuple[Tensor, Tensor, Tensor]:
    """Return seeded hidden (n, C) and head weight (v, C), which need gradients, and targets (n), some ignored."""
    generator = torch.Generator().manual_seed(n)
    hidden = torch.randn(n, C, generator=generator).requires_grad_()
    weight = torch.randn(v, C, generator=generator).requires_grad_()
    targets = torch.randint(v, (n,), generator=generator)
    targets[ignored] = IGNORE_INDEX
    return hidden, weight, targets


def reference(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Return the same loss from all logits at once, independent of both twins."""
    return F.cross_entropy((hidden @ weight.T).flatten(0, -2), targets.flatten(), ignore_index=IGNORE_INDEX)


@pytest.fixture
def set_rows(monkeypatch) -> Callable[..., None]:
    """Let the loss compute this many rows of logits (v) at a time."""
    return lambda rows, v=V, itemsize=4: monkeypatch.setattr(module, "CPU_CHUNK_BYTES", rows * v * itemsize)


def relative_error(value: Tensor, expected: Tensor) -> float:
    return ((value.float() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "ignored",
    [slice(None, None, 3), slice(5), slice(1, None), slice(None)],
    ids=["some", "first-chunk", "all-but-one", "all"],
)
@pytest.mark.parametrize(("rows", "width"), [(0.1, 2048), (5, 7), (170, 7)])  # 0.1: less memory than one row needs
def test_equals_its_plain_twin(dtype, ignored, rows, width, monkeypatch, set_rows):
    """Value and gradients equal `next_token_loss` for any chunks, slices and ignored targets."""
    monkeypatch.setattr(module, "VOCAB_SLICE", width)
    set_rows(rows, itemsize=dtype.itemsize)
    results = []
    for function in (chunked_next_token_loss, next_token_loss):
        hidden, weight, targets = make_problem(ignored, n=101)
        hidden = hidden.detach().to(dtype).requires_grad_()
        loss = function(hidden, weight, targets)
        results.append((loss.detach(), *torch.autograd.grad(loss, [hidden, weight])))
    assert [tensor.dtype for tensor in results[0]] == [torch.float32, dtype, torch.float32]
    assert [tensor.dtype for tensor in results[1]] == [torch.float32, dtype, torch.float32]
    torch.testing.assert_close(results[0][0], results[1][0], atol=1e-6, rtol=2e-4 if dtype == torch.bfloat16 else 1e-6)
    for fast, plain in zip(results[0][1:], results[1][1:], strict=True):
        if dtype == torch.float32 or not plain.any():
            torch.testing.assert_close(fast, plain, atol=1e-6, rtol=1e-5)
        else:
            assert relative_error(fast, plain.float()) < 0.005


def test_gradients_are_given_once():
    """The caller may change them in place, so a second pass over the same loss is refused."""
    hidden, weight, targets = make_problem()
    loss = chunked_next_token_loss(hidden, weight, targets)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="went to an earlier backward pass"):
        loss.backward()


@pytest.mark.parametrize("size", [1, 1000])
def test_upstream_gradient(size, set_rows):
    """Operations after the loss scale the gradients, and operations before it receive them.

    Logits of thousands neither overflow nor lose the loss.
    """
    set_rows(5)
    hidden, weight, targets = make_problem()
    mixer = (size * torch.randn(C, C, generator=torch.Generator().manual_seed(3))).requires_grad_()
    parameters = [hidden, weight, mixer]
    loss = chunked_next_token_loss(hidden @ mixer, weight, targets)
    expected_loss = reference(hidden @ mixer, weight, targets)
    assert expected_loss > size
    torch.testing.assert_close(loss, expected_loss)
    gradients = torch.autograd.grad(3 * loss, parameters)
    expected = torch.autograd.grad(3 * expected_loss, parameters)
    torch.testing.assert_close(gradients, expected, atol=1e-5 * size, rtol=1e-5)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_gradients(context, set_rows):
    """Without gradients the value is the same, and nothing is kept for a backward pass."""
    set_rows(5)
    hidden, weight, targets = make_problem(slice(5))
    with context(), Recorder() as recorder:
        loss = chunked_next_token_loss(hidden, weight, targets)
    assert not loss.requires_grad
    assert len(recorder.products) == 3  # one per chunk
    assert torch.equal(loss, chunked_next_token_loss(hidden, weight, targets).detach())


@pytest.mark.parametrize("frozen", [0, 1])
def test_frozen_input(frozen, set_rows):
    """Only tensors that require a gradient get one."""
    set_rows(5)
    problem = make_problem()
    problem[frozen].requires_grad_(False)
    chunked_next_token_loss(*problem).backward()
    assert problem[frozen].grad is None
    (expected,) = torch.autograd.grad(reference(*problem), [problem[1 - frozen]])
    torch.testing.assert_close(problem[1 - frozen].grad, expected, atol=1e-6, rtol=1e-5)


def test_second_derivative_is_refused():
    """Gradients are computed in the forward pass, so they cannot be differentiated. That is an error, not zero."""
    hidden, weight, targets = make_problem()
    (gradient,) = torch.autograd.grad(
        chunked_next_token_loss(hidden, weight, targets).square(), hidden, create_graph=True
    )
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 2048), (torch.bfloat16, 128)])
def test_never_holds_all_logits(dtype, width, monkeypatch, set_rows):
    """No tensor of forward and backward is larger than a chunk of logits, also with slices."""
    set_rows(11, 1009, itemsize=dtype.itemsize)
    monkeypatch.setattr(module, "VOCAB_SLICE", width)
    hidden, weight, targets = make_problem(n=203, v=1009)
    with Recorder() as recorder:
        chunked_next_token_loss(hidden.to(dtype), weight, targets).backward()
    assert recorder.largest == 11 * 1009
    assert set(recorder.products) == {dtype}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scored_slice_by_slice(dtype, monkeypatch):
    """Without gradients a chunk holds the logits of one slice."""
    monkeypatch.setattr(module, "VOCAB_SLICE", 128)
    monkeypatch.setattr(module, "CPU_CHUNK_BYTES", dtype.itemsize * 53 * 128)
    hidden, weight, targets = make_problem(slice(5), n=53, v=1009)
    with torch.no_grad(), Recorder() as recorder:
        loss = chunked_next_token_loss(hidden.to(dtype), weight, targets)
    assert (len(recorder.products), recorder.largest) == (8, 53 * 128)
    learning = chunked_next_token_loss(hidden.to(dtype), weight, targets)
    assert loss.item() == pytest.approx(learning.item(), rel=1e-6)


@pytest.mark.slow
def test_scale():
    """In fp16 the gradients of many logits need the scale of the loss: its smallest number is 6e-8."""
    hidden, weight, targets = make_problem(n=4001, v=5003)
    weight = (weight * 0.02).detach().requires_grad_()  # all tokens nearly as likely, as at the start of a training
    half = hidden.detach().half().requires_grad_()
    expected = torch.autograd.grad(reference(half.float(), weight, targets), (half, weight))
    errors = {}
    for scale in (1.0, 65536.0, torch.tensor(65536.0)):
        loss = chunked_next_token_loss(half, weight, targets, scale=scale)
        gradients = torch.autograd.grad(loss * 65536 / 3, (half, weight))  # a third, as if gradients accumulated
        pairs = zip(gradients, expected, strict=True)
        errors[scale] = [relative_error(gradient.float() * 3 / 65536, expected.float()) for gradient, expected in pairs]
    unscaled, scaled, as_tensor = errors.values()
    assert as_tensor == scaled
    assert max(scaled) < 0.006 < 0.012 < min(unscaled)

    plain, with_scale = (
        torch.autograd.grad(chunked_next_token_loss(hidden, weight, targets, scale=scale) * factor, (hidden, weight))
        for scale, factor in ((1.0, 1.0), (64.0, 64.0))
    )
    for gradient, expected in zip(with_scale, plain, strict=True):
        assert torch.equal(gradient / 64, expected)
