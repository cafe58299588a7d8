"""Mixtures: their shares, their names, and the tokenizer that their corpora share."""

import os
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gpt.data.prepare
import gpt.data.python_docs
from gpt.data.data_config import DataConfig
from gpt.data.mixture import integer_weights, source_names
from gpt.data.prepare import prepare
from gpt.data.token_dataset import TokenDataset
from gpt.data.tokenizer import Tokenizer, TokenizerConfig, train_bpe
from harness import refusal
from workshop import (
    BYTE,
    CONTEXT,
    EXAMPLES,
    cache_entries,
    expected_split_ids,
    patched_constants,
    prepare_source,
    split_documents,
    split_ids,
    write_documents,
    write_text,
)

# --- mixtures ---

ANIMALS = [f"The zebra and the aardvark number {i} met. " * (1 + i % 3) for i in range(47)]
PLANTS = ["Of the oak and the ash " * 30, "and the bitter willow tree " * 30]


def write_mixture(folder: Path, *weights: float) -> DataConfig:
    """The configuration of a mixture of up to three corpora, the last of a single text."""
    paths = [write_documents(folder / "documents").path, write_documents(folder / "animals", ANIMALS).path]
    return DataConfig("mix", [*paths, write_text(folder, "".join(PLANTS)).path][: len(weights)], list(weights))


def mix(data: DataConfig, cache: Path, tokenizer: TokenizerConfig = BYTE, **more) -> TokenDataset:
    """Prepare a mixture without a word."""
    return prepare(data, tokenizer, CONTEXT, cache, print_line=more.pop("print_line", [].append), **more)


def parts_of(data: DataConfig) -> list[DataConfig]:
    """The configurations that read the corpora of a mixture alone."""
    return [DataConfig("text", path) for path in data.paths]


def test_shares_by_largest_remainder(tmp_path):
    """Of 1000 windows, hand-computed: 285.7, 285.7 and 428.6."""
    assert mix(write_mixture(tmp_path, 2, 2, 3), tmp_path / "cache").weights == (286, 286, 428)
    assert mix(write_mixture(tmp_path, 1e-9, 2e-9, 3e-9), tmp_path / "cache").weights == (167, 333, 500)


@EXAMPLES
@given(st.lists(st.floats(1e-2, 1), min_size=2, max_size=9))
def test_shares_are_next_to_exact(weights):
    """They sum to 1000, and none is off by one or more."""
    shares = integer_weights(DataConfig("mix", [f"{i}" for i in range(len(weights))], weights))
    assert sum(shares) == 1000
    exact = [1000 * Fraction(weight) / sum(map(Fraction, weights)) for weight in weights]
    assert all(abs(share - true) < 1 for share, true in zip(shares, exact, strict=True))


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["python_docs", "/home/me/books/a.txt"], ("python_docs", "a")),
        (["a-2.txt", "x/a.txt", "y/a.md", "z/a.jsonl.gz"], ("a-2", "a", "a-3", "a-4")),
        (["books/*.txt", "/data/**/*.jsonl", "/*.txt"], ("books", "data", "text")),
        (["some/war and-peace.txt.gz", "~/b.TXT"], ("war_and-peace", "b")),
        (["texts/my novel, part 1.txt", "😀.txt", "Bücher.v2.txt"], ("my_novel_part_1", "text", "Bücher.v2")),
        (["../v1.2/", "."], ("v1.2", "v1.2-2")),  # folders, of which one is the working directory
    ],
)
def test_names_of_a_mixture(tmp_path, monkeypatch, paths, names):
    """Names are short, unique, and valid as tags of curves for all paths."""
    (tmp_path / "v1.2").mkdir()
    monkeypatch.chdir(tmp_path / "v1.2")
    assert source_names(DataConfig("mix", paths, [1] * len(paths))) == names


def test_weight_that_is_too_small(tmp_path):
    """Less than a window in a thousand: the corpus is named, before anything is prepared."""
    data = write_mixture(tmp_path, 1000, 1, 0.3)
    message = f"data.weights: {data.path[2]!r} has less than a thousandth of all: raise its weight, or leave it out"
    assert refusal(mix, data, tmp_path / "cache") == message
    assert not (tmp_path / "cache").exists()


FIRST = ["reading", "the", "prepared"]  # the first words of the printed lines


@pytest.mark.parametrize("name", ["gpt2", "byte"])
def test_mixture_of_what_is_there(tmp_path, name):
    """Its corpora are those that each would be alone, in the same folders, so one that is there is not made again."""
    data, cache, printed = write_mixture(tmp_path, 1, 2, 4), tmp_path / "cache", list[str]()
    alone = prepare_source(parts_of(data)[1], cache, TokenizerConfig(name))
    mixture = mix(data, cache, TokenizerConfig(name), print_line=printed.append)
    assert [line.split()[0] for line in printed] == [*FIRST, "text", "reading", "prepared"]
    assert mixture.names == ("text", "text-2", "text-3")
    assert mixture.sources[1].metadata == alone.metadata
    for part, source in zip(parts_of(data), mixture.sources, strict=True):
        assert split_ids(source) == expected_split_ids(part, source.tokenizer)
    assert len(cache_entries(cache)) == 3
    assert mixture.train_tokens == sum(len(split_ids(source)[0]) for source in mixture.sources)


