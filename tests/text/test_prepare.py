"""Preparing: the tokens of every document in order, whatever interrupts it, and whoever prepares the same at once."""

import contextlib
import errno
import functools
import gc
import gzip
import hashlib
import io
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gpt.text.encode
import gpt.text.prepare
import gpt.text.python_docs
from gpt.errors import UserError, command_line
from gpt.files import hold
from gpt.text.cache import write_json
from gpt.text.corpus import DataConfig, open_corpus
from gpt.text.mixture import names_of, shares_of
from gpt.text.pieces import cut
from gpt.text.prepare import FORMAT, TooShortError, prepare
from gpt.text.shards import SPLITS, Corpora, Shards, Tokens
from gpt.text.split import survey
from gpt.text.tokenizer import BYTE_PATTERN, Tokenizer, TokenizerConfig, byte_tokenizer, gpt2_tokenizer, train_bpe

ROOT = Path(__file__).parents[2]
CONTEXT = 13
BYTE = TokenizerConfig("byte")
EXAMPLES = settings(max_examples=200, deadline=None, derandomize=True, database=None)
DOCUMENTS = [f"Document {i} says: the café has {i * i} seats. " * (1 + i % 3) + "😀<|endoftext|>\n" for i in range(53)]
# Of a small text many pieces, tasks and files, read a second time to encode it, and a journal that is written often.
SMALL = {
    "gpt.text.corpus.cut": 31,
    "gpt.text.split.SAMPLE_BYTES": 10_007,
    "gpt.text.encode.TASK": 199,
    "gpt.text.encode.PROGRESS_BYTES": 1511,
    "gpt.text.shards.SHARD_BYTES": 2 * 2503,
}
LARGE = SMALL | {"gpt.text.split.SAMPLE_BYTES": 10**9}  # all of it is kept from the first reading


def write_documents(folder: Path, documents: list[str] = DOCUMENTS) -> DataConfig:
    """The configuration that reads the documents from a file of JSON lines."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "text.jsonl"
    file.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents))
    return DataConfig("text", str(file))


def write_files(folder: Path, documents: list[str] = DOCUMENTS) -> DataConfig:
    """The configuration that reads the documents from a file each."""
    folder.mkdir(parents=True, exist_ok=True)
    for i, document in enumerate(documents):
        (folder / f"{i:03}.txt").write_text(document, encoding="utf-8", newline="")
    return DataConfig("text", str(folder))


def write_text(folder: Path, text: str) -> DataConfig:
    """The configuration that reads a single text."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "text.txt").write_text(text, encoding="utf-8", newline="")
    return DataConfig("text", str(folder / "text.txt"))


def make(
    data: DataConfig, cache: Path, tokenizer: TokenizerConfig = BYTE, context_length: int = CONTEXT, **more
) -> Shards:
    """Prepare one corpus without a word."""
    [shards] = prepare(data, tokenizer, context_length, cache, say=more.pop("say", [].append), **more).sources
    return shards


def refusal(*arguments, **more) -> str:
    """The one line that refuses to prepare."""
    with pytest.raises(UserError) as caught:
        make(*arguments, **more)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@contextlib.contextmanager
