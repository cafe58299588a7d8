"""What is printed of a completion: its tokens, and what it copied from the training text."""

import math

import pytest

from gpt.data.corpus import DataConfig
from gpt.data.prepare import prepare
from gpt.data.token_dataset import TokenSource
from gpt.data.tokenizer import TokenizerConfig, byte_tokenizer
from gpt.sampling.language_model import Completion, TokenLogprob
from gpt.sampling.printing import format_completion, format_copies


def test_line_of_a_token():
    """White space, parts of characters and the smallest probabilities are visible."""
    top = (TokenLogprob(b"\n", math.log(0.5)), TokenLogprob(b"\xe2\x82", math.log(1e-7)))
    completion = Completion(byte_tokenizer())
    completion.logprobs = [TokenLogprob(" é".encode(), math.log(0.25), top)]
    head = "\n  token             likeliest 1       likeliest 2"
    assert format_completion(completion) == f"{head}\n  ·é 25%            ⏎ 50%             <e2><82> 1e-05%"


def make_sources(folder, *texts: str) -> list[TokenSource]:
    """Prepare texts as corpora of bytes."""
    sources = []
    for i, text in enumerate(texts):
        file = folder / f"{i}.txt"
        file.write_text(text, encoding="utf-8")
        data = DataConfig("text", str(file))
        sources += prepare(data, TokenizerConfig("byte"), 8, folder / "cache", print_line=lambda line: None).sources
    return sources


@pytest.mark.parametrize(
    ("text", "count", "expected"),
    [
        (
            "all men are fast, to be self-evid, all men are ",
            "41 of 47 tokens, in [[brackets]]; the longest passage has 16 characters",
            "[[all men are ]]fast,[[ to be self-evid]],[[ all men are ]]\n",
        ),
        (  # a yen and a pound have the same first byte
            "created equal \u00a5",
            "15 of 16 tokens, in [[brackets]]; the longest passage has 14 characters",
            "[[created equal ]]\u00a5\n",
        ),
        (  # the passage begins with the last byte of a character
            "\u0123we hold these truths",
            "20 of 22 tokens, in [[brackets]]; the longest passage has 20 characters",
            "\u0123[[we hold these truths]]\n",
        ),
        ("truth", "nothing of 8 tokens or more", ""),
    ],
)
def test_copied_passages_are_in_brackets(tmp_path, text, count, expected):
    sources = make_sources(
        tmp_path, "we hold these truths to be self-evident, that all men are created equal \u00a3" * 9
    )
    shown = format_copies(list(text.encode()), sources)
    assert shown == f"--- copied from the training text: {count} ---\n{expected}"


@pytest.mark.parametrize("num_corpora", [1, 2])
def test_the_longest_of_two_overlapping_passages_is_whole(tmp_path, num_corpora):
    """Each passage in brackets occurs in the training text, in one corpus or the other."""
    texts = ["The quiet river ran under\n" * 9, "under the old stone bridge\n" * 9]
    sources = make_sources(tmp_path, *(["".join(texts)] if num_corpora == 1 else texts))
    shown = format_copies(list(b"quiet river ran under the old stone, quiet"), sources)
    count = "35 of 42 tokens, in [[brackets]]; the longest passage has 21 characters"
    passages = "[[quiet river ran under]][[ the old stone]], quiet"
    assert shown == f"--- copied from the training text: {count} ---\n{passages}\n"
