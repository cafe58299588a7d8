"""Shards: what is written is the split, token for token; when it is written anew; and what damage says."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest

import gpt.shards
from gpt.corpus import DataConfig, Split, open_corpus
from gpt.errors import UserError
from gpt.shards import FORMAT, Shards, open_shards, prepare
from gpt.tokenizer import BYTE_PATTERN, Tokenizer, TokenizerConfig, byte_tokenizer, gpt2_tokenizer, train_bpe

ROOT = Path(__file__).parents[1]
CONTEXT = 13
DOCUMENTS = [f"Document {i} says: the café has {i * i} seats. " * (1 + i % 3) + "😀<|endoftext|>\n" for i in range(53)]
BYTE = TokenizerConfig("byte")


def write_documents(folder: Path, documents: list[str] = DOCUMENTS) -> DataConfig:
    """The configuration that reads the documents from a file of JSON lines."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "text.jsonl"
    file.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents))
    return DataConfig("text", str(file))


def write_text(folder: Path, text: str) -> DataConfig:
    """The configuration that reads a single text."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "text.txt").write_text(text, encoding="utf-8", newline="")
    return DataConfig("text", str(folder / "text.txt"))


def make(
    data: DataConfig, cache: Path, tokenizer: TokenizerConfig = BYTE, context_length: int = CONTEXT, **more
) -> Shards:
    """Prepare without a word."""
    return prepare(data, tokenizer, context_length, cache, say=more.pop("say", [].append), **more)


def documents_of(ids: np.ndarray, tokenizer: Tokenizer) -> list[str]:
    """The texts between the ends of text, the first of which stands at the very start."""
    starts = np.flatnonzero(ids == tokenizer.end_of_text)
    assert starts[0] == 0
    return [tokenizer.decode(part[1:]) for part in np.split(ids, starts[1:])]


def folder_of(cache: Path) -> Path:
    """The one folder in a cache, which holds nothing else, hidden or not."""
    [folder] = cache.iterdir()
    return folder


def refusal(*arguments, **more) -> str:
    """The one line that refuses to prepare."""
    with pytest.raises(UserError) as caught:
        make(*arguments, **more)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def pairs_tokenizer(tokens: int) -> Tokenizer:
    """So many tokens without training: every byte, then pairs of bytes, those that begin with an a last."""
    pairs = [bytes([(i // 256 + ord("b")) % 256, i % 256]) for i in range(tokens - 257)]
    ranks = {token: rank for rank, token in enumerate([bytes([byte]) for byte in range(256)] + pairs)}
    return Tokenizer("pairs", ranks, BYTE_PATTERN)


# --- what is written ---


@pytest.mark.parametrize("name", ["bpe", "gpt2", "byte"])
def test_tokens_are_the_split(tmp_path, name):
    """Every document of each part after an end-of-text, and the tokenizer is the one configured."""
    data = write_documents(tmp_path)
    shards = make(data, tmp_path / "cache", TokenizerConfig(name, 307))
    split = Split(lambda: DOCUMENTS, data.validation_bytes)
    expected = {"bpe": lambda: train_bpe(split.train(), 307), "gpt2": gpt2_tokenizer, "byte": byte_tokenizer}[name]()
    assert shards.tokenizer.to_dict() == expected.to_dict()
    assert documents_of(shards.train, expected) == list(split.train())
    assert documents_of(shards.validation, expected) == list(split.validation())
    assert len(documents_of(shards.validation, expected)) > 1


def test_bytes_by_hand(tmp_path):
    """Ten characters: nine to learn from and one that validates."""
    shards = make(write_text(tmp_path, "abcdefgh\né"), tmp_path / "cache", context_length=7)
    assert shards.train.tolist() == [256, 97, 98, 99, 100, 101, 102, 103, 104, 10]
    assert shards.validation.tolist() == [256, 0xC3, 0xA9]


def test_manifest(tmp_path):
    """The counts are those of the texts, the hashes those of the files."""
    data = write_documents(tmp_path)
    shards = make(data, tmp_path / "cache")
    folder = folder_of(tmp_path / "cache")
    split = Split(lambda: DOCUMENTS, data.validation_bytes)
    counts = {}
    for name, documents in (("train", list(split.train())), ("validation", list(split.validation()))):
        size = sum(len(document.encode()) for document in documents)
        digest = hashlib.sha256((folder / f"{name}.bin").read_bytes()).hexdigest()
        counts[name] = {"tokens": size + len(documents), "bytes": size, "documents": len(documents), "sha256": digest}
        assert len(getattr(shards, name)) == size + len(documents)
    assert counts["train"]["documents"] + counts["validation"]["documents"] == 53
    key = {"format": FORMAT, "corpus": open_corpus(data).sha256(), "tokenizer": {"name": "byte"}}
    assert shards.manifest == {
        "key": key | {"validation_bytes": 1_000_000},
        "corpus": "text",
        "tokenizer": byte_tokenizer().sha256,
        "splits": counts,
        "dtype": "uint16",
    }
    assert json.loads((folder / "manifest.json").read_text()) == shards.manifest
    assert sorted(file.name for file in folder.iterdir()) == [
        "manifest.json",
        "tokenizer.json",
        "train.bin",
        "validation.bin",
    ]
    assert re.fullmatch("text-byte-[0-9a-f]{16}", folder.name)


def test_single_text(tmp_path):
    """The two parts of one text join to it again."""
    text = "The end of the text validates, to the character. " * 11
    shards = make(write_text(tmp_path, text), tmp_path / "cache")
    [train], [validation] = (documents_of(ids, shards.tokenizer) for ids in (shards.train, shards.validation))
    assert train + validation == text
    assert len(train) == len(text) * 9 // 10
    assert [part["documents"] for part in shards.manifest["splits"].values()] == [1, 1]


def test_lone_surrogates_are_counted_as_written(tmp_path):
    """JSON can spell half a pair, which becomes U+FFFD: the bytes counted are those of the text that is learnt."""
    shards = make(write_documents(tmp_path, ["\ud800" * 5 + "x" * 95]), tmp_path / "cache")
    [train] = documents_of(shards.train, shards.tokenizer)
    assert train == "\ufffd" * 5 + "x" * 85
    assert shards.manifest["splits"]["train"]["bytes"] == len(train.encode())


@pytest.mark.parametrize(("tokens", "dtype"), [(65_536, "uint16"), (65_537, "uint32"), (65_793, "uint32")])
def test_width_of_the_ids(tmp_path, tokens, dtype):
    """The narrowest type that holds every id of the tokenizer, end-of-text among them."""
    tokenizer = pairs_tokenizer(tokens)
    assert tokenizer.vocab_size == tokens
    shards = make(write_text(tmp_path, "a" * 138), tmp_path / "cache", given=tokenizer)
    assert (shards.train.dtype, shards.validation.dtype) == (np.dtype(dtype), np.dtype(dtype))
    assert shards.train[0] == tokens - 1
    assert (shards.train[1] == 256 + 255 * 256 + ord("a")) == (tokens == 65_793)
    assert documents_of(shards.train, tokenizer) == ["a" * 124]
    size = (folder_of(tmp_path / "cache") / "train.bin").stat().st_size
    assert size == len(shards.train) * np.dtype(dtype).itemsize


def test_shards_are_read_only(tmp_path):
    """What is mapped from disk cannot be changed by mistake."""
    shards = make(write_documents(tmp_path), tmp_path / "cache")
    assert isinstance(shards.train, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        shards.train[0] = 0


# --- when it is written ---


def test_second_time_comes_from_the_cache(tmp_path):
    """Nothing is said and no file is touched, also for the same text elsewhere and another context."""
    said: list[str] = []
    first = make(write_documents(tmp_path), tmp_path / "cache", say=said.append)
    assert [line.split()[0] for line in said] == ["reading", "prepared"]
    folder = folder_of(tmp_path / "cache")
    times = {file: file.stat().st_mtime_ns for file in [folder, *folder.iterdir()]}
    for place, context_length in (("", CONTEXT), ("elsewhere", CONTEXT), ("", 101)):
        data = write_documents(tmp_path / place)
        again = make(data, tmp_path / "cache", context_length=context_length, say=said.append)
        assert np.array_equal(again.train, first.train)
        assert np.array_equal(again.validation, first.validation)
        assert again.manifest == first.manifest
    assert len(said) == 2
    assert {file: file.stat().st_mtime_ns for file in [folder, *folder.iterdir()]} == times


def test_what_is_said(tmp_path):
    """How many files are read, and what came of them: 10 bytes and 2 ends of text."""
    said: list[str] = []
    make(write_text(tmp_path, "abcdefghij"), tmp_path / "cache", context_length=7, say=said.append)
    assert said[0] == "reading text (1 file)"
    assert said[1].startswith("prepared 10 bytes as 12 tokens of 257 kinds, 0.83 bytes each; 1 bytes")


def test_every_change_is_another_folder(tmp_path):
    """Changed text, tokenizer, size of the vocabulary or of the validation never meets old shards."""
    cache, data = tmp_path / "cache", write_documents(tmp_path)
    limited = DataConfig("text", data.path, validation_bytes=101)
    changes = [
        make(data, cache),
        make(data, cache, TokenizerConfig("gpt2")),
        make(data, cache, TokenizerConfig("bpe", 263)),
        make(data, cache, TokenizerConfig("bpe", 269)),
        make(limited, cache),
        make(data, cache, given=byte_tokenizer()),
        make(write_documents(tmp_path, DOCUMENTS[::-1]), cache),
        make(write_documents(tmp_path, [*DOCUMENTS, "x"]), cache),
    ]
    assert len(list(cache.iterdir())) == len(changes)
    assert [shards.tokenizer.vocab_size for shards in changes] == [257, 50257, 263, 269, 257, 257, 257, 257]
    assert (
        changes[4].manifest["splits"]["validation"]["bytes"]
        <= 101
        < changes[0].manifest["splits"]["validation"]["bytes"]
    )


def test_vocab_size_matters_only_where_it_is_used(tmp_path):
    """The byte tokenizer is the same whatever the size that bpe would have had."""
    data = write_documents(tmp_path)
    make(data, tmp_path / "cache", TokenizerConfig("byte", 300))
    make(data, tmp_path / "cache", TokenizerConfig("byte", 400))
    assert folder_of(tmp_path / "cache").name.startswith("text-byte-")


def test_given_tokenizer_is_used(tmp_path):
    """That of a model to fine-tune, whatever the configuration says; another one has another folder."""
    data, cache = write_documents(tmp_path), tmp_path / "cache"
    given = train_bpe(["Document café seats " * 7], 293)
    shards = make(data, cache, TokenizerConfig("gpt2"), given=given)
    assert shards.tokenizer.to_dict() == given.to_dict()
    expected = [
        id for document in documents_of(shards.train, given) for id in [given.end_of_text, *given.encode(document)]
    ]
    assert shards.train.tolist() == expected
    assert np.array_equal(make(data, cache, TokenizerConfig("byte"), given=given).train, shards.train)
    assert folder_of(cache).name.startswith("text-bpe-")
    make(data, cache, given=train_bpe(["another text " * 7], 293))
    assert len(list(cache.iterdir())) == 2


# --- too short ---


@pytest.mark.parametrize("text", ["hello world", "é" * 7, "ab"])
def test_too_short_a_text(tmp_path, text):
    """The line names the tokens, the context and the greatest context that the text can fill; nothing is left."""
    cache, data = tmp_path / "cache", write_text(tmp_path, text)
    tokens = 1 + len(text[: len(text) * 9 // 10].encode())
    assert refusal(data, cache) == (
        f"the training text has {tokens} tokens, fewer than model.context_length={CONTEXT} and a target: "
        f"give more text, or set model.context_length={tokens - 1} or less"
    )
    assert list(cache.iterdir()) == []
    assert f"has {tokens} tokens" in refusal(data, cache, context_length=tokens)
    assert len(make(data, cache, context_length=tokens - 1).train) == tokens


@pytest.mark.parametrize("text", ["a", "\ufeff"], ids=["one character", "a byte order mark alone"])
def test_hardly_any_text(tmp_path, text):
    """Where no context is short enough, no context is advised."""
    message = refusal(write_text(tmp_path, text), tmp_path / "cache", context_length=1)
    assert "give more text" in message
    assert "set model.context_length" not in message


def test_too_long_a_context_for_the_cache(tmp_path):
    """Prepared shards stay when they are too short for another model."""
    data, cache = write_text(tmp_path, "a" * 100), tmp_path / "cache"
    make(data, cache)
    assert "has 91 tokens, fewer than model.context_length=91 and a target" in refusal(data, cache, context_length=91)
    assert len(make(data, cache, context_length=90).train) == 91


# --- interrupted, alone or together ---


class Interrupted(Tokenizer):
    """The bytes of two documents, then an end in mid-work."""

    def __init__(self, error: BaseException):
        super().__init__("byte", {bytes([byte]): byte for byte in range(256)}, BYTE_PATTERN)
        self.error = error

    def encode_documents(self, documents: Iterable[str], threads: int = 2) -> Iterator[np.ndarray]:
        """Stop after the second document."""
        for i, ids in enumerate(super().encode_documents(documents, threads)):
            if i == 2:
                raise self.error
            yield ids


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), MemoryError(), OSError(28, "No space left on device")], ids=repr
)
def test_interruption_leaves_nothing(tmp_path, error):
    """Neither a half-written folder that would be taken for whole, nor a temporary one; the next time is the first."""
    data, cache = write_documents(tmp_path), tmp_path / "cache"
    with pytest.raises(type(error)):
        make(data, cache, given=Interrupted(error))
    assert list(cache.iterdir()) == []
    shards = make(data, cache, given=byte_tokenizer())
    assert documents_of(shards.train, shards.tokenizer) == list(Split(lambda: DOCUMENTS, 1_000_000).train())


def test_remains_of_the_dead_are_swept(tmp_path):
    """A process that was killed leaves its temporary folder to the next one, which leaves those of the living alone."""
    cache = tmp_path / "cache"
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait(timeout=60)
    remains, living = cache / f".preparing-{dead.pid}-abc_d", cache / f".preparing-{os.getpid()}-abc_d"
    for folder in (remains, living):
        folder.mkdir(parents=True)
        (folder / "train.bin").write_bytes(b"half")
    make(write_documents(tmp_path), cache)
    assert not remains.exists()
    assert (living / "train.bin").read_bytes() == b"half"


@pytest.mark.parametrize("name", [".preparing-abc_d", ".preparing-"])
def test_foreign_names_do_no_harm(tmp_path, name):
    """A hidden entry of the cache that only looks like a temporary folder stops nothing."""
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / name).write_text("a file")
    make(write_documents(tmp_path), cache)
    assert len([folder for folder in cache.iterdir() if folder.name.startswith("text-")]) == 1


@pytest.mark.parametrize("below", ["", "cache"])
def test_cache_that_cannot_be_written(tmp_path, below):
    """A file where the folder should be: the line says which, and how to choose another."""
    data, cache = write_documents(tmp_path), tmp_path / "file" / below
    (tmp_path / "file").write_text("in the way")
    reason = "Not a directory" if below else "File exists"
    assert refusal(data, cache) == f"{cache}: cannot be written ({reason}); name another folder with data.cache="
    assert (tmp_path / "file").read_text() == "in the way"


TOGETHER = """
import sys, time
from pathlib import Path
from gpt.corpus import DataConfig
from gpt.shards import prepare
from gpt.tokenizer import TokenizerConfig

