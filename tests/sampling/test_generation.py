"""Generation: the cache against a plain loop, filters against numbers by hand, and text in whole pieces."""

import itertools
import math
from collections.abc import Iterable, Iterator

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gpt.errors import UserError
from gpt.model.transformer import GPT, GPTConfig
from gpt.sampling.generation import Sampling, TextStream, align, filter_logits, generate, next_token, window_start
from gpt.text.tokenizer import BYTE_PATTERN, Tokenizer, byte_tokenizer

VOCAB, CONTEXT = 101, 13
EOT = 256  # the byte tokenizer's end-of-text
GREEDY = Sampling(temperature=0.0)
PLAIN = Sampling(temperature=1.0, top_p=1.0)
BYTES = byte_tokenizer()


def make_model(dropout: float = 0.0) -> GPT:
    """A small model with large random weights and token embeddings of one length, so that its greedy text varies."""
    model = GPT(GPTConfig(CONTEXT, 35, 2, 7, dropout, vocab_size=VOCAB))
    generator = torch.Generator().manual_seed(17)
    for name, parameter in model.named_parameters():
        mean = 1.0 if name.endswith(("norm.weight", "norm1.weight", "norm2.weight")) else 0.0
        torch.nn.init.normal_(parameter, mean, 0.3, generator=generator)
    with torch.no_grad():
        model.token_embedding.weight.copy_(F.normalize(model.token_embedding.weight))
    return model.eval()


def make_idx(B: int, T: int) -> Tensor:
    """Seeded token ids (B, T)."""
    return torch.randint(VOCAB, (B, T), generator=torch.Generator().manual_seed(T))


def collect(tokens: Iterator[Tensor]) -> Tensor:
    """Everything that `generate` yields, as (B, new tokens)."""
    return torch.stack(list(tokens), dim=1)


@torch.no_grad()
def naive_greedy(model: GPT, idx: Tensor, new: int, slide: int) -> Tensor:
    """The slow, obvious loop: the whole window goes through the model for every token."""
    start = 0
    for _ in range(new):
        while idx.shape[1] - start > CONTEXT:
            start += slide
        likeliest = model(idx[:, start:])[:, -1].argmax(-1, keepdim=True)
        idx = torch.cat([idx, likeliest], dim=1)
    return idx[:, -new:]


@pytest.mark.parametrize("slide", [1, 3, CONTEXT])
@pytest.mark.parametrize("T", [1, 7, CONTEXT, CONTEXT + 1, 29])
def test_cached_equals_uncached(T, slide):
    """Greedy tokens of three rows, within the context and far past it, equal those of the plain loop."""
    model, idx, new = make_model(), make_idx(3, T), 31
    expected = naive_greedy(model, idx, new, slide)
    assert min(len(row.unique()) for row in expected) >= 5  # no row is stuck on a few tokens
    assert torch.equal(collect(generate(model, idx, new, GREEDY, slide=slide)), expected)
    assert torch.equal(collect(generate(model, idx, new, GREEDY, use_cache=False, slide=slide)), expected)


def test_slides_differ():
    """Past the context, different slides give different text, so the test above can tell them apart."""
    model, idx = make_model(), make_idx(3, 7)
    results = [collect(generate(model, idx, 41, GREEDY, slide=slide)) for slide in (1, 3, CONTEXT)]
    within = CONTEXT - 7 + 1  # the last of these was drawn from a full view
    assert all(torch.equal(result[:, :within], results[0][:, :within]) for result in results)
    assert not torch.equal(results[0], results[1])
    assert not torch.equal(results[1], results[2])


def test_rows_do_not_mix():
    """A row of a batch continues as it does alone."""
    model, idx = make_model(), make_idx(3, 7)
    together = collect(generate(model, idx, 23, GREEDY))
    for row in range(3):
        assert torch.equal(collect(generate(model, idx[row : row + 1], 23, GREEDY)), together[row : row + 1])


