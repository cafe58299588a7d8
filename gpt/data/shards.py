"""Shards: a plan cuts a corpus into parts, and each part is encoded separately, in any order and as often as one likes.

plan.json and tokenizer.json hold all that `encode_shard` needs besides the text. A shard is complete once its record,
shard-NNNNNN.json, is written.
"""

import contextlib
import hashlib
import json
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from gpt.console import print_line
from gpt.data.chunking import utf8_size
from gpt.data.corpus import Chunk, Corpus, Say, ShardStart, make_corpus, open_corpus
from gpt.data.data_config import BUILTIN_CORPORA, DataConfig
from gpt.data.dataset_cache import (
    DEFAULT_CACHE,
    PLAN_FILE,
    dump_checked_json,
    load_checked_json,
    read_checked_json,
    write_checked_json,
)
from gpt.data.download import RemoteFile
from gpt.data.file_hashes import hash_files
from gpt.data.scan import CorpusScanner, make_tokenizer
from gpt.data.split import Split
from gpt.data.token_dataset import COUNTS, DAMAGE_HINT, SPLITS, TOKENIZER_FILE
from gpt.data.token_files import token_dtype
from gpt.data.tokenizer import Tokenizer, TokenizerConfig, tokenizer_key
from gpt.errors import UserError
from gpt.files import atomic_write, expand_path, sync_parents, user_errors, write_text

TOKENS_FORMAT = 3  # raise it when the same text gives other tokens: no run resumes on them
PLAN_FORMAT = 2  # raise it when a plan is to be read in another way
TASK_CHARS = 1 << 18  # the least text that a thread encodes at once

Task = list[tuple[Chunk, bool]]  # chunks, each with True if it is for validation
Progress = Callable[[int], object]  # takes a number of bytes of text


@dataclass(frozen=True)
class ShardPlan:
    """How a corpus is split, tokenized and cut into shards: the content of plan.json, and the tokenizer.

    `content["hashes"]` holds the SHA-256 of files by their numbers, at least of all files that two shards share.
    `content["bytes"]` is the size of all documents.
    """

    content: dict
    tokenizer: Tokenizer

    @cached_property
    def split(self) -> Split:
        return Split(**self.content["split"])

    @cached_property
    def shard_starts(self) -> list[ShardStart]:
        return [ShardStart(*start) for start in self.content["starts"]]

    @cached_property
    def fingerprints(self) -> list[tuple]:
        return [tuple(fingerprint) for _, *fingerprint in self.content["files"]]

    @cached_property
    def digest(self) -> str:
        """The hash of the plan. Each shard's record contains it."""
        return hashlib.sha256(dump_checked_json(self.content).encode()).hexdigest()

    def write(self, directory: Path) -> None:
        if not directory.is_dir():
            directory.mkdir(parents=True, exist_ok=True)
            sync_parents(directory)
        write_text(directory / TOKENIZER_FILE, json.dumps(self.tokenizer.to_dict()))
        write_checked_json(directory / PLAN_FILE, self.content)

    def matches(self, scanner: CorpusScanner, tokenizer: TokenizerConfig | Tokenizer) -> bool:
        """Return True if this is the plan of a corpus and its files have not changed."""
        corpus = {**_describe_corpus(scanner), "tokenizer_key": tokenizer_key(tokenizer)}
        return all(self.content[key] == value for key, value in corpus.items())

    def open_corpus(self, cache: Path, cache_bytes: int, print_line: Say) -> Corpus:
        """Return the corpus. Remote files are fetched into the cache, where copies may take `cache_bytes`."""
        settings = self.content["data"]
        data = DataConfig(**settings | ({} if settings["name"] in BUILTIN_CORPORA else {"path": "."}))
        files = tuple(
            RemoteFile(file, size, tag, cache, cache_bytes, print_line=print_line)
            if isinstance(tag, str)
            else Path(file)
            for file, size, tag in self.content["files"]
        )
        if data.name not in ("python_docs", "python_stdlib"):
            return make_corpus(data, files, self.content["validation_files"])
        corpus = open_corpus(data, cache, print_line)
        if corpus.files != files:
            raise UserError(f"data={data.name} is of another Python here: use the same on all machines")
        return corpus

    def files_of_shard(self, number: int) -> range:
        """Return the numbers of the files whose text is in a shard."""
        start, end = self._bounds(number)
        return range(start.file, len(self.content["files"]) if end is None else end.file + (end.byte > 0))

    def chunks_of_shard(self, number: int, corpus: Corpus) -> Iterator[Chunk]:
        """Yield the chunks of a shard."""
        for _, _, chunk in corpus.chunks(*self._bounds(number)):
            yield chunk

    def _bounds(self, number: int) -> tuple[ShardStart, ShardStart | None]:
        return self.shard_starts[number], (*self.shard_starts, None)[number + 1]


