"""Tokens on disk: files of a bounded size as one array, what is written where, and what damage says."""

import hashlib
import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gpt.text.shards
from gpt.text.cache import read_json, write_json
from gpt.text.shards import SPLITS, Corpora, Tokens, Writer, open_shards, shard_files, width
from gpt.text.tokenizer import BYTE_PATTERN, Tokenizer, byte_tokenizer, gpt2_tokenizer
from harness import refusal

EXAMPLES = settings(max_examples=100, deadline=None, derandomize=True, database=None)
IDS = {name: np.random.default_rng(7).integers(0, 257, count) for name, count in zip(SPLITS, (103, 31), strict=True)}


def write_folder(folder: Path, shard_bytes: int = 50, tokenizer: Tokenizer | None = None, **changes) -> Path:
    """A prepared corpus in the obvious way: files of so many bytes, and what the manifest says of them."""
    tokenizer = tokenizer or byte_tokenizer()
    dtype = np.dtype("uint16" if tokenizer.vocab_size <= 65_536 else "uint32")
    per_file = shard_bytes // dtype.itemsize
    folder.mkdir(parents=True)
    splits = {}
    for name, ids in IDS.items():
        contents = [ids[at : at + per_file].astype(dtype).tobytes() for at in range(0, len(ids), per_file)]
        for number, content in enumerate(contents):
            (folder / f"{name}-{number:05}.bin").write_bytes(content)
        splits[name] = {"tokens": len(ids), "sha256": [hashlib.sha256(content).hexdigest() for content in contents]}
    manifest = {"tokenizer": tokenizer.sha256, "dtype": dtype.name, "shard_bytes": shard_bytes, "splits": splits}
    write_json(folder / "manifest.json", manifest | changes)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer.to_dict()))
    return folder