def constants(values: dict[str, int]) -> Iterator[None]:
    """Other constants for a while; that of `cut` is the size of the pieces."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in values.items():
            patch.setattr(name, functools.partial(cut, size=value) if name == "gpt.text.corpus.cut" else value)
        yield


def folder_of(cache: Path) -> Path:
    """The one folder in a cache, which holds nothing else, hidden or not."""
    [folder] = entries(cache)
    return folder


def entries(cache: Path) -> list[Path]:
    """All that is in a cache, hidden or not, but for the locks beside its folders."""
    return [entry for entry in cache.iterdir() if entry.suffix != ".lock"]


def content(folder: Path) -> dict[str, bytes]:
    """All that is in a folder."""
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def lists(shards: Shards) -> tuple[list[int], list[int]]:
    """The ids of both parts."""
    return shards.train[:].tolist(), shards.validation[:].tolist()


def documents_of(tokens: Tokens, tokenizer: Tokenizer) -> list[str]:
    """The texts between the ends of text, the first of which stands at the very start."""
    ids = tokens[:]
    starts = np.flatnonzero(ids == tokenizer.end_of_text)
    assert starts[0] == 0
    return [tokenizer.decode(part[1:]) for part in np.split(ids, starts[1:])]


def halves(data: DataConfig) -> tuple[list[str], list[str]]:
    """The documents to learn from, and those that validate."""
    corpus = open_corpus(data, Path("unused"))
    pieces = [piece for _, _, piece in corpus.pieces()]
    split = survey(pieces, data.validation_bytes).split
    parts: tuple[list[str], list[str]] = ([], [])
    characters = 0
    for whole in pieces:
        for piece, validates in split.sides(whole, characters):
            parts[validates].extend([""] * piece.begins)
            parts[validates][-1] += piece.text
        characters += len(whole.text)
    return parts


def obvious(documents: list[str], tokenizer: Tokenizer) -> list[int]:
    """The ids of documents, each after an end-of-text."""
    return [id for document in documents for id in (tokenizer.end_of_text, *tokenizer.encode(document))]


def pairs_tokenizer(tokens: int) -> Tokenizer:
    """So many tokens without training: every byte, then pairs of bytes, those that begin with an a last."""
    pairs = [bytes([(i // 256 + ord("b")) % 256, i % 256]) for i in range(tokens - 257)]
    ranks = {token: rank for rank, token in enumerate([bytes([byte]) for byte in range(256)] + pairs)}
    return Tokenizer("bpe", ranks, BYTE_PATTERN)


@contextlib.contextmanager
def watching(at: int = 0, happens: Callable[[], object] = lambda: None) -> Iterator[list[str]]:
    """The pieces that are encoded meanwhile, on whatever thread; before piece number `at`, something happens."""
    pieces: list[str] = []
    encode_piece = Tokenizer.encode_piece

    def watched(tokenizer: Tokenizer, piece: str) -> np.ndarray:
        pieces.append(piece)
        if len(pieces) == at:
            happens()
        return encode_piece(tokenizer, piece)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tokenizer, "encode_piece", watched)
        yield pieces


def fail_with(error: BaseException) -> Callable[[], None]:
    """What raises an error."""

    def fail() -> None:
        raise error

    return fail


# --- processes to be hurt: they are forked from one that has everything imported, since that takes seconds ---


def serve() -> None:
    """For each order on stdin begin a process, or wait until one has stopped or ended; its number, or how it ended."""
    gc.freeze()
    print("null", flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        if "wait" in order:
            _, status = os.waitpid(order["wait"], os.WUNTRACED)
            print("null" if os.WIFSTOPPED(status) else os.waitstatus_to_exitcode(status), flush=True)
        elif number := os.fork():
            print(number, flush=True)
        else:
            obey(**order)


def obey(
    data: dict, cache: str, output: str, values: dict, at: tuple | None, tokenizer: str, context_length: int
) -> NoReturn:
    """Prepare as a command line would; `at` is what is done to the file system, how many times, when a signal comes."""
    signal.alarm(60)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    stream = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(stream, 1)
    os.dup2(stream, 2)
    if at:
        what, number, signal_number = at
        touches = itertools.count(1)

        def touch(event: str, arguments: tuple) -> None:
            changes = event in ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.fsync", "fcntl.flock")
            here = changes or (event == "open" and cache in str(arguments))
            if here and what in f"{event} {arguments}" and next(touches) == number:
                os.kill(os.getpid(), signal_number)

        os.fsync = lambda descriptor: touch("os.fsync", ())  # a signal spares what the system has not yet written
        sys.addaudithook(touch)
    code: object = 0
    try:
        with constants(values), command_line("prepare"):
            say = functools.partial(print, flush=True)
            prepare(DataConfig(**data), TokenizerConfig(tokenizer, 307), context_length, Path(cache), say=say)
    except SystemExit as end:
        code = end.code
    sys.stderr.flush()
    os._exit(int(str(code)))  # the way out of Python takes a second that has nothing to do with this


class Workshop:
    """Real processes that prepare."""

    def __init__(self, outputs: Path):
        self._server = subprocess.Popen(
            [sys.executable, "-W", "default::ResourceWarning", "-c", "import test_prepare; test_prepare.serve()"],
            env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests/text'}"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._outputs = outputs
        self._living: set[int] = set()
        assert self._answer() is None

    def _ask(self, order: dict) -> int | None:
        assert self._server.stdin is not None
        print(json.dumps(order), file=self._server.stdin, flush=True)
        return self._answer()

    def _answer(self) -> int | None:
        assert self._server.stdout is not None
        return json.loads(self._server.stdout.readline())

    def start(
        self,
        data: DataConfig,
        cache: Path,
        values: dict[str, int] = SMALL,
        at: tuple[str, int, int] | None = None,
        tokenizer: str = "byte",
        context_length: int = CONTEXT,
    ) -> int:
        """The number of a process that prepares, and is to get a signal `at` something, the how many-th time."""
        output = self._outputs / str(time.monotonic_ns())
        output.touch()
        number = self._ask(
            {
                "data": {"name": data.name, "path": data.path, "weights": data.weights},
                "cache": str(cache),
                "output": str(output),
                "values": values,
                "at": at,
                "tokenizer": tokenizer,
                "context_length": context_length,
            }
        )
        assert number is not None
        self._living.add(number)
        (self._outputs / f"of {number}").unlink(missing_ok=True)  # numbers come round again
        (self._outputs / f"of {number}").symlink_to(output)
        return number

    def wait(self, number: int) -> int | None:
        """Its exit code, negative where a signal ended it; None where one has stopped it."""
        code = self._ask({"wait": number})
        if code is not None:
            self._living.remove(number)
        return code

    def said(self, number: int) -> str:
        """What a process has printed so far."""
        return (self._outputs / f"of {number}").read_text()

    def run(self, *arguments, **more) -> tuple[int | None, str]:
        """Prepare to the end: the exit code, and all that was printed."""
        number = self.start(*arguments, **more)
        return self.wait(number), self.said(number)

    def wait_until_said(self, number: int, text: str) -> None:
        """Wait for a line of a process."""
        deadline = time.monotonic() + 30
        while text not in self.said(number):
            assert time.monotonic() < deadline, self.said(number)
            time.sleep(0.005)

    def close(self) -> None:
        """End all that is left."""
        for number in self._living:
            os.kill(number, signal.SIGKILL)
        self._server.communicate()


@pytest.fixture(scope="module")
def workshop(tmp_path_factory) -> Iterator[Workshop]:
    """One for all tests, as it takes a second or two to begin."""
    found = Workshop(tmp_path_factory.mktemp("outputs"))
    yield found
    found.close()


@pytest.fixture
def disk(tmp_path) -> Iterator[Path]:
    """A disk of its own, which is to run full or to be made read-only."""
    place = tmp_path / "disk"
    place.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", place]).returncode:
        pytest.skip("SKIPPED LOUDLY: only root can mount the small disk that is to run full")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True)


def remount(disk: Path, options: str) -> None:
    """Give a disk another size, or make it read-only."""
    subprocess.run(["mount", "-o", f"remount,{options}", disk], check=True)


# --- what is written ---


@pytest.mark.parametrize("name", ["bpe", "gpt2", "byte"])
@pytest.mark.parametrize("values", [{}, LARGE], ids=["as it is", "in small portions"])
def test_tokens_are_the_split(tmp_path, name, values):
    """Every document of each part after an end-of-text, and the tokenizer is the one configured."""
    data = write_documents(tmp_path)
    with constants(values):
        shards = make(data, tmp_path / "cache", TokenizerConfig(name, 307))
        train, validation = halves(data)
    expected = {"bpe": lambda: train_bpe(train, 307), "gpt2": gpt2_tokenizer, "byte": byte_tokenizer}[name]()
    assert shards.tokenizer.to_dict() == expected.to_dict()
    assert lists(shards) == (obvious(train, expected), obvious(validation, expected))
    assert documents_of(shards.train, expected) == train
    assert documents_of(shards.validation, expected) == validation
    assert len(train) > 40 and len(validation) > 1


@pytest.mark.parametrize("name", ["bpe", "gpt2", "byte"])
def test_tokens_of_a_long_text(tmp_path, name):
    """A text of several pieces is encoded as a whole would be, its run of a million letters included."""
    chooser = random.Random(7)
    words = "".join(chooser.choice([" café", " the", "\n\n\n", "  42", "\t😀", " it's"]) for _ in range(60_000))
    text = words + "".join(chooser.choice("abc") for _ in range(600_000)) + words
    shards = make(write_text(tmp_path, text), tmp_path / "cache", TokenizerConfig(name, 263))
    end = len(text) * 9 // 10
    assert len(list(cut([text[:end]]))) == 4
    assert lists(shards) == (obvious([text[:end]], shards.tokenizer), obvious([text[end:]], shards.tokenizer))


def test_bytes_by_hand(tmp_path):
    """Ten characters: nine to learn from and one that validates."""
    shards = make(write_text(tmp_path, "abcdefgh\né"), tmp_path / "cache", context_length=7)
    assert lists(shards) == ([256, 97, 98, 99, 100, 101, 102, 103, 104, 10], [256, 0xC3, 0xA9])


def test_manifest(tmp_path):
    """The counts are those of the texts, the hashes those of the files."""
    data, cache = write_documents(tmp_path), tmp_path / "cache"
    with constants({"gpt.text.shards.SHARD_BYTES": 2003}):
        shards = make(data, cache)
    folder = folder_of(cache)
    counts, names = {}, ["manifest.json", "tokenizer.json"]
    for name, documents in zip(SPLITS, halves(data), strict=True):
        size = sum(len(document.encode()) for document in documents)
        tokens = size + len(documents)
        files = [folder / f"{name}-{number:05}.bin" for number in range(-(-tokens // 1001))]
        digests = [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
        counts[name] = {"tokens": tokens, "bytes": size, "documents": len(documents), "sha256": digests}
        names += [file.name for file in files]
        assert len(getattr(shards, name)) == tokens
        assert [file.stat().st_size for file in files] == [2002] * (tokens // 1001) + [2 * (tokens % 1001)]
    assert counts["train"]["documents"] + counts["validation"]["documents"] == 53
    corpus = open_corpus(data, cache).sha256(cache)
    key = {"format": FORMAT, "corpus": corpus, "tokenizer": {"name": "byte"}, "validation_bytes": 1_000_000}
    assert shards.manifest == {
        "key": key,
        "corpus": "text",
        "tokenizer": byte_tokenizer().sha256,
        "dtype": "uint16",
        "shard_bytes": 2003,
        "splits": counts,
    }
    stored = json.loads((folder / "manifest.json").read_text())
    assert len(stored.pop("seal")) == 64
    assert stored == shards.manifest
    assert sorted(file.name for file in folder.iterdir()) == sorted(names)
    assert re.fullmatch("text-byte-[0-9a-f]{16}", folder.name)


def test_single_text(tmp_path):
    """The two parts of one text join to it again."""
    text = "The end of the text validates, to the character. " * 11
    shards = make(write_text(tmp_path, text), tmp_path / "cache")
    [train], [validation] = (documents_of(ids, shards.tokenizer) for ids in (shards.train, shards.validation))
    assert train + validation == text
    assert len(train) == len(text) * 9 // 10
    assert [part["documents"] for part in shards.manifest["splits"].values()] == [1, 1]


def test_lone_surrogates_are_counted_as_written(tmp_path):
    """JSON can spell half a pair, which becomes U+FFFD: that is said, and the bytes are those of what is learnt."""
    said: list[str] = []
    shards = make(write_documents(tmp_path, ["\ud800" * 5 + "x" * 95]), tmp_path / "cache", say=said.append)
    [train] = documents_of(shards.train, shards.tokenizer)
    assert train == "\ufffd" * 5 + "x" * 85
    assert shards.manifest["splits"]["train"]["bytes"] == len(train.encode())
    assert "the text contains U+FFFD 5 times, in place of bytes that are not UTF-8" in said


@pytest.mark.parametrize(("tokens", "dtype"), [(65_536, "uint16"), (65_537, "uint32"), (65_793, "uint32")])
def test_width_of_the_ids(tmp_path, tokens, dtype):
    """The narrowest type that holds every id of the tokenizer, end-of-text among them."""
    tokenizer = pairs_tokenizer(tokens)
    assert tokenizer.vocab_size == tokens
    shards = make(write_text(tmp_path, "a" * 138), tmp_path / "cache", given=tokenizer)
    assert (shards.train[:].dtype, shards.validation[:].dtype) == (np.dtype(dtype), np.dtype(dtype))
    assert shards.train[:1].tolist() == [tokens - 1]
    assert (shards.train[1:2].tolist() == [256 + 255 * 256 + ord("a")]) == (tokens == 65_793)
    assert documents_of(shards.train, tokenizer) == ["a" * 124]
    size = (folder_of(tmp_path / "cache") / "train-00000.bin").stat().st_size
    assert size == len(shards.train) * np.dtype(dtype).itemsize


@pytest.mark.parametrize("documents", [DOCUMENTS, ["".join(DOCUMENTS)], DOCUMENTS[:11]], ids=["many", "one", "few"])
def test_portions_do_not_matter(tmp_path, documents):
    """Read once or twice, in tasks of a character or of all, journaled always or never: the very same files."""
    data = write_documents(tmp_path, documents)
    results = []
    for i, changes in enumerate(
        [
            {},
            {"gpt.text.split.SAMPLE_BYTES": 10**9},
            {"gpt.text.encode.TASK": 1},
            {"gpt.text.encode.TASK": 10**9},
            {"gpt.text.encode.PROGRESS_BYTES": 101},
            {"gpt.text.encode.PROGRESS_BYTES": 10**9},
        ]
    ):
        with constants(SMALL | changes):
            make(data, tmp_path / str(i))
        results.append(content(folder_of(tmp_path / str(i))))
    assert results == [results[0]] * 6
    assert {"manifest.json", "tokenizer.json", "train-00000.bin", "validation-00000.bin"} <= results[0].keys()


@pytest.mark.parametrize("shard_bytes", [2, 7, 50, 4096])
def test_sizes_of_files_do_not_matter(tmp_path, shard_bytes):
    """The ids are the same wherever a file ends, also within a document or a character."""
    data = write_documents(tmp_path, ["Naïve 😀", "text: 10 € for", " a café"])
    whole = lists(make(data, tmp_path / "whole"))
    with constants({"gpt.text.shards.SHARD_BYTES": shard_bytes}):
        assert lists(make(data, tmp_path / "parts")) == whole
    assert len(list(folder_of(tmp_path / "parts").glob("train-*.bin"))) == -(-len(whole[0]) // (shard_bytes // 2))
    assert lists(make(data, tmp_path / "parts")) == whole  # whatever the size is by now


def test_few_portions_are_held():
    """They are encoded on all cores and come back in order, and no more is read than the cores soon need."""
    begun: list[int] = []

    def tasks() -> Iterator[tuple[int, int]]:
        for number in range(1009):
            begun.append(number)
            yield number, -number

    found = []
    for result, place in gpt.text.encode._in_order(lambda number: number**2, tasks()):
        found.append((result, place))
        assert len(begun) - len(found) <= 2 * os.cpu_count()
    assert found == [(number**2, -number) for number in range(1009)]


@pytest.mark.parametrize("name", ["bpe", "byte"])
def test_kind_of_file_does_not_matter(tmp_path, name):
    """The same documents as files of text, packed JSON lines and parquet: the very same token files."""
    parquet = pytest.importorskip("pyarrow.parquet")
    arrow = pytest.importorskip("pyarrow")
    write_files(tmp_path / "files")
    lines = "".join(json.dumps({"text": document, "id": 7}) + "\n" for document in ["", *DOCUMENTS])
    (tmp_path / "lines.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    parquet.write_table(arrow.table({"text": [*DOCUMENTS, None]}), tmp_path / "rows.parquet", row_group_size=7)
    results = []
    for path in ("files", "lines.jsonl.gz", "rows.parquet"):
        make(DataConfig("text", str(tmp_path / path)), tmp_path / f"cache-{path}", TokenizerConfig(name, 307))
        results.append(content(folder_of(tmp_path / f"cache-{path}")))
        assert json.loads(results[-1].pop("manifest.json"))["splits"]["train"]["documents"] > 40
    assert results == [results[0]] * 3
    assert sorted(results[0]) == ["tokenizer.json", "train-00000.bin", "validation-00000.bin"]


def test_sample_to_train_the_tokenizer(tmp_path):
    """Of a text that is too large, one in so many pieces, without what validates; and that is said."""
    data, said = write_documents(tmp_path), list[str]()
    with constants(SMALL):
        shards = make(data, tmp_path / "cache", TokenizerConfig("bpe", 307), say=said.append)
        found = survey((piece for _, _, piece in open_corpus(data, tmp_path).pieces()), data.validation_bytes)
        sample = list(found.training_sample())
        train, _ = halves(data)
    assert found.stride == 8
    assert f"training the byte-pair encoding on an even sample, one in {found.stride} pieces of the text" in said
    assert shards.tokenizer.to_dict() == train_bpe(sample, 307).to_dict()
    assert shards.tokenizer.sha256 != train_bpe(train, 307).sha256


# --- when it is written ---


def test_second_time_comes_from_the_cache(tmp_path):
    """That is said, and no file is touched, also for the same text elsewhere and another context."""
    said: list[str] = []
    first = make(write_documents(tmp_path), tmp_path / "cache", say=said.append)
    assert [line.split()[0] for line in said] == ["reading", "prepared"]
    folder = folder_of(tmp_path / "cache")
    times = {file: file.stat().st_mtime_ns for file in [tmp_path / "cache", folder, *folder.iterdir()]}
    for place, context_length in (("", CONTEXT), ("elsewhere", CONTEXT), ("", 101)):
        data = write_documents(tmp_path / place)
        again = make(data, tmp_path / "cache", context_length=context_length, say=said.append)
        assert lists(again) == lists(first)
        assert again.manifest == first.manifest
    assert said[2:] == [f"text is already prepared, in {folder}"] * 3
    assert {file: file.stat().st_mtime_ns for file in [tmp_path / "cache", folder, *folder.iterdir()]} == times


def test_what_is_said(tmp_path):
    """How many files are read, and what came of them: 10 bytes and 2 ends of text."""
    said: list[str] = []
    make(write_text(tmp_path, "abcdefghij"), tmp_path / "cache", context_length=7, say=said.append)
    assert said == [
        "reading text (1 file)",
        "prepared 10 bytes as 12 tokens (0.83 bytes per token, vocabulary 257); 1 bytes are for validation",
    ]


def test_every_change_is_another_folder(tmp_path):
    """Changed text, tokenizer, size of the vocabulary or of the validation never meets old tokens."""
    cache, data = tmp_path / "cache", write_documents(tmp_path)
    limited = DataConfig("text", data.path, validation_bytes=101)
    changes = [
        make(data, cache),
        make(data, cache, TokenizerConfig("gpt2")),
        make(data, cache, TokenizerConfig("bpe", 263)),
        make(data, cache, TokenizerConfig("bpe", 269)),
        make(limited, cache),
        make(data, cache, given=byte_tokenizer()),
        make(write_documents(tmp_path, DOCUMENTS[::-1]), cache),
        make(write_documents(tmp_path, [*DOCUMENTS, "x"]), cache),
    ]
    assert len(entries(cache)) == len(changes)
    assert [shards.tokenizer.vocab_size for shards in changes] == [257, 50257, 263, 269, 257, 257, 257, 257]
    sizes = [shards.manifest["splits"]["validation"]["bytes"] for shards in changes]
    assert sizes[4] <= 101 < sizes[0]


def test_vocab_size_matters_only_where_it_is_used(tmp_path):
    """The byte tokenizer is the same whatever the size that bpe would have had."""
    data = write_documents(tmp_path)
    make(data, tmp_path / "cache", TokenizerConfig("byte", 300))
    make(data, tmp_path / "cache", TokenizerConfig("byte", 400))
    assert folder_of(tmp_path / "cache").name.startswith("text-byte-")


def test_given_tokenizer_is_used(tmp_path):
    """That of a model to fine-tune, whatever the configuration says; another one has another folder."""
    data, cache = write_documents(tmp_path), tmp_path / "cache"
    given = train_bpe(["Document café seats " * 7], 293)
    shards = make(data, cache, TokenizerConfig("gpt2"), given=given)
    assert shards.tokenizer.to_dict() == given.to_dict()
    assert lists(shards) == tuple(obvious(documents, given) for documents in halves(data))
    assert lists(make(data, cache, TokenizerConfig("byte"), given=given)) == lists(shards)
    assert folder_of(cache).name.startswith("text-bpe-")
    make(data, cache, given=train_bpe(["another text " * 7], 293))
    assert len(entries(cache)) == 2


# --- too short ---


@pytest.mark.parametrize("text", ["hello world", "é" * 7, "ab"])
def test_too_short_a_text(tmp_path, text):
    """The line names the tokens, the context and the greatest context that the text can fill; nothing is left."""
    cache, data = tmp_path / "cache", write_text(tmp_path, text)
    tokens = 1 + len(text[: len(text) * 9 // 10].encode())
    assert refusal(data, cache) == (
        f"the training text has {tokens} tokens, fewer than a context of {CONTEXT} and a target: give more text"
    )
    assert entries(cache) == []
    assert f"has {tokens} tokens" in refusal(data, cache, context_length=tokens)
    assert len(make(data, cache, context_length=tokens - 1).train) == tokens


@pytest.mark.parametrize("documents", [[], [""], ["", "", ""]], ids=["no lines", "an empty one", "empty ones"])
def test_no_text(tmp_path, documents):
    """Lines without a document are named, and nothing is left."""
    data, cache = write_documents(tmp_path, documents), tmp_path / "cache"
    if not documents:
        Path(data.path).write_text("\n\n")
    assert (
        refusal(data, cache) == f"{data.path}: every document is empty; give a text, or its key with data.text_field="
    )
    assert entries(cache) == []


@pytest.mark.parametrize("text", ["a", "\ufeffa"], ids=["one character", "one and a byte order mark"])
def test_hardly_any_text(tmp_path, text):
    """Where no context is short enough, no context is advised."""
    message = refusal(write_text(tmp_path, text), tmp_path / "cache", context_length=1)
    assert message == "the training text has 0 tokens, fewer than a context of 1 and a target: give more text"


@pytest.mark.parametrize(("text", "longest"), [("hello world", 9), ("a", 0), ("ab", 1)])
def test_too_short_for_the_context(tmp_path, text, longest):
    """The error holds the longest context that works, and that one does work."""
    data, cache = write_text(tmp_path, text), tmp_path / "cache"
    with pytest.raises(TooShortError) as caught:
        make(data, cache)
    assert caught.value.longest_context == longest
    assert "model." not in str(caught.value)
    if longest:
        assert len(make(data, cache, context_length=longest).train) == longest + 1


def test_too_short_to_validate():
    """No context would do where the validation text has a single token."""
    with pytest.raises(TooShortError) as caught:
        gpt.text.prepare._require_enough(30, 1, CONTEXT)
    assert str(caught.value) == "the validation text has 1 tokens but needs 2: give more text"
    assert caught.value.longest_context == 0


def test_too_long_a_context_for_the_cache(tmp_path):
    """Prepared tokens stay when they are too few for another model."""
    data, cache = write_text(tmp_path, "a" * 100), tmp_path / "cache"
    make(data, cache)
    assert "has 91 tokens, fewer than a context of 91 and a target" in refusal(data, cache, context_length=91)
    assert len(make(data, cache, context_length=90).train) == 91


# --- interrupted ---


@pytest.fixture(scope="module")
def many(tmp_path_factory) -> DataConfig:
    """Documents in five files, one of which is long."""
    parts = [DOCUMENTS[:11], ["".join(DOCUMENTS[11:23])], DOCUMENTS[23:29], DOCUMENTS[29:31], DOCUMENTS[31:]]
    folder = tmp_path_factory.mktemp("many")
    for i, part in enumerate(parts):
        shutil.move(str(write_documents(folder, part).path), folder / f"{i}.jsonl")
    return DataConfig("text", str(folder))


@pytest.fixture(scope="module")
def undisturbed(many, tmp_path_factory) -> dict[str, bytes]:
    """What it comes to."""
    cache = tmp_path_factory.mktemp("undisturbed")
    with constants(SMALL):
        shards = make(many, cache)
        expected = tuple(obvious(documents, byte_tokenizer()) for documents in halves(many))
    assert lists(shards) == expected
    assert len(list(folder_of(cache).glob("train-*.bin"))) == 2
    return content(folder_of(cache))


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError(), OSError(5, "Input/output error")], ids=repr)
def test_going_on(tmp_path, many, undisturbed, error):
    """What is safe on disk is not encoded again, and that is said; the rest is, each piece once."""
    cache, said = tmp_path / "cache", list[str]()
    with constants(SMALL):
        with watching() as everything:
            make(many, tmp_path / "whole")
        with watching(100, fail_with(error)), pytest.raises(UserError if isinstance(error, OSError) else type(error)):
            make(many, cache)
        working = folder_of(cache)
        assert working.name.startswith(".preparing-text-byte-")
        progress = json.loads((working / "progress.json").read_text())
        with watching() as rest:
            make(many, cache, say=said.append)
    done = sum(progress["splits"][name]["bytes"] for name in SPLITS)
    size = sum(len(piece.encode()) for piece in everything)
    assert 1511 <= done < size
    assert said[0] == f"resuming the preparation of text at {done / size:.0%}"
    assert [line.split()[0] for line in said[1:]] == ["prepared"]
    assert sum(len(piece.encode()) for piece in rest) == size - done
    assert not Counter(rest) - Counter(everything)
    assert content(folder_of(cache)) == undisturbed


def test_journal_names_only_what_is_safe(tmp_path, many, monkeypatch):
    """Also where the machine ends and not only the process: all that a journal counts was synced before."""
    synced: dict[int, int] = {}
    safe: list[bool] = []
    fsync = os.fsync

    def watched_fsync(descriptor: int) -> None:
        fsync(descriptor)
        synced[os.fstat(descriptor).st_ino] = os.fstat(descriptor).st_size

    def watched_write(path: Path, stored: dict) -> None:
        if path.name in ("progress.json", "manifest.json"):
            for name in SPLITS:
                size = sum(synced.get(file.stat().st_ino, 0) for file in path.parent.glob(f"{name}-*"))
                safe.append(size >= 2 * stored["splits"][name]["tokens"])
        write_json(path, stored)

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(gpt.text.encode, "write_json", watched_write)
    monkeypatch.setattr(gpt.text.prepare, "write_json", watched_write)
    with constants(SMALL):
        make(many, tmp_path / "cache")
    assert safe == [True] * 8  # three journals, the manifest


def test_interrupted_before_there_is_a_journal(tmp_path, many, undisturbed):
    """The split and the tokenizer stay, and the rest begins again; nothing is said of resuming."""
    cache, said = tmp_path / "cache", list[str]()
    with constants(SMALL | {"gpt.text.encode.PROGRESS_BYTES": 10**9}):
        with watching(100, fail_with(MemoryError())), pytest.raises(MemoryError):
            make(many, cache)
        assert {file.name for file in folder_of(cache).iterdir()} >= {"plan.json", "tokenizer.json", "train-00000.bin"}
        with watching() as rest:
            make(many, cache, say=said.append)
    assert [line.split()[0] for line in said] == ["prepared"]
    assert len(rest) > 100
    assert content(folder_of(cache)) == undisturbed


def test_interrupted_while_it_is_read(tmp_path, many, undisturbed):
    """Before anything is decided there is nothing to keep, and the next time is the first."""
    cache = tmp_path / "cache"
    with constants(SMALL):
        with pytest.raises(KeyboardInterrupt):
            make(many, cache, say=lambda line: fail_with(KeyboardInterrupt())())
        assert content(folder_of(cache)) == {}
        make(many, cache)
    assert content(folder_of(cache)) == undisturbed


def test_interrupted_and_small(tmp_path, many, undisturbed):
    """A text that fits into the sample is encoded from memory the first time, and read again after an interruption."""
    cache = tmp_path / "cache"
    with constants(LARGE):
        for journaled in (False, True):
            with watching(100, fail_with(MemoryError())), pytest.raises(MemoryError):
                make(many, cache)
            assert (folder_of(cache) / "progress.json").exists() == journaled
        make(many, cache)
    assert content(folder_of(cache)) == undisturbed


@pytest.mark.slow
@pytest.mark.parametrize("third", [1, 2, 3])
def test_killed_at_every_step(tmp_path, workshop, many, undisturbed, third):
    """Wherever the file system is touched, a kill there changes nothing of what the next one makes."""
    for number in itertools.count(third, 3):
        values = LARGE if number % 5 == 0 else SMALL
        cache = tmp_path / str(number)
        code, said = workshop.run(many, cache, values, at=("", number, signal.SIGKILL))
        assert code in (0, -signal.SIGKILL), said
        if code == 0:
            break
        code, said = workshop.run(many, cache, values)
        assert code == 0, said
        assert content(folder_of(cache)) == undisturbed, number
        shutil.rmtree(cache)
    assert number > 30


def test_killed_again_and_again(tmp_path, workshop, many, undisturbed):
    """At any moment, until it is done: each goes on from where the last one came, and the result is the same."""
    cache, chooser, outputs = tmp_path / "cache", random.Random(11), []
    values = SMALL | {"gpt.text.encode.PROGRESS_BYTES": 101}
    for attempt in itertools.count(1):
        number = workshop.start(many, cache, values)
        time.sleep(chooser.random() * 0.01 * attempt)
        with contextlib.suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)
        code = workshop.wait(number)
        outputs.append(workshop.said(number))
        assert code in (0, -signal.SIGKILL), outputs[-1]
        if code == 0:
            break
    assert attempt > 2
    assert content(folder_of(cache)) == undisturbed
    shares = [int(share) for output in outputs for share in re.findall(r"resuming .* at (\d+)%", output)]
    assert shares == sorted(shares)


def test_killed_once_it_is_under_way(tmp_path, workshop, many, undisturbed):
    """The next process goes on from the journal: it decides nothing anew, and no other trace is left of the first."""
    cache = tmp_path / "cache"
    code, _ = workshop.run(many, cache, at=("progress.json", 8, signal.SIGKILL))
    assert code == -signal.SIGKILL
    working = folder_of(cache)
    assert {"plan.json", "progress.json", "tokenizer.json"} <= {file.name for file in working.iterdir()}
    code, said = workshop.run(many, cache)
    assert code == 0
    assert re.match(r"resuming the preparation of text at \d\d%\nprepared [\d,]+ bytes", said)
    assert "reading" not in said
    assert content(folder_of(cache)) == undisturbed


def test_killed_before_the_tokenizer_is_kept(tmp_path, workshop, many):
    """The next process learns the very same one."""
    cache = tmp_path / "cache"
    with constants(SMALL):
        make(many, tmp_path / "whole", TokenizerConfig("bpe", 307))
    assert workshop.run(many, cache, at=("tokenizer.json", 1, signal.SIGKILL), tokenizer="bpe")[0] == -signal.SIGKILL
    code, said = workshop.run(many, cache, tokenizer="bpe")
    assert code == 0, said
    assert content(folder_of(cache)) == content(folder_of(tmp_path / "whole"))


def test_killed_at_the_very_end(tmp_path, workshop, many, undisturbed):
    """A folder that lacks nothing but its name is not made again."""
    cache = tmp_path / "cache"
    code, said = workshop.run(many, cache, at=(f"{cache}/text-byte-", 1, signal.SIGKILL))
    assert code == -signal.SIGKILL and "prepared" in said
    assert [folder.name[:15] for folder in entries(cache)] == [".preparing-text"]
    assert workshop.run(many, cache) == (0, "")
    assert content(folder_of(cache)) == undisturbed


@pytest.mark.parametrize("number", [1, 2, 3, 4, 5, 6])
def test_killed_while_it_clears_away(tmp_path, workshop, many, undisturbed, number):
    """What a failed preparation has not yet deleted is never taken for work to continue."""
    cache = tmp_path / "cache"
    code, _ = workshop.run(many, cache, at=("os.remove ('", number, signal.SIGKILL), context_length=100_000)
    assert code == -signal.SIGKILL
    code, said = workshop.run(many, cache)
    assert code == 0, said
    assert content(folder_of(cache)) == undisturbed


def test_remains_of_an_older_version(tmp_path, many, undisturbed):
    """Older versions kept a lock in the folder: it is no obstacle, and does not stay."""
    cache, said = tmp_path / "cache", list[str]()
    with constants(SMALL):
        with watching(100, fail_with(MemoryError())), pytest.raises(MemoryError):
            make(many, cache)
        (folder_of(cache) / ".lock").write_text("123\n")
        make(many, cache, say=said.append)
        assert said[0].startswith("resuming")
        assert content(folder_of(cache)) == undisturbed
        (folder_of(cache) / ".lock").write_text("123\n")  # in a finished folder
        assert len(make(many, cache).train) > 0


@pytest.mark.slow
@pytest.mark.parametrize("half", [1, 2])
def test_ctrl_c_at_every_step(tmp_path, workshop, many, undisturbed, half):
    """It ends at once with 130 and without a word more, and the next one goes on."""
    for number in itertools.count(half * 3, 6):
        cache = tmp_path / str(number)
        code, said = workshop.run(many, cache, at=("", number, signal.SIGINT))
        if code == 0:
            break
        assert code == 130, said
        assert not [line for line in said.splitlines() if line.split()[0] not in ("reading", "resuming", "prepared")]
        code, said = workshop.run(many, cache)
        assert code == 0, said
        assert content(folder_of(cache)) == undisturbed, number
    assert number > 30


# --- text that changes ---


CHANGED = "text: its files changed while they were read: run the command again"


@pytest.mark.parametrize(
    ("change", "when", "message"),
    [
        ("longer", "read", CHANGED),
        ("longer", "encoded", CHANGED),
        ("as long", "read", CHANGED),
        ("as long", "encoded", CHANGED),
        ("gone", "read", "{file}: cannot be read (No such file or directory)"),
        ("gone", "encoded", "{file}: cannot be read (No such file or directory)"),
    ],
)
def test_text_that_changes(tmp_path, change, when, message):
    """It is named, nothing is kept, and the next preparation is of the text as it is then."""
    data, cache = write_files(tmp_path / "text"), tmp_path / "cache"
    file = tmp_path / "text/041.txt"

    def happen() -> None:
        if change == "gone":
            file.unlink()
        else:
            file.write_text(DOCUMENTS[41].swapcase() + "!" * (change == "longer"), encoding="utf-8")

    with constants(SMALL | {"gpt.text.encode.PROGRESS_BYTES": 10**9}):
        with watching(when == "encoded", happen):
            said = refusal(data, cache, say=lambda line: happen() if when == "read" else None)
        assert said.startswith(message.format(file=file))
        assert entries(cache) == []
        shards = make(data, cache)
        assert lists(shards) == tuple(obvious(documents, byte_tokenizer()) for documents in halves(data))


@pytest.mark.parametrize("when", ["read", "encoded"])
def test_text_that_changes_and_changes_back(tmp_path, many, undisturbed, when):
    """What was read of another text is not gone on with once the text is that of before again."""
    cache = tmp_path / "cache"
    shutil.copytree(many.path, tmp_path / "text")
    data, file = DataConfig("text", str(tmp_path / "text")), tmp_path / "text/4.jsonl"
    before = file.read_text()

    def change(line: str = "") -> None:
        file.write_text(before.replace("caf", "CAF") + before)

    with constants(SMALL):
        ends = pytest.raises((MemoryError, UserError))
        at = 150 if when == "encoded" else 60  # after the file was read again, or before
        with ends, watching(at, fail_with(MemoryError())), watching(when == "encoded", change):
            make(data, cache, say=change if when == "read" else [].append)
        assert file.read_text() != before
        file.write_text(before)
        make(data, cache)
    assert content(folder_of(cache)) == undisturbed


# --- several processes at once ---


def two_at_once(workshop, data: DataConfig, cache: Path, at: tuple[str, int] = ("progress.json", 5), **of_first):
    """The numbers of two processes: one that is stopped while it prepares, and one that says it waits for it."""
    first = workshop.start(data, cache, at=(*at, signal.SIGSTOP), **of_first)
    assert workshop.wait(first) is None
    second = workshop.start(data, cache)
    workshop.wait_until_said(second, "waiting")
    return first, second


def test_two_processes_at_once(tmp_path, workshop, many, undisturbed):
    """One waits and says so, and then has what the other has made; nothing is prepared twice."""
    cache = tmp_path / "cache"
    first, second = two_at_once(workshop, many, cache)
    os.kill(first, signal.SIGCONT)
    assert [workshop.wait(first), workshop.wait(second)] == [0, 0]
    assert [line.split()[0] for line in workshop.said(first).splitlines()] == ["reading", "prepared"]
    assert workshop.said(second) == f"process {first} is preparing this text: waiting for it\n"
    assert content(folder_of(cache)) == undisturbed


def test_many_processes_at_once(tmp_path, workshop, many, undisturbed):
    """One of seven prepares, the others have it; none is left with an error, whoever comes when."""
    cache = tmp_path / "cache"
    numbers = [workshop.start(many, cache) for _ in range(7)]
    assert [workshop.wait(number) for number in numbers] == [0] * 7
    said = [workshop.said(number) for number in numbers]
    assert sum("\nprepared" in lines for lines in said) == 1
    assert content(folder_of(cache)) == undisturbed


@pytest.mark.parametrize("touches", [1, 12])
def test_waiting_for_one_that_is_killed(tmp_path, workshop, many, undisturbed, touches):
    """The one that waits goes on with what the other has left, be it nothing or a part."""
    cache = tmp_path / "cache"
    place = ("plan.json" if touches == 1 else "progress.json", touches)
    first, second = two_at_once(workshop, many, cache, place)
    os.kill(first, signal.SIGKILL)
    assert [workshop.wait(first), workshop.wait(second)] == [-signal.SIGKILL, 0]
    waiting, then, *_ = workshop.said(second).splitlines()
    assert waiting == f"process {first} is preparing this text: waiting for it"
    assert then.split()[0] == ("reading" if touches == 1 else "resuming")
    assert content(folder_of(cache)) == undisturbed


def test_waiting_for_one_that_fails(tmp_path, workshop, many, undisturbed):
    """The text is too short for the first, which keeps nothing of it, and long enough for the one that waits."""
    cache = tmp_path / "cache"
    first, second = two_at_once(workshop, many, cache, context_length=100_000)
    os.kill(first, signal.SIGCONT)
    assert [workshop.wait(first), workshop.wait(second)] == [2, 0]
    assert "prepare: the training text has" in workshop.said(first).splitlines()[-1]
    assert [line.split()[0] for line in workshop.said(second).splitlines()] == ["process", "reading", "prepared"]
    assert content(folder_of(cache)) == undisturbed


def test_ctrl_c_while_waiting(tmp_path, workshop, many, undisturbed):
    """The one that waited is gone, and the other is not disturbed by that."""
    cache = tmp_path / "cache"
    first, second = two_at_once(workshop, many, cache)
    os.kill(second, signal.SIGINT)
    assert workshop.wait(second) == 130
    os.kill(first, signal.SIGCONT)
    assert workshop.wait(first) == 0
    assert workshop.said(second) == f"process {first} is preparing this text: waiting for it\n"
    assert content(folder_of(cache)) == undisturbed


@pytest.mark.parametrize(("context_length", "code"), [(CONTEXT, 0), (100_000, 2)], ids=["succeeds", "fails"])
def test_taking_a_lock_that_is_gone(tmp_path, workshop, many, undisturbed, context_length, code):
    """Between the opening of its file and the locking, the folder of the other has got its name, or was removed."""
    cache = tmp_path / "cache"
    first = workshop.start(many, cache, at=("progress.json", 5, signal.SIGSTOP), context_length=context_length)
    assert workshop.wait(first) is None
    second = workshop.start(many, cache, at=("fcntl.flock", 1, signal.SIGSTOP))
    assert workshop.wait(second) is None
    os.kill(first, signal.SIGCONT)
    assert workshop.wait(first) == code
    os.kill(second, signal.SIGCONT)
    assert workshop.wait(second) == 0, workshop.said(second)
    assert "waiting" not in workshop.said(second)
    assert content(folder_of(cache)) == undisturbed


@pytest.mark.parametrize(
    ("removal", "number"),
    [
        ("plan.json', -1)", 2),
        *((f"os.remove ('{name}'", 1) for name in ("progress.json", "train-00000.bin", "validation-00000.bin")),
    ],
    ids=["plan", "journal", "train", "validation"],
)
def test_beginning_while_one_clears_away(tmp_path, workshop, many, undisturbed, removal, number):
    """What one that has failed still has to remove is not what the next one makes meanwhile."""
    cache = tmp_path / "cache"
    first = workshop.start(many, cache, at=(removal, number, signal.SIGSTOP), context_length=100_000)
    assert workshop.wait(first) is None
    second = workshop.start(many, cache, at=("progress.json", 5, signal.SIGSTOP))
    workshop.wait_until_said(second, "text")
    begun = "waiting" not in workshop.said(second)
    assert not begun or workshop.wait(second) is None
    os.kill(first, signal.SIGCONT)
    assert workshop.wait(first) == 2
    assert begun or workshop.wait(second) is None
    os.kill(second, signal.SIGCONT)
    assert workshop.wait(second) == 0, workshop.said(second)
    assert content(folder_of(cache)) == undisturbed


# --- what others have left ---


def leave(cache: Path, name: str, days: float) -> Path:
    """The remains of a preparation that ended so long ago."""
    folder = cache / name
    folder.mkdir(parents=True)
    for file in (".lock", "train-00000.bin"):
        (folder / file).write_bytes(b"half")
    for path in (*folder.iterdir(), folder):
        os.utime(path, (time.time() - days * 24 * 3600,) * 2)
    return folder


def test_remains_of_long_ago_are_swept(tmp_path):
    """After a week nobody goes on with them, unless a process still holds them."""
    cache = tmp_path / "cache"
    old, fresh, held = (leave(cache, f".preparing-{name}", days) for name, days in (("a", 7.1), ("b", 6.9), ("c", 8)))
    recent = leave(cache, ".preparing-d", 8)
    os.utime(recent / "train-00000.bin")
    lock = hold(cache / ".c.lock")
    for path in (held, held / ".lock"):
        os.utime(path, (0, 0))
    make(write_documents(tmp_path), cache)
    lock.release()
    assert not old.exists() and not (cache / ".a.lock").exists()
    for folder in (fresh, held, recent):
        assert (folder / "train-00000.bin").read_bytes() == b"half"
    assert len(entries(cache)) == 4


def test_own_remains_of_long_ago(tmp_path, many, undisturbed):
    """They are swept too, and the preparation begins anew."""
    cache, said = tmp_path / "cache", list[str]()
    with constants(SMALL):
        with watching(100, fail_with(MemoryError())), pytest.raises(MemoryError):
            make(many, cache)
        for path in (*folder_of(cache).iterdir(), folder_of(cache)):
            os.utime(path, (0, 0))
        make(many, cache, say=said.append)
    assert [line.split()[0] for line in said] == ["reading", "prepared"]
    assert content(folder_of(cache)) == undisturbed


@pytest.mark.parametrize("name", [".preparing-abc_d", ".preparing-"])
def test_foreign_names_do_no_harm(tmp_path, name):
    """A hidden entry of the cache that only looks like a folder of ours stops nothing."""
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / name).write_text("a file")
    os.utime(cache / name, (0, 0))
    make(write_documents(tmp_path), cache)
    assert (cache / name).read_text() == "a file"
    assert len([folder for folder in entries(cache) if folder.name.startswith("text-")]) == 1


# --- the disk ---


@pytest.mark.parametrize("below", ["", "cache"])
def test_cache_that_cannot_be_written(tmp_path, below):
    """A file where the folder should be: the line says which, and how to choose another."""
    data, cache = write_documents(tmp_path), tmp_path / "file" / below
    (tmp_path / "file").write_text("in the way")
    reason = "Not a directory" if below else "File exists"
    assert refusal(data, cache) == f"{cache}: cannot be written ({reason}); name another folder with data.cache="
    assert (tmp_path / "file").read_text() == "in the way"


def test_read_only_cache(tmp_path, disk):
    """What was prepared is used; what was not is refused in a line."""
    data, cache = write_text(tmp_path, "a text " * 101), disk / "cache"
    whole = make(data, cache)
    remount(disk, "ro")
    assert lists(make(data, cache)) == lists(whole)
    reason = "cannot be written (Read-only file system); name another folder with data.cache="
    for place in (cache, disk / "other"):
        assert refusal(write_documents(tmp_path), place) == f"{place}: {reason}"


@pytest.mark.parametrize("half", [0, 1])
def test_full_disk(workshop, disk, many, undisturbed, half):
    """Wherever it runs full, one line says so, and what was done by then is gone on with once there is room."""
    cache, outputs = disk / "cache", []
    for pages in itertools.count(1 + half, 2):
        remount(disk, f"size={4096 * pages}")
        code, said = workshop.run(many, cache)
        if code == 0:
            break
        lines = [line for line in said.splitlines() if line.split()[0] not in ("reading", "resuming")]
        assert code == 2
        assert len(lines) == 1, said
        assert re.match(
            rf"prepare: {cache}: the disk is full \(No space left on device\): free some space and run", lines[0]
        )
        remount(disk, "size=8m")
        code, said = workshop.run(many, cache)
        assert code == 0, said
        assert content(folder_of(cache)) == undisturbed
        outputs.append(said.split()[0])
        shutil.rmtree(cache)
    assert pages > 7
    assert {"reading", "resuming"} <= set(outputs)


@pytest.mark.parametrize("number", ["EDQUOT", "EFBIG", "EIO", "ESTALE"])
@pytest.mark.parametrize("call", ["fsync", "write", "replace", "replace a folder", "mkdir"])
def test_disk_that_fails(tmp_path, many, undisturbed, monkeypatch, number, call):
    """At whichever call and of whichever kind: one line names the cache, and the next preparation goes on."""
    cache, error = tmp_path / "cache", getattr(errno, number)
    text, failed = os.strerror(error), 0
    cache.mkdir()
    with constants(SMALL):
        for at in (1, 2, 4, 7):
            calls = itertools.count(1)

            def fail(*arguments, real, calls=calls, at=at, **more):
                folder = call == "replace a folder"
                if (at == 1 and os.path.isdir(arguments[0])) if folder else next(calls) == at:
                    raise OSError(error, text)
                return real(*arguments, **more)

            with monkeypatch.context() as patch:
                if call == "write":
                    patch.setattr(Path, "open", functools.partialmethod(open_on_a_failing_disk, Path.open, fail))
                else:
                    name = call.split()[0]
                    patch.setattr(os, name, functools.partial(fail, real=getattr(os, name)))
                try:
                    make(many, cache)
                except UserError as caught:
                    failed += 1
                    full = number in ("EDQUOT", "EFBIG")
                    what = f"the disk is full ({text}): free" if full else f"cannot be written ({text}); name"
                    assert f": {what}" in str(caught)
                    assert str(caught).startswith(str(cache))
            if not any(folder.name.startswith(".preparing-") for folder in entries(cache)):
                shutil.rmtree(cache)  # the disk failed before there was anything, or where it does not matter
                cache.mkdir()
        make(many, cache)
    assert failed
    assert content(folder_of(cache)) == undisturbed


def open_on_a_failing_disk(path: Path, real: Callable, fail: Callable, mode: str = "r", *how, **more):
    """A file that may fail when it is written."""

    class Disk(io.FileIO):
        def write(self, content):
            return fail(content, real=super().write)

    if "w" not in mode and "+" not in mode:
        return real(path, mode, *how, **more)
    file = io.BufferedRandom(Disk(path, mode.replace("b", "") if "+" in mode else mode.replace("b", "") + "+"))
    return file if "b" in mode else io.TextIOWrapper(file, encoding=more["encoding"])


def test_two_tokenizers_at_once(tmp_path, workshop, many, undisturbed):
    """Two preparations of one text do not wait for each other, nor get into each other's way."""
    cache = tmp_path / "cache"
    first = workshop.start(many, cache, at=("progress.json", 5, signal.SIGSTOP))
    assert workshop.wait(first) is None
    code, said = workshop.run(many, cache, tokenizer="gpt2")
    assert (code, "waiting" in said) == (0, False)
    os.kill(first, signal.SIGCONT)
    both = [first, *(workshop.start(many, cache, tokenizer=name) for name in ("bpe", "bpe", "gpt2"))]
    assert [workshop.wait(number) for number in both] == [0] * 4
    assert content(next(cache.glob("text-byte-*"))) == undisturbed
    alone = tmp_path / "alone"
    for name in ("gpt2", "bpe"):
        assert workshop.run(many, alone, tokenizer=name)[0] == 0
        assert content(next(cache.glob(f"text-{name}-*"))) == content(next(alone.glob(f"text-{name}-*")))