def make_shard_plan(
    scanner: CorpusScanner, tokenizer: TokenizerConfig | Tokenizer, hash_all: bool
) -> tuple[ShardPlan, list[Chunk] | None]:
    """Scan a corpus; return the plan, and all chunks of the text if they fit into memory.

    Args:
        scanner: The corpus.
        tokenizer: A tokenizer, or which one to train or take.
        hash_all: Put the hash of every file into the plan, and not only of files that two shards share.
    """
    scan = scanner.scan
    if hash_all:
        hashes = {str(number): sha256 for number, sha256 in enumerate(scanner.hashes)}
    else:
        shared = sorted({start.file for start in scan.shard_starts if start.byte})
        hashes = _hash_by_number(shared, scanner.corpus, scanner.cache)
    made_tokenizer = make_tokenizer(tokenizer, scan, scanner.print_line)
    content = {
        "plan": PLAN_FORMAT,
        "format": TOKENS_FORMAT,
        **_describe_corpus(scanner),
        "hashes": hashes,
        "split": asdict(scan.split),
        "starts": [list(start) for start in scan.shard_starts],
        "bytes": scan.bytes,
        "tokenizer": made_tokenizer.sha256,
        "tokenizer_key": tokenizer_key(tokenizer),
    }
    del scanner.scan  # its sample takes memory
    has_all_chunks = scan.stride == 1 and len(scan.shard_starts) == 1
    chunks = [chunk for chunk, _ in scan.sample] if has_all_chunks else None
    return ShardPlan(content, made_tokenizer), chunks


def _describe_corpus(scanner: CorpusScanner) -> dict:
    """Return the settings that determine the documents, and the path or URL and the fingerprint of each file."""
    data, corpus = scanner.data, scanner.corpus
    settings = {key: getattr(data, key) for key in ("name", "text_field", "errors", "validation_bytes")}
    names = [file.url if isinstance(file, RemoteFile) else str(file.absolute()) for file in corpus.files]
    return {
        "data": settings | data.reader_settings,
        "files": [[name, *fingerprint] for name, fingerprint in zip(names, scanner.fingerprints, strict=True)],
        "validation_files": corpus.validation_files,
    }


def _hash_by_number(numbers: Sequence[int], corpus: Corpus, cache: Path) -> dict[str, str]:
    hashes = hash_files([corpus.files[number] for number in numbers], cache)
    return dict(zip(map(str, numbers), hashes, strict=True))


def read_shard_plan(directory: Path) -> ShardPlan | None:
    """Return the plan in a directory, or None without one; `UserError` if it is damaged or of another version."""
    content = load_checked_json(directory / PLAN_FILE, DAMAGE_HINT)
    if content is None or not (directory / TOKENIZER_FILE).exists():
        return None
    if (content.get("plan"), content["format"]) != (PLAN_FORMAT, TOKENS_FORMAT):
        raise UserError(f"{directory}: another version began to prepare it: start again in an empty folder")
    try:
        tokenizer = Tokenizer.from_dict(json.loads((directory / TOKENIZER_FILE).read_bytes()))
    except (ValueError, KeyError, TypeError):
        tokenizer = None
    if tokenizer is None or tokenizer.sha256 != content["tokenizer"]:
        raise UserError(f"{directory}: its tokenizer is not the one in its plan: start again in an empty folder")
    return ShardPlan(content, tokenizer)


# --- one shard ---


def encode_shard(
    directory: str | Path,
    number: int,
    cache: str | Path = DEFAULT_CACHE,
    cache_bytes: int = DataConfig.cache_bytes,
    threads: int = 1,
) -> int:
    """Encode one shard of a planned corpus unless it is complete; return its bytes of text.

    This may run on any machine, any number of times. Each file enters the directory whole, and the record last.

    Args:
        directory: The folder of the plan and of the shards.
        number: The number of the shard.
        cache: The folder for copies of remote files.
        cache_bytes: The space that copies of remote files may take there.
        threads: The number of threads that encode.
    """
    directory = expand_path(directory).absolute()
    plan = read_shard_plan(directory)
    if plan is None:
        raise UserError(f"{directory}: holds no plan: begin with prepare() of gpt.data.prepare")
    record = read_record(directory, plan, number)
    if record is None:
        corpus = plan.open_corpus(Path(cache), cache_bytes, print_line)
        record = write_shard(plan, number, corpus, directory, Path(cache), threads)
    return text_bytes(record)


