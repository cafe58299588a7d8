"""Texts to prepare, and real processes that prepare them and can be killed."""

import contextlib
import functools
import itertools
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest
from hypothesis import settings

from gpt.console import clean_exit
from gpt.data.chunking import split_into_chunks
from gpt.data.corpus import open_corpus
from gpt.data.data_config import DataConfig
from gpt.data.prepare import prepare
from gpt.data.split import scan_chunks
from gpt.data.token_dataset import TokenSource
from gpt.data.tokenizer import Tokenizer, TokenizerConfig
from gpt.files import CACHE_TAG

ROOT = Path(__file__).parents[2]
CONTEXT = 13
BYTE = TokenizerConfig("byte")
EXAMPLES = settings(max_examples=200, deadline=None, derandomize=True, database=None)
DOCUMENTS = [f"Document {i} says: the café has {i * i} seats. " * (1 + i % 3) + "😀<|endoftext|>\n" for i in range(53)]
# A small text then has many chunks, tasks and shards, and is read a second time to encode it.
SMALL_SHARDS = {
    "gpt.data.corpus.split_into_chunks": 31,
    "gpt.data.split.SAMPLE_BYTES": 10_007,
    "gpt.data.shards.TASK_CHARS": 199,
    "gpt.data.scan.SHARD_BYTES": 1511,
}
# All chunks stay in memory after the first reading, and are one shard.
LARGE_SHARDS = SMALL_SHARDS | {"gpt.data.split.SAMPLE_BYTES": 10**9, "gpt.data.scan.SHARD_BYTES": 10**9}


def write_documents(folder: Path, documents: list[str] = DOCUMENTS) -> DataConfig:
    """Write the documents to a file of JSON lines, and return its configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "text.jsonl"
    file.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents))
    return DataConfig("text", str(file))


def write_files(folder: Path, documents: list[str] = DOCUMENTS) -> DataConfig:
    """Write each document to a file, and return the configuration of their folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for i, document in enumerate(documents):
        (folder / f"{i:03}.txt").write_text(document, encoding="utf-8", newline="")
    return DataConfig("text", str(folder))


def write_text(folder: Path, text: str) -> DataConfig:
    """Write a text to a file, and return its configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "text.txt").write_text(text, encoding="utf-8", newline="")
    return DataConfig("text", str(folder / "text.txt"))


def prepare_source(
    data: DataConfig, cache: Path, tokenizer: TokenizerConfig | Tokenizer = BYTE, context_length: int = CONTEXT, **more
) -> TokenSource:
    """Prepare one corpus without printing."""
    [source] = prepare(data, tokenizer, context_length, cache, **({"print_line": [].append} | more)).sources
    return source


@contextlib.contextmanager
def patched_constants(values: dict[str, int]) -> Iterator[None]:
    """Replace constants within a block. The value of `split_into_chunks` is its size."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in values.items():
            is_size = name == "gpt.data.corpus.split_into_chunks"
            patch.setattr(name, functools.partial(split_into_chunks, size=value) if is_size else value)
        yield


def dataset_folder(cache: Path) -> Path:
    """Return the only folder in a cache, hidden or not."""
    [folder] = cache_entries(cache)
    return folder


def cache_entries(cache: Path) -> list[Path]:
    """Return the entries of a cache, hidden ones too, without its tag and locks."""
    return [entry for entry in cache.iterdir() if entry.suffix != ".lock" and CACHE_TAG not in entry.name]


def read_files(folder: Path) -> dict[str, bytes]:
    """Return the content of each file in a folder."""
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def read_joined_files(folder: Path) -> dict[str, bytes]:
    """Return the content of a folder with its training files joined, so that the number of shards does not matter."""
    files = sorted(read_files(folder).items())
    joined = {name: data for name, data in files if name in ("validation.bin", "tokenizer.json")}
    joined["train"] = b"".join(data for name, data in files if name.startswith("train-"))
    return joined


def split_ids(source: TokenSource) -> tuple[list[int], list[int]]:
    """Return the ids of both splits."""
    return source.train[:].tolist(), source.validation.tolist()


def split_documents(data: DataConfig) -> tuple[list[str], list[str]]:
    """Return the documents for training and for validation."""
    corpus = open_corpus(data, Path("unused"))
    chunks = [chunk for _, _, chunk in corpus.chunks()]
    split = scan_chunks(chunks, data.validation_bytes).split
    parts: tuple[list[str], list[str]] = ([], [])
    characters = 0
    for chunk in chunks:
        for part, validates in split.assign(chunk, characters):
            parts[validates].extend([""] * part.starts_document)
            parts[validates][-1] += part.text
        characters += len(chunk.text)
    return parts


