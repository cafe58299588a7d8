"""The project's attention reproduces every number printed in the five attention notes (notes.json).

The notes build attention in steps. Each step is a special case of `attention_weights`, `attention` or
`MultiHeadAttention`. Plain tensor operations compute only projections and raw scores, which these do not show. Numbers
agree to half a unit of their last printed digit.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from gpt.model.attention import MultiHeadAttention, attention, attention_weights

NOTES = {
    name: torch.tensor(numbers)
    for name, numbers in json.loads(Path(__file__).with_name("notes.json").read_text(encoding="utf-8")).items()
}
BOTH_PATHS = pytest.mark.parametrize("fused_kernel", [True, False])


def assert_prints(actual: Tensor, name: str) -> None:
    """Assert that `actual` rounds to the printed numbers, up to the last bits of a float32."""
    digits = 3 if name.startswith(("000 weights", "000 context")) else 4
    torch.testing.assert_close(actual, NOTES[name], atol=0.501 * 10.0**-digits, rtol=3e-7)


def causal(tokens: int) -> Tensor:
    """Return the causal mask, True where blocked."""
    return torch.ones(tokens, tokens, dtype=torch.bool).triu(diagonal=1)


def heads_module(projections: list[Tensor], num_heads: int, context_length: int) -> MultiHeadAttention:
    """Return the module with the notes' separate projections (d_out, d_in), and an identity after the heads."""
    d_out, d_in = projections[0].shape
    module = MultiHeadAttention(d_in, d_out, context_length, 0.0, num_heads)
    names = ("W_query.weight", "W_key.weight", "W_value.weight")
    output = {"out_proj.weight": torch.eye(d_out), "out_proj.bias": torch.zeros(d_out)}
    module.load_state_dict(dict(zip(names, projections, strict=True)) | output)
    return module.eval()


# Note 000: three tokens, two heads of three dimensions.
def kid_projections() -> list[Tensor]:
    """The three weight matrices (d_in, d_out), drawn as the note draws them."""
    torch.manual_seed(0)
    return [torch.randn(6, 6) for _ in range(3)]


def kid_heads() -> list[Tensor]:
    """Queries, keys and values, each (H, T, D)."""
    return [(NOTES["000 x"] @ W).view(3, 2, 3).transpose(0, 1) for W in kid_projections()]


def kid_scores() -> Tensor:
    queries, keys, _ = kid_heads()
    return queries @ keys.mT


# Note 001 is unseeded: its printed scores and values are where the tests start.
def trio_queries() -> Tensor:
    """Queries (3, 4) that score as printed against the keys eye(3, 4): the scores, times sqrt(d_k)."""
    return nn.functional.pad(NOTES["001 scaled scores"], (0, 1)) * math.sqrt(4)


# Note 003: one embedded sentence.
def life_embedded() -> Tensor:
    """The sentence (6, 3), embedded; a word's id is its place among the sorted words."""
    words = ["Life", "is", "short", "eat", "dessert", "first"]
    torch.manual_seed(123)
    return nn.Embedding(50_000, 3)(torch.tensor([sorted(words).index(word) for word in words])).detach()


def life_projected() -> list[Tensor]:
    """Queries (6, 2), keys (6, 2) and values (6, 4)."""
    embedded = life_embedded()
    torch.manual_seed(123)
    return [embedded @ torch.rand(3, width) for width in (2, 2, 4)]


# Note 004: six tokens of three dimensions, whose simplified attention has no matrices and no scale.
STEP = NOTES["004 x"]
UNSCALED = STEP * math.sqrt(3)  # undoes the scale
EXAMPLE_KEYS = torch.tensor([0.1, -0.2, 0.3, -0.2, 0.5])[:, None]


def uniform() -> list[Tensor]:
    """Matrices (d_in, d_out) for queries, keys and values, uniformly drawn."""
    torch.manual_seed(123)
    return [torch.rand(3, 2) for _ in range(3)]


