"""A model with compiled blocks says what it said before, and what cannot be compiled is refused."""

import copy
import shutil

import pytest
import torch

from gpt.model.fast import single_token
from gpt.model.transformer import GPTConfig
from gpt.sampling.generation import Sampling, generate
from gpt.sampling.packed import pack_weights
from small_models import make_idx, make_initial_model

GREEDY = Sampling(temperature=0.0)
SHAPE = GPTConfig(context_length=23, d_model=48, num_layers=2, num_heads=3, vocab_size=101)
COMPILER = any(map(shutil.which, ("c++", "g++", "clang++")))
NEEDS_COMPILER = pytest.mark.skipif(not COMPILER, reason="SKIPPED LOUDLY: there is no C++ compiler for sampling")


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # PyTorch's own, within its compiler
@pytest.mark.parametrize(("precision", "error"), [("fp32", 1e-6), ("bf16", 0.02), ("int8", 0.02)])
@pytest.mark.parametrize("really", [pytest.param(True, marks=[pytest.mark.slow, NEEDS_COMPILER]), False])
def test_compiled(precision, error, really, monkeypatch):
    """Compiled or not, the single-token functions say what the model says, as nearly as its precision allows."""
    used, compile_once = [], single_token._compiled
    make = compile_once if really else lambda function: function
    monkeypatch.setattr(single_token, "_compiled", lambda function: used.append(function) or make(function))
    exact = make_initial_model(SHAPE, scale=5.0)
    model = pack_weights(copy.deepcopy(exact), precision, compiled=True)
    idx = make_idx(101, 1, 23)
    with torch.no_grad():
        expected = exact(idx)
        caches = model.new_caches()
        steps = torch.cat([model(idx[:, t : t + 1], caches).float() for t in range(23)], dim=1)
        # Two blocks, and all tokens except the first and the last of the context.
        assert used.count(single_token._transform) == 2 * 21
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