@pytest.mark.parametrize("slide", [1, 3, CONTEXT])
@pytest.mark.parametrize("use_cache", [True, False])
def test_prompts_of_different_lengths(slide, use_cache):
    """Each row continues as it does alone, even when only some rows have passed the context."""
    model = make_model()
    prompts = [make_idx(1, T)[0].tolist() for T in (7, 1, CONTEXT, 2, 7)]
    idx, padding = align(prompts)
    assert padding == [CONTEXT - 7, CONTEXT - 1, 0, CONTEXT - 2, CONTEXT - 7]
    assert [row[fill:] for row, fill in zip(idx.tolist(), padding, strict=True)] == prompts
    together = collect(generate(model, idx, 37, GREEDY, use_cache=use_cache, slide=slide, padding=padding))
    for row, ids in enumerate(prompts):
        assert torch.equal(together[row : row + 1], naive_greedy(model, torch.tensor([ids]), 37, slide)), row


def test_padding_is_not_seen():
    """Padding does not count as text: the repetition penalty ignores it too."""
    model, sampling = make_model(), Sampling(repetition_penalty=2.0, temperature=0.0)
    prompts = [make_idx(1, 3)[0].tolist(), make_idx(1, 11)[0].tolist()]
    idx, padding = align(prompts)
    together = collect(generate(model, idx, 7, sampling, padding=padding))
    for row, ids in enumerate(prompts):
        assert torch.equal(together[row : row + 1], collect(generate(model, torch.tensor([ids]), 7, sampling)))


def test_sampled_cached_equals_uncached():
    """With the same seed, sampled tokens are the same with the cache and without."""
    model, sampling = make_model(), Sampling(1.1, 0.9, 53, 0.97, 0.001)
    pair = [
        collect(generate(model, make_idx(2, 5), 37, sampling, torch.Generator().manual_seed(3), use_cache=use_cache))
        for use_cache in (True, False)
    ]
    assert torch.equal(pair[0], pair[1])


@pytest.mark.parametrize(
    ("length", "slide", "expected"),
    [
        *[(1, 1, 0), (13, 1, 0), (14, 1, 1), (29, 1, 16)],
        *[(13, 3, 0), (14, 3, 3), (16, 3, 3), (17, 3, 6), (29, 3, 18)],
        *[(13, 13, 0), (14, 13, 13), (26, 13, 13), (27, 13, 26)],
    ],
)
def test_window_start(length, slide, expected):
    """Counted by hand for a context of 13."""
    assert window_start(length, CONTEXT, slide) == expected


@pytest.mark.parametrize(
    ("use_cache", "expected"),
    [(True, [7, 1, 1, 1, 1, 1, 1, 11, 1, 1, 11, 1, 1]), (False, [7, 8, 9, 10, 11, 12, 13, 11, 12, 13, 11, 12, 13])],
)
def test_passes(use_cache, expected):
    """With the cache, one token goes through the model at each step, except for the prompt and each slide."""
    model, passes = make_model(), []
    model.final_norm.register_forward_hook(lambda module, inputs, output: passes.append(output.shape[1]))
    collect(generate(model, make_idx(2, 7), 13, GREEDY, use_cache=use_cache, slide=3))
    assert passes == expected


def test_generate_is_lazy():
    """No token is computed before it is asked for, and there are exactly as many as ordered."""
    model, passes = make_model(), []
    model.final_norm.register_forward_hook(lambda module, inputs, output: passes.append(output.shape[1]))
    tokens = generate(model, make_idx(1, 2), 5, GREEDY)
    assert passes == []
    assert next(tokens).shape == (1,)
    assert passes == [2]
    assert len(list(tokens)) == 4


def test_generation_ignores_dropout():
    """A model in training mode is sampled as in evaluation mode."""
    model = make_model(dropout=0.5).train()
    tokens = collect(generate(model, make_idx(2, 5), 11, GREEDY))
    assert torch.equal(tokens, naive_greedy(make_model(), make_idx(2, 5), 11, slide=1))