def uniform_projected() -> list[Tensor]:
    return [STEP @ W for W in uniform()]


def linear_layers(seed: int, count: int) -> list[Tensor]:
    """The weights (2, 3) of `count` linear layers created one after the other."""
    torch.manual_seed(seed)
    return [nn.Linear(3, 2, bias=False).weight.detach() for _ in range(count)]


def linear_projected() -> list[Tensor]:
    return [STEP @ W.T for W in linear_layers(789, 3)]


def linear_weights(mask: Tensor | None = None) -> Tensor:
    queries, keys, _ = linear_projected()
    return attention_weights(queries, keys, mask)


def linear_masked_scores() -> Tensor:
    queries, keys, _ = linear_projected()
    return (queries @ keys.T).masked_fill(causal(6), -math.inf)


COMPUTED: dict[str, Callable[[], Tensor]] = {
    "000 queries": lambda: NOTES["000 x"] @ kid_projections()[0],
    "000 keys": lambda: NOTES["000 x"] @ kid_projections()[1],
    "000 values": lambda: NOTES["000 x"] @ kid_projections()[2],
    "000 values by head": lambda: kid_heads()[2],
    "000 keys transposed": lambda: kid_heads()[1].mT,
    "000 scores": kid_scores,
    "000 masked scores": lambda: kid_scores().masked_fill(causal(3), -math.inf),
    "000 weights": lambda: attention_weights(*kid_heads()[:2], causal(3)),
    "000 weights after dropout": lambda: attention_weights(*kid_heads()[:2], causal(3)) / 0.9,
    "000 context by head": lambda: attention(*kid_heads(), causal(3)) / 0.9,
    "000 context": lambda: (attention(*kid_heads(), causal(3)) / 0.9).transpose(0, 1).flatten(1),
    "001 example weights": lambda: attention_weights(
        torch.ones(1, 1), NOTES["001 example"][:, None], torch.tensor([False] * 4 + [True])
    )[0],
    "001 scaled scores": lambda: trio_queries() @ torch.eye(3, 4).T / math.sqrt(4),
    "001 weights": lambda: attention_weights(trio_queries(), torch.eye(3, 4), causal(3)),
    "001 output": lambda: attention(trio_queries(), torch.eye(3, 4), NOTES["001 values"], causal(3)),
    "003 embedded": life_embedded,
    "003 score of two words": lambda: life_projected()[0][1].dot(life_projected()[1][4]),
    "003 scores": lambda: life_projected()[0][1] @ life_projected()[1].T,
    "003 weights": lambda: attention_weights(life_projected()[0][1:2], life_projected()[1])[0],
    "003 context": lambda: attention(life_projected()[0][1:2], *life_projected()[1:])[0],
    "004 simple scores": lambda: STEP @ STEP.T,
    "004 scores over their sum": lambda: STEP @ STEP[1] / (STEP @ STEP[1]).sum(),
    "004 simple weights": lambda: attention_weights(UNSCALED, STEP),
    "004 simple context": lambda: attention(UNSCALED, STEP, STEP),
    "004 uniform W_query": lambda: uniform()[0],
    "004 uniform W_key": lambda: uniform()[1],
    "004 uniform W_value": lambda: uniform()[2],
    "004 uniform queries": lambda: uniform_projected()[0],
    "004 uniform keys": lambda: uniform_projected()[1],
    "004 uniform values": lambda: uniform_projected()[2],
    "004 uniform scores": lambda: uniform_projected()[0] @ uniform_projected()[1].T,
    "004 uniform weights of the second": lambda: attention_weights(*uniform_projected()[:2])[1],
    "004 uniform context": lambda: attention(*uniform_projected()),
    "004 mild weights": lambda: attention_weights(torch.tensor([[1.0]]), EXAMPLE_KEYS)[0],
    "004 sharp weights": lambda: attention_weights(torch.tensor([[8.0]]), EXAMPLE_KEYS)[0],
    "004 linear weights": linear_weights,
    "004 linear context": lambda: attention(*linear_projected()),
    "004 linear weights times the mask": lambda: linear_weights() * torch.ones(6, 6).tril(),
    "004 linear causal weights": lambda: linear_weights(causal(6)),
    "004 linear masked scores": linear_masked_scores,
    "004 linear weights after dropout": lambda: linear_weights(causal(6)) * NOTES["004 dropout pattern"],
    "004 products of heads": lambda: NOTES["004 heads"] @ NOTES["004 heads"].mT,
}
MODULES: dict[str, Callable[[], MultiHeadAttention]] = {  # the notes' whole attention is a special case of each
    "000 context": lambda: heads_module([W.T for W in kid_projections()], 2, 3),
    "004 uniform context": lambda: heads_module([W.T for W in uniform()], 1, 6),
    "004 linear context": lambda: heads_module(linear_layers(789, 3), 1, 6),
    "004 one causal head": lambda: heads_module(linear_layers(123, 3), 1, 6),
    "004 stacked heads": lambda: heads_module(stacked_layers(), 2, 6),
    "004 fused heads": lambda: drawn_module(),
}


