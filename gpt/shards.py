"""Tokens on disk: prepared once for a corpus, a tokenizer and a split, and memory-mapped ever after."""

import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gpt.corpus import Corpus, DataConfig, Split, open_corpus
from gpt.errors import UserError
from gpt.files import write_text
from gpt.tokenizer import Tokenizer, TokenizerConfig, byte_tokenizer, gpt2_tokenizer, train_bpe

FORMAT = 2  # of the folder; raise it when what is written for the same text changes
SPLITS = ("train", "validation")
VERIFY_BYTES = 1 << 28  # files up to this size, which hash in a fraction of a second, are hashed when they are opened


@dataclass(frozen=True)
class Shards:
    """A prepared corpus. `train` and `validation` are one-dimensional arrays of token ids, mapped from disk.

    Every document is preceded by end-of-text. `manifest` holds the hashes and the counts of tokens, bytes and
    documents.
    """

    train: np.ndarray
    validation: np.ndarray
    tokenizer: Tokenizer
    manifest: dict


def prepare(
    data: DataConfig,
    tokenizer: TokenizerConfig,
    context_length: int,
    cache: Path,
    given: Tokenizer | None = None,
    say: Callable[[str], None] = print,
) -> Shards:
    """The shards of the configured corpus, from the cache where they are already there.

    `given` is a tokenizer to use as it is, in place of the configured one: that of a model to fine-tune. The folder's
    name is a hash of everything that decides its content, so changed text or settings never meet old shards. A text too
    short for one window of `context_length` tokens raises `UserError`, and nothing is written.
    """
    corpus = open_corpus(data)
    how = {"given": given.sha256} if given else {"name": tokenizer.name}
    if not given and tokenizer.name == "bpe":
        how["vocab_size"] = str(tokenizer.vocab_size)
    key = {"format": FORMAT, "corpus": corpus.sha256(), "tokenizer": how, "validation_bytes": data.validation_bytes}
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    folder = cache / f"{corpus.name}-{given.name if given else tokenizer.name}-{digest}"
    if not folder.exists():

        def make_tokenizer(texts: Iterable[str]) -> Tokenizer:
            return given or _make(tokenizer, texts)

        _write_folder(folder, corpus, key, data.validation_bytes, make_tokenizer, context_length, say)
    shards = open_shards(folder)
    _require_enough(len(shards.train), len(shards.validation), context_length)
    return shards


def _require_enough(train_tokens: int, validation_tokens: int, context_length: int) -> None:
    if train_tokens <= context_length:
        remedy = f", or set model.context_length={train_tokens - 1} or less" if train_tokens > 1 else ""
        raise UserError(
            f"the training text has {train_tokens} tokens, fewer than model.context_length={context_length} and a "
            f"target: give more text{remedy}"
        )
    if validation_tokens < 2:
        raise UserError(f"the validation text has {validation_tokens} tokens, and 2 are the least: give more text")


def _make(config: TokenizerConfig, texts: Iterable[str]) -> Tokenizer:
    if config.name == "gpt2":
        return gpt2_tokenizer()
    return byte_tokenizer() if config.name == "byte" else train_bpe(texts, config.vocab_size)


def _write_folder(
    folder: Path,
    corpus: Corpus,
    key: dict,
    validation_bytes: int,
    make_tokenizer: Callable[[Iterable[str]], Tokenizer],
    context_length: int,
    say: Callable[[str], None],
) -> None:
    """Write a shard folder whole or not at all: beside its place first, then renamed into it."""
    say(f"reading {corpus.name} ({len(corpus.files)} file{'s' * (len(corpus.files) != 1)})")
    documents = list(corpus.documents())
    split = Split(lambda: documents, validation_bytes)
    tokenizer = make_tokenizer(split.train())
    temporary = _new_folder(folder.parent)
    try:
        counts = {
            "train": _write_tokens(temporary / "train.bin", split.train(), tokenizer),
            "validation": _write_tokens(temporary / "validation.bin", split.validation(), tokenizer),
        }
        _require_enough(counts["train"]["tokens"], counts["validation"]["tokens"], context_length)
        manifest = {"key": key, "corpus": corpus.name, "tokenizer": tokenizer.sha256, "splits": counts}
        manifest["dtype"] = _dtype(tokenizer).name
        write_text(temporary / "tokenizer.json", json.dumps(tokenizer.to_dict()))
        write_text(temporary / "manifest.json", json.dumps(manifest, indent=2))
        try:
            os.rename(temporary, folder)
        except OSError:
            if not folder.exists():  # else another run has prepared the same corpus meanwhile, and its work is as good
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    total = sum(counts[name]["tokens"] for name in SPLITS)
    size = sum(counts[name]["bytes"] for name in SPLITS)
    say(
        f"prepared {size:,} bytes as {total:,} tokens of {tokenizer.vocab_size:,} kinds, "
        f"{size / total:.2f} bytes each; {counts['validation']['bytes']:,} bytes of it validate"
    )


