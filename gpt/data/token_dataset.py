"""The dataset of a run: token ids for training and validation with their metadata, checked when they are opened.

A prepared text is a directory with dataset.json, tokenizer.json, validation.bin and files for training. Hashes and
counts are in dataset.json. Token files of other programs have none of these.
"""

import contextlib
import errno
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np

from gpt.data.dataset_cache import load_checked_json, read_checked_json
from gpt.data.token_files import TokenSequence, hash_tokens, map_tokens, raise_open_file_limit, token_dtype
from gpt.data.tokenizer import Tokenizer
from gpt.errors import ExternalError, UserError, summarize_error
from gpt.files import flatten, user_errors

SPLITS = ("train", "validation")
DATASET_FILE, TOKENIZER_FILE = "dataset.json", "tokenizer.json"
MANIFEST_FILE = "manifest.json"  # the name of dataset.json in version 0.5
MIXTURE_BLOCK = 1000  # sequences; each source of a mixture provides a whole number of them
VERIFY_BYTES = 1 << 28  # text up to this size is hashed whenever it is opened, in a fraction of a second
DECODED_TOKENS = 1 << 16  # tokens to decode at once
DAMAGE_HINT = "put an intact copy in its place, or prepare the text again, in an empty folder"
_TOKEN_FILE = r"(train|validation)(-[0-9]+){0,2}\.bin"
COUNTS = ("tokens", "bytes", "documents")  # of each split


@dataclass(frozen=True)
class TokenSource:
    """The token ids of one text, with end-of-text before each document.

    `metadata` holds `key`, which determines the tokens, and the counts of tokens, bytes and documents of both splits.
    """

    train: TokenSequence
    validation: np.ndarray  # (tokens,)
    tokenizer: Tokenizer
    metadata: dict

    def validation_text(self) -> Iterator[bytes]:
        """Yield the validation text in blocks of bounded size, without end-of-text."""
        for start in range(0, len(self.validation), DECODED_TOKENS):
            ids = self.validation[start : start + DECODED_TOKENS]
            yield self.tokenizer.decode_bytes(ids[ids != self.tokenizer.end_of_text].tolist())


@dataclass(frozen=True)
class TokenDataset:
    """The data of a run: one source of tokens, or several with their weights.

    `names` are short and unique. `weights` are whole numbers that sum to `MIXTURE_BLOCK`.
    """

    sources: tuple[TokenSource, ...]
    names: tuple[str, ...]
    weights: tuple[int, ...]

    @property
    def tokenizer(self) -> Tokenizer:
        return self.sources[0].tokenizer

    @property
    def key(self) -> dict:
        """Everything that determines the tokens and their order, as plain types."""
        keys = [source.metadata["key"] for source in self.sources]
        if len(keys) == 1:
            return keys[0]
        return {"mix": keys, "shares": list(self.weights), "tokenizer": keys[0]["tokenizer"]}

    @property
    def train_tokens(self) -> int:
        return sum(len(source.train) for source in self.sources)


def is_prepared(directory: Path) -> bool:
    """Return True if `prepare` has made this folder."""
    return (directory / DATASET_FILE).is_file() or (directory / MANIFEST_FILE).is_file()


def open_source(
    directory: Path, cache: Path, hint: str = DAMAGE_HINT, tokenizer: Tokenizer | None = None
) -> TokenSource:
    """Open a prepared text. Raise `UserError` if it is damaged.

    Args:
        directory: The folder that `prepare` made.
        cache: The folder that remembers the hashes of large files.
        hint: The remedy for damage, for the error.
        tokenizer: The text must have been prepared with this tokenizer.
    """
    metadata, prepared_tokenizer = read_metadata(directory, hint)
    if tokenizer is not None and tokenizer.sha256 != prepared_tokenizer.sha256:
        raise UserError(
            f"{directory}: was prepared with another tokenizer than the model's: give the text itself, or another model"
        )
    dtype = token_dtype(prepared_tokenizer.vocab_size)
    entries = [tuple(entry) for split in SPLITS for entry in metadata["splits"][split]["files"]]
    raise_open_file_limit(len(entries))
    is_small = sum(tokens for _, tokens, _ in entries) * dtype.itemsize <= VERIFY_BYTES
    arrays = []
    for name, tokens, sha256 in entries:
        file = directory / name
        with token_file_errors(file, hint):
            if file.resolve().parent != directory.resolve():
                raise ValueError("it is a link out of its folder")
            arrays.append(map_tokens(file, dtype, 0, tokens))
            digest, highest = hash_tokens(file, arrays[-1], None if is_small else cache)
            if digest != sha256:
                raise ValueError(f"its SHA-256 is not the one in {DATASET_FILE}")
            require_in_vocabulary(highest, prepared_tokenizer.vocab_size)
    num_train_files = len(metadata["splits"]["train"]["files"])
    train = TokenSequence(arrays[:num_train_files])
    validation = TokenSequence(arrays[num_train_files:])[:]
    return TokenSource(train, validation, prepared_tokenizer, metadata)


