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
from gpt.text.prepared import SPLITS, Corpora, open_folder, width
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
    prepared = open_folder(write_folder(tmp_path / "folder", tokenizer=tokenizer))
    assert prepared.at_hand.dtype == np.dtype(dtype)
    assert prepared.at_hand.tolist() == IDS["train"].tolist()


# --- opening ---


def test_open(tmp_path):
    """The ids of both splits as arrays that cannot be changed."""
    prepared = open_folder(write_folder(tmp_path / "folder"))
    for found, ids in zip((prepared.at_hand, prepared.validation), IDS.values(), strict=True):
        assert np.array_equal(found, ids)
        with pytest.raises(ValueError, match="read-only"):
            found[5:11] = 7
    assert prepared.tokenizer.to_dict() == byte_tokenizer().to_dict()
    assert prepared.manifest == read_json(tmp_path / "folder/manifest.json")


def test_key_of_a_mixture(tmp_path):
    """Of one corpus it is that of its folder; of several all their keys, the shares and the tokenizer."""
    keys = [{"corpus": name, "tokenizer": {"name": "byte"}} for name in "ab"]
    sources = [open_folder(write_folder(tmp_path / key["corpus"], key=key)) for key in keys]
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


SEAL = r"is damaged \(the content of manifest\.json does not match its seal\)"
NOTHING = r"holds no prepared text; python -m gpt\.prepare --to \S+ makes it"
DAMAGE = {
    "truncated": (truncate, r"cannot be read \(it has 101 tokens where the manifest says 103\)"),
    "half a token": (
        lambda folder: os.truncate(folder / "train.bin", 101),
        r"cannot be read \(.* not a multiple of .*\)",
    ),
    "empty file": (lambda folder: os.truncate(folder / "train.bin", 0), r"cannot be read \(.* empty file\)"),
    "no file": (lambda folder: (folder / "train.bin").unlink(), r"cannot be read \(\[Errno 2\] No such file .*\)"),
    "no manifest": (lambda folder: (folder / "manifest.json").unlink(), NOTHING),
    "half a manifest": (lambda folder: os.truncate(folder / "manifest.json", 101), r"is damaged \(.*: line \d.*\)"),
    "manifest of another kind": (lambda folder: (folder / "manifest.json").write_text("[7]"), SEAL),
    "changed manifest": (edit_unsealed, SEAL),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), NOTHING),
    "half a tokenizer": (lambda folder: os.truncate(folder / "tokenizer.json", 101), r"is damaged \(.*: line \d.*\)"),
    "changed tokenizer": (
        lambda folder: edit_tokenizer(folder, pattern="."),
        r"is damaged \(the tokenizer's pattern=.*\)",
    ),
    "foreign tokenizer": (
        lambda folder: edit_tokenizer(folder, **gpt2_tokenizer().to_dict()),
        r"is damaged \(the tokenizer is not the one in the manifest\)",
    ),
    "a file in its place": (
        lambda folder: [shutil.rmtree(folder), folder.write_text("")],
        r"cannot be read \(Not a directory\); fix that, or move the file away",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_named(tmp_path, damage):
    """One line says what is wrong and what to delete."""
    inflict, reason = DAMAGE[damage]
    folder = write_folder(tmp_path / "folder")
    open_folder(folder)
    inflict(folder)
    said = refusal(open_folder, folder)
    remedy = "" if "; " in reason else f"; delete {folder} and it will be made anew"
    assert re.fullmatch(rf"{folder}[^:]*: {reason}{remedy}", said), said


@pytest.mark.parametrize("split", SPLITS)
def test_a_small_text_is_hashed_whenever_it_is_opened(tmp_path, monkeypatch, split):
    """A flipped bit is named; above the limit a file is hashed once, and when its size or its time has changed."""
    folder = write_folder(tmp_path / "folder")
    file, size = folder / f"{split}.bin", 2 * (103 + 31)
    monkeypatch.setattr(gpt.text.prepared, "VERIFY_BYTES", size - 1)
    open_folder(folder)
    status = file.stat()
    flip(file)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert len(open_folder(folder).validation) == 31
    monkeypatch.setattr(gpt.text.prepared, "VERIFY_BYTES", size)
    reason = "cannot be read (its SHA-256 is not the one in the manifest)"
    assert refusal(open_folder, folder) == f"{file}: {reason}; delete {folder} and it will be made anew"
    monkeypatch.setattr(gpt.text.prepared, "VERIFY_BYTES", 0)
    os.utime(file)
    assert reason in refusal(open_folder, folder)


# --- the validation text ---


@pytest.mark.parametrize("block", [1, 2, 7, 31, 100_003])
def test_validation_bytes(monkeypatch, tmp_path, block):
    """The validation text comes in blocks, without end-of-text, wherever a character ends."""
    end = byte_tokenizer().end_of_text
    ids = [end, *"naïve €".encode(), end, end, *"😀\n".encode()]
    monkeypatch.setitem(IDS, "validation", np.array(ids))
    monkeypatch.setattr(gpt.text.prepared, "DECODED_TOKENS", block)
    blocks = list(open_folder(write_folder(tmp_path / "folder")).validation_bytes())
    assert b"".join(blocks) == "naïve €😀\n".encode()
    assert max(map(len, blocks)) <= block
    assert len(blocks) == -(-len(ids) // block)
