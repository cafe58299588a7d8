"""Preparing: from the configured text to a dataset of token ids, once for each corpus, tokenizer and split.

    files -> documents -> chunks -> token ids -> shards -> validation.bin and dataset.json -> TokenDataset

One machine and many follow the same path. A scan makes a plan (scan.py), `encode_shard` encodes each shard of the plan
(shards.py), and dataset.json is written last. A corpus is read twice, to scan and to encode it. A small corpus is read
once, since its chunks stay in memory.
"""

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import BrokenExecutor, Executor, as_completed
from pathlib import Path

from gpt.console import print_line, progress_bar
from gpt.data.corpus import Chunk, Corpus, Say
from gpt.data.data_config import DataConfig, is_url
from gpt.data.dataset_cache import (
    CACHE_WRITE_HINT,
    DEFAULT_CACHE,
    delete_working_folder,
    exclusive_lock,
    make_cache,
    working_folder,
    write_checked_json,
)
from gpt.data.imported_tokens import open_tokens
from gpt.data.mixture import integer_weights, source_names, split_mixture
from gpt.data.scan import CorpusScanner
from gpt.data.shards import (
    TOKENS_FORMAT,
    Progress,
    ShardPlan,
    encode_shard,
    make_shard_plan,
    read_records,
    read_shard_plan,
    shard_file,
    text_bytes,
    write_shard,
)
from gpt.data.split import SAMPLE_BYTES
from gpt.data.token_dataset import (
    COUNTS,
    DATASET_FILE,
    MIXTURE_BLOCK,
    SPLITS,
    TOKENIZER_FILE,
    TokenDataset,
    TokenSource,
    open_cached,
    open_source,
)
from gpt.data.tokenizer import Tokenizer, TokenizerConfig, tokenizer_key, train_bpe
from gpt.errors import ExternalError, UserError, summarize_error
from gpt.files import atomic_rename as publish_folder
from gpt.files import atomic_write, expand_path, mark_as_cache, user_errors, write_text

DATASET_LAYOUT = 2  # raise it when a directory holds the same tokens in another way
NUM_CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class TooShortError(UserError):
    """A text does not fill one sequence. `longest_context` is the longest context that it would fill, or 0."""

    def __init__(self, message: str, longest_context: int):
        super().__init__(message)
        self.longest_context = longest_context


def prepare(
    data: DataConfig | str | Sequence[str],
    tokenizer: TokenizerConfig | Tokenizer | None = None,
    context_length: int = 1,
    cache: str | Path = DEFAULT_CACHE,
    print_line: Say = print_line,
    *,
    to: str | Path | None = None,
    executor: Executor | None = None,
) -> TokenDataset:
    """Return the configured text or mixture as token ids. Text that is already prepared is not read again.

    Args:
        data: The text, or a value of `data.path`.
        tokenizer: A tokenizer, for example of a model to fine-tune, or which one to take or to train.
        context_length: A text that does not fill one sequence of this length raises `TooShortError`.
        cache: The folder for prepared text and for copies of remote files.
        print_line: Prints a line.
        to: A folder for the result, instead of one in the cache.
        executor: Encodes the shards, instead of the threads of this process. It has Python's `concurrent.futures`
            interface (processes, Dask, MPI). Each worker must reach the text, the cache and the result.
    """
    if not isinstance(data, DataConfig):
        data = DataConfig("text", data if isinstance(data, str) else list(data))
    tokenizer = tokenizer or TokenizerConfig()
    cache = Path(cache).absolute()
    names, weights = source_names(data), integer_weights(data)
    if data.name == "tokens":
        source = open_tokens(data, tokenizer, cache, print_line)
        _require_enough_tokens(len(source.train), len(source.validation), context_length)
        return TokenDataset((source,), names, weights)
    if to is not None and data.name == "mix":
        raise UserError(f"to={str(to)!r} takes one text, not a mixture: prepare each of its texts")
    if is_url(str(to)):
        raise UserError(f"to={str(to)!r} is a URL: name a folder, and copy its files to the URL afterwards")
    scanners = [CorpusScanner(part, cache, print_line) for part in split_mixture(data)]
    if len(scanners) > 1 and isinstance(tokenizer, TokenizerConfig) and tokenizer.name == "bpe":
        tokenizer = _joint_tokenizer(scanners, weights, tokenizer.vocab_size, cache)
    if to is not None:
        sources = [_prepare_into(expand_path(to).absolute(), scanners[0], tokenizer, context_length, executor)]
    else:
        sources = [_prepare_in_cache(scanner, tokenizer, context_length, executor) for scanner in scanners]
    return TokenDataset(tuple(sources), names, weights)


