"""A block for one token, as a function of its weights, against the plain block with a cache."""

import pytest
import torch

from gpt.model.attention import KVCache
from gpt.model.fast import single_token
from gpt.model.transformer import ModelConfig, TransformerBlock

CONTEXT, HEADS, C = 13, 3, 21


def make_block(qkv_bias: bool) -> TransformerBlock:
    """A block in which every parameter, biases and gains included, is random and large enough to matter."""
    block = TransformerBlock(ModelConfig(CONTEXT, C, 1, HEADS, qkv_bias=qkv_bias)).eval()
    generator = torch.Generator().manual_seed(17)
    for name, parameter in block.named_parameters():
        mean = 1.0 if name in ("norm1.weight", "norm2.weight") else 0.0
        torch.nn.init.normal_(parameter, mean, 0.3, generator=generator)
    return block


@pytest.mark.parametrize("qkv_bias", [True, False])
@torch.no_grad()
def test_equals_the_plain_block(qkv_bias):
    """Token by token after a prompt, the outputs and the cache are those of `TransformerBlock` with a `KVCache`."""
    block = make_block(qkv_bias)
    x = torch.randn(1, CONTEXT, C, generator=torch.Generator().manual_seed(3))
    plain, fast = KVCache(CONTEXT), KVCache(CONTEXT)
    for cache in (plain, fast):
        block(x[:, :2], cache)
    places = torch.arange(CONTEXT)
    for t in range(2, CONTEXT):
        expected = block(x[:, t : t + 1], plain)
        weights = single_token.weights_of(block)
        result = single_token.transform(x[:, t : t + 1], places[: t + 1], fast.keys, fast.values, *weights)
        assert result.shape == (1, 1, C)
        torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close((fast.keys, fast.values), (plain.keys, plain.values), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(result, block(x)[:, -1:], atol=1e-5, rtol=1e-5)
