"""Preparing: the tokens of every document in order, once, and one line for a text that is too short."""

import hashlib
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from gpt.data.corpus import open_corpus
from gpt.data.data_config import DataConfig
from gpt.data.prepare import TooShortError
from gpt.data.shards import TOKENS_FORMAT
from gpt.data.split import scan_chunks
from gpt.data.token_dataset import SPLITS
from gpt.data.tokenizer import TokenizerConfig, byte_tokenizer, gpt2_tokenizer, train_bpe
from harness import refusal
from workshop import (
    CONTEXT,
    DOCUMENTS,
    LARGE_SHARDS,
    SMALL_SHARDS,
    cache_entries,
    dataset_folder,
    expected_ids,
    expected_split_ids,
    patched_constants,
    prepare_source,
    read_files,
    read_joined_files,
    split_documents,
    split_ids,
    write_documents,
    write_files,
    write_text,
)

# --- what is written ---


@pytest.mark.parametrize("name", ["bpe", "gpt2", "byte"])
@pytest.mark.parametrize("values", [{}, LARGE_SHARDS], ids=["as it is", "in small portions"])
def test_tokens_are_the_split(tmp_path, name, values):
    """Each split is its documents, each after an end-of-text, in ids of the configured tokenizer."""
    data = write_documents(tmp_path)
    with patched_constants(values):
        prepared = prepare_source(data, tmp_path / "cache", TokenizerConfig(name, 307))
        train, validation = split_documents(data)
    expected = {"bpe": lambda: train_bpe(train, 307), "gpt2": gpt2_tokenizer, "byte": byte_tokenizer}[name]()
    assert prepared.tokenizer.to_dict() == expected.to_dict()
    assert split_ids(prepared) == (expected_ids(train, expected), expected_ids(validation, expected))
    assert len(train) > 40 and len(validation) > 1


def test_tokens_computed_by_hand(tmp_path):
    """Of ten characters, nine are for training and one for validation. The printed lines count them."""
    printed: list[str] = []
    prepared = prepare_source(
        write_text(tmp_path, "abcdefgh\né"), tmp_path / "cache", context_length=7, print_line=printed.append
    )
    assert split_ids(prepared) == ([256, 97, 98, 99, 100, 101, 102, 103, 104, 10], [256, 0xC3, 0xA9])
    assert printed == [
        "reading text (1 file)",
        "prepared 11 bytes as 13 tokens (0.85 bytes per token, vocabulary 257), of which 2 bytes are for validation",
    ]


def test_dataset_json_counts_and_hashes(tmp_path):
    """dataset.json holds the counts of the texts and the hashes of the files."""
    data, cache = write_documents(tmp_path), tmp_path / "cache"
    prepared = prepare_source(data, cache)
    folder, counts = dataset_folder(cache), {}
    for name, documents in zip(SPLITS, split_documents(data), strict=True):
        size = sum(len(document.encode()) for document in documents)
        tokens = size + len(documents)
        file = {"train": "train-000000.bin", "validation": "validation.bin"}[name]
        ids = (folder / file).read_bytes()
        files = [[file, tokens, hashlib.sha256(ids).hexdigest()]]
        counts[name] = {"tokens": tokens, "bytes": size, "documents": len(documents), "files": files}
        assert len(getattr(prepared, name)) == tokens == len(ids) / 2
    assert counts["train"]["documents"] + counts["validation"]["documents"] == 53
    corpus = open_corpus(data, cache).sha256(cache)
    key = {"format": TOKENS_FORMAT, "corpus": corpus, "tokenizer": {"name": "byte"}, "validation_bytes": 1_000_000}
    assert prepared.metadata == {
        "key": key,
        "corpus": "text",
        "tokenizer": byte_tokenizer().sha256,
        "splits": counts,
    }
    stored = json.loads((folder / "dataset.json").read_text())
    assert len(stored.pop("seal")) == 64
    assert stored == prepared.metadata
    assert read_files(folder).keys() == {"dataset.json", "tokenizer.json", "train-000000.bin", "validation.bin"}
    assert re.fullmatch("text-byte-[0-9a-f]{16}", folder.name)