@pytest.mark.parametrize("name", ["plan.json", "progress.json", "tokenizer.json", "train-00001.bin"])
@pytest.mark.parametrize("damage", ["gone", "emptied", "zeros", "garbage", "nested", "another", "flipped"])
def test_damaged_remains(tmp_path, many, undisturbed, name, damage):
    """What an interrupted preparation left is not trusted: it is made anew, at the latest by the next command."""
    cache = tmp_path / "cache"
    with constants(SMALL):
        with watching(100, fail_with(MemoryError())), pytest.raises(MemoryError):
            make(many, cache)
        file = folder_of(cache) / name
        before = file.read_bytes()
        flipped = before.replace(b"1", b"2") if name.endswith(".json") else bytes([before[0] ^ 1]) + before[1:]
        contents = {"emptied": b"", "zeros": bytes(len(before)), "garbage": b"\xff\xfe{", "nested": b"[" * 10**5}
        file.write_bytes((contents | {"another": b"{}", "flipped": flipped}).get(damage, b""))
        if damage == "gone":
            file.unlink()
        try:
            make(many, cache)
        except UserError as caught:
            assert re.search(
                "was damaged while the preparation was interrupted|; delete .* and it will be", str(caught)
            )
            shutil.rmtree(folder_of(cache), ignore_errors=True) if entries(cache) else None
            make(many, cache)
    assert content(folder_of(cache)) == undisturbed