def test_nothing_to_start_from():
    """Generation needs a token to start from, and the error suggests one."""
    with pytest.raises(ValueError, match=r"at least one token .*end-of-text"):
        next(generate(make_model(), make_idx(1, 0), 2, GREEDY))


@pytest.mark.parametrize("slide", [0, -1, CONTEXT + 1])
def test_slide_range(slide):
    """The error names the value and the limits."""
    with pytest.raises(UserError, match=rf"slide={slide} .*at least 1 .*\b13$"):
        next(generate(make_model(), make_idx(1, 2), 2, GREEDY, slide=slide))


def filtered(weights: list[float], previous: tuple[int, ...] = (), **changes) -> list[float]:
    """Probabilities after the filters of a row whose tokens have these weights, each with the logit log(weight)."""
    logits = torch.tensor([weights]).log()
    before = torch.tensor([previous], dtype=torch.long)
    sampling = Sampling(**({"temperature": 1.0, "top_p": 1.0} | changes))
    return filter_logits(logits, before, sampling).softmax(-1)[0].tolist()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [4, 8, 2, 1, 1]),
        ({"top_k": 1}, [0, 8, 0, 0, 0]),
        ({"top_k": 2}, [4, 8, 0, 0, 0]),
        ({"top_k": 3}, [4, 8, 2, 0, 0]),
        ({"top_k": 4}, [4, 8, 2, 1, 1]),  # a tie for the fourth place: both stay
        ({"top_k": 5}, [4, 8, 2, 1, 1]),
        ({"top_k": 11}, [4, 8, 2, 1, 1]),
        ({"top_p": 1e-9}, [0, 8, 0, 0, 0]),
        ({"top_p": 0.49}, [0, 8, 0, 0, 0]),
        ({"top_p": 0.51}, [4, 8, 0, 0, 0]),
        ({"top_p": 0.74}, [4, 8, 0, 0, 0]),
        ({"top_p": 0.76}, [4, 8, 2, 0, 0]),
        ({"top_p": 0.86}, [4, 8, 2, 0, 0]),
        ({"top_p": 0.99}, [4, 8, 2, 1, 1]),
        ({"min_p": 0.12}, [4, 8, 2, 1, 1]),
        ({"min_p": 0.13}, [4, 8, 2, 0, 0]),
        ({"min_p": 0.24}, [4, 8, 2, 0, 0]),
        ({"min_p": 0.26}, [4, 8, 0, 0, 0]),
        ({"min_p": 1.0}, [0, 8, 0, 0, 0]),
        ({"temperature": 0.5}, [16, 64, 4, 1, 1]),
        ({"temperature": 2.0}, [2, 8**0.5, 2**0.5, 1, 1]),
        ({"temperature": 0.5, "top_p": 0.74}, [0, 64, 0, 0, 0]),  # 64 of 86 is 0.744
        ({"temperature": 0.5, "top_p": 0.75}, [16, 64, 0, 0, 0]),
        ({"top_k": 2, "top_p": 0.7}, [4, 8, 0, 0, 0]),  # top-p counts what top-k has left: 8 of 12 is 0.67
        ({"top_k": 2, "top_p": 0.6}, [0, 8, 0, 0, 0]),
        ({"top_p": 0.86, "min_p": 0.26}, [4, 8, 0, 0, 0]),
        ({"top_k": 3, "temperature": 0.5, "min_p": 0.2}, [16, 64, 0, 0, 0]),
    ],
)
def test_filters_by_hand(changes, expected):
    """Tokens of weights 4, 8, 2, 1 and 1 of 16; those that stay keep their proportions."""
    result = filtered([4.0, 8.0, 2.0, 1.0, 1.0], **changes)
    assert result == pytest.approx([value / sum(expected) for value in expected], abs=1e-6)


