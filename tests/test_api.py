"""`import gpt` as Python users meet it: what it offers, what it costs, and that it says what generate.py says."""

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
from small_models import CONTEXT, EOT

ROOT = Path(__file__).resolve().parents[1]
NAMES = {"GPT", "GPTConfig", "MultiHeadAttention", "Tokenizer", "generate", "load", "train"}
TEXT = "2 3 5 7 11 13 17 19 23 29 31 37 41 43 47 53 59"  # longer than two contexts


@pytest.fixture
def language_model(project, monkeypatch) -> LanguageModel:
    """The newest run of the current folder, opened without a name."""
    monkeypatch.chdir(project)
    return gpt.load()


def test_names():
    """The star import and `dir` give the seven names; anything else is an error."""
    names: dict = {}
    exec("from gpt import *", names)
    assert names.keys() - {"__builtins__"} == set(dir(gpt)) == NAMES
    assert names["GPT"](names["GPTConfig"](5, 6, 1, 2, vocab_size=7)).config.num_parameters > 0
    for name in NAMES - {"load"}:
        assert names[name].__module__.startswith("gpt.")
        assert names[name].__name__ == name
    with pytest.raises(AttributeError, match="module 'gpt' has no attribute 'GTP'"):
        gpt.GTP  # noqa: B018


def test_types_are_told():
    """Type checkers read the annotations of an installed package only if this marker is in it."""
    assert (ROOT / "gpt/py.typed").read_bytes() == b""
    assert '"py.typed"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def test_same_text_as_generate(language_model, capsys):
    """`generate`, `stream` and generate.py are one path: the same options and seed give the same text."""
    options = ["--max-new-tokens", "23", "--seed", "7", "--top-k", "31", "--temperature", "1.5", "--stop", "\u03b1"]
    generate.main(["--prompt", "2 3 5", "--json", *options])
    expected = json.loads(capsys.readouterr().out)["samples"][0]["text"]
    settings = {"max_new_tokens": 23, "seed": 7, "top_k": 31, "temperature": 1.5, "stop": "\u03b1"}
    assert language_model.generate("2 3 5", **settings) == expected
    pieces = list(language_model.stream("2 3 5", **settings))
    assert "".join(pieces) == expected
    assert len(pieces) > 5
    assert "" not in pieces


def test_stop_and_seed(language_model):
    """`stop` takes one text or several; without a seed every text is a new one, whatever was seeded before."""
    text = language_model.generate("2 3 5", 23, temperature=0.0)
    stop = text[7:9]
    cut = text[: text.index(stop)]
    assert 0 < len(cut) < len(text)
    assert language_model.generate("2 3 5", 23, temperature=0.0, stop=stop) == cut
    assert language_model.generate("2 3 5", 23, temperature=0.0, stop=["never there", stop]) == cut
    torch.manual_seed(7)
    first = language_model.generate("2 3 5", 23)
    torch.manual_seed(7)
    assert language_model.generate("2 3 5", 23) != first


@pytest.mark.parametrize("length", [1, CONTEXT, CONTEXT + 1, CONTEXT + CONTEXT // 2 + 2, len(TEXT)])
def test_logprobs(language_model, length):
    """Each token's probability after all those that fit, at least half a context, beginning with end-of-text."""
    text = TEXT[:length]
    found = language_model.logprobs(text, top=3)
    assert b"".join(token.token for token in found) == text.encode()
    ids, half = [EOT, *text.encode()], CONTEXT // 2
    for i, token in enumerate(found):
        rest = (i - CONTEXT) % (CONTEXT - half)  # past the first context, windows begin where half a one is left
        start = 0 if i < CONTEXT else i - half - rest
        assert start == 0 or i - start >= half
        with torch.no_grad():
            logprobs = language_model.model(torch.tensor([ids[start : i + 1]]))[0, -1].log_softmax(-1)
        assert token.logprob == pytest.approx(logprobs[ids[i + 1]].item(), abs=1e-4)
        assert [other.token for other in token.top] == [bytes([j]) for j in logprobs.topk(3).indices]
        assert [other.logprob for other in token.top] == pytest.approx(logprobs.topk(3).values.tolist(), abs=1e-4)
        assert all(after.logprob <= before.logprob for before, after in pairwise(token.top))


def test_all_logprobs(language_model):
    """Asked for more tokens than there are, it lists them all, and their probabilities add up to one."""
    assert language_model.logprobs("") == []
    (token,) = language_model.logprobs("2", top=1000)
    assert len(token.top) == 257
    assert math.fsum(math.exp(other.logprob) for other in token.top) == pytest.approx(1.0, abs=1e-5)
    assert language_model.logprobs("2") == [TokenLogprob(b"2", token.logprob)]


def test_mistakes(language_model, tmp_path):
    """Each is a `UserError`, which is a `ValueError`, that names the value, the limit or the remedy."""
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


def test_repr(language_model):
    """A language model introduces itself in one line."""
    count = language_model.model.config.num_parameters
    size = f"{count:,} parameters, a context of 17 tokens"
    assert repr(language_model) == f"LanguageModel({size}, tokenizer byte, on cpu)"


def test_the_model_is_an_ordinary_module(language_model):
    """In fp32, in evaluation mode, and ready to be trained further."""
    assert isinstance(language_model.model, gpt.GPT)
    assert isinstance(language_model.tokenizer, gpt.Tokenizer)
    assert not language_model.model.training
    assert all(p.dtype == torch.float32 and p.requires_grad for p in language_model.model.parameters())
    language_model.generate("a", 2)
    language_model.model(torch.tensor([[2, 3]])).sum().backward()
    assert language_model.model.final_norm.bias.grad is not None
