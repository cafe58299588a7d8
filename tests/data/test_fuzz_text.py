"""Whatever happens to the files of the cache: the same corpus comes out, or one line, and nothing else is touched."""

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import gpt.data.file_hashes
import gpt.data.scan
import gpt.data.shards
import gpt.data.split
from gpt.data.data_config import DataConfig
from gpt.data.prepare import prepare
from gpt.data.token_dataset import TokenDataset
from gpt.data.tokenizer import Tokenizer, TokenizerConfig
from gpt.errors import UserError

pytestmark = pytest.mark.slow

EXAMPLES = settings(
    max_examples=350, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)
SECONDS = 20  # at most, for an example


# --- mutations ---

WHOLE = [b"", b"null", b"7", b'"a"', b"[]", b"{}", b'{"seal": null}', b"\xff\xfe{", bytes(1000)]
WHOLE += [b'{"a": 1' + b"0" * 5000 + b"}", b"\xef\xbb\xbf{}", b"NaN", b'{"splits": {}}']


def mutate_bytes(content: bytes, draw: Callable) -> bytes:
    """One change to the bytes of a file."""
    at = draw(st.integers(0, max(0, len(content) - 1)))
    way = draw(st.sampled_from(["flip", "cut", "insert", "leave out", "whole"]))
    if way == "flip" and content:
        return content[:at] + bytes([content[at] ^ 1 << draw(st.integers(0, 7))]) + content[at + 1 :]
    if way == "cut":
        return content[:at]
    if way == "insert":
        return content[:at] + draw(st.binary(min_size=1, max_size=9)) + content[at:]
    if way == "leave out":
        return content[:at] + content[at + draw(st.integers(1, 99)) :]
    return draw(st.sampled_from(WHOLE))


def mutate(file: Path, draw: Callable) -> None:
    """One change to a file: to its bytes, or to what is at its place."""
    way = draw(st.sampled_from(["bytes"] * 10 + ["gone", "folder", "link"]))
    if way == "bytes":
        file.write_bytes(mutate_bytes(file.read_bytes(), draw))
        return
    file.unlink()
    if way == "folder":
        file.mkdir()
    elif way == "link":
        file.symlink_to("nowhere")


# --- what is mutated ---


class Bench:
    """A text, and caches of it in several states."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch):
        for module, name, value in [
            (gpt.data.split, "SAMPLE_BYTES", 2003),  # the text is read a second time to encode it
            (gpt.data.shards, "TASK_CHARS", 199),
            (gpt.data.scan, "SHARD_BYTES", 1511),
            (gpt.data.file_hashes, "REMEMBERED_BYTES", 11),
            (gpt.data.file_hashes, "time", SimpleNamespace(time=lambda: time.time() + 60)),
            (os, "fsync", lambda descriptor: None),
        ]:
            patch.setattr(module, name, value)
        self.folder = folder
        for name in ("one", "two"):
            (folder / name).mkdir()
            for i in range(3):
                texts = [f"The {name} text number {j} of file {i} says café. " * (1 + j % 3) for j in range(29)]
                lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
                (folder / name / f"{i}.jsonl").write_text(lines)
        self.one = DataConfig("text", str(folder / "one"))
        self.both = DataConfig("mix", [str(folder / "one"), str(folder / "two")], [1, 2])
        self.prepare(self.one, folder / "prepared", "byte")
        self.prepare(self.both, folder / "mixed", "bpe")
        with patch.context() as interruption:
            pieces, encode_chunk = [], Tokenizer.encode_chunk

            def interrupted(tokenizer, piece):
                pieces.append(piece)
                if len(pieces) == 67:
                    raise MemoryError
                return encode_chunk(tokenizer, piece)

            interruption.setattr(Tokenizer, "encode_chunk", interrupted)
            with pytest.raises(MemoryError):
                self.prepare(self.one, folder / "interrupted", "byte")
        self.texts = {file: file.read_bytes() for file in sorted(folder.glob("*/*.jsonl"))}
        assert len(self.texts) == 6

    def prepare(self, data: DataConfig, cache: Path, tokenizer: str) -> TokenDataset:
        """Prepare a text without a word."""
        return prepare(data, TokenizerConfig(tokenizer, 307), 13, cache, print_line=[].append)

    def attack(self, state: str, names: list[str], draw: Callable) -> bool:
        """Mutate a file of a cache and prepare: returns whether the true corpus came out, else a line did."""
        data, tokenizer = (self.both, "bpe") if state == "mixed" else (self.one, "byte")
        true = self.prepare(data, self.folder / ("mixed" if state == "mixed" else "prepared"), tokenizer)
        cache = self.folder / "attacked"
        shutil.rmtree(cache, ignore_errors=True)
        shutil.copytree(self.folder / state, cache)
        [*candidates] = (file for name in names for file in sorted(cache.glob(name)) if file.is_file())
        victim = draw(st.sampled_from(candidates))
        mutate(victim, draw)
        others = {file: file.read_bytes() for file in cache.rglob("*") if file.is_file() and file != victim}
        start = time.monotonic()
        try:
            found = self.prepare(data, cache, tokenizer)
        except (UserError, IsADirectoryError) as error:  # of the second, `clean_exit` makes a line as well
            assert "\n" not in str(error)
            assert str(cache) in str(error)
            found = None
        finally:
            assert time.monotonic() - start < SECONDS
            assert {file: file.read_bytes() for file in self.texts} == self.texts
        kept = {file for file in others if ".preparing-" not in str(file.parent)}
        assert all(file.read_bytes() == others[file] for file in kept if file.suffix != ".lock" and file.name[0] != "h")
        if found is None:
            return False
        assert found.key == true.key
        for mine, theirs in zip(found.sources, true.sources, strict=True):
            assert mine.train[:].tolist() == theirs.train[:].tolist()
            assert mine.validation[:].tolist() == theirs.validation[:].tolist()
            assert mine.metadata == theirs.metadata
            assert mine.tokenizer.encode("the café ") == theirs.tokenizer.encode("the café ")
        return True


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        yield Bench(tmp_path_factory.mktemp("bench"), patch)


@pytest.mark.parametrize(
    ("state", "names"),
    [
        ("prepared", ["*/*.json", "*/*.bin", "hashes.json"]),
        ("interrupted", [".preparing-*/*"]),
        ("mixed", ["tokenizer-*.json", "*/tokenizer.json", "*/dataset.json"]),
    ],
    ids=["prepared", "interrupted", "mixed"],
)
def test_mutations(bench, state, names):
    """The same bits, or one line that names the file or its folder: no other error, and nothing else is changed."""
    came = {True: 0, False: 0}

    @EXAMPLES
    @given(st.data())
    def attack(data):
        came[bench.attack(state, names, data.draw)] += 1

    attack()
    assert sum(came.values()) >= 300
    assert min(came.values()) > 5, came
