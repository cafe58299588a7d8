"""A model with compiled blocks says what it said before, and what cannot be compiled is refused."""

import copy
import shutil

import pytest
import torch

from gpt.errors import UserError
from gpt.model import single_token
from gpt.model.transformer import GPT, GPTConfig
from gpt.sampling import compiled
from gpt.sampling.compiled import require_compilable
from gpt.sampling.generation import Sampling, generate
from gpt.sampling.packed import pack_weights

GREEDY = Sampling(temperature=0.0)
COMPILER = any(map(shutil.which, ("c++", "g++", "clang++")))
NEEDS_COMPILER = pytest.mark.skipif(not COMPILER, reason="SKIPPED LOUDLY: there is no C++ compiler for sampling")


def make_model() -> GPT:
    torch.manual_seed(5)
    model = GPT(GPTConfig(context_length=23, d_model=48, num_layers=2, num_heads=3, vocab_size=101))
    with torch.no_grad():  # larger than at the start of training, so that precision has something to lose
        for parameter in model.parameters():
            parameter.mul_(5.0 if parameter.dim() == 2 else 1.0)
    return model


def make_idx(rows: int, tokens: int) -> torch.Tensor:
    return torch.randint(101, (rows, tokens), generator=torch.Generator().manual_seed(3))


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # PyTorch's own, within its compiler
@pytest.mark.parametrize(("precision", "error"), [("fp32", 1e-6), ("bf16", 0.02), ("int8", 0.02)])
@pytest.mark.parametrize("really", [pytest.param(True, marks=[pytest.mark.slow, NEEDS_COMPILER]), False])
def test_compiled(precision, error, really, monkeypatch):
    """Compiled or not, the single-token functions say what the model says, as nearly as its precision allows."""
    used, compile_once = [], compiled._compiled
    make = compile_once if really else lambda function: function
    monkeypatch.setattr(compiled, "_compiled", lambda function: used.append(function) or make(function))
    exact = make_model()
    model = pack_weights(copy.deepcopy(exact), precision, compiled=True)
    idx = make_idx(1, 23)
    with torch.no_grad():
        expected = exact(idx)
        caches = model.new_caches()
        steps = torch.cat([model(idx[:, t : t + 1], caches).float() for t in range(23)], dim=1)
        # Two blocks, and all tokens except the first and the last of the context.
        assert used.count(single_token.transform) == 2 * 21
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


def test_what_cannot_be_compiled(monkeypatch):
    """Each refusal is one line that says what to do instead."""
    monkeypatch.setattr(shutil, "which", lambda name: name)
    require_compilable(1)
    with pytest.raises(UserError, match="is for a single text, and these are 3"):
        require_compilable(3)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(UserError, match=r"needs a C\+\+ compiler"):
        require_compilable(1)