path, cache, meeting, name = sys.argv[1:]
lines = []

def say(line):
    lines.append(line.split()[0])
    (Path(meeting) / f"{name}-{len(lines)}").touch()
    while len(list(Path(meeting).glob("*-1"))) < 2:  # both begin before either is done
        time.sleep(0.01)

shards = prepare(DataConfig("text", path), TokenizerConfig("bpe", 307), 13, Path(cache), say=say)
print(*lines, shards.tokenizer.sha256, len(shards.train), int(shards.train.sum()), int(shards.validation.sum()))
"""


def test_two_processes_at_once(tmp_path):
    """Both find nothing, both prepare, both succeed with the same tokens, and one folder remains."""
    data, cache, meeting = write_documents(tmp_path), tmp_path / "cache", tmp_path / "meeting"
    meeting.mkdir()
    command = [sys.executable, "-c", TOGETHER, str(data.path), str(cache), str(meeting)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    both = [subprocess.Popen([*command, name], cwd=ROOT, **pipes) for name in "ab"]
    try:
        (out, errors), (other_out, other_errors) = (process.communicate(timeout=60) for process in both)
    finally:
        for process in both:
            process.kill()
    assert (errors, other_errors) == ("", "")
    assert [process.returncode for process in both] == [0, 0]
    shards = open_shards(folder_of(cache))
    sums = f"{len(shards.train)} {shards.train.sum()} {shards.validation.sum()}"
    assert out == other_out == f"reading prepared {shards.tokenizer.sha256} {sums}\n"


# --- damage ---


def truncate(folder: Path) -> None:
    """Two tokens fewer."""
    os.truncate(folder / "train.bin", (folder / "train.bin").stat().st_size - 4)


def odd_size(folder: Path) -> None:
    """Half a token more."""
    with (folder / "train.bin").open("ab") as stream:
        stream.write(b"\0")


def flip(folder: Path) -> None:
    """One bit in the middle."""
    content = bytearray((folder / "validation.bin").read_bytes())
    content[len(content) // 2] ^= 1
    (folder / "validation.bin").write_bytes(content)


def edit_manifest(folder: Path, **changes) -> None:
    """Replace entries of the manifest."""
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | changes))


def edit_tokenizer(folder: Path, **changes) -> None:
    """Replace entries of the tokenizer."""
    stored = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(stored | changes))


UNREADABLE = "the manifest or the tokenizer cannot be read"
FOREIGN = "the tokenizer is not the one that the manifest names"
DAMAGE = {
    "truncated": (truncate, r"train\.bin: \d+ bytes where the manifest says \d+"),
    "odd size": (odd_size, r"train\.bin: \d+ bytes where the manifest says \d+"),
    "emptied": (
        lambda folder: os.truncate(folder / "train.bin", 0),
        r"train\.bin: 0 bytes where the manifest says \d+",
    ),
    "no validation": (
        lambda f: (f / "validation.bin").unlink(),
        r"validation\.bin: None bytes where the manifest says",
    ),
    "flipped bit": (flip, r"validation\.bin: damaged"),
    "no manifest": (lambda folder: (folder / "manifest.json").unlink(), UNREADABLE),
    "half a manifest": (lambda folder: os.truncate(folder / "manifest.json", 101), UNREADABLE),
    "emptied manifest": (lambda folder: os.truncate(folder / "manifest.json", 0), UNREADABLE),
    "manifest of zeros": (lambda folder: (folder / "manifest.json").write_bytes(bytes(101)), UNREADABLE),
    "manifest of another kind": (lambda folder: (folder / "manifest.json").write_text("[7]"), UNREADABLE),
    "no counts": (lambda folder: edit_manifest(folder, splits={}), UNREADABLE),
    "counts of another kind": (lambda folder: edit_manifest(folder, splits=[1]), UNREADABLE),
    "unknown type": (lambda folder: edit_manifest(folder, dtype="uint17"), "the ids are 'uint17' by the manifest"),
    "another type": (
        lambda folder: edit_manifest(folder, dtype="uint32"),
        "the ids are 'uint32' by the manifest and not uint16",
    ),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), UNREADABLE),
    "half a tokenizer": (lambda folder: os.truncate(folder / "tokenizer.json", 101), UNREADABLE),
    "tampered tokenizer": (
        lambda folder: edit_tokenizer(folder, pattern="."),
        f"{UNREADABLE}.*do not match their hash",
    ),
    "foreign tokenizer": (lambda folder: edit_tokenizer(folder, **gpt2_tokenizer().to_dict()), FOREIGN),
    "folder emptied": (lambda folder: [file.unlink() for file in folder.iterdir()], UNREADABLE),
    "a file in its place": (lambda folder: [shutil.rmtree(folder), folder.write_text("")], UNREADABLE),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_named(tmp_path, damage):
    """One line says what is wrong and what to delete, and after that all is well."""
    inflict, message = DAMAGE[damage]
    data, cache = write_documents(tmp_path), tmp_path / "cache"
    whole = make(data, cache).train.tolist()
    folder = folder_of(cache)
    inflict(folder)
    said = refusal(data, cache)
    assert re.match(f"{re.escape(str(folder))}(/|: ){message}", said), said
    assert said.endswith(f"; delete {folder} and it will be made anew")
    shutil.rmtree(folder) if folder.is_dir() else folder.unlink()
    assert make(data, cache).train.tolist() == whole


def test_ranks_of_another_kind(tmp_path):
    """A tokenizer whose strings are none is unreadable like any other."""
    data, cache = write_documents(tmp_path), tmp_path / "cache"
    make(data, cache)
    edit_tokenizer(folder_of(cache), ranks=7)
    assert UNREADABLE in refusal(data, cache)


def test_large_shards_are_not_hashed(tmp_path, monkeypatch):
    """Above the limit only sizes are compared, so that a corpus of gigabytes opens at once."""
    data, cache = write_documents(tmp_path), tmp_path / "cache"
    size = make(data, cache).validation.nbytes
    flip(folder_of(cache))
    monkeypatch.setattr(gpt.shards, "VERIFY_BYTES", size)
    assert "validation.bin: damaged" in refusal(data, cache)
    monkeypatch.setattr(gpt.shards, "VERIFY_BYTES", size - 1)
    assert make(data, cache).validation.nbytes == size