def pairs_tokenizer(tokens: int) -> Tokenizer:
    """So many tokens without training: every byte, then pairs of bytes."""
    pairs = [bytes([i // 256, i % 256]) for i in range(tokens - 257)]
    ranks = {token: rank for rank, token in enumerate([bytes([byte]) for byte in range(256)] + pairs)}
    return Tokenizer("bpe", ranks, BYTE_PATTERN)


def write_files(folder: Path, ids: np.ndarray, per_file: int) -> Tokens:
    """An array in files of so many ids."""
    files = shard_files(folder, "train", -(-len(ids) // per_file))
    for number, file in enumerate(files):
        ids[number * per_file : (number + 1) * per_file].tofile(file)
    return Tokens(files, ids.dtype)


# --- several files as one array ---


@pytest.mark.parametrize("per_file", [1, 7, 100, 101, 1000])
@settings(EXAMPLES, max_examples=50)
@given(st.data())
def test_tokens_are_one_array(tmp_path_factory, per_file, data):
    """Any slice and any array of indices, in any shape and order, gives what the whole array gives."""
    ids = np.random.default_rng(3).integers(0, 50_000, 101).astype(np.uint16)
    tokens = write_files(tmp_path_factory.mktemp("tokens"), ids, per_file)
    assert len(tokens) == 101
    bounds = st.none() | st.integers(-130, 130)
    part = slice(data.draw(bounds), data.draw(bounds), data.draw(st.sampled_from([None, 1, 3, -1, -7])))
    assert np.array_equal(tokens[part], ids[part])
    shape = data.draw(st.sampled_from([(0,), (1,), (13,), (2, 3), (3, 5, 2)]))
    count = int(np.prod(shape))
    drawn = data.draw(st.lists(st.integers(0, 100), min_size=count, max_size=count))
    for kind in (np.int64, np.uint64):
        index = np.array(drawn, dtype=kind).reshape(shape)
        assert tokens[index].dtype == np.uint16
        assert tokens[index].shape == shape
        assert np.array_equal(tokens[index], ids[index])


@pytest.mark.parametrize("per_file", [7, 1000])
def test_beyond_the_end(tmp_path, per_file):
    """There is nothing, in one file and in several."""
    tokens = write_files(tmp_path, np.arange(101, dtype=np.uint16), per_file)
    for index in (101, 105, 10_000):
        with pytest.raises(IndexError):
            tokens[np.array([3, index])]


@pytest.mark.parametrize("per_file", [7, 1000])
def test_tokens_are_read_only(tmp_path, per_file):
    """What is done to ids that were read is not done to the file."""
    ids = np.arange(101, dtype=np.uint16)
    tokens = write_files(tmp_path, ids, per_file)
    for index in (slice(5, 11), np.arange(5, 11)):
        tokens[index][:] = 7
        assert np.array_equal(tokens[:], ids)
    with pytest.raises(TypeError):
        tokens[5:11] = 7


@pytest.mark.parametrize(("tokens", "dtype"), [(257, "uint16"), (65_536, "uint16"), (65_537, "uint32")])
def test_width_of_the_ids(tmp_path, tokens, dtype):
    """The narrowest type that holds every id of the tokenizer, end-of-text among them."""
    tokenizer = pairs_tokenizer(tokens)
    assert tokenizer.vocab_size == tokens
    assert width(tokenizer) == np.dtype(dtype)
    assert np.iinfo(dtype).max >= tokenizer.end_of_text
    shards = open_shards(write_folder(tmp_path / "folder", tokenizer=tokenizer))
    assert shards.train[:].dtype == np.dtype(dtype)
    assert shards.train[:].tolist() == IDS["train"].tolist()


# --- writing ---


@EXAMPLES
@given(st.integers(1, 23), st.integers(0, 101), st.lists(st.integers(0, 40), max_size=8), st.sampled_from(["u2", "u4"]))
def test_portions_do_not_matter(tmp_path_factory, per_file, length, portions, kind):
    """In whatever portions ids arrive, the files are those of the whole, each but the last one full."""
    folder, dtype = tmp_path_factory.mktemp("written"), np.dtype(kind)
    ids = np.arange(1, length + 1, dtype=dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpt.text.shards, "SHARD_BYTES", per_file * dtype.itemsize + dtype.itemsize - 1)
        writer = Writer(folder, "train", dtype)
    for part in np.split(ids, np.minimum(np.cumsum([0, *portions]), length)):
        writer.append(part)
    writer.close()
    assert writer.length == length
    files = sorted(folder.iterdir())
    assert files == shard_files(folder, "train", -(-length // per_file))
    assert [np.fromfile(file, dtype).tolist() for file in files] == [
        ids[at : at + per_file].tolist() for at in range(0, length, per_file)
    ]
    assert writer.hashes == [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]


@pytest.mark.slow
@settings(EXAMPLES, max_examples=40)
@given(st.integers(1, 23), st.integers(0, 101), st.integers(0, 101), st.booleans())
def test_going_on(tmp_path_factory, per_file, length, more, torn):
    """After any number of ids, whatever lies behind them, the files become those of one that was not disturbed."""
    folder, dtype = tmp_path_factory.mktemp("written"), np.dtype("u2")
    ids = np.arange(1, length + more + 1, dtype=dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpt.text.shards, "SHARD_BYTES", 2 * per_file)
        writer = Writer(folder, "train", dtype)
        writer.append(ids[:length])
        writer.flush()
        known = (writer.length, list(writer.hashes), writer.digest)
        writer.append(np.full(3 * more + 1, 999, dtype))  # what the journal does not know of
        writer.close()
        if torn:
            with shard_files(folder, "train", len(known[1]) + 1)[-1].open("ab") as stream:
                stream.write(b"\xff")
        writer = Writer(folder, "train", dtype, *known)
        writer.append(ids[length:])
        writer.close()
    files = shard_files(folder, "train", -(-len(ids) // per_file))
    assert writer.length == len(ids)
    assert b"".join(file.read_bytes() for file in files) == ids.tobytes()
    assert writer.hashes == [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]


# --- opening ---


@pytest.mark.parametrize("shard_bytes", [2, 3, 50, 62, 206, 1 << 28])
def test_open(tmp_path, shard_bytes):
    """One file or many, the last ones full or not."""
    shards = open_shards(write_folder(tmp_path / "folder", shard_bytes))
    for name, ids in IDS.items():
        assert len(getattr(shards, name)) == len(ids)
        assert np.array_equal(getattr(shards, name)[:], ids)
    assert shards.tokenizer.to_dict() == byte_tokenizer().to_dict()
    assert shards.manifest == read_json(tmp_path / "folder/manifest.json")


def test_key_of_a_mixture(tmp_path):
    """Of one corpus it is that of its folder; of several all their keys, the shares and the tokenizer."""
    keys = [{"corpus": name, "tokenizer": {"name": "byte"}} for name in "ab"]
    sources = [open_shards(write_folder(tmp_path / key["corpus"], key=key)) for key in keys]
    assert Corpora((sources[0],), ("a",), (1000,)).key == keys[0]
    mixture = Corpora(tuple(sources), ("a", "b"), (701, 299))
    assert mixture.key == {"mix": keys, "shares": [701, 299], "tokenizer": {"name": "byte"}}
    assert json.loads(json.dumps(mixture.key)) == mixture.key
    assert mixture.train_tokens == 206
    assert mixture.tokenizer.name == "byte"


# --- damage ---


def truncate(folder: Path) -> None:
    """Two tokens fewer in the second file."""
    os.truncate(folder / "train-00001.bin", 46)


def flip(folder: Path) -> None:
    """One bit in the middle of the second file of the second split."""
    content = bytearray((folder / "validation-00001.bin").read_bytes())
    content[len(content) // 2] ^= 1
    (folder / "validation-00001.bin").write_bytes(content)


def edit_manifest(folder: Path, **changes) -> None:
    """Replace entries of the manifest; `None` takes them out."""
    manifest = read_json(folder / "manifest.json") | changes
    write_json(folder / "manifest.json", {name: value for name, value in manifest.items() if value is not None})


def edit_counts(folder: Path, **changes) -> None:
    """Replace what the manifest says of training."""
    splits = read_json(folder / "manifest.json")["splits"]
    edit_manifest(folder, splits=splits | {"train": splits["train"] | changes})


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
    "truncated": (truncate, r"train-00001\.bin has 46 bytes where the manifest says 50"),
    "no last file": (lambda folder: (folder / "train-00004.bin").unlink(), GONE.format("train-00004.bin")),
    "no manifest": (lambda folder: (folder / "manifest.json").unlink(), GONE.format("manifest.json")),
    "half a manifest": (lambda folder: os.truncate(folder / "manifest.json", 101), r"[^\n]+: line \d[^\n]+"),
    "manifest of another kind": (lambda folder: (folder / "manifest.json").write_text("[7]"), SEAL),
    "changed manifest": (edit_unsealed, SEAL),
    "manifest of other files": (
        lambda folder: edit_manifest(folder, shard_bytes=48),
        r"train-00000\.bin has 50 bytes where the manifest says 48",
    ),
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
    open_shards(folder)
    inflict(folder)
    said = refusal(open_shards, folder)
    assert re.fullmatch(rf"{folder}: is damaged \({reason}\); delete {folder} and it will be made anew", said), said


def test_damaged_tokens_are_named(tmp_path):
    """A flipped bit, or another hash in the manifest."""
    flip(folder := write_folder(tmp_path / "flipped"))
    reason = "damaged (its hash is not the one in the manifest); delete"
    assert refusal(open_shards, folder).startswith(f"{folder}/validation-00001.bin: {reason} {folder} and")
    edit_counts(folder := write_folder(tmp_path / "hash"), sha256=["0" * 64] * 5)
    assert refusal(open_shards, folder).startswith(f"{folder}/train-00000.bin: {reason}")


def test_large_folders_are_not_hashed(tmp_path, monkeypatch):
    """Above the limit only sizes are compared, so that a corpus of gigabytes opens at once."""
    folder = write_folder(tmp_path / "folder")
    flip(folder)
    size = 2 * (103 + 31)
    monkeypatch.setattr(gpt.text.shards, "VERIFY_BYTES", size)
    assert "validation-00001.bin: damaged" in refusal(open_shards, folder)
    monkeypatch.setattr(gpt.text.shards, "VERIFY_BYTES", size - 1)
    assert len(open_shards(folder).validation) == 31
    truncate(folder)
    assert "train-00001.bin has 46 bytes where" in refusal(open_shards, folder)


# --- the validation text ---


@pytest.mark.parametrize("block", [1, 2, 7, 31, 100_003])
def test_validation_bytes(monkeypatch, tmp_path, block):
    """The validation text comes in blocks, without end-of-text, wherever a file or a character ends."""
    end = byte_tokenizer().end_of_text
    ids = [end, *"naïve €".encode(), end, end, *"😀\n".encode()]
    monkeypatch.setitem(IDS, "validation", np.array(ids))
    monkeypatch.setattr(gpt.text.shards, "DECODED_TOKENS", block)
    blocks = list(open_shards(write_folder(tmp_path / "folder", 14)).validation_bytes())
    assert b"".join(blocks) == "naïve €😀\n".encode()
    assert max(map(len, blocks)) <= block
    assert len(blocks) == -(-len(ids) // block)
