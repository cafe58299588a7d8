"""Tokens on disk: what is written, what is read, and what damage says."""

import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

import gpt.text.prepared
from gpt.text.cache import read_json
from gpt.text.prepared import SPLITS, Corpora, open_prepared, width
from gpt.text.tokenizer import BYTE_PATTERN, Tokenizer, byte_tokenizer, gpt2_tokenizer
from harness import refusal
from model_files import write_prepared

IDS = {name: np.random.default_rng(7).integers(0, 257, count) for name, count in zip(SPLITS, (103, 31), strict=True)}


def write_folder(folder: Path, tokenizer: Tokenizer | None = None, **changes) -> Path:
    """A prepared corpus of `IDS`."""
    return write_prepared(folder, tokenizer, *IDS.values(), **changes)


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
    assert width(tokenizer) == np.dtype(dtype)
    assert np.iinfo(dtype).max >= tokenizer.end_of_text
    prepared = open_prepared(write_folder(tmp_path / "folder", tokenizer=tokenizer))
    assert prepared.train[:].dtype == np.dtype(dtype)
    assert prepared.train[:].tolist() == IDS["train"].tolist()


# --- opening ---


def test_open(tmp_path):
    """The ids of both splits as arrays that cannot be changed."""
    prepared = open_prepared(write_folder(tmp_path / "folder"))
    for name, ids in IDS.items():
        assert np.array_equal(getattr(prepared, name), ids)
        with pytest.raises(ValueError, match="read-only"):
            getattr(prepared, name)[5:11] = 7
    assert prepared.tokenizer.to_dict() == byte_tokenizer().to_dict()
    assert prepared.manifest == read_json(tmp_path / "folder/manifest.json")


def test_key_of_a_mixture(tmp_path):
    """Of one corpus it is that of its folder; of several all their keys, the shares and the tokenizer."""
    keys = [{"corpus": name, "tokenizer": {"name": "byte"}} for name in "ab"]
    sources = [open_prepared(write_folder(tmp_path / key["corpus"], key=key)) for key in keys]
    assert Corpora((sources[0],), ("a",), (1000,)).key == keys[0]
    mixture = Corpora(tuple(sources), ("a", "b"), (701, 299))
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
    """One digit of the manifest."""
    text = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(text.replace('"tokens": 103', '"tokens": 203'))


SEAL = r"the content of manifest\.json does not match its seal"
GONE = r"\[Errno 2\] No such file or directory: '[^']+/{}'"
DAMAGE = {
    "truncated": (truncate, r"train\.bin has 101 tokens where the manifest says 103"),
    "half a token": (lambda folder: os.truncate(folder / "train.bin", 101), r"[^\n]+ not a multiple of [^\n]+"),
    "empty file": (lambda folder: os.truncate(folder / "train.bin", 0), r"[^\n]+ empty file"),
    "no file": (lambda folder: (folder / "train.bin").unlink(), GONE.format("train.bin")),
    "no manifest": (lambda folder: (folder / "manifest.json").unlink(), GONE.format("manifest.json")),
    "half a manifest": (lambda folder: os.truncate(folder / "manifest.json", 101), r"[^\n]+: line \d[^\n]+"),
    "manifest of another kind": (lambda folder: (folder / "manifest.json").write_text("[7]"), SEAL),
    "changed manifest": (edit_unsealed, SEAL),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), GONE.format("tokenizer.json")),
    "half a tokenizer": (lambda folder: os.truncate(folder / "tokenizer.json", 101), r"[^\n]+: line \d[^\n]+"),
    "changed tokenizer": (lambda folder: edit_tokenizer(folder, pattern="."), r"the tokenizer's pattern=[^\n]+"),
    "foreign tokenizer": (
        lambda folder: edit_tokenizer(folder, **gpt2_tokenizer().to_dict()),
        "the tokenizer is not the one in the manifest",
    ),
    "a file in its place": (lambda folder: [shutil.rmtree(folder), folder.write_text("")], r"\[Errno 20\] [^\n]+"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_named(tmp_path, damage):
    """One line says what is wrong and what to delete."""
    inflict, reason = DAMAGE[damage]
    folder = write_folder(tmp_path / "folder")
    open_prepared(folder)
    inflict(folder)
    said = refusal(open_prepared, folder)
    assert re.fullmatch(rf"{folder}: is damaged \({reason}\); delete {folder} and it will be made anew", said), said


@pytest.mark.parametrize("split", SPLITS)
def test_tokens_are_hashed_unless_the_folder_is_large(tmp_path, monkeypatch, split):
    """A flipped bit is named; above the limit only sizes are compared, so that a corpus of gigabytes opens at once."""
    folder = write_folder(tmp_path / "folder")
    flip(folder / f"{split}.bin")
    size = 2 * (103 + 31)
    monkeypatch.setattr(gpt.text.prepared, "VERIFY_BYTES", size)
    reason = "damaged (its hash is not the one in the manifest); delete"
    assert refusal(open_prepared, folder).startswith(f"{folder}/{split}.bin: {reason} {folder} and")
    monkeypatch.setattr(gpt.text.prepared, "VERIFY_BYTES", size - 1)
    assert len(open_prepared(folder).validation) == 31
    truncate(folder)
    assert "train.bin has 101 tokens where" in refusal(open_prepared, folder)


# --- the validation text ---


@pytest.mark.parametrize("block", [1, 2, 7, 31, 100_003])
def test_validation_bytes(monkeypatch, tmp_path, block):
    """The validation text comes in blocks, without end-of-text, wherever a character ends."""
    end = byte_tokenizer().end_of_text
    ids = [end, *"naïve €".encode(), end, end, *"😀\n".encode()]
    monkeypatch.setitem(IDS, "validation", np.array(ids))
    monkeypatch.setattr(gpt.text.prepared, "DECODED_TOKENS", block)
    blocks = list(open_prepared(write_folder(tmp_path / "folder")).validation_bytes())
    assert b"".join(blocks) == "naïve €😀\n".encode()
    assert max(map(len, blocks)) <= block
    assert len(blocks) == -(-len(ids) // block)
