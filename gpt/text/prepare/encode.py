"""From text to token files: on all cores, in order, and resumable after any interruption."""

import contextlib
import hashlib
import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from gpt.console import progress_bar
from gpt.errors import UserError
from gpt.text.cache import JOURNAL, write_json
from gpt.text.corpus.corpus import Piece
from gpt.text.prepare.source import Source
from gpt.text.prepare.split import Split
from gpt.text.prepared import SPLITS, width
from gpt.text.tokenizer import Tokenizer

TASK = 1 << 18  # characters, at least, that a thread encodes at once
PROGRESS_BYTES = 1 << 26  # of text, at most, that an interrupted preparation encodes again


class Place(NamedTuple):
    """A place in a corpus: its file, the next piece in that file, and the number of characters before it."""

    file: int
    piece: int
    characters: int


Task = list[tuple[Piece, bool]]  # pieces, each with whether it is for validation
Encoded = dict[str, tuple[np.ndarray, int, int]]  # of each split, the ids, bytes and documents


def encode(working: Path, source: Source, journal: dict, tokenizer: Tokenizer, sample: list[Piece] | None) -> dict:
    """Write the token files of both splits into a folder and return their counts and hashes.

    `journal` says how far an earlier process came, if `splits` is there; `sample` is the whole corpus where it is in
    memory already. After every `PROGRESS_BYTES` of text, a file records the journal of what is safe on disk by then;
    whatever an earlier process wrote after that is cut off.
    """
    split, start = Split(**journal["split"]), Place(*journal["place"])
    nothing = {"tokens": 0, "bytes": 0, "documents": 0, "sha256": ""}
    size, counts = journal["bytes"], journal.setdefault("splits", {name: dict(nothing) for name in SPLITS})
    done = journaled = sum(counts[name]["bytes"] for name in SPLITS)
    if done:
        source.say(f"resuming the preparation of {source.corpus.name} at {done / size:.0%}")
    kept = ((0, number, piece) for number, piece in enumerate(sample or ()))
    tasks = _tasks(source.corpus.pieces(start.file) if sample is None else kept, split, start)
    with contextlib.ExitStack() as stack:
        streams, digests = {}, {}
        for name, count in counts.items():
            file = working / f"{name}.bin"
            stream = streams[name] = stack.enter_context(file.open("a+b"))
            stream.truncate(count["tokens"] * width(tokenizer).itemsize)  # fills up one too short, as its hash shows
            stream.seek(0)
            digests[name] = hashlib.file_digest(stream, "sha256")
            if count["tokens"] and digests[name].hexdigest() != count["sha256"]:
                raise UserError(f"{file}: was damaged while the preparation was interrupted; run the command again")
        bar = stack.enter_context(progress_bar(f"tokenizing {source.corpus.name}", size, done, delay=1))

        def flush() -> None:
            for name, stream in streams.items():
                stream.flush()
                os.fsync(stream.fileno())
                counts[name]["sha256"] = digests[name].hexdigest()

        for encoded, place in _in_order(tasks, tokenizer):
            for name, (ids, num_bytes, documents) in encoded.items():
                streams[name].write(ids.data)
                digests[name].update(ids.data)
                counts[name]["tokens"] += len(ids)
                counts[name]["bytes"] += num_bytes
                counts[name]["documents"] += documents
                done += num_bytes
                bar.update(num_bytes)
            if done - journaled >= PROGRESS_BYTES and sample is None:
                flush()
                source.require_unchanged(slice(start.file, place.file + 1))
                write_json(working / JOURNAL, journal | {"place": place})
                journaled, start = done, place
        flush()
    return counts


def _tasks(pieces: Iterable[tuple[int, int, Piece]], split: Split, start: Place) -> Iterator[tuple[Task, Place]]:
    """Yield portions of work for a thread, from a place on, each with the place where it ends."""
    task: Task = []
    size, place = 0, start
    for file, number, piece in pieces:
        if file == start.file and number < start.piece:
            continue
        task += split.sides(piece, place.characters)
        size += len(piece.text)
        place = Place(file, number + 1, place.characters + len(piece.text))
        if size >= TASK:
            yield task, place
            task, size = [], 0
    if task:
        yield task, place


def _in_order(tasks: Iterable[tuple[Task, Place]], tokenizer: Tokenizer) -> Iterator[tuple[Encoded, Place]]:
    """Encode tasks on all cores and yield the results in order, holding only a few at a time."""
    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    running: deque[tuple[Future, Place]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        for task, place in tasks:
            running.append((pool.submit(_encode_task, task, tokenizer), place))
            if len(running) > 2 * threads:
                future, reached = running.popleft()
                yield future.result(), reached
        for future, reached in running:
            yield future.result(), reached


def _encode_task(task: Task, tokenizer: Tokenizer) -> Encoded:
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
        size = sum(len(piece.text.encode("utf-8")) for piece in pieces)
        result[name] = np.concatenate(ids), size, sum(piece.begins for piece in pieces)
    return result
