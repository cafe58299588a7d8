"""Sample prompts from the text itself: a few words that a shell command can hold, always the same."""

from pathlib import Path

import pytest

from gpt.data.data_config import DataConfig
from gpt.data.prepare import prepare
from gpt.data.prompts import MAX_PROMPT_CHARS, extract_prompts
from gpt.data.tokenizer import TokenizerConfig


def taken(folder: Path, *texts: str, name: str = "text") -> list[str]:
    """The prompts from texts, each a file of its own."""
    for number, text in enumerate(texts):
        (folder / f"{number}.txt").write_text(text, encoding="utf-8")
    paths = [str(folder / f"{number}.txt") for number in range(len(texts))]
    weights = [1.0] * len(texts) if name == "mix" else []
    data = DataConfig(name, paths, weights)
    return extract_prompts(prepare(data, TokenizerConfig("byte"), 5, folder / "cache", print_line=lambda line: None))


def single(end: str) -> str:
    """A text whose last tenth, which is for validation, is `end`."""
    return "x" * (9 * len(end)) + end


@pytest.mark.parametrize(
    ("end", "prompt"),
    [
        ("ing house. It was\n\nOnce upon a time, there was\n", "Once upon a time,"),
        ("ing house\nof the old man who\nslept", "of the old man"),
        ("ing house of the old man", "house of the old"),
        ("wordwithoutanyspace", "wordwithoutanyspace"),
        ("a\n\n---\n\n  * * *\n\tdef f(x):\n", "def f(x):"),
        ("a\n\nun\u00a0deux trois quatre cinq", "un deux trois quatre"),
        ("a\nb\x07ell\nc d", "c d"),
        ("a\n\n\u4e00\u4e8c\u4e09", "\u4e00\u4e8c\u4e09"),
        ('a\n\nit\'s so\na "b" `c` $d\n', 'a "b" `c` $d'),
        ("z\n" + "long" * 20, ("long" * 20)[:MAX_PROMPT_CHARS]),
        ("?? !! ...\n--- ...", ""),
    ],
)
def test_words_of_a_single_text(tmp_path, end, prompt):
    """The validation text begins anywhere: what follows a blank line, else a line, else a space, in printable words."""
    assert taken(tmp_path, single(end)) == (["", prompt] if prompt else [""])


def test_words_of_documents(tmp_path):
    """Of several documents, two that begin within the validation text."""
    texts = [f"Title {i} of a text\nand more of it, with the number {i}" for i in range(41)]
    prompts = taken(tmp_path, *texts)
    assert len(set(prompts)) == 3
    assert set(prompts[1:]) < {f"Title {i} of a" for i in range(41)}
    assert taken(tmp_path, *texts) == prompts


def test_words_of_paragraphs(tmp_path):
    """A single text gives two paragraphs, the first one last."""
    assert taken(tmp_path, single("end.\n\nKATE:\nHo!\n\nMEG:\nNo.\n\nANN:\nSo.\n")) == ["", "MEG:", "KATE:"]


def test_one_of_each_corpus(tmp_path):
    """A mixture is sampled with words of its corpora, of three at most."""
    texts = [single(f"{name}\n\n{name} begins here") for name in ("one", "two", "three", "four")]
    assert taken(tmp_path, *texts, name="mix") == ["", "one begins here", "two begins here", "three begins here"]