@pytest.mark.parametrize("shard_bytes", [10**9, 1])
@pytest.mark.parametrize("name", ["bpe", "byte"])
def test_validation_path_replaces_the_split(tmp_path, name, shard_bytes):
    """The given validation text is not trained on, even if it lies in the folder. It is part of the identity."""
    write_files(tmp_path / "text", DOCUMENTS[:40])
    (tmp_path / "text/007.txt").rename(tmp_path / "text/valid.txt")
    train, validation = DOCUMENTS[:7] + DOCUMENTS[8:40], DOCUMENTS[7:8]
    folder, file = str(tmp_path / "text"), str(tmp_path / "text/valid.txt")
    with patched_constants({"gpt.data.scan.SHARD_BYTES": shard_bytes}):
        data = DataConfig("text", folder, validation_path=file)
        prepared = prepare_source(data, tmp_path / "cache", TokenizerConfig(name, 307))
    expected = train_bpe(train, 307) if name == "bpe" else byte_tokenizer()
    assert prepared.tokenizer.sha256 == expected.sha256
    assert split_ids(prepared) == (expected_ids(train, expected), expected_ids(validation, expected))
    assert prepared.metadata["splits"]["validation"]["documents"] == 1
    without = prepare_source(DataConfig("text", folder), tmp_path / "cache", TokenizerConfig(name, 307))
    assert without.metadata["key"]["corpus"] != prepared.metadata["key"]["corpus"]


def test_mistaken_validation_text(tmp_path):
    """Nothing to train on, nothing to validate with, or a corpus that has its own."""
    write_files(tmp_path / "text", DOCUMENTS[:3])
    folder = str(tmp_path / "text")
    printed = refusal(prepare_source, DataConfig("text", folder, validation_path=folder), tmp_path / "cache")
    assert printed == f"data.path={folder!r} has no text but that for validation: give text to train on"
    printed = refusal(DataConfig, "python_docs", validation_path=folder)
    assert "works only with data=text and data=tokens: leave it out" in printed
    assert "names no text file" in refusal(
        prepare_source, DataConfig("text", folder, validation_path="none"), tmp_path / "cache"
    )


@pytest.mark.parametrize(
    ("write", "documents"),
    [
        (write_documents, DOCUMENTS),
        (write_files, DOCUMENTS[:11]),
        (write_files, ["".join(DOCUMENTS[:31])]),
    ],
    ids=["many in one file", "files", "one"],
)
def test_sizes_of_portions_do_not_change_tokens(tmp_path, documents, write):
    """Sample size, task size and shard size do not change the tokens."""
    data = write(tmp_path / "text", documents)
    results = []
    for i, changes in enumerate(
        [
            {},
            {"gpt.data.split.SAMPLE_BYTES": 10**9},
            {"gpt.data.shards.TASK_CHARS": 1},
            {"gpt.data.shards.TASK_CHARS": 10**9},
            {"gpt.data.scan.SHARD_BYTES": 1},
            {"gpt.data.scan.SHARD_BYTES": 10**9},
        ]
    ):
        with patched_constants(SMALL_SHARDS | changes):
            prepare_source(data, tmp_path / str(i))
        results.append(read_joined_files(dataset_folder(tmp_path / str(i))))
    assert results == [results[0]] * 6


def test_sample_to_train_the_tokenizer(tmp_path):
    """A large text is sampled at even distances, without its validation text, and a line reports it."""
    data, printed = write_documents(tmp_path), list[str]()
    with patched_constants(SMALL_SHARDS):
        prepared = prepare_source(data, tmp_path / "cache", TokenizerConfig("bpe", 307), print_line=printed.append)
        found = scan_chunks((piece for _, _, piece in open_corpus(data, tmp_path).chunks()), data.validation_bytes)
        sample = list(found.training_sample())
        train, _ = split_documents(data)
    assert found.stride == 8
    assert f"training the byte-pair encoding on an even sample, one in {found.stride} chunks of the text" in printed
    assert prepared.tokenizer.to_dict() == train_bpe(sample, 307).to_dict()
    assert prepared.tokenizer.sha256 != train_bpe(train, 307).sha256


# --- when it is written ---


