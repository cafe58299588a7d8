"""Tokens on disk: files of bounded size with a manifest, memory-mapped as one long array."""

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from gpt.errors import UserError
from gpt.text.cache import read_json
from gpt.text.corpus.formats import explain_unreadable
from gpt.text.tokenizer import Tokenizer

SPLITS = ("train", "validation")
MIXTURE_WINDOWS = 1000  # a mixture deals out windows in blocks of this many, of which each corpus has a whole number
SHARD_BYTES = 1 << 28  # in a file; the last one of a split is shorter
VERIFY_BYTES = 1 << 28  # folders up to this size are hashed whenever they are opened: it takes a fraction of a second
DECODED_TOKENS = 1 << 16  # to decode at once


class Tokens:
    """The token ids of several files as one array, indexed by a slice or by an array of indices."""

    def __init__(self, files: Sequence[Path], dtype: np.dtype):
        self._dtype = dtype
        self._files = [np.asarray(np.memmap(file, dtype, mode="r")) for file in files]
        self._length = sum(map(len, self._files))

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: slice | np.ndarray) -> np.ndarray:
        if isinstance(index, slice):
            index = np.arange(*index.indices(self._length))
        if len(self._files) == 1:
            return self._files[0][index]
        number, place = np.divmod(index, len(self._files[0]))  # all files but the last are as long as the first
        ids = np.empty(index.shape, self._dtype)
        for one in np.unique(number):
            here = number == one
            ids[here] = self._files[int(one)][place[here]]
        return ids


@dataclass(frozen=True)
class Shards:
    """A prepared corpus: the token ids of both splits, with end-of-text before each document.

    `manifest` holds the key that the folder was made for, the hashes, and the counts of tokens, bytes and documents.
    """

    train: Tokens
    validation: Tokens
    tokenizer: Tokenizer
    manifest: dict

    def validation_bytes(self) -> Iterator[bytes]:
        """Yield the validation text in blocks of bounded size, without end-of-text."""
        for start in range(0, len(self.validation), DECODED_TOKENS):
            ids = self.validation[start : start + DECODED_TOKENS]
            yield self.tokenizer.decode_bytes(ids[ids != self.tokenizer.end_of_text].tolist())


@dataclass(frozen=True)
class Corpora:
    """What a run trains on: one prepared corpus, or several, each with its share of the windows.

    `names` are short and unique; `shares` are whole numbers that sum to `MIXTURE_WINDOWS`.
    """

    sources: tuple[Shards, ...]
    names: tuple[str, ...]
    shares: tuple[int, ...]

    @property
    def tokenizer(self) -> Tokenizer:
        return self.sources[0].tokenizer

    @property
    def key(self) -> dict:
        """Everything that determines the tokens and their order, as plain types."""
        if len(self.sources) == 1:
            return self.sources[0].manifest["key"]
        keys = [source.manifest["key"] for source in self.sources]
        return {"mix": keys, "shares": list(self.shares), "tokenizer": keys[0]["tokenizer"]}

    @property
    def train_tokens(self) -> int:
        return sum(len(source.train) for source in self.sources)


def width(tokenizer: Tokenizer) -> np.dtype:
    """Return the type of ids on disk: uint16 if the vocabulary fits, else uint32."""
    return np.dtype("uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32")


def shard_files(folder: Path, split: str, count: int) -> list[Path]:
    """Return the paths of a split's token files."""
    return [folder / f"{split}-{number:05d}.bin" for number in range(count)]


