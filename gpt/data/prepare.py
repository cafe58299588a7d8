"""Preparing: from the configured text to a dataset of token ids, once for each corpus, tokenizer and split.

The way is the same on one machine and on many. A scan makes a plan. `encode_shard` makes each shard of it, in any
order and as often as one likes. dataset.json, written last, publishes them. A corpus is read twice, to scan and to
encode it, unless it is so small that the scan keeps all of it in memory.
"""

import contextlib
import hashlib
import json
import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, Executor, Future, ThreadPoolExecutor, as_completed
from pathlib import Path

import numpy as np

from gpt.console import progress_bar, say
from gpt.data.chunking import utf8_size
from gpt.data.corpus import Chunk, Corpus, Say
from gpt.data.data_config import DataConfig
from gpt.data.dataset_cache import (
    CACHE_WRITE_HINT,
    DEFAULT_CACHE,
    delete,
    exclusive_lock,
    make_cache,
    parse_checked_json,
    working_folder,
)
from gpt.data.file_hashes import hash_files
from gpt.data.imported_tokens import open_tokens
from gpt.data.mixture import integer_weights, source_names, split_mixture
from gpt.data.scan import TOKENS_FORMAT, CorpusScanner, ShardPlan, make_shard_plan, read_shard_plan
from gpt.data.split import SAMPLE_BYTES, Split
from gpt.data.storage import Directory, as_directory, file_size, new_file, read_bytes, write_bytes, write_sealed
from gpt.data.token_dataset import (
    DATASET_FILE,
    MIXTURE_BLOCK,
    SPLITS,
    TOKENIZER_FILE,
    TokenDataset,
    TokenSource,
    open_cached,
    open_source,
)
from gpt.data.token_files import token_dtype
from gpt.data.tokenizer import Tokenizer, TokenizerConfig, tokenizer_key, train_bpe
from gpt.errors import OutsideError, UserError, reason
from gpt.files import explain, mark_as_cache, write_text
from gpt.files import publish as publish_folder

DATASET_LAYOUT = 2  # raise it when a directory holds the same tokens in another way
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
TASK_CHARS = 1 << 18  # that a thread encodes at once, at least

Task = list[tuple[Chunk, bool]]  # chunks, each with whether it is for validation
Encoded = dict[str, tuple[np.ndarray, int, int]]  # of each split, the ids, bytes and documents
Progress = Callable[[int], object]  # takes a number of bytes of text


class TooShortError(UserError):
    """A text does not fill one sequence; `longest_context` is the longest context that it would fill, or 0."""

    def __init__(self, message: str, longest_context: int):
        super().__init__(message)
        self.longest_context = longest_context


def prepare(
    data: DataConfig | str | Sequence[str],
    tokenizer: TokenizerConfig | Tokenizer | None = None,
    context_length: int = 1,
    cache: str | Path = DEFAULT_CACHE,
    say: Say = say,
    *,
    to: str | Path | None = None,
    executor: Executor | None = None,
) -> TokenDataset:
    """Return the configured text, or the several of a mixture, as token ids; use what is prepared where possible.

    Args:
        data: The text, or what `data.path` takes.
        tokenizer: A tokenizer, such as that of a model to fine-tune, or which one to take or to train.
        context_length: A text must fill one sequence of so many tokens, or it raises `TooShortError`.
        cache: The folder for prepared text and for copies of remote files.
        say: Prints a line.
        to: A directory or URL for the result, instead of a folder of the cache.
        executor: Makes the shards, instead of the threads of this process. Any of Python's `concurrent.futures`
            interface: processes, Dask, MPI. Each worker must reach the text, the cache and the result.
    """
    if not isinstance(data, DataConfig):
        data = DataConfig("text", data if isinstance(data, str) else list(data))
    tokenizer, cache = tokenizer or TokenizerConfig(), Path(cache).absolute()
    names, weights = source_names(data), integer_weights(data)
    if data.name == "tokens":
        source = open_tokens(data, tokenizer, cache, say)
        _require_enough(len(source.train), len(source.validation), context_length)
        return TokenDataset((source,), names, weights)
    if to is not None and data.name == "mix":
        raise UserError(f"to={str(to)!r} takes one text, not a mixture: prepare each of its texts")
    scanners = [CorpusScanner(part, cache, say) for part in split_mixture(data)]
    if len(scanners) > 1 and isinstance(tokenizer, TokenizerConfig) and tokenizer.name == "bpe":
        tokenizer = _joint_tokenizer(scanners, weights, tokenizer.vocab_size, cache)
    if to is not None:
        sources = [_prepare_into(as_directory(to), scanners[0], tokenizer, context_length, executor)]
    else:
        sources = [_prepare_in_cache(scanner, tokenizer, context_length, executor) for scanner in scanners]
    return TokenDataset(tuple(sources), names, weights)