def write_shard(
    plan: ShardPlan,
    number: int,
    corpus: Corpus,
    directory: Path,
    cache: Path,
    threads: int,
    on_progress: Progress = lambda size: None,
    chunks: Iterable[Chunk] | None = None,
) -> dict:
    """Write the token files of a shard, one for each split, and then its record. Return the record.

    Args:
        plan: The plan.
        number: The number of the shard.
        corpus: The corpus of the plan.
        directory: Where the files go.
        cache: The folder that remembers the hashes of files.
        threads: The number of threads that encode.
        on_progress: Called with numbers of bytes of text.
        chunks: The chunks of the shard if they are in memory.
    """
    files = plan.files_of_shard(number)
    corpus.require_unchanged(plan.fingerprints, files)
    if chunks is None:
        chunks = plan.chunks_of_shard(number, corpus)
    tasks = _split_into_tasks(chunks, plan.split, plan.shard_starts[number].characters)
    counts = {split: Counter(dict.fromkeys(COUNTS, 0)) for split in SPLITS}
    digests = {split: hashlib.sha256() for split in SPLITS}
    with contextlib.ExitStack() as stack:
        streams = {}
        for split in SPLITS:
            path = stack.enter_context(atomic_write(directory / shard_file(split, number)))
            streams[split] = stack.enter_context(path.open("wb"))
        for encoded in _encode_in_order(tasks, plan.tokenizer, threads):
            for split, part in encoded.items():
                streams[split].write(part.ids.data)
                digests[split].update(part.ids.data)
                counts[split].update(part.counts)
                on_progress(part.counts["bytes"])
    unhashed = [file for file in files if str(file) not in plan.content["hashes"]]
    hashes = _hash_by_number(unhashed, corpus, cache)
    corpus.require_unchanged(plan.fingerprints, files)
    splits = {split: {**counts[split], "sha256": digests[split].hexdigest()} for split in SPLITS}
    record = {"plan": plan.digest, "hashes": hashes, "splits": splits}
    write_checked_json(directory / _record_file(number), record)
    return record


def shard_file(split: str, number: int) -> str:
    """Return the name of a shard's token file."""
    return f"{split}-{number:06}.bin"


def _record_file(number: int) -> str:
    return f"shard-{number:06}.json"


def text_bytes(record: dict) -> int:
    """Return the bytes of text in a shard."""
    return sum(record["splits"][split]["bytes"] for split in SPLITS)


class _Encoded(NamedTuple):
    """The ids of some text, (tokens,), and its counts of tokens, bytes and documents."""

    ids: np.ndarray
    counts: dict[str, int]


def _split_into_tasks(chunks: Iterable[Chunk], split: Split, characters: int) -> Iterator[Task]:
    """Yield portions of work for a thread. `characters` precede the chunks in the corpus."""
    task: Task = []
    size = 0
    for chunk in chunks:
        task += split.assign(chunk, characters)
        characters += len(chunk.text)
        size += len(chunk.text)
        if size >= TASK_CHARS:
            yield task
            task, size = [], 0
    if task:
        yield task


def _encode_in_order(tasks: Iterable[Task], tokenizer: Tokenizer, threads: int) -> Iterator[dict[str, _Encoded]]:
    """Encode tasks on several threads. Yield the results in order, and hold only a few at a time."""
    running: deque[Future] = deque()
    with ThreadPoolExecutor(threads) as pool:
        for task in tasks:
            running.append(pool.submit(_encode_task, task, tokenizer))
            if len(running) > 2 * threads:
                yield running.popleft().result()
        for future in running:
            yield future.result()


def _encode_task(task: Task, tokenizer: Tokenizer) -> dict[str, _Encoded]:
    """Encode a task's chunks for each split, with end-of-text before each document."""
    dtype = token_dtype(tokenizer.vocab_size)
    end_of_text = np.array([tokenizer.end_of_text], dtype)
    encoded = {}
    for split in SPLITS:
        chunks = [chunk for chunk, is_validation in task if is_validation == (split == "validation")]
        parts = [end_of_text[:0]]
        for chunk in chunks:
            if chunk.starts_document:
                parts.append(end_of_text)
            parts.append(tokenizer.encode_chunk(chunk.text).astype(dtype))
        ids = np.concatenate(parts)
        size = sum(utf8_size(chunk.text) for chunk in chunks)
        num_documents = sum(chunk.starts_document for chunk in chunks)
        encoded[split] = _Encoded(ids, {"tokens": len(ids), "bytes": size, "documents": num_documents})
    return encoded


# --- records ---


def read_records(directory: Path, plan: ShardPlan, verify: bool = True) -> list[dict | None]:
    """Return the record of each shard, or None for a shard that is incomplete."""
    with ThreadPoolExecutor(16) as threads:
        numbers = range(len(plan.shard_starts))
        return list(threads.map(lambda number: read_record(directory, plan, number, verify), numbers))


def read_record(directory: Path, plan: ShardPlan, number: int, verify: bool = True) -> dict | None:
    """Return the record of a shard, or None if the shard is incomplete.

    A complete shard has files of the recorded sizes. With `verify`, they must have the recorded hashes too.
    """
    try:
        record = read_checked_json(directory / _record_file(number))
    except (FileNotFoundError, ValueError):
        return None
    if record["plan"] != plan.digest:
        return None
    for split in SPLITS:
        file = directory / shard_file(split, number)
        recorded = record["splits"][split]
        size = recorded["tokens"] * token_dtype(plan.tokenizer.vocab_size).itemsize
        if not file.exists() or file.stat().st_size != size:
            return None
        if verify:
            with user_errors(file), file.open("rb") as stream:
                if hashlib.file_digest(stream, "sha256").hexdigest() != recorded["sha256"]:
                    return None
    return record