class Writer:
    """Appends ids to the files of a split.

    To continue the work of an earlier process, give the `length` in ids that it recorded, the `hashes` of its full
    files and the `digest` of its last one; anything that it wrote after that is cut off. Raises `UserError` if the last
    file is not what the earlier process left.
    """

    def __init__(
        self,
        folder: Path,
        split: str,
        dtype: np.dtype,
        length: int = 0,
        hashes: Sequence[str] = (),
        digest: str = "",
    ):
        self._folder, self._split, self._dtype = folder, split, dtype
        self._per_file = SHARD_BYTES // dtype.itemsize
        self.length, self.hashes = length, list(hashes)
        self._stream: BinaryIO | None = None
        if rest := length % self._per_file:
            file, size = self._next_file(), rest * dtype.itemsize
            whole = file.exists() and file.stat().st_size >= size
            if whole:
                self._stream = file.open("r+b")
                self._stream.truncate(size)
                self._digest = hashlib.file_digest(self._stream, "sha256")
                whole = digest == self.digest
            if not whole:
                self.__exit__()
                raise UserError(f"{file}: was damaged while the preparation was interrupted; run the command again")

    @property
    def digest(self) -> str:
        """The hash of the unfinished file, so far."""
        return self._digest.copy().hexdigest() if self._stream is not None else ""

    def _next_file(self) -> Path:
        return shard_files(self._folder, self._split, len(self.hashes) + 1)[-1]

    def append(self, ids: np.ndarray) -> None:
        """Write ids, which must have the files' type."""
        assert ids.dtype == self._dtype
        while len(ids):
            if self._stream is None:
                self._stream, self._digest = self._next_file().open("wb"), hashlib.sha256()
            here = ids[: self._per_file - self.length % self._per_file]
            self._stream.write(here.data)
            self._digest.update(here.data)
            self.length += len(here)
            if self.length % self._per_file == 0:
                self.close()
            ids = ids[len(here) :]

    def flush(self) -> None:
        """Wait until everything written is safe on disk."""
        if self._stream is not None:
            self._stream.flush()
            os.fsync(self._stream.fileno())

    def close(self) -> None:
        """Finish the current file and record its hash."""
        if self._stream is not None:
            self.flush()
            self._stream.close()
            self._stream = None
            self.hashes.append(self._digest.hexdigest())

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, *error: object) -> None:
        """Let go of an unfinished file, as after an error; only what was flushed needs to be on disk."""
        if self._stream is not None:
            with contextlib.suppress(OSError):
                self._stream.close()


def open_shards(folder: Path) -> Shards:
    """Open a prepared corpus, after checking its manifest and sizes, and its hashes unless it is large.

    Raises `UserError` naming what is wrong and the remedy.
    """
    try:
        manifest = read_json(folder / "manifest.json")
        tokenizer = Tokenizer.from_dict(json.loads((folder / "tokenizer.json").read_text(encoding="utf-8")))
        if manifest["tokenizer"] != tokenizer.sha256:
            raise ValueError("the tokenizer is not the one in the manifest")
        dtype = width(tokenizer)
        per_file = int(manifest["shard_bytes"]) // dtype.itemsize
        lengths = {split: int(manifest["splits"][split]["tokens"]) for split in SPLITS}
        files = {split: shard_files(folder, split, len(manifest["splits"][split]["sha256"])) for split in SPLITS}
        for split in SPLITS:
            for number, file in enumerate(files[split]):
                expected = min(per_file, lengths[split] - number * per_file) * dtype.itemsize
                if (actual := file.stat().st_size) != expected:
                    raise ValueError(f"{file.name} has {actual} bytes where the manifest says {expected}")
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{folder}: is damaged ({error}); {_remedy(folder)}") from None
    if sum(lengths.values()) * dtype.itemsize <= VERIFY_BYTES:
        verify(folder, manifest)
    return Shards(Tokens(files["train"], dtype), Tokens(files["validation"], dtype), tokenizer, manifest)


def find_shards(record: dict, tokenizer: Tokenizer, cache: Path) -> list[Shards]:
    """Open the prepared corpus of a checkpoint's run, or the several of a mixture; none if the cache lacks one.

    They are found by the hashes in the checkpoint, `record`, which names no path that is opened.
    """
    corpus = record.get("corpus")
    keys = corpus.get("mix", [corpus]) if isinstance(corpus, dict) else None
    wanted = [json.dumps(key, default=repr) for key in keys] if isinstance(keys, list) else []
    prepared = {}
    for file in cache.glob("[!.]*/manifest.json"):
        with contextlib.suppress(OSError, ValueError):  # damaged, so it is not found
            manifest = read_json(file)
            if manifest.get("tokenizer") == tokenizer.sha256:
                prepared[json.dumps(manifest.get("key"))] = file.parent
    return [open_shards(prepared[key]) for key in wanted] if prepared.keys() >= set(wanted) else []


def verify(folder: Path, manifest: dict, read: Callable[[int], object] = lambda size: None) -> None:
    """Hash every token file of a prepared corpus; raise `UserError` naming the first damaged one.

    Each file that passes is reported to `read` by its size in bytes.
    """
    for split in SPLITS:
        hashes = manifest["splits"][split]["sha256"]
        for file, expected in zip(shard_files(folder, split, len(hashes)), hashes, strict=True):
            with explain_unreadable(file), file.open("rb") as stream:
                if hashlib.file_digest(stream, "sha256").hexdigest() != expected:
                    raise UserError(f"{file}: damaged (its hash is not the one in the manifest); {_remedy(folder)}")
                read(stream.tell())


def _remedy(folder: Path) -> str:
    return f"delete {folder} and it will be made anew"