def _joint_tokenizer(scanners: list[CorpusScanner], weights: Sequence[int], vocab_size: int, cache: Path) -> Tokenizer:
    """Return one byte-pair encoding for a mixture, kept in the cache. It samples large corpora by their weight."""
    parts = [[s.sha256, s.data.validation_bytes, weight] for s, weight in zip(scanners, weights, strict=True)]
    file = cache / f"tokenizer-{_digest({'format': TOKENS_FORMAT, 'parts': parts, 'vocab_size': vocab_size})}.json"
    with contextlib.suppress(FileNotFoundError, ValueError):  # damaged: train it again
        return Tokenizer.from_dict(json.loads(file.read_text(encoding="utf-8")))

    def sample() -> Iterator[str]:
        for scanner, weight in zip(scanners, weights, strict=True):
            texts = list(scanner.scan.training_sample())
            size = sum(len(text.encode("utf-8")) for text in texts)
            yield from texts[:: max(1, -(-size * MIXTURE_BLOCK // (SAMPLE_BYTES * weight)))]

    tokenizer = train_bpe(sample(), vocab_size)
    with explain(cache, *CACHE_WRITE_HINT):
        make_cache(cache)
        write_text(file, json.dumps(tokenizer.to_dict()))
    return tokenizer


def _digest(key: dict) -> str:
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]


def _dataset_key(corpus: str, tokenizer: dict, validation_bytes: int) -> dict:
    """Return everything that determines the tokens: the hash of all documents, and how they are encoded and split."""
    return {"format": TOKENS_FORMAT, "corpus": corpus, "tokenizer": tokenizer, "validation_bytes": validation_bytes}


def _prepare_in_cache(
    scanner: CorpusScanner, tokenizer: TokenizerConfig | Tokenizer, context_length: int, executor: Executor | None
) -> TokenSource:
    """Return one corpus as token ids, from the cache or after adding it there.

    The folder's name is a hash of everything that determines its content, so changed text never meets old tokens.
    """
    name, cache = scanner.corpus.name, scanner.cache
    key = _dataset_key(scanner.sha256, tokenizer_key(tokenizer), scanner.data.validation_bytes)
    folder = cache / f"{name}-{tokenizer.name}-{_digest(key | {'layout': DATASET_LAYOUT})}"
    if folder.exists():
        scanner.say(f"{name} is already prepared, in {folder}")
    else:
        with explain(cache, *CACHE_WRITE_HINT), working_folder(folder, scanner.say) as working:
            if not folder.exists():  # another process may have made it while we waited
                if not (working / DATASET_FILE).exists():  # which is written last
                    _make_shards(working, scanner, tokenizer, context_length, executor)
                _delete_unfinished(working)
                publish_folder(working, folder)
    source = open_cached(folder)
    _require_enough(len(source.train), len(source.validation), context_length)
    return source


def _delete_unfinished(folder: Path) -> None:
    for file in folder.iterdir():
        if not re.fullmatch(rf"{DATASET_FILE}|{TOKENIZER_FILE}|validation\.bin|train-[0-9]+\.bin", file.name):
            file.unlink()


def _prepare_into(
    directory: Directory,
    scanner: CorpusScanner,
    tokenizer: TokenizerConfig | Tokenizer,
    context_length: int,
    executor: Executor | None,
) -> TokenSource:
    """Prepare a corpus into a directory that the user has named; an interrupted preparation goes on."""
    with contextlib.ExitStack() as stack:
        if isinstance(directory, Path):
            stack.enter_context(explain(directory, "written", "fix that, or name another directory"))
            directory.mkdir(parents=True, exist_ok=True)
            mark_as_cache(directory)
            stack.enter_context(exclusive_lock(directory / ".lock", "preparing this text", scanner.say))
            for file in directory.glob(".*.bin.*"):  # which a killed process has left
                file.unlink()
        _make_shards(directory, scanner, tokenizer, context_length, executor, keep_plan=True)
    scanner.say(f"to train on it: data=tokens data.path={directory}")
    return open_source(directory, scanner.cache, scanner.data.cache_bytes)


def _make_shards(
    directory: Directory,
    scanner: CorpusScanner,
    tokenizer: TokenizerConfig | Tokenizer,
    context_length: int,
    executor: Executor | None,
    keep_plan: bool = False,
) -> None:
    """Plan, make the shards that are missing, and publish. `keep_plan` refuses a directory with another plan."""
    plan, chunks = None, None
    try:
        plan = read_shard_plan(directory)
    except UserError:  # damaged, or of another version
        if keep_plan:
            raise
    if plan is not None and not plan.matches(scanner, tokenizer):
        if keep_plan:
            raise UserError(f"{directory}: holds another text, or one that has changed since: name an empty folder")
        plan = None
    if plan is None:
        if isinstance(directory, Path) and not keep_plan:
            delete(directory)
        plan, chunks = make_shard_plan(scanner, tokenizer, hash_all=not keep_plan)
        scanner.__dict__.pop("scan", None)  # whose sample takes memory
        plan.write(directory)
    records = read_records(directory, plan)
    done = sum(_text_bytes(record) for record in records if record)
    missing = [number for number, record in enumerate(records) if record is None]
    if done and missing:
        scanner.say(f"resuming the preparation of {scanner.corpus.name} at {done / max(done, plan.bytes):.0%}")
    with progress_bar(f"tokenizing {scanner.corpus.name}", plan.bytes, done, delay=1) as bar:
        if executor is None:
            for number in missing:
                _encode_shard(plan, number, scanner.corpus, directory, scanner.cache, CORES, bar.update, chunks)
        else:
            arguments = directory, scanner.cache, scanner.data.cache_bytes
            _run_on_executor(executor, missing, arguments, bar.update)
    metadata = _publish(directory, plan, scanner.corpus, context_length)
    text, tokens = (sum(metadata["splits"][split][kind] for split in SPLITS) for kind in ("bytes", "tokens"))
    validation_bytes = metadata["splits"]["validation"]["bytes"]
    scanner.say(
        f"prepared {text:,} bytes as {tokens:,} tokens ({text / tokens:.2f} bytes per token, vocabulary "
        f"{plan.tokenizer.vocab_size:,}), of which {validation_bytes:,} bytes are for validation"
    )


def _run_on_executor(
    executor: Executor, missing: list[int], arguments: tuple[Directory, Path, int], on_progress: Progress
) -> None:
    """Make shards elsewhere; `OutsideError` names those that failed, after all were tried."""
    directory, cache, cache_bytes = arguments
    try:
        futures = {
            executor.submit(encode_shard, str(directory), number, str(cache), cache_bytes): number for number in missing
        }
    except BrokenExecutor as error:
        raise OutsideError(f"{directory}: nothing was encoded ({error}): give another executor") from None
    failed: dict[int, str] = {}
    for future in as_completed(futures):
        try:
            on_progress(future.result())
        except (UserError, OSError, MemoryError, BrokenExecutor) as error:  # all else is a bug
            failed[futures[future]] = reason(error)
    if failed:
        first = "; ".join(f"shard {number}: {why}" for number, why in sorted(failed.items())[:3])
        what = f"{len(failed):,} of {len(missing):,} shards failed ({first}{'; ...' * (len(failed) > 3)})"
        raise OutsideError(f"{directory}: {what}: fix that and prepare it again, which keeps the others")


# --- one shard ---


def encode_shard(
    directory: str | Path,
    number: int,
    cache: str | Path = DEFAULT_CACHE,
    cache_bytes: int = DataConfig.cache_bytes,
    threads: int = 1,
) -> int:
    """Make one shard of a planned text, unless it is there, and return its bytes of text.

    It may run on any machine, and as often as one likes: its files come into the directory whole, and its record last.

    Args:
        directory: Where the plan is, and the shard comes.
        number: Of the shard.
        cache: The folder for copies of remote files and for unfinished uploads.
        cache_bytes: That copies of remote files may take there.
        threads: On which to encode.
    """
    directory, cache = as_directory(directory), Path(cache)
    if (plan := read_shard_plan(directory)) is None:
        raise UserError(f"{directory}: holds no plan: begin with prepare() of gpt.data.prepare")
    record = read_record(directory, plan, number)
    if record is None:
        corpus = plan.open_corpus(cache, cache_bytes, say)
        record = _encode_shard(plan, number, corpus, directory, cache, threads)
    return _text_bytes(record)


def _encode_shard(
    plan: ShardPlan,
    number: int,
    corpus: Corpus,
    directory: Directory,
    cache: Path,
    threads: int,
    on_progress: Progress = lambda size: None,
    chunks: Iterable[Chunk] | None = None,
) -> dict:
    """Write the tokens of a shard into a file for each split, and last its record, which is returned.

    `chunks` are those of the shard if memory holds them.
    """
    files = plan.files_of_shard(number)
    corpus.require_unchanged(plan.fingerprints, files)
    tasks = _tasks(chunks or plan.chunks_of_shard(number, corpus), plan.split, plan.shard_starts[number].characters)
    splits: dict[str, dict] = {name: {"tokens": 0, "bytes": 0, "documents": 0} for name in SPLITS}
    digests = {name: hashlib.sha256() for name in SPLITS}
    with contextlib.ExitStack() as stack:
        paths = {name: stack.enter_context(new_file(directory, _shard_file(name, number), cache)) for name in SPLITS}
        streams = {name: stack.enter_context(path.open("wb")) for name, path in paths.items()}
        for encoded in _encode_in_order(tasks, plan.tokenizer, threads):
            for name, (ids, size, documents) in encoded.items():
                streams[name].write(ids.data)
                digests[name].update(ids.data)
                for kind, count in (("tokens", len(ids)), ("bytes", size), ("documents", documents)):
                    splits[name][kind] += count
                on_progress(size)
    unhashed = [i for i in files if str(i) not in plan.hashes]  # which no other shard has
    hashes = dict(zip(map(str, unhashed), hash_files([corpus.files[i] for i in unhashed], cache), strict=True))
    corpus.require_unchanged(plan.fingerprints, files)
    splits = {name: {**splits[name], "sha256": digests[name].hexdigest()} for name in SPLITS}
    record = {"plan": plan.digest, "hashes": hashes, "splits": splits}
    write_sealed(directory, _record_file(number), record)
    return record


def _shard_file(split: str, number: int) -> str:
    return f"{split}-{number:06}.bin"


def _record_file(number: int) -> str:
    return f"shard-{number:06}.json"


def _text_bytes(record: dict) -> int:
    return sum(record["splits"][name]["bytes"] for name in SPLITS)


def _tasks(chunks: Iterable[Chunk], split: Split, characters: int) -> Iterator[Task]:
    """Yield portions of work for a thread; `characters` come before the chunks."""
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


def _encode_in_order(tasks: Iterable[Task], tokenizer: Tokenizer, threads: int) -> Iterator[Encoded]:
    """Encode tasks on several cores and yield the results in order, holding only a few at a time."""
    running: deque[Future] = deque()
    with ThreadPoolExecutor(threads) as pool:
        for task in tasks:
            running.append(pool.submit(_encode_task, task, tokenizer))
            if len(running) > 2 * threads:
                yield running.popleft().result()
        for future in running:
            yield future.result()


def _encode_task(task: Task, tokenizer: Tokenizer) -> Encoded:
    """Encode a task's chunks for each split, with end-of-text before each document."""
    dtype = token_dtype(tokenizer.vocab_size)
    end_of_text = np.array([tokenizer.end_of_text], dtype)
    encoded = {}
    for name in SPLITS:
        chunks = [chunk for chunk, is_validation in task if is_validation == (name == "validation")]
        ids = [end_of_text[:0]]
        for chunk in chunks:
            if chunk.starts_document:
                ids.append(end_of_text)
            ids.append(tokenizer.encode_chunk(chunk.text).astype(dtype))
        size = sum(utf8_size(chunk.text) for chunk in chunks)
        encoded[name] = np.concatenate(ids), size, sum(chunk.starts_document for chunk in chunks)
    return encoded


# --- all shards ---


def read_records(directory: Directory, plan: ShardPlan, verify: bool = True) -> list[dict | None]:
    """Return the record of each shard; None of a shard that the directory does not have whole."""
    with ThreadPoolExecutor(16) as threads:
        return list(threads.map(lambda i: read_record(directory, plan, i, verify), range(len(plan.shard_starts))))


def read_record(directory: Directory, plan: ShardPlan, number: int, verify: bool = True) -> dict | None:
    """Return the record of a shard; None unless its files are there, with their sizes, and here with their hashes."""
    content = read_bytes(directory, _record_file(number)) or b""
    try:
        record = parse_checked_json(content.decode(), _record_file(number))
    except ValueError:
        return None
    if record["plan"] != plan.digest:
        return None
    for name in SPLITS:
        split, file = record["splits"][name], _shard_file(name, number)
        if file_size(directory, file) != split["tokens"] * token_dtype(plan.tokenizer.vocab_size).itemsize:
            return None
        if verify and isinstance(directory, Path):
            with explain(directory / file), (directory / file).open("rb") as stream:
                if hashlib.file_digest(stream, "sha256").hexdigest() != split["sha256"]:
                    return None
    return record


def _publish(directory: Directory, plan: ShardPlan, corpus: Corpus, context_length: int) -> dict:
    """Write dataset.json, after checking that every shard is there, and return what it holds.

    Raises `UserError` naming the shards that are missing.
    """
    found = read_records(directory, plan, verify=False)
    records = [record for record in found if record is not None]
    if missing := [number for number, record in enumerate(found) if record is None]:
        numbers = ", ".join(map(str, missing[:5])) + ", ..." * (len(missing) > 5)
        raise UserError(f"{directory}: lacks {len(missing):,} of {len(found):,} shards ({numbers}): make them first")
    splits: dict[str, dict] = {
        name: {
            kind: sum(record["splits"][name][kind] for record in records) for kind in ("tokens", "bytes", "documents")
        }
        for name in SPLITS
    }
    _require_enough(splits["train"]["tokens"], splits["validation"]["tokens"], context_length)
    splits["train"]["files"] = [
        [_shard_file("train", number), record["splits"]["train"]["tokens"], record["splits"]["train"]["sha256"]]
        for number, record in enumerate(records)
        if record["splits"]["train"]["tokens"]
    ]
    validation = b"".join(_read_validation(directory, number, record) for number, record in enumerate(records))
    write_bytes(directory, "validation.bin", validation)
    digest = hashlib.sha256(validation).hexdigest()
    splits["validation"]["files"] = [["validation.bin", splits["validation"]["tokens"], digest]]
    hashes = plan.hashes | {number: sha256 for record in records for number, sha256 in record["hashes"].items()}
    identity = corpus.identity(hashes[str(number)] for number in range(len(corpus.files)))
    key = _dataset_key(identity, plan.tokenizer_key, plan.data["validation_bytes"])
    metadata = {"key": key, "corpus": corpus.name, "tokenizer": plan.tokenizer.sha256, "splits": splits}
    write_sealed(directory, DATASET_FILE, metadata)
    return metadata


def _read_validation(directory: Directory, number: int, record: dict) -> bytes:
    """Return the validation tokens of a shard; `OutsideError` if they are not what its record says."""
    name = _shard_file("validation", number)
    content = read_bytes(directory, name) or b""
    if hashlib.sha256(content).hexdigest() != record["splits"]["validation"]["sha256"]:
        raise OutsideError(f"{directory}/{name}: is damaged: delete it, and prepare the text again")
    return content


def _require_enough(train_tokens: int, validation_tokens: int, context_length: int) -> None:
    if train_tokens <= context_length:
        raise TooShortError(
            f"the training text has {train_tokens} tokens, fewer than a context of {context_length} and a target: "
            "give more text",
            max(0, train_tokens - 1),
        )
    if validation_tokens < 2:
        raise TooShortError(f"the validation text has {validation_tokens} tokens but needs 2: give more text", 0)