@contextlib.contextmanager
def token_file_errors(file: object, hint: str) -> Iterator[None]:
    """Turn an error about a token file into one line with a hint."""
    try:
        yield
    except (OSError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        if getattr(error, "errno", None) == errno.EMFILE:
            hint = "allow more open files with ulimit -n, and run the command again"
        raise ExternalError(f"{file}: cannot be read ({summarize_error(error)}); {hint}") from None


def require_in_vocabulary(highest: int, vocab_size: int) -> None:
    """Raise `ValueError` if an id is beyond the vocabulary."""
    if highest >= vocab_size:
        raise ValueError(f"it has the id {highest:,}, but the vocabulary has only {vocab_size:,} entries")


def read_metadata(directory: Path, hint: str = DAMAGE_HINT) -> tuple[dict, Tokenizer]:
    """Return the content of dataset.json, and the tokenizer; `UserError` if they are missing or damaged."""
    metadata = load_checked_json(directory / DATASET_FILE, hint)
    manifest = load_checked_json(directory / MANIFEST_FILE, hint) if metadata is None else None
    tokenizer_file = directory / TOKENIZER_FILE
    if (metadata or manifest) is None or not tokenizer_file.exists():
        raise UserError(f"{directory}: holds no prepared text: make it with prepare() of gpt.data.prepare")
    try:
        metadata = metadata or _from_manifest(manifest or {})
        _require_shape(metadata)
        with user_errors(tokenizer_file):
            tokenizer = Tokenizer.from_dict(json.loads(tokenizer_file.read_bytes()))
        if metadata["tokenizer"] != tokenizer.sha256:
            raise ValueError(f"the tokenizer is not the one in {DATASET_FILE}")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ExternalError(f"{directory}: is damaged ({summarize_error(error)}); {hint}") from None
    return metadata, tokenizer


def _from_manifest(manifest: dict) -> dict:
    """Return the metadata of a text that version 0.5 prepared: one file for each split, or a list of shards."""
    splits = {}
    for name in SPLITS:
        split = manifest["splits"][name]
        files = [[f"{name}.bin", split["tokens"], split["sha256"]]]
        splits[name] = split | {"files": manifest.get("shards", files) if name == "train" else files}
    return manifest | {"splits": splits}


def _require_shape(metadata: dict) -> None:
    """Raise `ValueError`, `KeyError` or `TypeError` unless names, hashes and counts are valid."""
    if not isinstance(metadata["key"]["tokenizer"], dict):
        raise ValueError("its key has no tokenizer")
    for split in SPLITS:
        stored = metadata["splits"][split]
        counts = {(split, kind): stored[kind] for kind in COUNTS}
        for name, tokens, sha256 in stored["files"]:
            if not (re.fullmatch(_TOKEN_FILE, name) and re.fullmatch("[0-9a-f]{64}", sha256)):
                raise ValueError(f"{name!r} with hash {sha256!r} is not the name of a token file and its hash")
            counts[name, "tokens"] = tokens
        for (place, kind), count in counts.items():
            if type(count) is not int or not 0 < count < 1 << 48:
                raise ValueError(f"{place} has {count!r} {kind}")
        if sum(tokens for _, tokens, _ in stored["files"]) != stored["tokens"]:
            raise ValueError(f"the tokens of its {split} files do not add up")


def find_cached_dataset(checkpoint: dict, tokenizer: Tokenizer, cache: Path) -> list[TokenSource]:
    """Open each prepared text of a checkpoint's run. Return [] if the caches of `list_caches` lack one.

    They are found by the hashes in the checkpoint. Nothing else is opened.
    """
    corpus = checkpoint.get("corpus")
    keys = corpus.get("mix", [corpus]) if isinstance(corpus, dict) else None
    names = [json.dumps(key, default=repr) for key in keys] if isinstance(keys, list) else []
    caches = [folder for folder in list_caches(checkpoint, cache) if os.path.isdir(folder)]
    folders = {}
    for file_name in (MANIFEST_FILE, DATASET_FILE):
        for file in chain.from_iterable(folder.glob(f"[!.]*/{file_name}") for folder in caches):
            with contextlib.suppress(OSError, ValueError):  # a damaged text is not found
                metadata = read_checked_json(file)
                if metadata.get("tokenizer") == tokenizer.sha256:
                    folders[json.dumps(metadata.get("key"))] = file.parent
    return [open_cached(folders[name]) for name in names] if folders.keys() >= set(names) else []


def list_caches(checkpoint: dict, cache: Path) -> list[Path]:
    """Return the folders that may hold the prepared text of a checkpoint's run: its `data.cache`, after `cache`.

    A folder of a network is left out: a stranger's checkpoint could name one to learn the login of this machine.
    """
    config = checkpoint.get("config")
    name = flatten(config).get("data.cache") if isinstance(config, dict) else None
    is_local = isinstance(name, str) and name and not name.startswith(("//", "\\\\"))
    return list(dict.fromkeys([cache, Path(str(name))] if is_local else [cache]))


def open_cached(folder: Path) -> TokenSource:
    """Open a prepared text of the cache."""
    return open_source(folder, folder.parent, hint=f"delete {folder}, and it will be prepared again")