def _joint_tokenizer(scanners: list[CorpusScanner], weights: Sequence[int], vocab_size: int, cache: Path) -> Tokenizer:
    """Return one byte-pair encoding for a mixture; keep it in the cache. Large corpora are sampled by their weight."""
    parts = [[s.sha256, s.data.validation_bytes, weight] for s, weight in zip(scanners, weights, strict=True)]
    file = cache / f"tokenizer-{_digest({'format': TOKENS_FORMAT, 'parts': parts, 'vocab_size': vocab_size})}.json"
    with contextlib.suppress(FileNotFoundError, ValueError):  # if it is damaged, train it again
        return Tokenizer.from_dict(json.loads(file.read_text(encoding="utf-8")))

    def sample() -> Iterator[str]:
        for scanner, weight in zip(scanners, weights, strict=True):
            texts = list(scanner.scan.training_sample())
            size = sum(len(text.encode("utf-8")) for text in texts)
            yield from texts[:: max(1, -(-size * MIXTURE_BLOCK // (SAMPLE_BYTES * weight)))]

    tokenizer = train_bpe(sample(), vocab_size)
    with user_errors(cache, *CACHE_WRITE_HINT):
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
    """Return one corpus as token ids. Add it to the cache unless it is there.

    The folder's name is a hash of everything that determines its content, so changed text never meets old tokens.
    """
    name, cache = scanner.corpus.name, scanner.cache
    key = _dataset_key(scanner.sha256, tokenizer_key(tokenizer), scanner.data.validation_bytes)
    folder = cache / f"{name}-{tokenizer.name}-{_digest(key | {'layout': DATASET_LAYOUT})}"
    if folder.exists():
        scanner.print_line(f"{name} is already prepared, in {folder}")
    else:
        with user_errors(cache, *CACHE_WRITE_HINT), working_folder(folder, scanner.print_line) as working:
            if not folder.exists():  # another process may have finished it while this one waited
                if not (working / DATASET_FILE).exists():  # it is written last
                    _make_dataset(working, scanner, tokenizer, context_length, executor, in_cache=True)
                _delete_intermediate_files(working)
                publish_folder(working, folder)
    source = open_cached(folder)
    _require_enough_tokens(len(source.train), len(source.validation), context_length)
    return source


def _delete_intermediate_files(folder: Path) -> None:
    for file in folder.iterdir():
        if not re.fullmatch(rf"{DATASET_FILE}|{TOKENIZER_FILE}|validation\.bin|train-[0-9]+\.bin", file.name):
            file.unlink()


def _prepare_into(
    directory: Path,
    scanner: CorpusScanner,
    tokenizer: TokenizerConfig | Tokenizer,
    context_length: int,
    executor: Executor | None,
) -> TokenSource:
    """Prepare a corpus into a directory that the user has named, or resume an interrupted preparation there."""
    with user_errors(directory, "written", "fix that, or name another directory"):
        directory.mkdir(parents=True, exist_ok=True)
        mark_as_cache(directory)
        with exclusive_lock(directory / ".lock", "preparing this text", scanner.print_line):
            for file in directory.glob(".*.bin.*"):  # unfinished files of a killed process
                file.unlink()
            _make_dataset(directory, scanner, tokenizer, context_length, executor, in_cache=False)
    scanner.print_line(f"to train on it: data=tokens data.path={directory}")
    return open_source(directory, scanner.cache)


def _make_dataset(
    directory: Path,
    scanner: CorpusScanner,
    tokenizer: TokenizerConfig | Tokenizer,
    context_length: int,
    executor: Executor | None,
    in_cache: bool,
) -> None:
    """Plan, encode the shards that are missing, and write dataset.json."""
    name, cache = scanner.corpus.name, scanner.cache
    plan, chunks = _open_or_make_plan(directory, scanner, tokenizer, in_cache)
    records = read_records(directory, plan)
    num_bytes = plan.content["bytes"]
    bytes_done = sum(text_bytes(record) for record in records if record)
    missing = [number for number, record in enumerate(records) if record is None]
    if bytes_done and missing:
        scanner.print_line(f"resuming the preparation of {name} at {bytes_done / num_bytes:.0%}")
    with progress_bar(f"tokenizing {name}", num_bytes, bytes_done, delay=1) as bar:
        if executor is not None:
            _run_on_executor(executor, missing, directory, cache, scanner.data.cache_bytes, bar.update)
        else:
            for number in missing:
                write_shard(plan, number, scanner.corpus, directory, cache, NUM_CORES, bar.update, chunks)
    splits = _publish(directory, plan, scanner.corpus, context_length)["splits"]
    size = sum(splits[split]["bytes"] for split in SPLITS)
    num_tokens = sum(splits[split]["tokens"] for split in SPLITS)
    scanner.print_line(
        f"prepared {size:,} bytes as {num_tokens:,} tokens ({size / num_tokens:.2f} bytes per token, vocabulary "
        f"{plan.tokenizer.vocab_size:,}), of which {splits['validation']['bytes']:,} bytes are for validation"
    )


def _open_or_make_plan(
    directory: Path, scanner: CorpusScanner, tokenizer: TokenizerConfig | Tokenizer, in_cache: bool
) -> tuple[ShardPlan, list[Chunk] | None]:
    """Return the plan of an interrupted preparation, or make one; with it all chunks if they are in memory.

    A plan of another text is replaced in the cache, and refused in a directory that the user has named.
    """
    plan = None
    try:
        plan = read_shard_plan(directory)
    except UserError:  # damaged, or of another version
        if not in_cache:
            raise
    if plan is not None and plan.matches(scanner, tokenizer):
        return plan, None
    if in_cache:
        delete_working_folder(directory)
    elif plan is not None:
        raise UserError(f"{directory}: holds another text, or one that has changed since: name an empty folder")
    plan, chunks = make_shard_plan(scanner, tokenizer, hash_all=in_cache)
    plan.write(directory)
    return plan, chunks


def _run_on_executor(
    executor: Executor, missing: list[int], directory: Path, cache: Path, cache_bytes: int, on_progress: Progress
) -> None:
    """Encode shards on an executor. After all were tried, `ExternalError` names the shards that failed."""
    try:
        futures = {
            executor.submit(encode_shard, str(directory), number, str(cache), cache_bytes): number for number in missing
        }
    except BrokenExecutor as error:
        raise ExternalError(f"{directory}: nothing was encoded ({error}): give another executor") from None
    failures: dict[int, str] = {}
    for future in as_completed(futures):
        try:
            on_progress(future.result())
        except (UserError, OSError, MemoryError, BrokenExecutor) as error:  # any other exception is a bug
            failures[futures[future]] = summarize_error(error)
    if failures:
        first = "; ".join(f"shard {number}: {failure}" for number, failure in sorted(failures.items())[:3])
        summary = f"{len(failures):,} of {len(missing):,} shards failed ({first}{'; ...' * (len(failures) > 3)})"
        raise ExternalError(f"{directory}: {summary}: fix that and prepare it again, which keeps the others")


def _publish(directory: Path, plan: ShardPlan, corpus: Corpus, context_length: int) -> dict:
    """Write validation.bin and dataset.json, and return what dataset.json holds.

    Raises `UserError` naming the shards that are missing.
    """
    read = read_records(directory, plan, verify=False)
    records = [record for record in read if record is not None]
    if missing := [number for number, record in enumerate(read) if record is None]:
        numbers = ", ".join(map(str, missing[:5])) + ", ..." * (len(missing) > 5)
        raise UserError(f"{directory}: lacks {len(missing):,} of {len(read):,} shards ({numbers}): make them first")
    splits: dict[str, dict] = {}
    for split in SPLITS:
        parts = [record["splits"][split] for record in records]
        splits[split] = {count: sum(part[count] for part in parts) for count in COUNTS}
    _require_enough_tokens(splits["train"]["tokens"], splits["validation"]["tokens"], context_length)
    train_parts = [record["splits"]["train"] for record in records]
    splits["train"]["files"] = [
        [shard_file("train", number), part["tokens"], part["sha256"]]
        for number, part in enumerate(train_parts)
        if part["tokens"]
    ]
    validation = b"".join(_read_validation(directory, number, record) for number, record in enumerate(records))
    with atomic_write(directory / "validation.bin") as file:
        file.write_bytes(validation)
    digest = hashlib.sha256(validation).hexdigest()
    splits["validation"]["files"] = [["validation.bin", splits["validation"]["tokens"], digest]]
    hashes = dict(plan.content["hashes"])
    for record in records:
        hashes |= record["hashes"]
    identity = corpus.identity(hashes[str(number)] for number in range(len(corpus.files)))
    key = _dataset_key(identity, plan.content["tokenizer_key"], plan.content["data"]["validation_bytes"])
    metadata = {"key": key, "corpus": corpus.name, "tokenizer": plan.tokenizer.sha256, "splits": splits}
    write_checked_json(directory / DATASET_FILE, metadata)
    return metadata


def _read_validation(directory: Path, number: int, record: dict) -> bytes:
    """Return the validation tokens of a shard; raise `ExternalError` unless they have the hash in its record."""
    file = directory / shard_file("validation", number)
    content = file.read_bytes()
    if hashlib.sha256(content).hexdigest() != record["splits"]["validation"]["sha256"]:
        raise ExternalError(f"{file}: is damaged: delete it, and prepare the text again")
    return content


def _require_enough_tokens(train_tokens: int, validation_tokens: int, context_length: int) -> None:
    if train_tokens <= context_length:
        raise TooShortError(
            f"the training text has {train_tokens} tokens, fewer than a context of {context_length} and a target: "
            "give more text",
            max(0, train_tokens - 1),
        )
    if validation_tokens < 2:
        raise TooShortError(f"the validation text has {validation_tokens} tokens but needs 2: give more text", 0)