@pytest.mark.parametrize(("top_p", "kept"), [(0.25, 1), (0.26, 2), (0.5, 2), (0.75, 3), (0.76, 4)])
def test_top_p_keeps_the_fewest(top_p, kept):
    """Of four tokens with exactly a quarter each, it keeps just enough to reach the probability."""
    assert sorted(filtered([1.0] * 4, top_p=top_p)) == pytest.approx([0.0] * (4 - kept) + [1 / kept] * kept)


def test_repetition_penalty_by_hand():
    """Positive logits are divided and negative ones multiplied, once, however often the token came."""
    logits = torch.tensor([[3.0, -1.0, 0.5, 0.0, 2.0], [3.0, -1.0, 0.5, 0.0, 2.0]])
    previous = torch.tensor([[0, 0, 1, 3], [4, 2, 2, 2]])
    result = filter_logits(logits, previous, Sampling(2.0, temperature=1.0, top_p=1.0))
    expected = torch.tensor([[1.5, -2.0, 0.5, 0.0, 2.0], [3.0, -1.0, 0.25, 0.0, 1.0]])
    assert torch.equal(result, expected)
    cooler = filter_logits(logits, previous, Sampling(2.0, temperature=0.5, top_p=1.0))
    assert torch.equal(cooler, 2 * expected)
    reward = filter_logits(logits, previous, Sampling(0.5, temperature=1.0, top_p=1.0))
    assert torch.equal(reward[0], torch.tensor([6.0, -0.5, 0.5, 0.0, 2.0]))
    assert logits[0].tolist() == [3.0, -1.0, 0.5, 0.0, 2.0]  # the caller's are left alone


def slow_filter(logits: list[float], previous: list[int], sampling: Sampling) -> list[float]:
    """Probabilities after all filters, one token at a time, in the order that `Sampling` documents."""
    values = list(logits)
    for token in set(previous):
        penalty = sampling.repetition_penalty
        values[token] = values[token] / penalty if values[token] > 0 else values[token] * penalty
    weights = {token: math.exp(value / sampling.temperature) for token, value in enumerate(values)}
    if sampling.top_k:
        weights = {t: w for t, w in weights.items() if sum(v > w for v in weights.values()) < sampling.top_k}
    total, reached, kept = sum(weights.values()), 0.0, {}
    for token in sorted(weights, key=lambda token: -weights[token]):
        if sampling.top_p == 1.0 or reached < sampling.top_p * total:
            kept[token] = weights[token]
            reached += weights[token]
    kept = {token: weight for token, weight in kept.items() if weight >= sampling.min_p * max(kept.values())}
    return [kept.get(token, 0.0) / sum(kept.values()) for token in range(len(logits))]


@pytest.mark.parametrize("repetition_penalty", [1.0, 1.7, 0.6])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.9])
def test_filters_equal_the_slow_reference(repetition_penalty, temperature):
    """All filters together, on five rows of 31 random logits."""
    generator = torch.Generator().manual_seed(11)
    logits = 2 * torch.randn(5, 31, generator=generator)
    previous = torch.randint(31, (5, 13), generator=generator)
    for filters in itertools.product([0, 1, 7, 31], [0.2, 0.83, 1.0], [0.0, 0.07]):
        sampling = Sampling(repetition_penalty, temperature, *filters)
        result = filter_logits(logits, previous, sampling).softmax(-1)
        rows = zip(logits.tolist(), previous.tolist(), strict=True)
        expected = torch.tensor([slow_filter(*row, sampling) for row in rows])
        assert torch.equal(result == 0, expected == 0), sampling
        torch.testing.assert_close(result, expected, atol=1e-6, rtol=1e-5)


def test_low_temperature_becomes_greedy():
    """A temperature near zero draws what zero takes: the likeliest."""
    logits = torch.randn(211, 31, generator=torch.Generator().manual_seed(13))
    nothing = torch.zeros(211, 0, dtype=torch.long)
    greedy = next_token(logits, nothing, GREEDY, None)
    assert torch.equal(greedy, logits.argmax(-1))
    generator = torch.Generator().manual_seed(13)
    assert torch.equal(next_token(logits, nothing, Sampling(temperature=1e-6, top_p=1.0), generator), greedy)
    assert not torch.equal(next_token(logits, nothing, PLAIN, generator), greedy)


