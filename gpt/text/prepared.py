"""Tokens on disk: a file for each split, memory-mapped, and a manifest."""

import contextlib
import hashlib
import json
import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gpt.errors import OutsideError, UserError, reason
from gpt.files import explain
from gpt.text.cache import read_json
from gpt.text.shards import GROUP, MEND, Shards, Store, check
from gpt.text.tokenizer import Tokenizer

SPLITS = ("train", "validation")
MIXTURE_WINDOWS = 1000  # a mixture deals out windows in blocks of this many, of which each corpus has a whole number
VERIFY_BYTES = 1 << 28  # folders up to this size are hashed whenever they are opened: it takes a fraction of a second
DECODED_TOKENS = 1 << 16  # to decode at once
_TOKEN_FILE = r"train-[0-9]+(-[0-9]+)?\.bin|validation\.bin"  # in a store


@dataclass(frozen=True)
class PreparedText:
    """A prepared corpus: the token ids of both splits, with end-of-text before each document.

    `manifest` holds the key that the folder was made for, the hashes, and the counts of tokens, bytes and documents.
    """

    train: np.ndarray | Shards  # (tokens,), of `width`, on disk
    validation: np.ndarray
    tokenizer: Tokenizer
    manifest: dict

    @property
    def at_hand(self) -> np.ndarray:
        """The training tokens, or those of the first shard: enough for a look at the text."""
        return self.train[0] if isinstance(self.train, Shards) else self.train

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


def open_prepared(folder: Path) -> PreparedText:
    """Open a prepared corpus, after checking its manifest and sizes, and its hashes unless it is large.

    Raises `UserError` naming what is wrong and the remedy.
    """
    try:
        manifest = read_json(folder / "manifest.json")
        tokenizer = Tokenizer.from_dict(json.loads((folder / "tokenizer.json").read_text(encoding="utf-8")))
        if manifest["tokenizer"] != tokenizer.sha256:
            raise ValueError("the tokenizer is not the one in the manifest")
        arrays = {}
        for split in SPLITS:
            file, expected = folder / f"{split}.bin", manifest["splits"][split]["tokens"]
            arrays[split] = np.asarray(np.memmap(file, width(tokenizer), mode="r"))
            if len(arrays[split]) != expected:
                raise ValueError(f"{file.name} has {len(arrays[split]):,} tokens where the manifest says {expected:,}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder}: is damaged ({error}); {_remedy(folder)}") from None
    if sum(tokens.nbytes for tokens in arrays.values()) <= VERIFY_BYTES:
        verify(folder, manifest)
    return PreparedText(arrays["train"], arrays["validation"], tokenizer, manifest)


def read_prepared(store: Store, cache: Path, room: int) -> PreparedText:
    """Open what `gpt.prepare` has published; shards come into the cache, which may take `room` bytes, as they are used.

    Raises `UserError` naming what is wrong and the remedy.
    """
    manifest, tokenizer = read_manifest(store)
    *listed, last = _token_files(manifest)
    lengths, each = [tokens for _, tokens, _ in listed], width(tokenizer).itemsize
    needed = 3 * GROUP * max(lengths, default=0) * each
    if not store.is_local and room < min(needed, sum(lengths) * each):
        raise UserError(f"data.cache_bytes={room:,} does not hold {3 * GROUP} files of this text: {needed:,} do")
    validation = _shards(store, [last], tokenizer, cache, room)[0]
    return PreparedText(_shards(store, listed, tokenizer, cache, room), validation, tokenizer, manifest)


def read_manifest(store: Store) -> tuple[dict, Tokenizer]:
    """Return the manifest and the tokenizer of a store; `UserError` if they are not such as `gpt.prepare` writes."""
    manifest, tokens = store.read_json("manifest.json"), store.read("tokenizer.json")
    if manifest is None or tokens is None:
        raise UserError(f"{store.url}: holds no prepared text; python -m gpt.prepare --to {store.url} makes it")
    try:
        _require_shape(manifest)
        tokenizer = Tokenizer.from_dict(json.loads(tokens))
        if manifest["tokenizer"] != tokenizer.sha256:
            raise ValueError("the tokenizer is not the one in the manifest")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise OutsideError(f"{store.url}: is damaged ({reason(error)}); {MEND}") from None
    return manifest, tokenizer


def _require_shape(manifest: dict) -> None:
    """Raise `ValueError`, `KeyError` or `TypeError` unless names, hashes and counts are as `gpt.prepare` writes."""
    if not isinstance(manifest["key"]["tokenizer"], dict):
        raise ValueError("its key names no tokenizer")
    kinds = ("tokens", "bytes", "documents")
    counts = {(split, kind): manifest["splits"][split][kind] for split in SPLITS for kind in kinds}
    for name, tokens, sha256 in _token_files(manifest):
        if not (re.fullmatch(_TOKEN_FILE, name) and re.fullmatch("[0-9a-f]{64}", sha256)):
            raise ValueError(f"{name!r}, of hash {sha256!r}, is not the name of a token file and its hash")
        counts[name, "tokens"] = tokens
    for (where, kind), count in counts.items():
        if type(count) is not int or not 0 < count < 1 << 48:
            raise ValueError(f"{where} has {count!r} {kind}")
    if sum(tokens for _, tokens, _ in manifest["shards"]) != counts["train", "tokens"]:
        raise ValueError("the tokens of its shards do not add up")


def _token_files(manifest: dict) -> list[tuple[str, int, str]]:
    """Return name, tokens and hash of each file of a store, that for validation last."""
    held = manifest["splits"]["validation"]
    return [*manifest["shards"], ("validation.bin", held["tokens"], held["sha256"])]


def _shards(
    store: Store, listed: Sequence[tuple[str, int, str]], tokenizer: Tokenizer, cache: Path, room: int
) -> Shards:
    each = width(tokenizer).itemsize
    files = [store.file(name, tokens * each, sha256, cache, room) for name, tokens, sha256 in listed]

    def checked(shard: int, file: Path, tokens: np.ndarray) -> None:
        check(file, tokens, listed[shard][2], tokenizer.vocab_size, cache)

    return Shards(files, [tokens for _, tokens, _ in listed], width(tokenizer), checked)


def verify_store(store: Store) -> tuple[dict, Tokenizer]:
    """Hash every token file of a store, fetched one at a time; raise `UserError` naming the first that is damaged."""
    manifest, tokenizer = read_manifest(store)
    with tempfile.TemporaryDirectory() as cache:  # an empty one, so that no file counts as known
        for file in _token_files(manifest):
            _shards(store, [file], tokenizer, Path(cache), file[1] * width(tokenizer).itemsize)[0]
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
    return [open_prepared(prepared[key]) for key in wanted] if prepared.keys() >= set(wanted) else []


def verify(folder: Path, manifest: dict) -> None:
    """Hash the token files of a prepared corpus; raise `UserError` naming the first damaged one."""
    for split in SPLITS:
        file = folder / f"{split}.bin"
        with explain(file), file.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256")
        if digest.hexdigest() != manifest["splits"][split]["sha256"]:
            raise UserError(f"{file}: damaged (its hash is not the one in the manifest); {_remedy(folder)}")


def _remedy(folder: Path) -> str:
    return f"delete {folder} and it will be made anew"
