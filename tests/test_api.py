"""`import gpt` in Python: its names, and the same text as generate.py."""

import json
import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import generate
import gpt
from gpt.errors import UserError
from gpt.sampling.language_model import LanguageModel, TokenLogprob
from models import EOT, WRITER_SHAPE

ROOT = Path(__file__).resolve().parents[1]
CONTEXT = WRITER_SHAPE.context_length
NAMES = {"GPT", "GPTConfig", "MultiHeadAttention", "Tokenizer", "generate", "load", "train"}
TEXT = "2 3 5 7 11 13 17 19 23 29 31 37 41 43 47 53 59"  # longer than two contexts


@pytest.fixture
def language_model(project, monkeypatch) -> LanguageModel:
    """The newest run of the current folder, opened without a name."""
    monkeypatch.chdir(project)
    return gpt.load()


def test_the_package_has_seven_names():
    """The star import and `dir` give them."""
    names: dict = {}
    exec("from gpt import *", names)
    assert names.keys() - {"__builtins__"} == set(dir(gpt)) == NAMES
    assert names["GPT"](names["GPTConfig"](5, 6, 1, 2, vocab_size=7)).config.num_parameters > 0
    for name in NAMES - {"load"}:
        assert names[name].__module__.startswith("gpt.")
        assert names[name].__name__ == name
    with pytest.raises(AttributeError, match="module 'gpt' has no attribute 'GTP'"):
        gpt.GTP  # noqa: B018


def test_type_checkers_read_the_annotations():
    """An installed package needs this marker."""
    assert (ROOT / "gpt/py.typed").read_bytes() == b""
    assert '"py.typed"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def test_text_is_that_of_generate_py(language_model, capsys):
    """`generate`, `stream` and generate.py give the same text for the same options and seed."""
    options = ["--max-new-tokens", "23", "--seed", "7", "--top-k", "31", "--temperature", "1.5", "--stop", "\u03b1"]
    generate.main(["--prompt", "2 3 5", "--json", *options])
    expected = json.loads(capsys.readouterr().out)["samples"][0]["text"]
    settings = {"max_new_tokens": 23, "seed": 7, "top_k": 31, "temperature": 1.5, "stop": "\u03b1"}
    assert language_model.generate("2 3 5", **settings) == expected
    parts = list(language_model.stream("2 3 5", **settings))
    assert "".join(parts) == expected
    assert len(parts) > 5
    assert "" not in parts


def test_text_ends_before_a_stop(language_model):
    """`stop` takes one text or several."""
    text = language_model.generate("2 3 5", 23, temperature=0.0)
    stop = text[7:9]
    expected = text[: text.index(stop)]
    assert 0 < len(expected) < len(text)
    assert language_model.generate("2 3 5", 23, temperature=0.0, stop=stop) == expected
    assert language_model.generate("2 3 5", 23, temperature=0.0, stop=["never there", stop]) == expected


def test_without_a_seed_every_text_is_new(language_model):
    """The global seed has no effect."""
    texts = []
    for _ in range(2):
        torch.manual_seed(7)
        texts.append(language_model.generate("2 3 5", 23))
    assert texts[0] != texts[1]


@pytest.mark.parametrize("length", [1, CONTEXT, CONTEXT + 1, CONTEXT + CONTEXT // 2 + 2, len(TEXT)])
def test_logprobs_are_those_of_the_model(language_model, length):
    """A token's context is at least half full, and the text begins with end-of-text."""
    text = TEXT[:length]
    tokens = language_model.logprobs(text, top=3)
    assert b"".join(token.token for token in tokens) == text.encode()
    ids, half = [EOT, *text.encode()], CONTEXT // 2
    for i, token in enumerate(tokens):
        rest = (i - CONTEXT) % (CONTEXT - half)  # past the first context, windows overlap by half
        start = 0 if i < CONTEXT else i - half - rest
        assert start == 0 or i - start >= half
        with torch.no_grad():
            logprobs = language_model.model(torch.tensor([ids[start : i + 1]]))[0, -1].log_softmax(-1)
        assert token.logprob == pytest.approx(logprobs[ids[i + 1]].item(), abs=1e-4)
        assert [other.token for other in token.top] == [bytes([j]) for j in logprobs.topk(3).indices]
        assert [other.logprob for other in token.top] == pytest.approx(logprobs.topk(3).values.tolist(), abs=1e-4)
        assert all(other.logprob >= next_other.logprob for other, next_other in pairwise(token.top))


def test_all_probabilities_add_up_to_one(language_model):
    """`top` may be larger than the vocabulary."""
    assert language_model.logprobs("") == []
    (token,) = language_model.logprobs("2", top=1000)
    assert len(token.top) == 257
    assert math.fsum(math.exp(other.logprob) for other in token.top) == pytest.approx(1.0, abs=1e-5)
    assert language_model.logprobs("2") == [TokenLogprob(b"2", token.logprob)]


def test_mistakes_are_value_errors_of_one_line(language_model, tmp_path):
    with pytest.raises(UserError, match="max_new_tokens=0 is out of range: it must be at least 1"):
        language_model.generate("a", max_new_tokens=0)
    with pytest.raises(TypeError, match="temprature"):
        language_model.generate("a", temprature=1.0)
    with pytest.raises(UserError, match="the prompt is of type list: give one text, and call again for another"):
        language_model.generate(["a", "b"])
    with pytest.raises(UserError, match="stop='' would end the text before it begins"):
        language_model.generate("a", stop=["b", ""])
    with pytest.raises(ValueError, match=r"a folder without checkpoints/best\.ckpt"):
        gpt.load(tmp_path)


def test_the_model_is_an_ordinary_module(language_model):
    """It is in fp32, in evaluation mode, and can be trained further."""
    assert isinstance(language_model.model, gpt.GPT)
    assert isinstance(language_model.tokenizer, gpt.Tokenizer)
    assert not language_model.model.training
    assert all(p.dtype == torch.float32 and p.requires_grad for p in language_model.model.parameters())
    language_model.generate("a", 2)
    language_model.model(torch.tensor([[2, 3]])).sum().backward()
    assert language_model.model.final_norm.bias.grad is not None