def test_corpus_that_holds_its_own_runs_and_cache(tmp_path, undisturbed, many):
    """Training in the folder of one's text and resuming there sees the same text each time."""
    folder = Path(shutil.copytree(many.path, tmp_path / "text"))
    data, cache = DataConfig("text", str(folder)), folder / "data/cache"
    with constants(SMALL):
        make(data, cache)
        (folder / "runs/one").mkdir(parents=True)
        for name in ("config.yaml", ".lock", "samples.md", "metrics.json"):
            (folder / "runs/one" / name).write_text("text")
        said: list[str] = []
        make(data, cache, say=said.append)
        assert said[-1].startswith("text is already prepared")
        make(data, tmp_path / "other", say=said.append)
    assert [content(folder_of(place)) for place in (cache, tmp_path / "other")] == [undisturbed] * 2


# --- damage: tests/test_shards.py has every kind of it ---


def flip(folder: Path) -> None:
    """One bit of the last token."""
    content = (folder / "validation-00000.bin").read_bytes()
    (folder / "validation-00000.bin").write_bytes(content[:-2] + bytes([content[-2] ^ 1]) + content[-1:])


DAMAGE = {
    "flipped bit": (flip, "/validation-00000.bin: damaged (its hash is not the one in the manifest)"),
    "missing file": (lambda folder: (folder / "train-00000.bin").unlink(), "/train-00000.bin: is missing"),
    "no manifest": (lambda folder: (folder / "manifest.json").unlink(), ": the manifest or the tokenizer cannot be"),
    "emptied": (lambda folder: [file.unlink() for file in folder.iterdir()], ": the manifest or the tokenizer"),
    "a file in its place": (lambda folder: [shutil.rmtree(folder), folder.write_text("")], ": the manifest or the"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_named(tmp_path, damage):
    """One line says what is wrong and what to delete, and after that all is well."""
    inflict, message = DAMAGE[damage]
    data, cache = write_documents(tmp_path), tmp_path / "cache"
    whole = lists(make(data, cache))
    folder = folder_of(cache)
    inflict(folder)
    said = refusal(data, cache)
    assert said.startswith(f"{folder}{message}"), said
    assert said.endswith(f"; delete {folder} and it will be made anew")
    shutil.rmtree(folder) if folder.is_dir() else folder.unlink()
    assert lists(make(data, cache)) == whole


def test_folder_of_another_corpus(tmp_path):
    """In order in itself, but not what its name says: that is told by the key, and it is not trained on."""
    cache = tmp_path / "cache"
    make(write_documents(tmp_path), cache)
    other = folder_of(cache)
    data = write_text(tmp_path, "another text " * 11)
    make(data, cache)
    [folder] = set(entries(cache)) - {other}
    shutil.rmtree(folder)
    shutil.copytree(other, folder)
    assert refusal(data, cache) == (
        f"{folder}: its manifest belongs to another corpus; delete {folder} and it will be made anew"
    )


# --- mixtures ---

ANIMALS = [f"The zebra and the aardvark number {i} met. " * (1 + i % 3) for i in range(47)]
PLANTS = ["Of the oak and the ash " * 30, "and the bitter willow tree " * 30]


def write_mixture(folder: Path, *weights: float) -> DataConfig:
    """The configuration of a mixture of up to three corpora, the last of a single text."""
    paths = [write_documents(folder / "documents").path, write_documents(folder / "animals", ANIMALS).path]
    return DataConfig("mix", [*paths, write_text(folder, "".join(PLANTS)).path][: len(weights)], list(weights))


def mix(data: DataConfig, cache: Path, tokenizer: TokenizerConfig = BYTE, **more) -> Corpora:
    """Prepare a mixture without a word."""
    return prepare(data, tokenizer, CONTEXT, cache, say=more.pop("say", [].append), **more)


def parts_of(data: DataConfig) -> list[DataConfig]:
    """The configurations that read the corpora of a mixture alone."""
    return [DataConfig("text", path) for path in data.paths]


@pytest.mark.parametrize(
    ("weights", "shares"),
    [
        ([3, 1], (750, 250)),
        ([0.5, 0.5], (500, 500)),
        ([1, 1, 1], (334, 333, 333)),
        ([2, 2, 3], (286, 286, 428)),  # 285.7, 285.7 and 428.6
        ([1, 5, 1], (143, 714, 143)),  # 142.9, 714.3 and 142.9
        ([999, 1], (999, 1)),
        ([1e-9, 2e-9, 3e-9], (167, 333, 500)),
    ],
)
def test_shares_by_largest_remainder(tmp_path, weights, shares):
    """Of 1000 windows, hand-computed."""
    assert mix(write_mixture(tmp_path, *weights), tmp_path / "cache").shares == shares


@EXAMPLES
@given(st.lists(st.floats(1e-2, 1), min_size=2, max_size=9))
def test_shares_are_next_to_exact(weights):
    """They sum to 1000, and none is off by one or more."""
    shares = shares_of(DataConfig("mix", [f"{i}" for i in range(len(weights))], weights))
    assert sum(shares) == 1000
    exact = [1000 * Fraction(weight) / sum(map(Fraction, weights)) for weight in weights]
    assert all(abs(share - true) < 1 for share, true in zip(shares, exact, strict=True))


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["python_docs", "/home/me/books/a.txt"], ("python_docs", "a")),
        (["x/a.txt", "y/a.md", "z/a.jsonl.gz"], ("a", "a-2", "a-3")),
        (["a-2.txt", "x/a.txt", "y/a.txt", "z/a.txt"], ("a-2", "a", "a-3", "a-4")),
        (["books/*.txt", "/data/**/*.jsonl", "/*.txt"], ("books", "data", "text")),
        (["https://example.org/some/war%20and-peace.txt.gz?raw=1#top", "~/b.TXT"], ("war_20and-peace", "b")),
        (["texts/my novel, part 1.txt", "😀.txt", "Bücher.v2.txt"], ("my_novel_part_1", "text", "Bücher.v2")),
    ],
)
def test_names_of_a_mixture(paths, names):
    """Short, unique and fit for a curve's tag, whatever the paths."""
    assert names_of(DataConfig("mix", paths, [1] * len(paths))) == names