def _new_folder(cache: Path) -> Path:
    """A folder for this process to prepare in; those of processes that are gone are swept away."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
        for left in cache.glob(".preparing-*"):
            process = re.fullmatch(r"\.preparing-(\d+)-\w+", left.name)
            if process and not _is_running(int(process[1])):
                shutil.rmtree(left, ignore_errors=True)
        folder = cache / f".preparing-{os.getpid()}-{secrets.token_hex(4)}"
        folder.mkdir()
        return folder
    except OSError as error:
        raise UserError(
            f"{cache}: cannot be written ({error.strerror}); name another folder with data.cache="
        ) from None


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it is somebody else's
        pass
    return True


def _dtype(tokenizer: Tokenizer) -> np.dtype:
    return np.dtype("uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32")


def _write_tokens(file: Path, documents: Iterable[str], tokenizer: Tokenizer) -> dict:
    dtype = _dtype(tokenizer)
    counts = {"tokens": 0, "bytes": 0, "documents": 0}

    def counted() -> Iterable[str]:
        for document in documents:
            counts["documents"] += 1
            counts["bytes"] += len(document.encode("utf-8"))
            yield document

    digest = hashlib.sha256()
    with file.open("wb") as stream:
        for ids in tokenizer.encode_documents(counted()):
            ids = np.concatenate([[tokenizer.end_of_text], ids])
            assert ids.max() < tokenizer.vocab_size
            block = ids.astype(dtype).tobytes()
            digest.update(block)
            stream.write(block)
            counts["tokens"] += len(ids)
        stream.flush()
        os.fsync(stream.fileno())
    return counts | {"sha256": digest.hexdigest()}


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def open_shards(folder: Path) -> Shards:
    """Map a shard folder, after a check of its parts. Raises `UserError` naming what is wrong and the remedy."""
    remedy = f"delete {folder} and it will be made anew"
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        tokenizer = Tokenizer.from_dict(json.loads((folder / "tokenizer.json").read_text(encoding="utf-8")))
        dtype = _dtype(tokenizer)
        sizes = {name: manifest["splits"][name]["tokens"] * dtype.itemsize for name in SPLITS}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{folder}: the manifest or the tokenizer cannot be read ({error}); {remedy}") from None
    if manifest["tokenizer"] != tokenizer.sha256:
        raise UserError(f"{folder}: the tokenizer is not the one that the manifest names; {remedy}")
    if manifest.get("dtype") != dtype.name:
        raise UserError(
            f"{folder}: the ids are {manifest.get('dtype')!r} by the manifest and not {dtype.name}; {remedy}"
        )
    arrays = {}
    for name in SPLITS:
        file = folder / f"{name}.bin"
        actual = file.stat().st_size if file.exists() else None
        if actual != sizes[name]:
            raise UserError(f"{file}: {actual} bytes where the manifest says {sizes[name]}; {remedy}")
        if sizes[name] <= VERIFY_BYTES and _sha256(file) != manifest["splits"][name]["sha256"]:
            raise UserError(f"{file}: damaged (its hash is not the one in the manifest); {remedy}")
        arrays[name] = np.memmap(file, dtype, mode="r") if actual else np.empty(0, dtype)
    return Shards(arrays["train"], arrays["validation"], tokenizer, manifest)
