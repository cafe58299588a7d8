"""The estimated memory of training equals the memory of a real model's tensors."""

import dataclasses

import pytest
import torch

from gpt.model.fast.chunked_loss import chunked_next_token_loss
from gpt.model.memory_estimate import activation_bytes, choose_micro_batch
from gpt.model.transformer import GPT, GPTConfig

SHAPE = GPTConfig(context_length=131, d_model=44, num_layers=3, num_heads=4, vocab_size=71)
FP32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize(("dtype", "context_length"), [(BF16, 131), (BF16, 262), (FP32, 131)])
def test_activations_are_what_autograd_keeps(dtype, context_length, dropout):
    """Two more blocks keep as many more bytes as estimated."""
    counted, computed = [], []
    for num_layers in (2, 4):
        shape = dataclasses.replace(SHAPE, num_layers=num_layers, context_length=context_length, dropout=dropout)
        counted.append(kept_bytes(shape, dtype))
        computed.append(activation_bytes(shape, 3, dtype, "cpu"))
    assert computed[1] - computed[0] == pytest.approx(counted[1] - counted[0], rel=0.06)


def kept_bytes(shape: GPTConfig, dtype: torch.dtype) -> int:
    """Return the memory of all tensors that the backward pass of three sequences needs, except for the weights."""
    model = GPT(shape).set_compute_dtype(dtype).train()
    parameter_storages = {p.untyped_storage().data_ptr() for p in [*model.parameters(), *model.buffers()]}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in parameter_storages:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    idx = torch.zeros(3, shape.context_length, dtype=torch.long)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        chunked_next_token_loss(*model.features_and_head(idx), idx)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_micro_batch_by_memory(device):
    """Activations and logits take half of what the state leaves, in equal parts of a step; one window in any case."""

    def choose(num_sequences: int, fits: int, state: int = 16) -> int:
        room = activation_bytes(SHAPE, fits, FP32, device) if fits else 0
        return choose_micro_batch(SHAPE, num_sequences, state * SHAPE.num_parameters + 2 * room, FP32, device)

    for fits, expected in [(0, 1), (1, 1), (2, 2), (5, 4), (6, 6), (11, 6), (12, 12), (100, 12)]:
        assert choose(12, fits) == expected
    assert choose(13, 12) == 1
    assert choose(12, 12, state=4) == 6


@pytest.mark.parametrize(
    ("num_sequences", "context_length", "device", "expected"),
    [(8, 128, "cpu", 8), (128, 64, "cpu", 64), (128, 65, "cpu", 32), (7, 5000, "cpu", 1), (128, 64, "cuda", 128)],
)
def test_micro_batch_where_memory_is_plentiful(num_sequences, context_length, device, expected):
    """A CPU gets at most 4,096 tokens, or one longer sequence. A GPU gets what fits."""
    shape = GPTConfig(context_length=context_length)
    for dtype in (FP32, BF16):
        assert choose_micro_batch(shape, num_sequences, 8e9, dtype, device) == expected
