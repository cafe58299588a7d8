"""Encoding one shard of a planned text: on several cores, in order, and recorded once it is safe."""

import contextlib
import hashlib
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from gpt.console import say
from gpt.errors import UserError
from gpt.text.cache import delete, unsealed
from gpt.text.corpus.corpus import Corpus, Piece
from gpt.text.hashes import hash_files
from gpt.text.pieces import size_of
from gpt.text.prepare.plan import Plan
from gpt.text.prepare.split import Split
from gpt.text.prepared import SPLITS, width
from gpt.text.shards import GROUP
from gpt.text.store import Store
from gpt.text.tokenizer import Tokenizer

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
TASK = 1 << 18  # characters, at least, that a thread encodes at once
FILES = 16  # of a shard that gpt.prepare publishes, at most
BLOCKS = 16  # in such a file, every sixteenth of the shard, so that groups of files are alike; 1 if there is one group
LEAST = 1 << 10  # tokens in a block: a small shard has fewer blocks

Task = list[tuple[Piece, bool]]  # pieces, each with whether it is for validation
Encoded = dict[str, tuple[np.ndarray, int, int]]  # of each split, the ids, bytes and documents


def encode_here(
    plan: Plan,
    number: int,
    corpus: Corpus,
    stamps: list[tuple],
    folder: Path,
    splits: dict[str, dict],
    digests: dict[str, Any],
    pieces: Iterable[Piece] | None = None,
    threads: int = CORES,
    read: Callable[[int], object] = lambda size: None,
) -> dict:
    """Append the tokens of a shard to a file for each split, and return the counts and hashes of these files then.

    `splits` and `digests` are those of what precedes; what comes behind that in a file is cut off. `stamps` are those
    that the files of the corpus must have; `pieces` are those of the shard if memory has them; the bytes of text are
    reported to `read`.
    """
    files = plan.files_of(number, corpus)
    corpus.require_unchanged(stamps, files)
    tasks = _tasks(pieces or _pieces(plan, number, corpus), plan.split, plan.places[number].characters)
    splits = {name: dict(counts) for name, counts in splits.items()}
    with contextlib.ExitStack() as stack:
        streams = {name: stack.enter_context((folder / f"{name}.bin").open("a+b")) for name in SPLITS}
        for name, stream in streams.items():
            stream.truncate(splits[name]["tokens"] * width(plan.tokenizer).itemsize)
        for encoded in _in_order(tasks, plan.tokenizer, threads):
            for name, (ids, size, documents) in encoded.items():
                streams[name].write(ids.data)
                digests[name].update(ids.data)
                for kind, count in (("tokens", len(ids)), ("bytes", size), ("documents", documents)):
                    splits[name][kind] += count
                read(size)
        for stream in streams.values():
            stream.flush()
            os.fsync(stream.fileno())
    corpus.require_unchanged(stamps, files)
    return {name: {**splits[name], "sha256": digests[name].hexdigest()} for name in SPLITS}


def nothing() -> tuple[dict[str, dict], dict[str, Any]]:
    """Return the counts of both splits before anything is encoded, and their digests."""
    empty: dict[str, dict] = {name: {"tokens": 0, "bytes": 0, "documents": 0, "sha256": ""} for name in SPLITS}
    return empty, {name: hashlib.sha256() for name in SPLITS}


def encode_apart(plan: Plan, number: int, cache: Path, room: int, store: Store, scratch: Path, threads: int) -> dict:
    """Put the tokens of a shard into a store, dealt to files, and last a record of them, which is returned.

    `scratch` is a folder for unfinished files. Made twice, a shard is the same.
    """
    delete(scratch)
    scratch.mkdir(parents=True)
    corpus = plan.corpus_at(cache, room, say)
    splits = encode_here(plan, number, corpus, plan.stamps, scratch, *nothing(), None, threads)
    files: dict[str, list] = {name: [] for name in SPLITS}
    for name, most in (("train", FILES), ("validation", 1)):
        for i, tokens in enumerate(_deal(scratch / f"{name}.bin", splits[name]["tokens"], most, plan)):
            file = f"{name}-{number:06}-{i:02}.bin"
            store.write(file, tokens.tobytes())
            files[name].append([file, len(tokens), hashlib.sha256(tokens.data).hexdigest()])
    own = [i for i in plan.files_of(number, corpus) if str(i) not in plan.text["hashes"]]  # which no other shard has
    hashes = dict(zip(map(str, own), hash_files([corpus.files[i] for i in own], cache), strict=True))
    record = {"plan": plan.digest, "hashes": hashes, "splits": splits, "files": files}
    store.write_json(name_of(number), record)
    delete(scratch)
    return record