def test_second_time_comes_from_the_cache(tmp_path):
    """The cache serves the same text from another folder, and for another context, without a change to its files."""
    printed: list[str] = []
    first = prepare_source(write_documents(tmp_path), tmp_path / "cache", print_line=printed.append)
    assert [line.split()[0] for line in printed] == ["reading", "the", "prepared"]
    folder = dataset_folder(tmp_path / "cache")
    times = {file: file.stat().st_mtime_ns for file in [tmp_path / "cache", folder, *folder.iterdir()]}
    for place, context_length in (("", CONTEXT), ("elsewhere", CONTEXT), ("", 101)):
        data = write_documents(tmp_path / place)
        again = prepare_source(data, tmp_path / "cache", context_length=context_length, print_line=printed.append)
        assert split_ids(again) == split_ids(first)
        assert again.metadata == first.metadata
    assert printed[3:] == [f"text is already prepared, in {folder}"] * 3
    assert {file: file.stat().st_mtime_ns for file in [tmp_path / "cache", folder, *folder.iterdir()]} == times


def test_a_likely_separator_is_reported(tmp_path):
    """A likely separator is counted and stays text. Once it is configured, it belongs to no document."""
    stories = [f"Story {i}. The river ran under bridge {i * 7 % 31}." for i in range(300)]
    text, printed = "\n<|endoftext|>\n".join(stories), list[str]()
    data = write_text(tmp_path, text)
    whole = prepare_source(data, tmp_path / "cache", print_line=printed.append)
    assert printed[1] == (
        "the text contains <|endoftext|> 299 times as ordinary characters: data.separator='<|endoftext|>' "
        "makes it separate the documents of plain text"
    )
    assert sum(split["documents"] for split in whole.metadata["splits"].values()) == 2
    data = replace(data, separator="<|endoftext|>")
    parted = prepare_source(data, tmp_path / "cache", print_line=printed.append)
    assert [line.split()[0] for line in printed[3:]] == ["reading", "prepared"]
    train, validation = split_documents(data)
    assert sorted([*train, *validation]) == sorted(stories)
    assert split_ids(parted) == expected_split_ids(data, byte_tokenizer())


def test_every_change_is_another_folder(tmp_path):
    """Each change of text, tokenizer, vocabulary or validation size has a folder of its own."""
    cache, data = tmp_path / "cache", write_documents(tmp_path)
    limited = DataConfig("text", data.path, validation_bytes=101)
    sources = [
        prepare_source(data, cache),
        prepare_source(limited, cache),
        prepare_source(data, cache, TokenizerConfig("bpe", 263)),
        prepare_source(data, cache, TokenizerConfig("bpe", 269)),
        prepare_source(data, cache, tokenizer=byte_tokenizer()),
        prepare_source(write_documents(tmp_path, DOCUMENTS[::-1]), cache),
    ]
    assert len(cache_entries(cache)) == len(sources)
    assert [source.tokenizer.vocab_size for source in sources] == [257, 257, 263, 269, 257, 257]
    sizes = [source.metadata["splits"]["validation"]["bytes"] for source in sources]
    assert sizes[1] <= 101 < sizes[0]


# --- too short ---


@pytest.mark.parametrize(
    ("text", "tokens"), [("hello world", 10), ("é" * 7, 13), ("ab", 2), ("a", 0), ("\ufeffa", 0)], ids=ascii
)
def test_a_short_text_is_refused_with_its_longest_context(tmp_path, text, tokens):
    """The error holds the longest context that the text fills, if there is one, and that one works; nothing is left."""
    cache, data = tmp_path / "cache", write_text(tmp_path, text)
    with pytest.raises(TooShortError) as caught:
        prepare_source(data, cache)
    advice = f"fewer than a context of {CONTEXT} and a target: give more text"
    assert str(caught.value) == f"the training text has {tokens} tokens, {advice}"
    assert caught.value.longest_context == max(0, tokens - 1)
    assert cache_entries(cache) == []
    if tokens:
        assert len(prepare_source(data, cache, context_length=tokens - 1).train) == tokens
        assert f"has {tokens} tokens" in refusal(
            prepare_source, data, cache, context_length=tokens
        )  # and what is prepared stays
        assert len(cache_entries(cache)) == 1


@pytest.mark.parametrize("documents", [[], [""], ["", "", ""]], ids=["no lines", "an empty one", "empty ones"])
def test_a_text_without_words_is_refused(tmp_path, documents):
    """A file without text is named, and nothing stays in the cache."""
    data, cache = write_documents(tmp_path, documents), tmp_path / "cache"
    if not documents:
        Path(data.path).write_text("\n\n")
    hint = "give a text, or its key with data.text_field="
    assert refusal(prepare_source, data, cache) == f"{data.path}: every document is empty; {hint}"
    assert cache_entries(cache) == []
