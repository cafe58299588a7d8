"""What of a store is checked before its tokens are used, whoever has written them."""

import functools
import hashlib
import http.server
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from gpt import tokens
from gpt.errors import OutsideError
from gpt.prepare import main
from gpt.text.cache import read_json, write_json
from gpt.text.corpus.config import DataConfig
from gpt.text.prepare.prepare import prepare
from gpt.text.prepared import PreparedText
from gpt.text.shards import Shards
from gpt.text.tokenizer import TokenizerConfig
from harness import refusal
from workshop import write_files

TRAIN, VALIDATION = "train-000000-02.bin", "validation.bin"
DAMAGED = r": cannot be read \(its SHA-256 is not the one in the manifest\); "


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A store of four files."""
    folder = tmp_path_factory.mktemp("made")
    text = write_files(folder / "text", ["to be or not to be " * 200]).path
    main(["--to", str(folder / "store"), "--text", str(text), "--tokenizer", "byte", "--cache", str(folder / "cache")])
    return folder / "store"


@pytest.fixture
def store(made, tmp_path) -> Path:
    """A copy, to be damaged."""
    return Path(shutil.copytree(made, tmp_path / "store"))


FAILS: list[int] = []  # how the next requests are answered


@pytest.fixture
def served(store, monkeypatch) -> Iterator[str]:
    """Its URL."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")

    class Handler(http.server.SimpleHTTPRequestHandler):
        def send_head(self):
            """Answer, or fail."""
            return self.send_error(FAILS.pop()) if FAILS else super().send_head()

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(store)))
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def opened(store: Path | str, cache: Path) -> PreparedText:
    """The text in a store, after all its files were opened."""
    [text] = prepare(DataConfig("prepared", str(store)), TokenizerConfig(), 13, cache).sources
    assert isinstance(text.train, Shards) and len(text.train.lengths) == 4
    for shard, length in enumerate(text.train.lengths):
        assert len(text.train[shard]) == length
    return text


def edit(file: Path) -> None:
    """Change a token and nothing else, not even the time of the file."""
    status, content = file.stat(), np.fromfile(file, "uint16")
    content[7] ^= 1
    content.tofile(file)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize("name", [TRAIN, VALIDATION])
def test_a_file_is_hashed_once_and_when_it_changes(store, tmp_path, monkeypatch, name):
    """On each machine, whose caches differ: what size and time do not tell is not hashed a second time."""
    opened(store, tmp_path / "cache")
    edit(store / name)
    with pytest.raises(OutsideError, match=name + DAMAGED):  # since the text is small
        opened(store, tmp_path / "cache")
    edit(store / name)
    monkeypatch.setattr("gpt.text.prepared.VERIFY_BYTES", 0)
    opened(store, tmp_path / "cache")
    edit(store / name)
    opened(store, tmp_path / "cache")
    with pytest.raises(OutsideError, match=name + DAMAGED + "put an intact copy in its place, or prepare"):
        opened(store, tmp_path / "another's")
    os.utime(store / name)
    with pytest.raises(OutsideError, match=name + DAMAGED):
        opened(store, tmp_path / "cache")


@pytest.mark.parametrize("name", [TRAIN, VALIDATION])
def test_a_copy_is_hashed_when_it_changes(served, tmp_path, monkeypatch, name):
    """Its use, which the cache notes, is no change; once it is deleted, it is fetched again."""
    monkeypatch.setattr("gpt.text.prepared.VERIFY_BYTES", 0)
    before = opened(served, tmp_path).train[2].tolist()
    [copy] = tmp_path.glob(f"downloads/[!.]*-{name}")
    edit(copy)
    opened(served, tmp_path)
    os.utime(copy)
    with pytest.raises(OutsideError, match=name + DAMAGED + "delete it, and run"):
        opened(served, tmp_path)
    copy.unlink()
    assert opened(served, tmp_path).train[2].tolist() == before


def huge(manifest: dict) -> None:
    """As many tokens in one file as no disk holds, and in all."""
    manifest["shards"][0][1] = manifest["splits"]["train"]["tokens"] = 10**30


