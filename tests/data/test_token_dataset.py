"""Tokens on disk: what is written, what is read, and what damage says."""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import gpt.data.token_dataset
from gpt.data.dataset_cache import read_checked_json, write_checked_json
from gpt.data.token_dataset import SPLITS, TokenDataset, find_cached_dataset, list_caches, open_cached
from gpt.data.token_files import token_dtype
from gpt.data.tokenizer import BYTE_PATTERN, Tokenizer, byte_tokenizer, gpt2_tokenizer
from harness import refusal
from models import write_prepared_corpus

IDS = {name: np.random.default_rng(7).integers(0, 257, count) for name, count in zip(SPLITS, (103, 31), strict=True)}


def write_folder(folder: Path, tokenizer: Tokenizer | None = None, **changes) -> Path:
    """A prepared corpus of `IDS`."""
    return write_prepared_corpus(folder, tokenizer, *IDS.values(), **changes)


def pairs_tokenizer(tokens: int) -> Tokenizer:
    """So many tokens without training: every byte, then pairs of bytes."""
    pairs = [bytes([i // 256, i % 256]) for i in range(tokens - 257)]
    ranks = {token: rank for rank, token in enumerate([bytes([byte]) for byte in range(256)] + pairs)}
    return Tokenizer("bpe", ranks, BYTE_PATTERN)


# --- ids on disk ---


@pytest.mark.parametrize(("tokens", "dtype"), [(257, "uint16"), (65_536, "uint16"), (65_537, "uint32")])
def test_width_of_the_ids(tmp_path, tokens, dtype):
    """The narrowest type that holds every id of the tokenizer, end-of-text among them."""
    tokenizer = pairs_tokenizer(tokens)
    assert tokenizer.vocab_size == tokens
    assert token_dtype(tokenizer.vocab_size) == np.dtype(dtype)
    assert np.iinfo(dtype).max >= tokenizer.end_of_text
    prepared = open_cached(write_folder(tmp_path / "folder", tokenizer=tokenizer))
    assert prepared.train[:].dtype == np.dtype(dtype)
    assert prepared.train[:].tolist() == IDS["train"].tolist()


# --- opening ---


def test_open(tmp_path):
    """The ids of both splits as arrays that cannot be changed."""
    prepared = open_cached(write_folder(tmp_path / "folder"))
    for found, ids in zip((prepared.train[:], prepared.validation), IDS.values(), strict=True):
        assert np.array_equal(found, ids)
        with pytest.raises(ValueError, match="read-only"):
            found[5:11] = 7
    assert prepared.tokenizer.to_dict() == byte_tokenizer().to_dict()
    assert prepared.metadata == read_checked_json(tmp_path / "folder/dataset.json")


def test_key_of_a_mixture(tmp_path):
    """Of one corpus it is that of its folder; of several all their keys, the shares and the tokenizer."""
    keys = [{"corpus": name, "tokenizer": {"name": "byte"}} for name in "ab"]
    sources = [open_cached(write_folder(tmp_path / key["corpus"], key=key)) for key in keys]
    assert TokenDataset((sources[0],), ("a",), (1000,)).key == keys[0]
    mixture = TokenDataset(tuple(sources), ("a", "b"), (701, 299))
    assert mixture.key == {"mix": keys, "shares": [701, 299], "tokenizer": {"name": "byte"}}
    assert mixture.train_tokens == 206
    assert mixture.tokenizer.name == "byte"


# --- damage ---


def truncate(folder: Path) -> None:
    """Two tokens fewer."""
    os.truncate(folder / "train.bin", 202)


def flip(file: Path) -> None:
    """One bit in the middle."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def edit_tokenizer(folder: Path, **changes) -> None:
    """Replace entries of the tokenizer."""
    stored = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(stored | changes))


def edit_unsealed(folder: Path) -> None:
    """One digit of the metadata."""
    text = (folder / "dataset.json").read_text()
    (folder / "dataset.json").write_text(text.replace('"tokens": 103', '"tokens": 203'))


SEAL = r"is damaged \(the content of dataset\.json does not match its seal\)"
NOTHING = r"holds no prepared text: make it with prepare\(\) of gpt\.data\.prepare"
DAMAGE = {
    "truncated": (truncate, r"cannot be read \(it has 202 bytes, not 206, .*\)"),
    "no file": (lambda folder: (folder / "train.bin").unlink(), r"cannot be read \(\[Errno 2\] No such file .*\)"),
    "no metadata": (lambda folder: (folder / "dataset.json").unlink(), NOTHING),
    "half of the metadata": (lambda folder: os.truncate(folder / "dataset.json", 101), r"is damaged \(.*: line \d.*\)"),
    "changed metadata": (edit_unsealed, SEAL),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), NOTHING),
    "changed tokenizer": (
        lambda folder: edit_tokenizer(folder, pattern="."),
        r"is damaged \(the tokenizer's pattern=.*\)",
    ),
    "foreign tokenizer": (
        lambda folder: edit_tokenizer(folder, **gpt2_tokenizer().to_dict()),
        r"is damaged \(the tokenizer is not the one in dataset.json\)",
    ),
    "a file in its place": (
        lambda folder: [shutil.rmtree(folder), folder.write_text("")],
        r"cannot be read \(Not a directory\); fix that, or move the file away",
    ),
}


@pytest.mark.promise("security.md#verified by its SHA-256")
@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_named(tmp_path, damage):
    """One line says what is wrong and what to delete."""
    inflict, reason = DAMAGE[damage]
    folder = write_folder(tmp_path / "folder")
    open_cached(folder)
    inflict(folder)
    said = refusal(open_cached, folder)
    has_hint = "; " in reason or reason == NOTHING
    hint = "" if has_hint else f"; delete {folder}, and it will be prepared again"
    assert re.fullmatch(rf"{folder}[^:]*: {reason}{hint}", said), said


@pytest.mark.promise("security.md#verified by its SHA-256")
@pytest.mark.parametrize("split", SPLITS)
def test_a_small_text_is_hashed_whenever_it_is_opened(tmp_path, monkeypatch, split):
    """A flipped bit is named; above the limit a file is hashed once, and when its size or its time has changed."""
    folder = write_folder(tmp_path / "folder")
    file, size = folder / f"{split}.bin", 2 * (103 + 31)
    monkeypatch.setattr(gpt.data.token_dataset, "VERIFY_BYTES", size - 1)
    open_cached(folder)
    status = file.stat()
    flip(file)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert len(open_cached(folder).validation) == 31
    monkeypatch.setattr(gpt.data.token_dataset, "VERIFY_BYTES", size)
    reason = "cannot be read (its SHA-256 is not the one in dataset.json)"
    assert refusal(open_cached, folder) == f"{file}: {reason}; delete {folder}, and it will be prepared again"
    monkeypatch.setattr(gpt.data.token_dataset, "VERIFY_BYTES", 0)
    os.utime(file)
    assert reason in refusal(open_cached, folder)


# --- what somebody else has written ---


def huge(metadata: dict) -> None:
    """As many tokens in one file as no disk holds, and in all."""
    split = metadata["splits"]["train"]
    split["files"][0][1] = split["tokens"] = 10**30


CHANGES: dict[str, tuple[Callable[[dict], object], str]] = {
    "a key without a tokenizer": (lambda m: m["key"].pop("tokenizer"), "it has no 'tokenizer'"),
    "a key that is a word": (lambda m: m.update(key="x"), "string indices must be integers.*"),
    "no train": (lambda m: m["splits"].pop("train"), "it has no 'train'"),
    "0 bytes": (lambda m: m["splits"]["validation"].update(bytes=0), "validation has 0 bytes"),
    "half a document": (lambda m: m["splits"]["train"].update(documents=0.5), "train has 0.5 documents"),
    "10^30 tokens": (huge, "train has 1000000000000000000000000000000 tokens"),
    "a token less": (lambda m: m["splits"]["train"].update(tokens=7), "the tokens of its train files do not add up"),
    "half a hash": (lambda m: m["splits"]["train"]["files"][0].__setitem__(2, "0" * 32), "'train.bin' with hash .*"),
    "files of numbers": (lambda m: m["splits"]["train"].update(files=[1, 2]), "cannot unpack non-iterable int object"),
}


@pytest.mark.promise("security.md#dataset.json")
@pytest.mark.parametrize("change", CHANGES)
def test_the_shape_of_the_metadata(tmp_path, change):
    """Whoever writes dataset.json can seal it: a line says what it lacks."""
    inflict, reason = CHANGES[change]
    folder = write_folder(tmp_path / "folder")
    metadata = read_checked_json(folder / "dataset.json")
    inflict(metadata)
    write_checked_json(folder / "dataset.json", metadata)
    assert re.fullmatch(rf"{folder}: is damaged \({reason}\); delete .*", refusal(open_cached, folder))


@pytest.mark.parametrize(
    ("name", "content"),
    [("dataset.json", b"[" * 100_000), ("dataset.json", b"\xff"), ("tokenizer.json", b"[" * 100_000)],
    ids=lambda value: ascii(value)[:23],
)
def test_other_files_than_metadata(tmp_path, name, content):
    """Nested deeper than Python reads, or no text."""
    folder = write_folder(tmp_path / "folder")
    (folder / name).write_bytes(content)
    assert "is damaged (" in refusal(open_cached, folder)


@pytest.mark.promise("security.md#dataset.json")
def test_ids_are_in_the_vocabulary(tmp_path):
    """A file with its hash may hold other ids than the tokenizer has."""
    folder = write_prepared_corpus(tmp_path / "folder", None, [257] * 50)
    said = refusal(open_cached, folder)
    assert "train.bin: cannot be read (it has the id 257, but the vocabulary has only 257 entries)" in said


def test_what_version_0_5_prepared(tmp_path):
    """Its manifest.json has no lists of files, or one of shards; both open, and the cache finds the first."""
    folder = write_folder(tmp_path / "folder", key={"corpus": "a", "tokenizer": {}})
    metadata = read_checked_json(folder / "dataset.json")
    (folder / "dataset.json").unlink()
    for split in metadata["splits"].values():
        [[_, _, split["sha256"]]] = split.pop("files")
    write_checked_json(folder / "manifest.json", metadata)
    source = open_cached(folder)
    assert source.train[:].tolist() == IDS["train"].tolist()
    assert source.validation.tolist() == IDS["validation"].tolist()
    [cached] = find_cached_dataset({"corpus": metadata["key"]}, byte_tokenizer(), tmp_path)
    assert cached.metadata == source.metadata
    shards = []
    for i, ids in enumerate(np.split(IDS["train"].astype("uint16"), [40])):
        ids.tofile(folder / f"train-000000-{i:02}.bin")
        shards.append([f"train-000000-{i:02}.bin", len(ids), hashlib.sha256(ids.tobytes()).hexdigest()])
    write_checked_json(folder / "manifest.json", metadata | {"shards": shards})
    (folder / "train.bin").unlink()
    assert open_cached(folder).train[:].tolist() == IDS["train"].tolist()


@pytest.mark.promise("security.md#They open only a text with the hashes")
@pytest.mark.parametrize("name", ["cache", "cache/", None, 7, "", "no\0name", "x" * 5000, "nowhere"])
def test_the_cache_that_a_checkpoint_names(tmp_path, name):
    """Its text is found in the default cache, and in the folder that the run named, if it is one."""
    key = {"corpus": "a", "tokenizer": {}}
    write_folder(tmp_path / "cache/folder", key=key)
    path = str(tmp_path / name) if isinstance(name, str) and name else name
    checkpoint = {"corpus": key, "config": {"data": {"cache": path}}}
    is_there = str(name).startswith("cache")
    assert len(find_cached_dataset(checkpoint, byte_tokenizer(), tmp_path / "default")) == is_there
    assert len(find_cached_dataset(checkpoint, byte_tokenizer(), tmp_path / "cache")) == 1
    other = checkpoint | {"corpus": {"corpus": "b", "tokenizer": {}}}
    assert find_cached_dataset(other, byte_tokenizer(), tmp_path / "default") == []


@pytest.mark.promise("security.md#unless that is on a network")
def test_no_folder_of_a_network_is_opened(tmp_path):
    """On Windows that would send the login of the user to a stranger."""
    for name in ("//server/share", r"\\server\share"):
        assert list_caches({"config": {"data": {"cache": name}}}, tmp_path) == [tmp_path]
    assert list_caches({}, tmp_path) == list_caches({"config": 7}, tmp_path) == [tmp_path]


# --- the validation text ---


@pytest.mark.parametrize("block", [1, 2, 7, 31, 100_003])
def test_validation_text(monkeypatch, tmp_path, block):
    """The validation text comes in blocks, without end-of-text, wherever a character ends."""
    end = byte_tokenizer().end_of_text
    ids = [end, *"naïve €".encode(), end, end, *"😀\n".encode()]
    monkeypatch.setitem(IDS, "validation", np.array(ids))
    monkeypatch.setattr(gpt.data.token_dataset, "DECODED_TOKENS", block)
    blocks = list(open_cached(write_folder(tmp_path / "folder")).validation_text())
    assert b"".join(blocks) == "naïve €😀\n".encode()
    assert max(map(len, blocks)) <= block
    assert len(blocks) == -(-len(ids) // block)