def expected_ids(documents: list[str], tokenizer: Tokenizer) -> list[int]:
    """Return the ids of documents, each after an end-of-text."""
    return [id for document in documents for id in (tokenizer.end_of_text, *tokenizer.encode(document))]


def expected_split_ids(data: DataConfig, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Return the ids that both splits of a prepared text must have."""
    train, validation = split_documents(data)
    return expected_ids(train, tokenizer), expected_ids(validation, tokenizer)


@contextlib.contextmanager
def record_chunks(at: int = 0, happens: Callable[[], object] = lambda: None) -> Iterator[list[str]]:
    """Yield a list that collects the encoded chunks of all threads. Call `happens` before chunk number `at`."""
    chunks: list[str] = []
    encode_chunk = Tokenizer.encode_chunk

    def record_and_encode(tokenizer: Tokenizer, chunk: str) -> np.ndarray:
        chunks.append(chunk)
        if len(chunks) == at:
            happens()
        return encode_chunk(tokenizer, chunk)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tokenizer, "encode_chunk", record_and_encode)
        yield chunks


def raising_function(error: BaseException) -> Callable[[], None]:
    """Return a function that raises an error."""

    def fail() -> None:
        raise error

    return fail


# --- processes to kill: they are forked from a process that has imported everything, which takes seconds ---

FORKS = multiprocessing.get_context("spawn" if os.name == "nt" else "forkserver")
FORKS.set_forkserver_preload(["pytest", "hypothesis", "gpt.data.prepare"])


def prepare_as_command(path, cache, output, values, at, events, tokenizer="byte", context_length=CONTEXT) -> NoReturn:
    """Prepare as a command does, with output to a file. `at` is as for `Preparation`."""
    signal.alarm(60)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    stream = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(stream, 1)
    os.dup2(stream, 2)
    ready, resumed = events
    if not at:
        ready.set()
    else:
        call, number, signal_number = at
        touches = itertools.count(1)

        def touch(event: str, arguments: tuple) -> None:
            changes = event in ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.fsync", "fcntl.flock")
            is_touch = changes or (event == "open" and cache in str(arguments))
            if is_touch and call in f"{event} {arguments}" and next(touches) == number:
                if signal_number == signal.SIGSTOP:
                    ready.set()
                    resumed.wait()
                else:
                    os.kill(os.getpid(), signal_number)

        os.fsync = lambda descriptor: touch("os.fsync", ())  # a signal spares what the system has not yet written
        sys.addaudithook(touch)
    code: object = 0
    try:
        with patched_constants(values), clean_exit("prepare"):
            print_line = functools.partial(print, flush=True)
            tokenizer_config = TokenizerConfig(tokenizer, 307)
            prepare(DataConfig("text", path), tokenizer_config, context_length, Path(cache), print_line)
    except SystemExit as end:
        code = end.code
    sys.stderr.flush()
    os._exit(int(str(code)))  # leaving Python takes a second that has nothing to do with this


class Preparation:
    """A process that prepares. `at` gives a system call, its number, and a signal to itself then; SIGSTOP pauses it."""

    def __init__(
        self, data: DataConfig, cache: Path, values: dict[str, int] = SMALL_SHARDS, at: tuple | None = None, **more
    ):
        self._output = tempfile.NamedTemporaryFile("r")  # noqa: SIM115 - it lives as long as this object
        self._events = FORKS.Event(), FORKS.Event()
        arguments = (data.path, str(cache), self._output.name, values, at, self._events)
        self._process = FORKS.Process(target=prepare_as_command, args=arguments, kwargs=more, daemon=True)
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def wait_until_ready(self) -> None:
        """Wait until the process pauses, or without `at` begins to prepare."""
        assert self._events[0].wait(30), self.output()

    def resume(self) -> None:
        self._events[1].set()

    def output(self) -> str:
        return Path(self._output.name).read_text()

    def wait_until_printed(self, text: str) -> None:
        deadline = time.monotonic() + 30
        while text not in self.output():
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.005)

    def wait(self) -> tuple[int | None, str]:
        """Return the exit code, negative after a signal, and the output."""
        self._process.join()
        return self._process.exitcode, self.output()


def remount(disk: Path, options: str) -> None:
    """Give a disk another size, or make it read-only."""
    subprocess.run(["mount", "-o", f"remount,{options}", disk], check=True)
