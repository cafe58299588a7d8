"""Tokens on disk: files of a bounded size with a manifest, memory-mapped as one long array.

`python -m gpt.text.shards` reads all of them, or those of the folders given, and checks every hash.
"""

import argparse
import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from tqdm import tqdm

from gpt.errors import UserError, command_line, write_line
from gpt.text.tokenizer import Tokenizer

SPLITS = ("train", "validation")
SHARD_BYTES = 1 << 28  # of a file; the last one of a split is shorter
VERIFY_BYTES = 1 << 28  # folders up to this size, which hash in a fraction of a second, are hashed when they are opened


class Tokens:
    """The token ids of several files as one array of `len(tokens)`; an array of indices, or a slice, gives ids."""

    def __init__(self, files: Sequence[Path], dtype: np.dtype, length: int, per_file: int):
        self._files = files
        self._maps: list[np.ndarray | None] = [None] * len(files)
        self._dtype, self._length, self._per_file = dtype, length, per_file

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: slice | np.ndarray) -> np.ndarray:
        if isinstance(index, slice):
            index = np.arange(*index.indices(self._length))
        if len(self._files) == 1:
            return self._map(0)[index]
        number, place = np.divmod(index, self._per_file)
        ids = np.empty(index.shape, self._dtype)
        for one in np.unique(number):
            here = number == one
            ids[here] = self._map(int(one))[place[here]]
        return ids

    def _map(self, number: int) -> np.ndarray:
        found = self._maps[number]
        if found is None:
            found = self._maps[number] = np.asarray(np.memmap(self._files[number], self._dtype, mode="r"))
        return found


@dataclass(frozen=True)
class Shards:
    """A prepared corpus: token ids of both splits, each document preceded by end-of-text.

    `manifest` holds the key by which the folder was made, the hashes, and the counts of tokens, bytes and documents.
    """

    train: Tokens
    validation: Tokens
    tokenizer: Tokenizer
    manifest: dict


@dataclass(frozen=True)
class Corpora:
    """What a run learns from: one prepared corpus, or several with their shares of the windows.

    `names` is what the configuration calls them; `shares` are whole numbers, of `gpt.text.batches.SHARES`.
    """

    sources: tuple[Shards, ...]
    names: tuple[str, ...]
    shares: tuple[int, ...]

    @property
    def tokenizer(self) -> Tokenizer:
        return self.sources[0].tokenizer

    @property
    def key(self) -> dict:
        """All that decides the tokens and their order, as plain types."""
        if len(self.sources) == 1:
            return self.sources[0].manifest["key"]
        keys = [source.manifest["key"] for source in self.sources]
        return {"mix": keys, "shares": list(self.shares), "tokenizer": keys[0]["tokenizer"]}

    @property
    def train_tokens(self) -> int:
        return sum(len(source.train) for source in self.sources)


def width(tokenizer: Tokenizer) -> np.dtype:
    """The type of ids on disk: uint16 where the vocabulary fits, else uint32."""
    return np.dtype("uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32")


def shard_files(folder: Path, split: str, count: int) -> list[Path]:
    """The token files of a split."""
    return [folder / f"{split}-{number:05d}.bin" for number in range(count)]


class Writer:
    """Appends ids to the files of a split.

    The first `length` ids, written by an earlier process whose full files have `hashes`, are taken as they are; what
    lies behind them is cut off.
    """

    def __init__(self, folder: Path, split: str, dtype: np.dtype, length: int = 0, hashes: Sequence[str] = ()):
        self._folder, self._split, self._dtype = folder, split, dtype
        self._per_file = SHARD_BYTES // dtype.itemsize
        self.length, self.hashes = length, list(hashes)
        self._stream: BinaryIO | None = None
        if rest := length % self._per_file:
            self._stream = self._next_file().open("r+b")
            self._stream.truncate(rest * dtype.itemsize)
            self._digest = hashlib.file_digest(self._stream, "sha256")

    def _next_file(self) -> Path:
        return shard_files(self._folder, self._split, len(self.hashes) + 1)[-1]

    def append(self, ids: np.ndarray) -> None:
        """Write ids, which have the type of the files."""
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
        """Wait until all that was written is safe on disk."""
        if self._stream is not None:
            self._stream.flush()
            os.fsync(self._stream.fileno())

    def close(self) -> None:
        """End the present file, and keep its hash."""
        if self._stream is not None:
            self.flush()
            self._stream.close()
            self._stream = None
            self.hashes.append(self._digest.hexdigest())

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, *error: object) -> None:
        """Let go of a file that was not closed, as after an error; of its end, only what was flushed is to be there."""
        if self._stream is not None:
            with contextlib.suppress(OSError):
                self._stream.close()