def stacked_layers() -> list[Tensor]:
    """Two heads' matrices for queries, keys and values, one below the other."""
    layers = linear_layers(123, 6)
    return [torch.cat(pair) for pair in zip(layers[:3], layers[3:], strict=True)]


def drawn_module() -> MultiHeadAttention:
    """The module drawn from the note's seed."""
    torch.manual_seed(123)
    return MultiHeadAttention(3, 2, 6, 0.0, num_heads=2)


def test_every_printed_number_is_computed():
    """The other numbers are inputs of tests."""
    inputs = {"000 x", "001 example", "001 values", "002 x", "004 x", "004 dropout pattern", "004 heads"}
    elsewhere = {"002 masked scores", "002 output", "002 output by head"}
    assert COMPUTED.keys() | MODULES.keys() | inputs | elsewhere == NOTES.keys()


@pytest.mark.parametrize("name", COMPUTED)
def test_formula(name):
    """`attention` and `attention_weights` print what the notes print."""
    assert_prints(COMPUTED[name](), name)


@BOTH_PATHS
@pytest.mark.parametrize("name", MODULES)
def test_module(name, fused_kernel):
    """The module with the notes' matrices, and without its mask where the note has none, prints the same."""
    module = MODULES[name]()
    if name in ("004 uniform context", "004 linear context"):
        fused_kernel = False
        module.mask.zero_()
    module.fused_kernel = fused_kernel
    x = NOTES["000 x"] if name.startswith("000") else STEP
    for row in module(torch.stack([x, x])):
        assert_prints(row / 0.9 if name == "000 context" else row, name)  # the note's dropout has kept every weight


@pytest.mark.parametrize("tokens", [3, 6, 8])
def test_mask(tokens):
    """The module's buffer blocks what the notes' masks block."""
    module = MultiHeadAttention(2, 2, tokens, 0.0, num_heads=1)
    printed = {3: "000 masked scores", 6: "004 linear masked scores", 8: "002 masked scores"}[tokens]
    assert torch.equal(module.mask, causal(tokens))
    assert torch.equal(NOTES[printed].isneginf(), causal(tokens).expand_as(NOTES[printed]))


def test_weights_of_the_module():
    """The module's weights equal the formula with the notes' mask."""
    kid = heads_module([W.T for W in kid_projections()], 2, 3).weights(NOTES["000 x"][None])
    assert_prints(kid[0], "000 weights")
    assert_prints(heads_module(linear_layers(789, 3), 1, 6).weights(STEP[None])[0, 0], "004 linear causal weights")


def test_masking_by_multiplication():
    """Zeroing later weights and dividing by the rows' sums equals blocking their scores."""
    multiplied = linear_weights() * torch.ones(6, 6).tril()
    assert_prints(multiplied / multiplied.sum(dim=1, keepdim=True), "004 linear causal weights")