def test_name_of_a_folder_in_a_mixture(tmp_path, monkeypatch):
    """The whole of its name, also with a dot in it, and also of the folder that one is in."""
    (tmp_path / "v1.2").mkdir()
    monkeypatch.chdir(tmp_path / "v1.2")
    assert names_of(DataConfig("mix", [f"{tmp_path}/v1.2/", "."], [1, 1])) == ("v1.2", "v1.2-2")


def test_names_are_not_in_the_key(tmp_path):
    """What is stored for resuming holds the texts' hashes, so a moved text is still the same."""
    here, there = (mix(write_mixture(tmp_path / place, 1, 1), tmp_path / "cache") for place in ("here", "there"))
    assert (
        here.key
        == there.key
        == {
            "mix": [source.manifest["key"] for source in here.sources],
            "shares": [500, 500],
            "tokenizer": {"name": "byte"},
        }
    )


def test_weight_that_is_too_small(tmp_path):
    """Less than a window in a thousand: the corpus is named, before anything is prepared."""
    data = write_mixture(tmp_path, 1000, 1, 0.3)
    with pytest.raises(UserError) as caught:
        mix(data, tmp_path / "cache")
    assert str(caught.value) == (
        f"data.weights: {data.path[2]!r} has less than a thousandth of all: raise its weight, or leave it out"
    )
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("name", ["gpt2", "byte"])
def test_mixture_of_what_is_there(tmp_path, name):
    """Its corpora are those that each would be alone, in the same folders, so one that is there is not made again."""
    data, cache, said = write_mixture(tmp_path, 1, 2, 4), tmp_path / "cache", list[str]()
    alone = make(parts_of(data)[1], cache, TokenizerConfig(name))
    sizes = [len("".join(documents).encode()) for documents in (DOCUMENTS, PLANTS)]
    mixture = mix(data, cache, TokenizerConfig(name), say=said.append)
    assert [line.split()[:3] for line in said] == [
        ["reading", "text", "(1"],
        ["prepared", f"{sizes[0]:,}", "bytes"],
        ["text", "is", "already"],
        ["reading", "text", "(1"],
        ["prepared", f"{sizes[1]:,}", "bytes"],
    ]
    assert mixture.names == ("text", "text-2", "text-3")
    assert mixture.sources[1].manifest == alone.manifest
    for part, source in zip(parts_of(data), mixture.sources, strict=True):
        assert lists(source) == tuple(obvious(documents, source.tokenizer) for documents in halves(part))
    assert len(entries(cache)) == 3
    assert mixture.train_tokens == sum(len(lists(source)[0]) for source in mixture.sources)