@pytest.mark.parametrize("sampling", [Sampling(temperature=1e-6), Sampling(0.01, temperature=1.0)])
def test_smallest_values_in_range(sampling):
    """The smallest values that `Sampling` accepts still draw a token."""
    logits = torch.tensor([[3.0, -1.0, 0.5]])
    drawn = next_token(logits, torch.tensor([[0, 0]]), sampling, torch.Generator().manual_seed(13))
    assert drawn.tolist() == [0]


def test_greedy_heeds_the_penalty():
    """Only the repetition penalty can change the greedy choice."""
    logits = torch.tensor([[3.0, 2.0, 1.0]])
    previous = torch.tensor([[0, 0]])
    assert next_token(logits, previous, Sampling(temperature=0.0, top_k=2, min_p=0.5), None).tolist() == [0]
    assert next_token(logits, previous, Sampling(2.0, temperature=0.0), None).tolist() == [1]


def test_half_precision_logits():
    """Logits of a bfloat16 model are filtered in fp32: the draw is that of the same logits in fp32."""
    logits = torch.randn(53, 2003, generator=torch.Generator().manual_seed(13)).bfloat16()
    nothing = torch.zeros(53, 0, dtype=torch.long)
    drawn = [next_token(x, nothing, Sampling(), torch.Generator().manual_seed(3)) for x in (logits, logits.float())]
    assert torch.equal(drawn[0], drawn[1])


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [(PLAIN, [8, 4, 2, 1, 1]), (Sampling(temperature=0.5, top_p=1.0, top_k=3), [64, 16, 4, 0, 0])],
)
def test_frequencies(sampling, expected):
    """20,011 draws fall as the probabilities say: chi-squared, at the 0.1% level of up to four degrees of freedom."""
    n = 20_011
    logits = torch.tensor([[8.0, 4.0, 2.0, 1.0, 1.0]]).log().expand(n, -1)
    drawn = next_token(logits, torch.zeros(n, 0, dtype=torch.long), sampling, torch.Generator().manual_seed(7))
    counts = drawn.bincount(minlength=5).tolist()
    means = [n * weight / sum(expected) for weight in expected]
    assert [count for count, mean in zip(counts, means, strict=True) if mean == 0] == [0] * expected.count(0)
    assert sum((count - mean) ** 2 / mean for count, mean in zip(counts, means, strict=True) if mean) < 18.47


def test_seed_decides():
    """The same seed gives the same tokens, another seed others, and rows of one batch differ."""
    model, idx = make_model(), make_idx(1, 5).repeat(3, 1)
    runs = [collect(generate(model, idx, 23, PLAIN, torch.Generator().manual_seed(seed))) for seed in (3, 3, 5)]
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])
    assert len({tuple(row) for row in runs[0].tolist()}) == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"repetition_penalty": 0.0}, "repetition-penalty=0.0 .* at least 0.01 and at most 100"),
        ({"repetition_penalty": -1.0}, "repetition-penalty=-1.0 .* at least 0.01"),
        ({"repetition_penalty": 101.0}, "repetition-penalty=101.0 .* at most 100"),
        ({"temperature": -0.1}, "temperature=-0.1 .* at least 1e-6 and at most 100"),
        ({"temperature": 101.0}, "temperature=101.0 .* at most 100"),
        ({"temperature": math.nan}, "temperature=nan .* at least 1e-6"),
        ({"temperature": math.inf}, "temperature=inf .* at most 100"),
        ({"top_k": -1}, "top-k=-1 .* at least 0"),
        ({"top_p": 0.0}, "top-p=0.0 .* at least 1e-30 and at most 1"),
        ({"top_p": 1.1}, "top-p=1.1 .* at most 1"),
        ({"top_p": math.nan}, "top-p=nan .* at least 1e-30"),
        ({"min_p": -0.1}, "min-p=-0.1 .* at least 0"),
        ({"min_p": 1.1}, "min-p=1.1 .* at most 1"),
        ({"min_p": math.nan}, "min-p=nan .* at least 0"),
    ],
)
def test_sampling_ranges(changes, message):
    """A value out of range is one line that names the setting, the value and the limit."""
    with pytest.raises(UserError, match=message) as caught:
        Sampling(**changes)
    assert "\n" not in str(caught.value)


