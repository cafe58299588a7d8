"""Prepared text: the tokens of both splits in a store, each file checked when it is opened, and a manifest."""

import contextlib
import json
import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from gpt.errors import OutsideError, UserError, reason
from gpt.text.cache import read_json
from gpt.text.corpus.remote import Remote
from gpt.text.shards import GROUP, Shards, check
from gpt.text.store import Store
from gpt.text.tokenizer import Tokenizer

SPLITS = ("train", "validation")
MIXTURE_WINDOWS = 1000  # a mixture deals out windows in blocks of this many, of which each corpus has a whole number
VERIFY_BYTES = 1 << 28  # text up to this size is hashed whenever it is opened: it takes a fraction of a second
DECODED_TOKENS = 1 << 16  # to decode at once
_TOKEN_FILE = r"train(-[0-9]+(-[0-9]+)?)?\.bin|validation\.bin"
_COUNTS = ("tokens", "bytes", "documents")


@dataclass(frozen=True)
class PreparedText:
    """A prepared corpus: the token ids of both splits, with end-of-text before each document.

    `manifest` holds the key that the text was prepared for, the hashes, and the counts of tokens, bytes and documents.
    """

    train: Shards
    validation: np.ndarray  # (tokens,), of `width`, on disk
    tokenizer: Tokenizer
    manifest: dict

    @cached_property
    def at_hand(self) -> np.ndarray:
        """The training tokens in the first file, which are all if train.py has prepared them: (tokens,), on disk."""
        return self.train[0]

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

    sources: tuple[PreparedText, ...]
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


def open_prepared(store: Store, cache: Path, room: int) -> PreparedText:
    """Open a prepared text. Files from elsewhere come into the cache, which may take `room` bytes, as they are used.

    Raises `UserError` naming what is wrong and the remedy.
    """
    manifest, tokenizer = read_manifest(store)
    *train, last = token_files(manifest)
    lengths, each = [tokens for _, tokens, _ in train], width(tokenizer).itemsize
    needed = 3 * GROUP * max(lengths) * each
    if not store.folder and room < min(needed, sum(lengths) * each):
        raise UserError(f"data.cache_bytes={room:,} does not hold {3 * GROUP} files of this text: {needed:,} do")
    known = None if sum(lengths, last[1]) * each <= VERIFY_BYTES else cache
    validation = _open(store, [last], tokenizer, cache, room, known)[0]
    found = PreparedText(_open(store, train, tokenizer, cache, room, known), validation, tokenizer, manifest)
    if store.folder:
        found.at_hand  # noqa: B018 - so that damage is known before anything else begins
    return found


def open_folder(folder: Path) -> PreparedText:
    """Open what train.py has prepared."""
    return open_prepared(Store(folder, f"delete {folder} and it will be made anew"), folder.parent, 0)


def read_manifest(store: Store) -> tuple[dict, Tokenizer]:
    """Return the manifest and the tokenizer of a store; `UserError` if they are not such as this project writes."""
    manifest, tokens = store.read_json("manifest.json"), store.read("tokenizer.json")
    if manifest is None or tokens is None:
        raise UserError(f"{store.url}: holds no prepared text; python -m gpt.prepare --to {store.url} makes it")
    try:
        _require_shape(manifest)
        tokenizer = Tokenizer.from_dict(json.loads(tokens))
        if manifest["tokenizer"] != tokenizer.sha256:
            raise ValueError("the tokenizer is not the one in the manifest")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise OutsideError(f"{store.url}: is damaged ({reason(error)}); {store.mend}") from None
    return manifest, tokenizer


def _require_shape(manifest: dict) -> None:
    """Raise `ValueError`, `KeyError` or `TypeError` unless names, hashes and counts are as this project writes them."""
    if not isinstance(manifest["key"]["tokenizer"], dict):
        raise ValueError("its key names no tokenizer")
    counts = {(split, kind): manifest["splits"][split][kind] for split in SPLITS for kind in _COUNTS}
    files = token_files(manifest)
    for name, tokens, sha256 in files:
        if not (re.fullmatch(_TOKEN_FILE, name) and re.fullmatch("[0-9a-f]{64}", sha256)):
            raise ValueError(f"{name!r}, of hash {sha256!r}, is not the name of a token file and its hash")
        counts[name, "tokens"] = tokens
    for (where, kind), count in counts.items():
        if type(count) is not int or not 0 < count < 1 << 48:
            raise ValueError(f"{where} has {count!r} {kind}")
    if sum(tokens for _, tokens, _ in files[:-1]) != counts["train", "tokens"]:
        raise ValueError("the tokens of its shards do not add up")


def token_files(manifest: dict) -> list[tuple[str, int, str]]:
    """Return name, tokens and hash of each file of a prepared text, that for validation last.

    train.py makes one file for training, and lists none.
    """
    whole = {split: (f"{split}.bin", held["tokens"], held["sha256"]) for split, held in manifest["splits"].items()}
    return [*manifest.get("shards", [whole["train"]]), whole["validation"]]


def _open(
    store: Store,
    listed: Sequence[tuple[str, int, str]],
    tokenizer: Tokenizer,
    cache: Path,
    room: int,
    known: Path | None = None,
) -> Shards:
    """Open files of a store; `known` is the cache that remembers which are intact, if they are not to be read again."""
    dtype = width(tokenizer)

    def file(name: str, tokens: int, sha256: str) -> Path | Remote:
        if store.folder:
            return store.folder / name
        return Remote(f"{store.url}/{name}", tokens * dtype.itemsize, "", cache, room, sha256)

    def require_intact(shard: int, file: Path) -> None:
        check(file, listed[shard][2], dtype, tokenizer.vocab_size, known)

    lengths = [tokens for _, tokens, _ in listed]
    mend = store.mend if store.folder else "delete it, and run the command again"
    return Shards([file(*one) for one in listed], lengths, dtype, require_intact, mend)


def verify(store: Store) -> tuple[dict, Tokenizer]:
    """Hash every token file of a store, fetched one at a time; raise `UserError` naming the first that is damaged."""
    manifest, tokenizer = read_manifest(store)
    with tempfile.TemporaryDirectory() as cache:
        for file in token_files(manifest):
            _open(store, [file], tokenizer, Path(cache), file[1] * width(tokenizer).itemsize)[0]
    return manifest, tokenizer


def find_prepared(record: dict, tokenizer: Tokenizer, cache: Path) -> list[PreparedText]:
    """Open the prepared corpus of a checkpoint's run, or the several of a mixture; none if the cache lacks one.

    They are found by the hashes in the checkpoint, `record`, which names no path that is opened.
    """
    corpus = record.get("corpus")
    keys = corpus.get("mix", [corpus]) if isinstance(corpus, dict) else None
    wanted = [json.dumps(key, default=repr) for key in keys] if isinstance(keys, list) else []
    prepared = {}
    for file in cache.glob("[!.]*/train.bin"):  # which folders of earlier versions have not
        with contextlib.suppress(OSError, ValueError):  # damaged, so it is not found
            manifest = read_json(file.with_name("manifest.json"))
            if manifest.get("tokenizer") == tokenizer.sha256:
                prepared[json.dumps(manifest.get("key"))] = file.parent
    return [open_folder(prepared[key]) for key in wanted] if prepared.keys() >= set(wanted) else []