def test_joint_tokenizer(tmp_path):
    """One byte-pair encoding of all their training text, kept in the cache; made again it is the same."""
    data, cache, said = write_mixture(tmp_path, 1, 2, 4), tmp_path / "cache", list[str]()
    config = TokenizerConfig("bpe", 307)
    mixture = mix(data, cache, config)
    expected = train_bpe([text for part in parts_of(data) for text in halves(part)[0]], 307)
    for part, source in zip(parts_of(data), mixture.sources, strict=True):
        assert source.tokenizer.to_dict() == expected.to_dict()
        assert lists(source) == tuple(obvious(documents, expected) for documents in halves(part))
    assert mixture.tokenizer.sha256 == expected.sha256
    assert sorted(entry.name.split("-")[0] for entry in entries(cache)) == ["text", "text", "text", "tokenizer"]
    [file] = cache.glob("tokenizer-*.json")
    kept = file.read_bytes()
    for remedy in (lambda: None, file.unlink):
        remedy()
        said.clear()
        assert mix(data, cache, config, say=said.append).key == mixture.key
        assert [line.split()[0] for line in said if "prepared" in line] == ["text"] * 3
        assert file.read_bytes() == kept
    assert len(entries(cache)) == 4


def test_only_what_is_missing_is_prepared(tmp_path):
    """Of a mixture whose second folder was deleted, the second is made again, with the tokenizer that was kept."""
    data, cache, said = write_mixture(tmp_path, 3, 5, 7), tmp_path / "cache", list[str]()
    config = TokenizerConfig("bpe", 307)
    mixture = mix(data, cache, config)
    folders = {folder: content(folder) for folder in cache.glob("text-*")}
    wanted = mixture.sources[1].manifest.items()
    [second] = [folder for folder in folders if wanted <= json.loads(folders[folder]["manifest.json"]).items()]
    shutil.rmtree(second)
    mix(data, cache, config, say=said.append)
    assert [line.split()[0] for line in said] == ["text", "reading", "prepared", "text"]
    assert {folder: content(folder) for folder in cache.glob("text-*")} == folders