def test_sampling_limits_are_accepted():
    """The ends of the ranges are within them."""
    for limits in [(100.0, 0.0, 0, 1.0, 0.0), (0.01, 100.0, 10**9, 1e-9, 1.0), (1.0, 1e-6, 0, 1.0, 0.0)]:
        assert torch.isfinite(next_token(torch.randn(1, 7), torch.tensor([[3]]), Sampling(*limits), None)).all()


def pieces_of(tokens: Iterable[int], stops: tuple[str, ...] = (), tokenizer: Tokenizer = BYTES) -> list[str]:
    """The piece that a stream gives for each token, then what it held back, then its finish reason."""
    stream, pieces, fed = TextStream(tokenizer, stops), [], []
    for token in tokens:
        fed.append(token)
        pieces.append(stream.feed(token))
        if stream.finish_reason is not None:
            break
    else:
        pieces.append(stream.finish())
    assert stream.finish_reason in ("end_of_text", "stop", "length")
    assert "".join(pieces) == stream.text
    assert stream.tokens == fed
    return [*pieces, stream.finish_reason]


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"ab", ["a", "b", ""]),
        ("aé€😀b".encode(), ["a", "", "é", "", "", "€", "", "", "", "😀", "b", ""]),
        (b"\xffa", ["\ufffd", "a", ""]),
        (b"\x80\x80", ["\ufffd", "\ufffd", ""]),
        (b"\xf0\x9f\x98a", ["", "", "", "\ufffda", ""]),
        (b"\xc3\xc3\xa9", ["", "\ufffd", "é", ""]),
        (b"a\xf0\x9f", ["a", "", "", "\ufffd"]),
        (b"\x00\r\n", ["\x00", "\r", "\n", ""]),
    ],
)
def test_never_half_a_character(data, expected):
    """Bytes become text as soon as a character is whole; those that make none become U+FFFD."""
    assert pieces_of(data) == [*expected, "length"]
    assert "".join(expected) == data.decode("utf-8", "replace")


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("12ENxEND34", ("END",), ["1", "2", "", "", "ENx", "", "", "", "stop"]),
        ("aaab", ("aab",), ["", "", "a", "", "stop"]),
        ("ababac", ("abac",), ["", "", "", "ab", "", "", "stop"]),
        ("1xy2b3", ("xyz", "b"), ["1", "", "", "xy2", "", "stop"]),
        ("1xyz", ("yz", "xyz"), ["1", "", "", "", "stop"]),
        ("1xyz", ("y", "xyz"), ["1", "", "x", "stop"]),  # at y the text is over, and xyz never came
        ("12EN", ("END",), ["1", "2", "", "", "EN", "length"]),
        ("12", ("2",), ["1", "", "stop"]),
        ("2", ("3",), ["2", "", "length"]),
        ("aaa", ("aaaa", "ab"), ["", "", "", "aaa", "length"]),
        ("\n\n\n", ("\n\n",), ["", "", "stop"]),
        ("1€2", ("€",), ["1", "", "", "", "stop"]),
    ],
)
def test_stop_strings(text, stops, expected):
    """A stop string and what follows are never shown; text that only began like one is released."""
    assert pieces_of(text.encode(), stops) == expected