def name_of(number: int) -> str:
    """Return the name of a shard's record in the store."""
    return f"part-{number:06}.json"


def record_of(store: Store, plan: Plan, number: int) -> dict | None:
    """Return what a store says of a shard; None if it is not there, or the record is damaged."""
    content = store.read(name_of(number)) or b""
    try:
        record = unsealed(content.decode(), name_of(number))
    except ValueError:
        return None
    if record["plan"] != plan.digest:
        raise UserError(f"{store.url}: shard {number} is of another plan: name an empty folder")
    return record


def records_of(store: Store, plan: Plan) -> list[dict | None]:
    """Return the record of each shard; None, and none is left, of a shard that the store does not have whole."""
    with ThreadPoolExecutor(16) as threads:
        records = list(threads.map(lambda number: record_of(store, plan, number), range(len(plan.places))))
    sizes, each = store.sizes(), width(plan.tokenizer).itemsize
    for number, record in enumerate(records):
        files = [file for name in SPLITS for file in record["files"][name]] if record else []
        if any(sizes.get(name) != tokens * each for name, tokens, _ in files):
            store.delete(name_of(number))
            records[number] = None
    return records


def _pieces(plan: Plan, number: int, corpus: Corpus) -> Iterator[Piece]:
    """Yield the pieces of a shard."""
    first, *following = plan.places[number : number + 2]
    if following:
        corpus = corpus.up_to(following[0])
    for file, byte, piece in corpus.pieces(first):
        if following and (file, byte) == following[0][:2]:
            return
        yield piece


def _tasks(pieces: Iterable[Piece], split: Split, characters: int) -> Iterator[Task]:
    """Yield portions of work for a thread; `characters` come before the pieces."""
    task: Task = []
    size = 0
    for piece in pieces:
        task += split.sides(piece, characters)
        characters += len(piece.text)
        size += len(piece.text)
        if size >= TASK:
            yield task
            task, size = [], 0
    if task:
        yield task


def _in_order(tasks: Iterable[Task], tokenizer: Tokenizer, threads: int) -> Iterator[Encoded]:
    """Encode tasks on several cores and yield the results in order, holding only a few at a time."""
    running: deque[Future] = deque()
    with ThreadPoolExecutor(threads) as pool:
        for task in tasks:
            running.append(pool.submit(_encode, task, tokenizer))
            if len(running) > 2 * threads:
                yield running.popleft().result()
        for future in running:
            yield future.result()


def _encode(task: Task, tokenizer: Tokenizer) -> Encoded:
    """Encode a task's pieces for each split, with end-of-text before each document."""
    dtype = width(tokenizer)
    end_of_text = np.array([tokenizer.end_of_text], dtype)
    result = {}
    for name in SPLITS:
        pieces = [piece for piece, validates in task if validates == (name == "validation")]
        ids = [end_of_text[:0]]
        for piece in pieces:
            if piece.begins:
                ids.append(end_of_text)
            ids.append(tokenizer.encode_piece(piece.text).astype(dtype))
        size = sum(size_of(piece.text) for piece in pieces)
        result[name] = np.concatenate(ids), size, sum(piece.begins for piece in pieces)
    return result


def _deal(file: Path, length: int, most: int, plan: Plan) -> Iterator[np.ndarray]:
    """Deal the tokens of a file in blocks to `most` parts at most, and yield these."""
    blocks = BLOCKS if len(plan.places) * FILES > GROUP else 1
    count = min(most * blocks, -(-length // LEAST))
    if count:
        parts = np.array_split(np.memmap(file, width(plan.tokenizer), mode="r"), count)
        for i in range(min(most, count)):
            yield np.concatenate(parts[i::most])