def test_what_the_joint_tokenizer_depends_on(tmp_path):
    """Shares, text and size of the vocabulary; not the way in which the weights are written."""
    cache = tmp_path / "cache"
    changes = [
        (write_mixture(tmp_path, 1, 2), 307, 1),
        (write_mixture(tmp_path, 0.5, 1.0), 307, 1),
        (write_mixture(tmp_path, 2, 1), 307, 2),
        (write_mixture(tmp_path, 1, 2), 311, 3),
        (write_mixture(tmp_path, 1, 2, 4), 307, 4),
    ]
    for data, vocab_size, count in changes:
        mix(data, cache, TokenizerConfig("bpe", vocab_size))
        assert len(list(cache.glob("tokenizer-*.json"))) == count


def test_sample_for_the_joint_tokenizer(tmp_path, monkeypatch):
    """Of each corpus no more than its share, and no less than half of it, evenly from its beginning to its end."""
    learnt: list[list[str]] = []

    def watched(texts: Iterator[str], vocab_size: int) -> Tokenizer:
        learnt.append(list(texts))
        return train_bpe(learnt[-1], vocab_size)

    monkeypatch.setattr(gpt.text.prepare, "train_bpe", watched)
    documents = [[f"{name} {i:04} " + "word " * 20 for i in range(997)] for name in "ab"]
    paths = [write_documents(tmp_path / name, part).path for name, part in zip("ab", documents, strict=True)]
    with constants({"gpt.text.split.SAMPLE_BYTES": 200_000, "gpt.text.prepare.SAMPLE_BYTES": 50_000}):
        mix(DataConfig("mix", paths, [4, 1]), tmp_path / "cache", TokenizerConfig("bpe", 307))
    for name, share in (("a", 40_000), ("b", 10_000)):
        part = [text for text in learnt[0] if text.startswith(name)]
        numbers = [int(text.split()[1]) for text in part]
        assert share / 2 < sum(map(len, part)) <= share
        assert numbers == sorted(numbers)
        assert max(np.diff([0, *numbers, 997])) < 3 * 997 / len(part)
    assert len(learnt) == 1