def test_joint_tokenizer(tmp_path):
    """One byte-pair encoding of all their training text, kept in the cache; gone or damaged, it is made again."""
    data, cache, printed = write_mixture(tmp_path, 1, 2, 4), tmp_path / "cache", list[str]()
    config = TokenizerConfig("bpe", 307)
    mixture = mix(data, cache, config)
    expected = train_bpe([text for part in parts_of(data) for text in split_documents(part)[0]], 307)
    for part, source in zip(parts_of(data), mixture.sources, strict=True):
        assert source.tokenizer.to_dict() == expected.to_dict()
        assert split_ids(source) == expected_split_ids(part, expected)
    assert mixture.tokenizer.sha256 == expected.sha256
    assert sorted(entry.name.split("-")[0] for entry in cache_entries(cache)) == ["text", "text", "text", "tokenizer"]
    [file] = cache.glob("tokenizer-*.json")
    kept = file.read_bytes()
    for happens in (lambda: None, file.unlink, lambda: os.truncate(file, 101), lambda: file.write_text("[7]")):
        happens()
        printed.clear()
        assert mix(data, cache, config, print_line=printed.append).key == mixture.key
        assert [line.split()[0] for line in printed if "prepared" in line] == ["text"] * 3
        assert file.read_bytes() == kept
    assert len(cache_entries(cache)) == 4


def test_what_the_joint_tokenizer_depends_on(tmp_path):
    """Weights, text and vocabulary size change it, but not the scale of the weights."""
    cache = tmp_path / "cache"
    changes = [
        (write_mixture(tmp_path, 1, 2), 307, 1),
        (write_mixture(tmp_path, 0.5, 1.0), 307, 1),
        (write_mixture(tmp_path, 2, 1), 307, 2),
        (write_mixture(tmp_path, 1, 2), 311, 3),
        (write_mixture(tmp_path, 1, 2, 4), 307, 4),
    ]
    for data, vocab_size, count in changes:
        mix(data, cache, TokenizerConfig("bpe", vocab_size))
        assert len(list(cache.glob("tokenizer-*.json"))) == count


def test_sample_for_the_joint_tokenizer(tmp_path, monkeypatch):
    """Of each corpus no more than its share, and no less than half of it, evenly from its beginning to its end."""
    learnt: list[list[str]] = []

    def watched(texts: Iterator[str], vocab_size: int) -> Tokenizer:
        learnt.append(list(texts))
        return train_bpe(learnt[-1], vocab_size)

    monkeypatch.setattr(gpt.data.prepare, "train_bpe", watched)
    documents = [[f"{name} {i:04} " + "word " * 20 for i in range(997)] for name in "ab"]
    paths = [write_documents(tmp_path / name, part).path for name, part in zip("ab", documents, strict=True)]
    with patched_constants({"gpt.data.split.SAMPLE_BYTES": 200_000, "gpt.data.prepare.SAMPLE_BYTES": 50_000}):
        mix(DataConfig("mix", paths, [4, 1]), tmp_path / "cache", TokenizerConfig("bpe", 307))
    for name, share in (("a", 40_000), ("b", 10_000)):
        part = [text for text in learnt[0] if text.startswith(name)]
        numbers = [int(text.split()[1]) for text in part]
        assert share / 2 < sum(map(len, part)) <= share
        assert numbers == sorted(numbers)
        assert max(np.diff([0, *numbers, 997])) < 3 * 997 / len(part)
    assert len(learnt) == 1


def test_tokenizer_of_a_model(tmp_path):
    """A given tokenizer is used unchanged for all corpora, and none is trained."""
    model = train_bpe(["Document café seats zebra " * 7], 293)
    data, cache = write_mixture(tmp_path, 1, 1), tmp_path / "cache"
    for part, source in zip(parts_of(data), mix(data, cache, model).sources, strict=True):
        assert source.tokenizer.to_dict() == model.to_dict()
        assert split_ids(source) == expected_split_ids(part, model)
    assert {entry.name[:9] for entry in cache_entries(cache)} == {"text-bpe-"}


def test_mixture_with_a_built_in_corpus(tmp_path, monkeypatch):
    """One that is named by a word, here of fewer modules, beside a file."""
    modules = gpt.data.python_docs.find_modules()[10:13]
    monkeypatch.setattr("gpt.data.python_docs.find_modules", lambda: modules)
    file = write_documents(tmp_path).path
    mixture = mix(DataConfig("mix", ["python_stdlib", file], [1, 3]), tmp_path / "cache")
    assert mixture.names == ("python_stdlib", "text")
    assert [source.metadata["corpus"] for source in mixture.sources] == ["python_stdlib", "text"]