CHANGES: dict[str, tuple[Callable[[dict], object], str]] = {
    "no key": (lambda m: m.pop("key"), "it has no 'key'"),
    "a key without a tokenizer": (lambda m: m["key"].pop("tokenizer"), "it has no 'tokenizer'"),
    "a key that is a word": (lambda m: m.update(key="x"), "string indices must be integers.*"),
    "no train": (lambda m: m["splits"].pop("train"), "it has no 'train'"),
    "no bytes": (lambda m: m["splits"]["validation"].pop("bytes"), "it has no 'bytes'"),
    "0 bytes": (lambda m: m["splits"]["validation"].update(bytes=0), "validation has 0 bytes"),
    "bytes in words": (lambda m: m["splits"]["train"].update(bytes="many"), "train has 'many' bytes"),
    "half a document": (lambda m: m["splits"]["train"].update(documents=0.5), "train has 0.5 documents"),
    "10^30 tokens": (huge, "train has 1000000000000000000000000000000 tokens"),
    "a token less": (lambda m: m["splits"]["train"].update(tokens=7), "the tokens of its shards do not add up"),
    "no hash": (lambda m: m["shards"][0].pop(), "not enough values to unpack.*"),
    "half a hash": (lambda m: m["shards"][0].__setitem__(2, "0" * 32), "'train-000000-00.bin', of hash .*"),
    "shards of numbers": (lambda m: m.update(shards=[1, 2]), "cannot unpack non-iterable int object"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_shape_of_a_manifest(store, tmp_path, change):
    """Whoever writes a manifest can seal it: a line says what it lacks."""
    inflict, reason = CHANGES[change]
    manifest = read_json(store / "manifest.json")
    inflict(manifest)
    write_json(store / "manifest.json", manifest)
    with pytest.raises(OutsideError, match=rf"{store}: is damaged \({reason}\); put an intact copy in its place, or"):
        opened(store, tmp_path / "cache")


@pytest.mark.parametrize("name", ["manifest.json", "tokenizer.json"])
@pytest.mark.parametrize("content", ["[" * 100_000, "7", "{}", "\xff"])
def test_other_files_than_a_manifest(store, tmp_path, name, content):
    """Nested deeper than Python reads, of another kind, empty, or of other letters."""
    (store / name).write_bytes(content.encode("latin-1"))
    assert "is damaged (" in refusal(opened, store, tmp_path / "cache")


def test_ids_are_in_the_vocabulary(store, tmp_path):
    """A file with its hash may hold other ids than the tokenizer has."""
    manifest = read_json(store / "manifest.json")
    tokenizer = json.loads((store / "tokenizer.json").read_text())
    assert tokenizer["name"] == "byte"
    np.full(manifest["shards"][2][1], 257, "uint16").tofile(store / TRAIN)
    manifest["shards"][2][2] = hashlib.sha256((store / TRAIN).read_bytes()).hexdigest()
    write_json(store / "manifest.json", manifest)
    said = refusal(opened, store, tmp_path / "cache")
    assert f"{TRAIN}: cannot be read (it has the id 257, and the vocabulary 257 entries)" in said


def test_a_store_that_is_away_is_waited_for(served, tmp_path):
    """Also for its small files, before there is any training."""
    FAILS[:] = [503] * 3
    opened(served, tmp_path)
    assert FAILS == []


def test_verify(store, served, tmp_path, capsys):
    """`gpt.tokens --verify` hashes all files of a store anew, here or behind a URL, and says how many there were."""
    opened(store, tmp_path / "cache")
    for name in (str(store), served):
        tokens.main(["--verify", name])
        assert capsys.readouterr().out == f"{name}: 3,802 tokens in 5 files, vocabulary 257, every hash matches\n"
    edit(store / TRAIN)
    assert f"{TRAIN}: cannot be read (its SHA-256" in refusal(tokens.main, ["--verify", str(store)])
    assert f"{TRAIN}: the SHA-256 is" in refusal(tokens.main, ["--verify", served])
    assert "holds no prepared text" in refusal(tokens.main, ["--verify", f"{served}/nothing"])
