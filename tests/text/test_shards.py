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
from gpt.errors import UserError
from gpt.text.shards import SPLITS, Corpora, Tokens, Writer, open_shards, shard_files, width
from gpt.text.tokenizer import BYTE_PATTERN, Tokenizer, byte_tokenizer, gpt2_tokenizer

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
    (folder / "manifest.json").write_text(json.dumps(manifest | changes))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer.to_dict()))
    return folder


def write_files(folder: Path, ids: np.ndarray, per_file: int) -> Tokens:
    """An array in files of so many ids."""
    files = shard_files(folder, "train", -(-len(ids) // per_file))
    for number, file in enumerate(files):
        ids[number * per_file : (number + 1) * per_file].tofile(file)
    return Tokens(files, ids.dtype, len(ids), per_file)


def pairs_tokenizer(tokens: int) -> Tokenizer:
    """So many tokens without training: every byte, then pairs of bytes."""
    pairs = [bytes([i // 256, i % 256]) for i in range(tokens - 257)]
    ranks = {token: rank for rank, token in enumerate([bytes([byte]) for byte in range(256)] + pairs)}
    return Tokenizer("bpe", ranks, BYTE_PATTERN)


def refusal(folder: Path) -> str:
    """The one line that refuses to open a folder."""
    with pytest.raises(UserError) as caught:
        open_shards(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


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


def test_files_are_opened_when_they_are_read(tmp_path):
    """A corpus of thousands of files begins at once, and what is not asked for need not be there."""
    tokens = write_files(tmp_path, np.arange(101, dtype=np.uint16), 11)
    for number in (0, 1, 3, 9):
        (tmp_path / f"train-{number:05}.bin").unlink()
    assert tokens[22:33].tolist() == list(range(22, 33))
    assert tokens[np.array([44, 32, 54])].tolist() == [44, 32, 54]
    with pytest.raises(FileNotFoundError, match=r"train-00003\.bin"):
        tokens[np.array([33])]


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
        known = (writer.length, list(writer.hashes))
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


def test_flushed_is_on_disk(tmp_path, monkeypatch):
    """After `flush` another process reads every id, and not only the full files; and the disk was waited for."""
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_size))
    writer = Writer(tmp_path, "validation", np.dtype("u2"))
    writer.append(np.arange(13, dtype=np.uint16))
    writer.flush()
    assert np.fromfile(tmp_path / "validation-00000.bin", np.uint16).tolist() == list(range(13))
    assert writer.hashes == []
    assert synced == [26]
    writer.close()
    assert len(writer.hashes) == 1


# --- opening ---


@pytest.mark.parametrize("shard_bytes", [2, 3, 50, 62, 206, 1 << 28])
def test_open(tmp_path, shard_bytes):
    """One file or many, the last ones full or not."""
    shards = open_shards(write_folder(tmp_path / "folder", shard_bytes))
    for name, ids in IDS.items():
        assert len(getattr(shards, name)) == len(ids)
        assert np.array_equal(getattr(shards, name)[:], ids)
    assert shards.tokenizer.to_dict() == byte_tokenizer().to_dict()
    assert shards.manifest == json.loads((tmp_path / "folder/manifest.json").read_text())


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


def odd_size(folder: Path) -> None:
    """Half a token more."""
    with (folder / "train-00004.bin").open("ab") as stream:
        stream.write(b"\0")


def flip(folder: Path) -> None:
    """One bit in the middle of the second file of the second split."""
    content = bytearray((folder / "validation-00001.bin").read_bytes())
    content[len(content) // 2] ^= 1
    (folder / "validation-00001.bin").write_bytes(content)


def swap(folder: Path) -> None:
    """Two files of the same size change places."""
    (folder / "train-00000.bin").rename(folder / "between")
    (folder / "train-00001.bin").rename(folder / "train-00000.bin")
    (folder / "between").rename(folder / "train-00001.bin")


def edit_manifest(folder: Path, **changes) -> None:
    """Replace entries of the manifest; `None` takes them out."""
    manifest = json.loads((folder / "manifest.json").read_text()) | changes
    kept = {name: value for name, value in manifest.items() if value is not None}
    (folder / "manifest.json").write_text(json.dumps(kept))


def edit_counts(folder: Path, **changes) -> None:
    """Replace what the manifest says of training."""
    splits = json.loads((folder / "manifest.json").read_text())["splits"]
    edit_manifest(folder, splits=splits | {"train": splits["train"] | changes})


def edit_tokenizer(folder: Path, **changes) -> None:
    """Replace entries of the tokenizer."""
    stored = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(stored | changes))


UNREADABLE = "the manifest or the tokenizer cannot be read"
UNFIT = "the manifest's counts of files and tokens disagree"
FOREIGN = "the tokenizer is not the one in the manifest"
DAMAGE = {
    "truncated": (truncate, r"train-00001\.bin: 46 bytes where the manifest says 50"),
    "odd size": (odd_size, r"train-00004\.bin: 7 bytes where the manifest says 6"),
    "emptied": (
        lambda folder: os.truncate(folder / "train-00000.bin", 0),
        r"train-00000\.bin: 0 bytes where the manifest says 50",
    ),
    "no validation": (lambda folder: (folder / "validation-00000.bin").unlink(), r"validation-00000\.bin: is missing"),
    "no last file": (lambda folder: (folder / "train-00004.bin").unlink(), r"train-00004\.bin: is missing"),
    "flipped bit": (flip, r"validation-00001\.bin: damaged"),
    "swapped files": (swap, r"train-00000\.bin: damaged"),
    "no manifest": (lambda folder: (folder / "manifest.json").unlink(), UNREADABLE),
    "half a manifest": (lambda folder: os.truncate(folder / "manifest.json", 101), UNREADABLE),
    "emptied manifest": (lambda folder: os.truncate(folder / "manifest.json", 0), UNREADABLE),
    "manifest of zeros": (lambda folder: (folder / "manifest.json").write_bytes(bytes(101)), UNREADABLE),
    "manifest of another kind": (lambda folder: (folder / "manifest.json").write_text("[7]"), UNREADABLE),
    "manifest of before": (lambda folder: edit_manifest(folder, shard_bytes=None), UNREADABLE),
    "manifest without a tokenizer": (lambda folder: edit_manifest(folder, tokenizer=None), FOREIGN),
    "files of no size": (lambda folder: edit_manifest(folder, shard_bytes=0), UNREADABLE),
    "files of another size": (lambda folder: edit_manifest(folder, shard_bytes=48), r"train-00000\.bin: 50 bytes"),
    "files of all sizes": (lambda folder: edit_manifest(folder, shard_bytes=1e999), UNREADABLE),
    "no counts": (lambda folder: edit_manifest(folder, splits={}), UNREADABLE),
    "counts of another kind": (lambda folder: edit_manifest(folder, splits=[1]), UNREADABLE),
    "more tokens": (lambda folder: edit_counts(folder, tokens=126), UNFIT),
    "a few more tokens": (lambda folder: edit_counts(folder, tokens=104), r"train-00004\.bin: 6 bytes where .* says 8"),
    "fewer tokens": (lambda folder: edit_counts(folder, tokens=100), UNFIT),
    "fewer than no tokens": (lambda folder: edit_counts(folder, tokens=-3, sha256=[]), UNFIT),
    "another hash": (lambda folder: edit_counts(folder, sha256=["0" * 64] * 5), r"train-00000\.bin: damaged"),
    "one hash for all": (lambda folder: edit_counts(folder, sha256="0" * 64), UNFIT),
    "hashes of another kind": (lambda folder: edit_counts(folder, sha256=5), UNREADABLE),
    "unknown type": (lambda folder: edit_manifest(folder, dtype="uint17"), "the manifest says 'uint17' ids"),
    "another type": (
        lambda folder: edit_manifest(folder, dtype="uint32"),
        "the manifest says 'uint32' ids, not uint16",
    ),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), UNREADABLE),
    "half a tokenizer": (lambda folder: os.truncate(folder / "tokenizer.json", 101), UNREADABLE),
    "tampered tokenizer": (
        lambda folder: edit_tokenizer(folder, pattern="."),
        f"{UNREADABLE}.*its pattern '.' is unknown",
    ),
    "tokenizer of another kind": (lambda folder: edit_tokenizer(folder, ranks=7), UNREADABLE),
    "foreign tokenizer": (lambda folder: edit_tokenizer(folder, **gpt2_tokenizer().to_dict()), FOREIGN),
    "folder emptied": (lambda folder: [file.unlink() for file in folder.iterdir()], UNREADABLE),
    "a file in its place": (lambda folder: [shutil.rmtree(folder), folder.write_text("")], UNREADABLE),
    "nothing in its place": (shutil.rmtree, UNREADABLE),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_named(tmp_path, damage):
    """One line says what is wrong and what to delete."""
    inflict, message = DAMAGE[damage]
    folder = write_folder(tmp_path / "folder")
    open_shards(folder)
    inflict(folder)
    said = refusal(folder)
    assert re.match(f"{re.escape(str(folder))}(/|: ){message}", said), said
    assert said.endswith(f"; delete {folder} and it will be made anew")


def test_large_folders_are_not_hashed(tmp_path, monkeypatch):
    """Above the limit only sizes are compared, so that a corpus of gigabytes opens at once."""
    folder = write_folder(tmp_path / "folder")
    flip(folder)
    size = 2 * (103 + 31)
    monkeypatch.setattr(gpt.text.shards, "VERIFY_BYTES", size)
    assert "validation-00001.bin: damaged" in refusal(folder)
    monkeypatch.setattr(gpt.text.shards, "VERIFY_BYTES", size - 1)
    assert len(open_shards(folder).validation) == 31
    truncate(folder)
    assert "train-00001.bin: 46 bytes where" in refusal(folder)


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