def test_stacked_heads_are_heads_side_by_side():
    """Alone, each head gives its own columns."""
    first, second = linear_layers(123, 6)[:3], linear_layers(123, 6)[3:]
    alone = [heads_module(head, 1, 6)(STEP[None]) for head in (first, second)]
    torch.testing.assert_close(heads_module(stacked_layers(), 2, 6)(STEP[None]), torch.cat(alone, dim=-1))


def test_dropout_of_004():
    """Dropout at one half doubles what it keeps. What it keeps differs by platform, so the printed choice is given."""
    torch.manual_seed(123)
    after = attention(torch.zeros(6, 1), torch.zeros(6, 1), torch.eye(6), dropout=0.5) * 6  # weights of one, each
    assert after.round(decimals=5).unique().tolist() == NOTES["004 dropout pattern"].unique().tolist() == [0, 2]


def test_002_output():
    """The printed output is a mixture, by the printed scores, of values that uniform draws could be."""
    scores, printed = NOTES["002 masked scores"], NOTES["002 output"]
    queries = scores.masked_fill(causal(8), 5.0) * math.sqrt(8)  # any number where blocked
    weights = attention_weights(queries, torch.eye(8), causal(8))
    # The note does not print the values: they are what its weights must have mixed. Solving multiplies rounding.
    values = torch.linalg.solve_triangular(weights, printed, upper=False)
    assert values.min() > -1e-3 and values.max() < 1 + 1e-3
    assert_prints(attention(queries, torch.eye(8), values, causal(8)), "002 output")


def test_002_heads_are_the_module_without_mask():
    """The note orders its fused rows by head first. Reordered, they equal the module's rows, without a mask."""
    torch.manual_seed(2)
    x, layer = NOTES["002 x"][None], nn.Linear(8, 24)
    queries, keys, values = layer(x).reshape(1, 4, 2, 12).chunk(3, dim=-1)  # each (1, 4, 2, 4)
    outputs = [attention(queries[:, :, i], keys[:, :, i], values[:, :, i]) for i in range(2)]

    # The note's layer is drawn without a seed, but any fresh one hardly tells tokens apart, as its numbers show.
    printed = NOTES["002 output by head"][:, None]
    assert torch.stack(outputs).shape == printed.shape
    spread, printed_spread = (x.std(dim=2).max() for x in (torch.stack(outputs), printed))
    assert 0 < spread < 5 * printed_spread

    rows = torch.arange(24).view(2, 3, 4).transpose(0, 1).flatten()  # (H, 3, D) -> (3, H, D)
    module = MultiHeadAttention(8, 8, 4, 0.0, num_heads=2, qkv_bias=True)
    module.fused_kernel = False
    module.mask.zero_()
    state = {"W_qkv.weight": layer.weight[rows], "W_qkv.bias": layer.bias[rows]}
    module.load_state_dict(state | {"out_proj.weight": torch.eye(8), "out_proj.bias": torch.zeros(8)})
    torch.testing.assert_close(module(x), torch.cat(outputs, dim=-1))


@pytest.mark.parametrize("d_k", [5, 100])
def test_scaling_keeps_the_variance_at_one(d_k):
    """The variance of dot products grows as d_k. The variance of scaled scores stays near one."""
    generator = torch.Generator().manual_seed(0)
    queries, keys = torch.randn(2, 20_011, 1, d_k, generator=generator)
    dots = (queries * keys).sum(dim=-1)
    assert dots.var().item() == pytest.approx(d_k, rel=0.1)
    # Against a second key of zeros, whose score is zero, the log-odds of the weights are the first key's score.
    weights = attention_weights(queries, torch.cat([keys, torch.zeros_like(keys)], dim=1))
    assert torch.logit(weights[:, 0, 0].double()).var().item() == pytest.approx(1.0, rel=0.1)
