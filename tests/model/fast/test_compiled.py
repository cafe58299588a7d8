"""Functions compiled for sampling equal the plain model."""

import copy
import shutil

import pytest
import torch

from gpt.model.fast import compiled
from gpt.model.transformer import GPTConfig
from gpt.sampling.generation import SamplingParams, generate
from gpt.sampling.packed import Int8Linear, pack_weights
from harness import refusal
from models import make_idx, random_model

GREEDY = SamplingParams(temperature=0.0)
SHAPE = GPTConfig(context_length=23, d_model=48, num_layers=2, num_heads=3, vocab_size=101)

needs_gcc = pytest.mark.skipif(
    not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="SKIPPED LOUDLY: there is no C compiler"
)


@needs_gcc
@pytest.mark.parametrize(
    "shape",
    [SHAPE, GPTConfig(23, 35, 2, 5, qkv_bias=False, vocab_size=101), GPTConfig(23, 150, 2, 3, vocab_size=101)],
    ids=["48", "35", "150"],  # channels: with 150, rows of 600 are more than one block of products
)
@pytest.mark.parametrize(("precision", "error"), [("fp32", 1e-6), ("bf16", 0.02), ("int8", 0.02)])
@pytest.mark.parametrize("threads", [1, 3])
def test_single_token(precision, error, shape, threads):
    """The compiled functions equal the model as closely as the precision allows. Any width works."""
    num_threads, plain_calls = torch.get_num_threads(), []
    torch.set_num_threads(threads)
    try:
        exact = random_model(shape, std=0.1)
        model = pack_weights(copy.deepcopy(exact), precision, compiled=True)
        for block in model.blocks:
            block.attention.register_forward_hook(lambda *_: plain_calls.append(True))
        idx = make_idx(101, 1, 23)
        with torch.no_grad():
            expected = exact(idx)
            caches = model.init_kv_caches()
            steps = torch.cat([model(idx[:, t : t + 1], caches).float() for t in range(23)], dim=1)
            assert len(plain_calls) == 2  # the blocks, for the first token only
            together = model(idx).float()
        bound = error * expected.std().item()
        assert 0 < (steps - expected).abs().mean().item() < bound
        apart = (together - expected).abs().mean().item()
        assert apart < bound
        assert (apart > 0) == (precision != "fp32")  # only single tokens are compiled
        assert caches[0].length == 23
        tokens = torch.stack(list(generate(model, idx[:, :5], 31, GREEDY)), dim=1)
        assert tokens.shape == (1, 31)
        if precision == "fp32":
            assert tokens.tolist() == [torch.stack(list(generate(exact, idx[:, :5], 31, GREEDY)), dim=1)[0].tolist()]
    finally:
        torch.set_num_threads(num_threads)


@needs_gcc
@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8"])
def test_damaged_weights_stay_visible(precision):
    """One NaN in a block makes every logit NaN, also if activations are rounded to integers."""
    model = random_model(SHAPE)
    model.blocks[0].feed_forward.expand.weight.data[3, 5] = torch.nan
    pack_weights(model, precision, compiled=True)
    caches = model.init_kv_caches()
    with torch.no_grad():
        model(torch.tensor([[2]]), caches)
        assert model(torch.tensor([[3]]), caches).isnan().all()


@needs_gcc
def test_integers_do_not_overflow():
    """The largest products of 8 and 16 bits add up correctly, as many as a row of GPT-2 XL has."""
    head = torch.nn.Linear(6400, 7, bias=False)
    head.weight.data[:] = torch.tensor([1.0, -1.0, 0.5, -0.5, 0.25, 1.0, 1.0])[:, None]
    packed = Int8Linear(head.weight, None, compiled=True)
    compiled.compile_head(packed)
    out = packed(torch.full((1, 6400), 3.0))
    torch.testing.assert_close(out, head(torch.full((1, 6400), 3.0)), rtol=0.01, atol=0)


@pytest.mark.parametrize(("compiler", "problem"), [("", "needs a C compiler"), ("exit 1", "does not work with")])
def test_without_a_compiler(compiler, problem, tmp_path, monkeypatch):
    """A missing or broken compiler is one line."""
    if compiler:
        (tmp_path / "gcc").write_text(f"#!/bin/sh\necho no such processor >&2\n{compiler}\n")
        (tmp_path / "gcc").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert problem in refusal(compiled._library.__wrapped__)


def test_not_for_fp16():
    """fp16 is refused in one line."""
    assert "--compile is for a CPU" in refusal(pack_weights, random_model(SHAPE), "fp16", compiled=True)