def open_shards(folder: Path) -> Shards:
    """Map a prepared corpus, after a check of its manifest and sizes, and of its hashes where it is not large.

    Raises `UserError` naming what is wrong and the remedy.
    """
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        tokenizer = Tokenizer.from_dict(json.loads((folder / "tokenizer.json").read_text(encoding="utf-8")))
        dtype = width(tokenizer)
        per_file = int(manifest["shard_bytes"]) // dtype.itemsize
        lengths = {split: int(manifest["splits"][split]["tokens"]) for split in SPLITS}
        files = {split: shard_files(folder, split, len(manifest["splits"][split]["sha256"])) for split in SPLITS}
        complete = all(0 < len(files[split]) == -(-lengths[split] // per_file) for split in SPLITS)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError) as error:
        raise UserError(
            f"{folder}: the manifest or the tokenizer cannot be read ({error}); {_remedy(folder)}"
        ) from None
    if manifest.get("tokenizer") != tokenizer.sha256:
        raise UserError(f"{folder}: the tokenizer is not the one that the manifest names; {_remedy(folder)}")
    if manifest.get("dtype") != dtype.name:
        told = manifest.get("dtype")
        raise UserError(f"{folder}: the ids are {told!r} by the manifest and not {dtype.name}; {_remedy(folder)}")
    if not complete:
        raise UserError(f"{folder}: the manifest's counts of files and tokens do not fit; {_remedy(folder)}")
    for split in SPLITS:
        for number, file in enumerate(files[split]):
            expected = min(per_file, lengths[split] - number * per_file) * dtype.itemsize
            actual = file.stat().st_size if file.exists() else None
            if actual is None:
                raise UserError(f"{file}: is missing; {_remedy(folder)}")
            if actual != expected:
                raise UserError(f"{file}: {actual} bytes where the manifest says {expected}; {_remedy(folder)}")
    tokens = {split: Tokens(files[split], dtype, lengths[split], per_file) for split in SPLITS}
    shards = Shards(tokens["train"], tokens["validation"], tokenizer, manifest)
    if sum(lengths.values()) * dtype.itemsize <= VERIFY_BYTES:
        verify(folder, manifest)
    return shards


def verify(folder: Path, manifest: dict, read: Callable[[int], object] = lambda size: None) -> None:
    """Hash every token file of a prepared corpus; `UserError` names the first that is damaged.

    `read` is told the size in bytes of each file that is in order.
    """
    for split in SPLITS:
        hashes = manifest["splits"][split]["sha256"]
        for file, expected in zip(shard_files(folder, split, len(hashes)), hashes, strict=True):
            with file.open("rb") as stream:
                if hashlib.file_digest(stream, "sha256").hexdigest() != expected:
                    raise UserError(f"{file}: damaged (its hash is not the one in the manifest); {_remedy(folder)}")
                read(stream.tell())


def _remedy(folder: Path) -> str:
    return f"delete {folder} and it will be made anew"


def main() -> None:
    """Check prepared corpora in full: a line for each, and an error at the first that is damaged."""
    parser = argparse.ArgumentParser(prog="python -m gpt.text.shards", description=__doc__)
    parser.add_argument("folders", nargs="*", type=Path, help="prepared corpora (default: all in data/cache)")
    folders = parser.parse_args().folders or sorted(
        file.parent for file in Path("data/cache").glob("[!.]*/manifest.json")
    )
    if not folders:
        raise UserError("data/cache holds no prepared corpus: name the folder of one")
    for folder in folders:
        shards = open_shards(folder)
        tokens = len(shards.train) + len(shards.validation)
        total = tokens * width(shards.tokenizer).itemsize
        with tqdm(total=total, unit="B", unit_scale=True, leave=False, disable=not sys.stderr.isatty()) as bar:
            verify(folder, shards.manifest, bar.update)
        write_line(f"{folder}: {tokens:,} tokens of {shards.tokenizer.vocab_size:,} kinds, all in order", sys.stdout)


if __name__ == "__main__":
    with command_line("gpt.text.shards"):
        main()
