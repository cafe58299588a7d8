"""The loss on a GPU, computed on a CPU: it equals its plain twin, and reads and writes little memory."""

import math
import shutil
from collections import Counter
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gpt.model.fast import gpu_loss
from gpt.model.fast.chunked_loss import chunked_next_token_loss
from gpt.model.fast.gpu_loss import loss_on_gpu, replace_by_gradient, rows_per_chunk, summarize_logits
from gpt.model.loss import IGNORE_INDEX, next_token_loss

N, C, V = 101, 7, 131


def make_problem(dtype: torch.dtype, ignored: slice) -> tuple[Tensor, Tensor, Tensor]:
    """Return seeded hidden states (N, C), a head weight (V, C) and targets (N,)."""
    generator = torch.Generator().manual_seed(N)
    hidden = torch.randn(N, C, generator=generator).to(dtype)
    weight = 3 * torch.randn(V, C, generator=generator)
    targets = torch.randint(V, (N,), generator=generator)
    targets[ignored] = IGNORE_INDEX
    return hidden.requires_grad_(), weight.requires_grad_(), targets


def compile_with(monkeypatch, backend: str) -> None:
    """Let the two functions be compiled on a CPU."""
    compiled = [torch.compile(f, backend=backend, dynamic=False) for f in (summarize_logits, replace_by_gradient)]
    monkeypatch.setattr(gpu_loss, "_functions", lambda _: compiled)


def assert_equals_its_plain_twin(dtype: torch.dtype, ignored: slice) -> None:
    hidden, weight, targets = make_problem(dtype, ignored)
    expected_loss = next_token_loss(hidden, weight, targets)
    expected = torch.autograd.grad(expected_loss, (hidden, weight))
    with torch.no_grad():
        loss, gradients = loss_on_gpu(hidden, weight, targets, 1.0, wants_gradients=True)
        scored, nothing = loss_on_gpu(hidden, weight, targets, 1.0, wants_gradients=False)
    assert nothing is None
    assert torch.equal(loss, scored)
    torch.testing.assert_close(loss, expected_loss, atol=1e-6, rtol=1e-5)
    assert gradients is not None
    for gradient, plain in zip(gradients, expected, strict=True):
        assert gradient.dtype == plain.dtype
        error = (gradient.float() - plain.float()).norm()
        assert error <= (1e-6 if dtype == torch.float32 else 0.005) * plain.float().norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ignored", [slice(None, None, 3), slice(40), slice(1, None), slice(None)])
@pytest.mark.parametrize("chunk_rows", [0.1, 17, 60, 101])
def test_equals_its_plain_twin(dtype, ignored, chunk_rows, monkeypatch):
    """Value and gradients equal `next_token_loss`, with a padded vocabulary, for any chunks and ignored targets."""
    monkeypatch.setattr(gpu_loss, "EAGER_CHUNK_BYTES", chunk_rows * 192 * dtype.itemsize)
    assert_equals_its_plain_twin(dtype, ignored)


@pytest.mark.parametrize(
    "backend",
    [
        "aot_eager",
        pytest.param(
            "inductor",
            marks=[
                pytest.mark.slow,
                pytest.mark.skipif(not shutil.which("g++"), reason="SKIPPED LOUDLY: Inductor needs g++ on a CPU"),
            ],
        ),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler's own imports
def test_compiled(backend, monkeypatch):
    """Compiled, the functions give the same. The gradient replaces the logits of the chunk also there."""
    compile_with(monkeypatch, backend)
    monkeypatch.setattr(gpu_loss, "EAGER_CHUNK_BYTES", 101 * 192)  # four chunks of 26, the last of 23
    for dtype in (torch.float32, torch.bfloat16):
        assert_equals_its_plain_twin(dtype, slice(None, None, 3))
    torch.compiler.reset()


def test_scale():
    """The gradients are computed at a scale, so that those of the logits are not too small for fp16."""
    hidden, weight, targets = make_problem(torch.float32, slice(0))
    plain, scaled = (
        loss_on_gpu(hidden.detach(), weight.detach(), targets, scale, wants_gradients=True)[1]
        for scale in (1.0, torch.tensor(64.0))
    )
    assert plain is not None and scaled is not None
    for gradient, expected in zip(scaled, plain, strict=True):
        assert torch.equal(gradient / 64, expected)


def test_rows_per_chunk():
    """Chunks are equal where a number of rows allows that, so that one graph is compiled."""
    row_bytes = 50304 * 2
    assert rows_per_chunk(16384, row_bytes, compiled=True) == 4096
    assert rows_per_chunk(3000, row_bytes, compiled=True) == 3000
    assert rows_per_chunk(16 * 1000, row_bytes, compiled=True) == 4000
    assert rows_per_chunk(16411, row_bytes, compiled=True) == math.ceil(16411 / 4)  # a prime number
    assert rows_per_chunk(0, row_bytes, compiled=False) == 1


class Traffic(TorchDispatchMode):
    """Counts the bytes that operations read and write. A function of `fuse` counts as one operation."""

    def __init__(self):
        super().__init__()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        if not operation.is_view and operation not in (
            torch.ops.aten.empty_like.default,
            torch.ops.aten.detach.default,
        ):
            is_product = operation.overloadpacket is torch.ops.aten.mm
            self.bytes["products" if is_product else "rest"] += count_bytes((args, kwargs, result))
        return result

    def fuse(self, function: Callable) -> Callable:
        """Return a function that runs as one operation, which reads its arguments and writes its result."""
        return partial(self._run_fused, function)

    def _run_fused(self, function: Callable, logits: Tensor, *others: Tensor) -> object:
        with torch.utils._python_dispatch._disable_current_modes():
            result = function(logits, *others)
        written = logits if result is None else result  # in place
        self.bytes["rest"] += count_bytes((logits, others, written))
        return result


def count_bytes(tree: object) -> int:
    return sum(leaf.numel() * leaf.itemsize for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))


def test_traffic(monkeypatch):
    """The loss of 16,384 tokens with GPT-2's vocabulary moves at most 10 GB, besides the matrix products.

    Version 0.5 moved 36 GB: it kept the softmax in fp32, and cast the head's weight for every chunk.
    """
    hidden = torch.empty(16384, 768, dtype=torch.bfloat16, device="meta", requires_grad=True)
    weight = torch.empty(50257, 768, device="meta", requires_grad=True)
    targets = torch.empty(16384, dtype=torch.int64, device="meta")
    with Traffic() as traffic:
        fused = [traffic.fuse(function) for function in (summarize_logits, replace_by_gradient)]
        monkeypatch.setattr(gpu_loss, "_functions", lambda compiled: fused)
        chunked_next_token_loss(hidden, weight, targets, compiled=True).backward()
    print({name: f"{count / 1e9:.2f} GB" for name, count in traffic.bytes.items()})
    logits = 2 * 16384 * 50257
    assert 3 * logits < traffic.bytes["rest"] < 10e9
    assert traffic.bytes["products"] < 8e9