def test_stop_on_replacement_characters():
    """The end of a text may itself complete a stop string."""
    assert pieces_of(b"1\xe2\x82", ("\ufffd",)) == ["1", "", "", "", "stop"]
    assert pieces_of(b"1\xe2\x82", ("\ufffdx",)) == ["1", "", "", "\ufffd", "length"]


def test_end_of_text():
    """End-of-text ends the text, releases what was held back, and is never shown."""
    assert pieces_of([49, EOT, 50], ("12",)) == ["", "1", "end_of_text"]
    assert pieces_of([EOT]) == ["", "end_of_text"]
    assert pieces_of([0xF0, 0x9F, EOT]) == ["", "", "\ufffd", "end_of_text"]
    assert pieces_of(b"<|endoftext|>")[-1] == "length"


def test_stop_within_a_token():
    """A token of several characters may end one stop string and hold what must not be shown."""
    ranks = {bytes([byte]): byte for byte in range(256)} | {b"ND34": 256, "😀é".encode()[1:]: 257}
    tokenizer = Tokenizer("test", ranks, BYTE_PATTERN)
    assert pieces_of([49, 69, 256, 50], ("END",), tokenizer) == ["1", "", "", "stop"]
    assert pieces_of([69, 256, 50], ("ENDE",), tokenizer) == ["", "END34", "2", "", "length"]
    assert pieces_of([0xF0, 257], (), tokenizer) == ["", "😀é", "", "length"]
    assert pieces_of([256, 256], ("4ND", "3"), tokenizer) == ["ND", "stop"]
    assert tokenizer.end_of_text == 258


ANY_TOKENS = st.lists(
    st.one_of(
        st.sampled_from([*b"ab\xed\xa0", *"€😀".encode()]),  # these meet in characters and stop strings now and then
        st.integers(0, 255),
    ),
    max_size=31,
)
ANY_TEXT = st.text(alphabet="ab€😀\ufffd", min_size=1, max_size=5)


@settings(max_examples=307, deadline=None)
@given(ANY_TOKENS)
def test_streamed_text_is_the_decoded_text(tokens):
    """However the bytes fall, the pieces together are the whole sequence decoded at once."""
    assert "".join(pieces_of(tokens)[:-1]) == BYTES.decode(tokens)


@settings(max_examples=307, deadline=None)
@given(ANY_TOKENS, ANY_TEXT)
def test_streamed_text_is_decoded_then_cut(tokens, stop):
    """With a stop string: decoded at once, then cut where it first stands."""
    *pieces, reason = pieces_of(tokens, (stop,))
    whole = BYTES.decode(tokens)
    assert "".join(pieces) == whole.split(stop)[0]
    assert reason == ("stop" if stop in whole else "length")


@settings(max_examples=307, deadline=None)
@given(ANY_TOKENS, st.lists(ANY_TEXT, min_size=2, max_size=5))
def test_several_stop_strings(tokens, stops):
    """With several: no text before the cut holds one, and at the cut stands one; without any, all is shown."""
    *pieces, reason = pieces_of(tokens, tuple(stops))
    text, whole = "".join(pieces), BYTES.decode(tokens)
    assert whole.startswith(text)
    assert not any(stop in text for stop in stops)
    assert (reason == "stop") is any(stop in whole for stop in stops)
    assert any(whole.startswith(stop, len(text)) for stop in stops) if reason == "stop" else text == whole


@settings(max_examples=101, deadline=None)
@given(ANY_TOKENS, ANY_TEXT)
def test_as_much_as_can_be_is_shown(tokens, stop):
    """At every token all is shown but the longest tail that may yet become the stop string."""
    plain, stream = TextStream(BYTES), TextStream(BYTES, (stop,))
    for token in tokens:
        plain.feed(token)
        stream.feed(token)
        if stream.finish_reason is not None:
            break
        longest = max(n for n in range(len(stop)) if plain.text.endswith(stop[:n]))
        assert stream.text == plain.text.removesuffix(stop[:longest])