def test_given_tokenizer_of_a_mixture(tmp_path):
    """That of a model to fine-tune is that of all corpora, and nothing is trained."""
    given = train_bpe(["Document café seats zebra " * 7], 293)
    data, cache = write_mixture(tmp_path, 1, 1), tmp_path / "cache"
    mixture = mix(data, cache, TokenizerConfig("bpe", 307), given=given)
    assert [source.tokenizer.sha256 for source in mixture.sources] == [given.sha256] * 2
    assert list(cache.glob("tokenizer-*")) == []


@pytest.mark.parametrize(
    "damage",
    [
        lambda file: os.truncate(file, 101),
        lambda file: os.truncate(file, 0),
        lambda file: file.write_text("[7]"),
        lambda file: file.write_text(file.read_text().replace('"sha256": "', '"sha256": "0')),
    ],
    ids=["half", "emptied", "of another kind", "tampered"],
)
def test_joint_tokenizer_that_is_damaged(tmp_path, damage):
    """It is named with the remedy, which helps."""
    data, cache, config = write_mixture(tmp_path, 1, 1), tmp_path / "cache", TokenizerConfig("bpe", 307)
    expected = mix(data, cache, config).key
    [file] = cache.glob("tokenizer-*.json")
    damage(file)
    with pytest.raises(UserError) as caught:
        mix(data, cache, config)
    assert re.fullmatch(rf"{file}: cannot be read \(.+\); delete it and it will be made anew", str(caught.value))
    file.unlink()
    assert mix(data, cache, config).key == expected


def test_mixture_with_a_text_that_is_too_short(tmp_path):
    """The others stay for the next time."""
    data, cache = write_mixture(tmp_path, 1, 1, 1), tmp_path / "cache"
    Path(data.path[2]).write_text("a short text")
    with pytest.raises(UserError, match=r"the training text has 11 tokens, fewer than a context of 13"):
        mix(data, cache)
    assert len(entries(cache)) == 2


def test_mixture_with_a_built_in_corpus(tmp_path, monkeypatch):
    """One that is named by a word, here of fewer modules, beside a file."""
    modules = gpt.text.python_docs.files()[10:13]
    monkeypatch.setattr("gpt.text.python_docs.files", lambda: modules)
    file = write_documents(tmp_path).path
    mixture = mix(DataConfig("mix", ["python_stdlib", file], [1, 3]), tmp_path / "cache")
    assert mixture.names == ("python_stdlib", "text")
    assert [source.manifest["corpus"] for source in mixture.sources] == ["python_stdlib", "text"]
    size = sum(mixture.sources[0].manifest["splits"][name]["bytes"] for name in SPLITS)
    assert size == sum(
        len(source.encode()) for module in modules for source in gpt.text.python_docs.read_source(module)
    )
