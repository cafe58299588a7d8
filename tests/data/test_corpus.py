"""Corpora: their documents in chunks, their configuration, their hash, and one line for each mistake."""

import functools
import gzip
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gpt.data.corpus
import gpt.data.file_hashes
import gpt.data.readers
from gpt.data import compression, readers
from gpt.data.chunking import split_into_chunks
from gpt.data.corpus import Chunk, Corpus, ShardStart, open_corpus
from gpt.data.data_config import DATA_NAMES, DataConfig
from gpt.data.dataset_cache import read_checked_json, write_checked_json
from gpt.data.readers import Document
from gpt.files import CACHE_TAG
from harness import ROOT, refusal

TEXT = "Naïve text: 10 € for a café, 中文 and 😀.\r\n\tIts lines\nstay as they are. \n"
NOWHERE = Path("no cache is needed")


def open_quietly(path: object, **more) -> Corpus:
    """Return the corpus of the text at a path. Any printed line fails the test."""
    return open_corpus(DataConfig("text", path if isinstance(path, list) else str(path), **more), NOWHERE, pytest.fail)


def documents_of(corpus: Corpus) -> list[str]:
    """Return the documents of a corpus."""
    return [text for _, text in join_chunks(list(corpus.chunks()))]


def read(path: object, **more) -> list[str]:
    """The documents of the text at a path."""
    return documents_of(open_quietly(path, **more))


# --- documents ---


def test_a_folder_of_every_format(tmp_path, fill):
    """Suffixes choose the readers. Markup that is read as raw text is named with a remedy."""
    fill(tmp_path, a__txt=TEXT, b__jsonl='{"text": "two"}\n{"text": "three"}', d__json="[4]", g__csv="eight,nine")
    pq.write_table(pa.table({"text": ["five", None, "six"]}), tmp_path / "c.parquet")
    printed: list[str] = []
    corpus = open_corpus(DataConfig("text", str(tmp_path)), NOWHERE, printed.append)
    assert documents_of(corpus) == [TEXT, "two", "three", "five", "six", "[4]", "eight,nine"]
    raw, d = "read as raw text with its markup; for the text alone:", tmp_path / "d.json"
    json_line = f"""d.json: JSON, {raw} jq -c '.. | objects | select(has("text"))' {d} > {d}.jsonl"""
    table_line = f"a table, {raw} convert it to .jsonl or .parquet and set data.text_field=COLUMN"
    assert printed == [json_line, f"g.csv: {table_line}"]
    fill(tmp_path, h__csv="ten,11")
    open_corpus(DataConfig("text", str(tmp_path)), NOWHERE, printed.append)
    assert printed[2:] == [json_line, f"g.csv and 1 more: {table_line}"]


def test_a_page_behind_a_url_is_named(tmp_path, server):
    """The address of a page that shows a text gives HTML. A line reports it once, when the copy is read."""
    server.content = b"<!DOCTYPE html>\n<html><body>The quiet river.</body></html>"
    printed: list[str] = []
    corpus = open_corpus(DataConfig("text", [server.url("whole"), server.url("moved")]), tmp_path, printed.append)
    for _ in range(2):
        assert "The quiet river." in "".join(chunk.text for _, _, chunk in corpus.chunks())
    [line] = printed
    assert line.startswith(f"{server.url('whole')}: HTML, read as raw text with its markup; ")
    assert line.endswith("give the URL of the text itself")


def test_text_field_and_errors(tmp_path, fill):
    """What is configured reaches the reader."""
    fill(tmp_path, a__jsonl=b'{"body": "caf\xe9", "text": "no"}')
    assert read(tmp_path, text_field="body", errors="replace") == ["caf\ufffd"]
    line = refusal(read, tmp_path, text_field="title", errors="replace")
    keys = "name the key with data.text_field= (body, text)"
    assert line == f"{tmp_path / 'a.jsonl'}: line 1 has no text under 'title'; {keys}"
    file = fill(tmp_path, b__txt="café|río".encode("latin-1")) / "b.txt"
    assert read(file, encoding="latin-1", separator="|") == ["café", "río"]


# --- mistakes ---


def test_language_c(tmp_path, fill):
    """Names, texts and messages do not depend on the language of the system."""
    fill(tmp_path, **{"café__txt": TEXT, "中文__jsonl": '{"text": "一"}'})
    code = (
        "import sys; from pathlib import Path; from gpt.console import clean_exit; "
        "from gpt.data.corpus import *\n"
        "with clean_exit('x'):\n"
        "    corpus = open_corpus(DataConfig('text', sys.argv[1]), Path(sys.argv[2]))\n"
        "    texts = [*map(str().join, (blocks for file in corpus.files for blocks, _ in corpus.read(file, 0)))]\n"
        "    print(corpus.sha256(Path(sys.argv[2])), ascii(texts))\n"
        "    from gpt.data.find_files import *; find_text_files(sys.argv[1] + '/\\xe9', Path())"
    )
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)}
    environment |= {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-c", code, tmp_path, tmp_path / "cache"]
    done = subprocess.run(command, env=environment, capture_output=True)
    expected = f"{open_quietly(tmp_path).sha256(tmp_path / 'cache')} {[TEXT, '一']!a}"
    assert done.stdout.decode("ascii").splitlines() == [expected]
    assert done.returncode == 2
    assert done.stderr.count(b"\n") == 1 and done.stderr.startswith(b"x: data.path=")


def test_file_that_goes_away(tmp_path, fill):
    """A file that vanishes after it was found."""
    file = fill(tmp_path, a__txt="a", b__txt="b") / "b.txt"
    corpus = open_quietly(tmp_path)
    file.unlink()
    reason = "cannot be read (No such file or directory); fix that, or move the file away"
    for attempt in (corpus.fingerprints, lambda: corpus.sha256(tmp_path), lambda: list(corpus.chunks())):
        assert refusal(attempt) == f"{file}: {reason}"


# --- the configuration ---


def test_paths():
    """Hydra reads a name of digits as a number."""
    assert DataConfig("text", ["a", None, 1984, ""]).paths == ["a", "1984"]
    assert DataConfig("text", 0).paths == ["0"]


MIX = {"name": "mix", "path": ["a", "b"]}
URL = {"name": "text", "path": "http://a/b"}
NEEDS_A_FILE = "data=text needs data.path=FILE: a file, a folder or a quoted glob such as 'books/*.txt'"
NEEDS_A_MIX = "data=mix needs at least two different corpora, such as data.path='[python_docs, FILE]'"
ONLY_WITH_TEXT = "works only with data=text and data=tokens: add one of these, or leave the path out"
NO_FIT = "does not fit: only data=mix takes weights, one for each data.path"
RANGE = "is out of range: it must be at least 1"
ONE_URL = "data.sha256 is the hash of one file behind a URL: leave it out, or give only data.path=URL"


@pytest.mark.parametrize(
    ("message", "arguments"),
    [
        (f"data.name='bible' is not known: choose from {', '.join(DATA_NAMES)}", {"name": "bible"}),
        ("data.errors='ignore' is not known: choose from strict, replace", {"errors": "ignore"}),
        *((NEEDS_A_FILE, {"name": "text", "path": path}) for path in (None, "", [], [""])),
        (f"data.path='a.txt' {ONLY_WITH_TEXT}", {"path": "a.txt"}),
        (f"data.path=['a', 'b'] {ONLY_WITH_TEXT}", {"name": "tinyshakespeare", "path": ["a", "b"]}),
        (NEEDS_A_MIX, {"name": "mix"}),
        (NEEDS_A_MIX, {"name": "mix", "path": "a.txt", "weights": [1]}),
        (NEEDS_A_MIX, {"name": "mix", "path": ["a.txt", "a.txt"], "weights": [1, 2]}),
        (f"data.weights=[] {NO_FIT}", MIX),
        (f"data.weights=[1, 2, 3] {NO_FIT}", MIX | {"weights": [1, 2, 3]}),
        (f"data.weights=[1] {NO_FIT}", {"name": "text", "path": "a", "weights": [1]}),
        *(
            (f"data.weights=[3, {weight}] is out of range: each must be above 0", MIX | {"weights": [3, weight]})
            for weight in (0, -0.5, float("inf"), float("nan"))
        ),
        (f"data.validation_bytes=0 {RANGE} and at most 1000000000", {"validation_bytes": 0}),
        (f"data.validation_bytes=1000000001 {RANGE} and at most 1000000000", {"validation_bytes": 1_000_000_001}),
        *(
            (f"data.sha256={value!r} is not 64 hex digits: give what sha256sum FILE prints", URL | {"sha256": value})
            for value in ("", "0" * 63 + "g", "0" * 64 + "\n")
        ),
        (ONE_URL, {"name": "text", "path": "file", "sha256": "0" * 64}),
        (ONE_URL, {"name": "text", "path": ["http://a/b", "http://a/c"], "sha256": "0" * 64}),
    ],
    ids=lambda value: str(value)[:37],
)
def test_config_that_contradicts_itself(message, arguments):
    """What is wrong is named with its remedy."""
    assert refusal(DataConfig, **arguments) == message


# --- the hash ---


def test_hash_by_hand(tmp_path, fill):
    """Of the corpus and how it is read, then the suffixes and the hash of each file; these two are public.

    The separator and the encoding are part of it only if they are set. Synonyms of an encoding are equal.
    """
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    abc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    fill(tmp_path, a__txt="", b__jsonl__gz="abc")

    def hash_with(**settings: str) -> str:
        return open_quietly(f"{tmp_path}/*", text_field="body", errors="replace", **settings).sha256(tmp_path / "cache")

    expected = hashlib.sha256(f"text\nbody\nreplace\n.txt\n{empty}\n.jsonl.gz\n{abc}\n".encode()).hexdigest()
    assert hash_with() == hash_with(encoding="UTF8", separator=None) == expected
    assert hash_with(encoding="latin-1") == hash_with(encoding="ISO-8859-1")
    assert len({expected, hash_with(encoding="latin-1"), *(hash_with(separator=word) for word in "|a")}) == 4
    assert not (tmp_path / "cache").exists()


def test_hash_follows_the_reader(tmp_path, fill, monkeypatch):
    """The same bytes under another suffix are other documents, and so they are to a new or a changed reader."""
    lines = '{"text": "a"}\n'
    fill(tmp_path, a__txt=lines, a__jsonl=lines, a__xyz=lines)

    def hashes() -> list[str]:
        texts = [DataConfig("text", str(tmp_path / f"a.{suffix}")) for suffix in ("txt", "jsonl", "xyz")]
        return [open_corpus(text, NOWHERE, lambda line: None).sha256(tmp_path) for text in texts]

    before = hashes()
    lines_reader, version = readers.READERS[".jsonl"]
    monkeypatch.setitem(readers.READERS, ".xyz", (lines_reader, 1))
    monkeypatch.setitem(readers.READERS, ".jsonl", (lines_reader, version + 1))
    after = hashes()
    assert read(tmp_path / "a.xyz") == ["a"]
    assert after[0] == before[0]
    assert len({*before, *after}) == 5


@pytest.fixture
def clock(monkeypatch) -> SimpleNamespace:
    """Return a clock for `file_hashes`, `ahead` of the real one. Files of eleven bytes count as large."""
    clock = SimpleNamespace(ahead=0, time=lambda: time.time() + clock.ahead)
    monkeypatch.setattr(gpt.data.file_hashes, "time", clock)
    monkeypatch.setattr(gpt.data.file_hashes, "REMEMBERED_BYTES", 11)
    return clock


def remembered(file: Path, digest: str | None = None) -> dict:
    """Return what the memory stores for a file: its fingerprint and its hash, or another hash."""
    status = file.stat()
    stamp = [status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns]
    return {str(file): [stamp, digest or hashlib.sha256(file.read_bytes()).hexdigest()]}


@pytest.fixture
def large(tmp_path, fill) -> Path:
    """A file of eleven bytes, in a folder with a smaller one."""
    return fill(tmp_path / "text", a__txt="hello world", b__txt="small") / "a.txt"


def test_large_files_are_remembered(tmp_path, clock, large, fill):
    """The cache remembers them, beside those of other corpora, and then they are not read again."""
    cache = tmp_path / "made" / "for it"
    clock.ahead = 3
    open_quietly(large.parent).sha256(cache)
    assert read_checked_json(cache / "hashes.json") == remembered(large)
    assert {file.name for file in cache.iterdir()} == {"hashes.json", CACHE_TAG}
    other = fill(tmp_path / "other", c__txt="hello again") / "c.txt"
    true_hash = open_quietly(other).sha256(cache)
    assert read_checked_json(cache / "hashes.json") == remembered(large) | remembered(other)
    write_checked_json(cache / "hashes.json", remembered(other, "0" * 64))
    false_hash = hashlib.sha256(f"text\ntext\nstrict\n.txt\n{'0' * 64}\n".encode()).hexdigest()
    assert open_quietly(other).sha256(cache) == false_hash != true_hash


def test_a_file_that_changes_is_read_again(tmp_path, clock, large, fill):
    """A file just written is not remembered: it could change again within the same tick of the clock.

    Later a change is noticed by the time of the inode, even if size and modification time are restored.
    """
    first = open_quietly(large).sha256(tmp_path)
    clock.ahead = 1
    os.utime(large, ns=(7, 11))
    assert open_quietly(large).sha256(tmp_path) == first
    assert not (tmp_path / "hashes.json").exists()
    clock.ahead = 3
    assert open_quietly(large).sha256(tmp_path) == first
    before = large.stat()
    while large.stat().st_ctime_ns == before.st_ctime_ns:  # until the clock ticks
        large.write_text("HELLO WORLD")
        os.utime(large, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = large.stat()
    assert (after.st_size, after.st_ino, after.st_mtime_ns) == (11, before.st_ino, before.st_mtime_ns)
    assert open_quietly(large).sha256(tmp_path) != first
    assert read_checked_json(tmp_path / "hashes.json") == remembered(large)
    replacement = fill(tmp_path, new="hello world") / "new"
    replacement.replace(large)
    assert open_quietly(large).sha256(tmp_path) == first


@pytest.mark.parametrize("content", [b"\xff\xfe", b"7", b"{}", b'{"PATH": [STAMP, "0"]}'], ids=ascii)
def test_damaged_memory_is_made_again(tmp_path, clock, large, content):
    """Whatever it has become, the file is read again, and remembered again. The last content has no seal."""
    true_hash = open_quietly(large).sha256(tmp_path)
    clock.ahead = 3
    [(path, (stamp, _))] = remembered(large).items()
    content = content.replace(b"PATH", path.encode()).replace(b"STAMP", json.dumps(stamp).encode())
    (tmp_path / "hashes.json").write_bytes(content)
    assert open_quietly(large).sha256(tmp_path) == true_hash
    assert read_checked_json(tmp_path / "hashes.json") == remembered(large)


def test_memory_that_cannot_be_written(tmp_path, clock, large):
    """The hash is the same where the cache is a file or the memory a folder."""
    clock.ahead = 3
    (tmp_path / "file").touch()
    (tmp_path / "folder/hashes.json").mkdir(parents=True)
    assert open_quietly(large).sha256(tmp_path / "file") == open_quietly(large).sha256(tmp_path / "folder")


# --- pieces ---


def join_chunks(chunks: list[tuple[int, int | None, Chunk]]) -> list[tuple[int, str]]:
    """Return the documents that chunks make, each with the number of its file. Check their order and flags."""
    documents: list[tuple[int, str]] = []
    is_open = False
    for number, _, chunk in chunks:
        assert not documents or number >= documents[-1][0]
        assert chunk.starts_document != is_open
        text = chunk.text if chunk.starts_document else documents.pop()[1] + chunk.text
        documents.append((number, text))
        assert chunk.text
        is_open = not chunk.ends_document
    assert not is_open
    return documents


WORDS = st.text(st.sampled_from("ab é\n"), max_size=31)


@settings(deadline=None)
@given(st.lists(st.lists(st.lists(WORDS, max_size=3), max_size=5), max_size=4))
def test_pieces_are_the_documents(files):
    """Whatever the documents and their blocks, and from whichever file on."""

    def open_file(file: Path, start: int) -> Iterator[Document]:
        assert start == 0
        return (Document(iter(blocks)) for blocks in files[int(file.name)])

    paths = tuple(Path(str(number)) for number in range(len(files)))
    corpus = Corpus("examples", paths, open_file)
    documents = [(number, "".join(blocks)) for number, file in enumerate(files) for blocks in file]
    documents = [(number, text) for number, text in documents if text]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpt.data.corpus, "split_into_chunks", functools.partial(split_into_chunks, size=5))
        pieces = list(corpus.chunks())
        assert join_chunks(pieces) == documents
        assert all(len(piece.text) <= 20 for _, _, piece in pieces)
        for start in range(len(files) + 1):
            place = ShardStart(start, 0, True, 0)
            assert list(corpus.chunks(place)) == [piece for piece in pieces if piece[0] >= start]
            assert list(corpus.chunks(end=place)) == [piece for piece in pieces if piece[0] < start]


@settings(deadline=None)
@given(
    st.lists(st.text(st.sampled_from("ab é😀\r\n|"), min_size=1, max_size=53), min_size=1, max_size=3),
    st.sampled_from([None, "|", "\r\n", "a"]),
    st.booleans(),
    st.sampled_from([3, 7, 1 << 20]),
)
def test_pieces_from_any_place(folder, texts, separator, marked, block):
    """Read from any piece of plain text on, with or without separators: the very pieces that all of the text has."""
    for old in folder.iterdir():
        old.unlink()
    for i, text in enumerate(texts):
        (folder / f"{i}.txt").write_bytes(("\ufeff" * marked + text).encode())
    data = DataConfig("text", [str(folder / f"{i}.txt") for i in range(len(texts))], separator=separator)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpt.data.corpus, "split_into_chunks", functools.partial(split_into_chunks, size=5))
        patch.setattr(gpt.data.readers, "READ_BLOCK_BYTES", block)
        corpus = open_corpus(data, NOWHERE, lambda line: None)
        pieces = list(corpus.chunks())
        for i, (file, byte, piece) in enumerate(pieces):
            assert byte is not None
            assert list(corpus.chunks(ShardStart(file, byte, piece.starts_document, 0))) == pieces[i:]


def test_where_reading_cannot_begin(tmp_path, fill):
    """Within a compressed file, JSON lines, and text of another encoding or with replacements."""
    fill(tmp_path, a__txt="a b " * 9, b__jsonl='{"text": "a"}')
    (tmp_path / "c.txt.gz").write_bytes(gzip.compress(b"a b " * 9))
    for how, places in (({}, 1), ({"errors": "replace"}, 0), ({"encoding": "latin-1"}, 0)):
        corpus = open_corpus(DataConfig("text", str(tmp_path), **how), NOWHERE, lambda line: None)
        assert sum(byte is not None for _, byte, _ in corpus.chunks()) == places


def test_error_behind_a_place(tmp_path):
    """The error gives the byte within the file, from any start of reading."""
    (tmp_path / "a.txt").write_bytes(b"a" * 1000 + b"\xff")
    corpus = open_corpus(DataConfig("text", str(tmp_path / "a.txt")), NOWHERE)
    assert "(byte 0xff at offset 1000)" in refusal(lambda: list(corpus.chunks(ShardStart(0, 7, False, 7))))


# --- memory ---


PEAK = """if True:
    import sys
    from pathlib import Path
    import pyarrow.parquet  # what is imported later is not what reading takes
    from gpt.data.corpus import DataConfig, open_corpus

    def peak() -> int:
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) << 10

    corpus = open_corpus(DataConfig("text", sys.argv[1]), Path("cache"), lambda line: None)
    before = peak()
    characters = sum(len(piece.text) for _, _, piece in corpus.chunks())
    print(characters, peak() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs the peak of memory from /proc/self/status")
@pytest.mark.parametrize(
    ("name", "megabytes"),
    [
        ("a.txt", 16),
        ("a.jsonl", 16),
        *(
            pytest.param(f"a.{suffix}", 64, marks=pytest.mark.slow)
            for suffix in ("parquet", "txt.gz", "txt.zst", "json")
        ),
    ],
)
def test_memory_does_not_grow_with_the_file(tmp_path, name, megabytes):
    """A text is read in less memory than three quarters of its size, above what the process had before."""
    megabyte = "".join(f"line {i * i % 1009} of the text\n" for i in range(60_000))[: 1 << 20]
    documents = [megabyte[i : i + 4096] for i in range(0, len(megabyte), 4096)]
    file = tmp_path / name
    match name:
        case "a.parquet":
            how = {"compression": "none", "use_dictionary": False}
            with pq.ParquetWriter(file, pa.schema({"text": pa.string()}), **how) as writer:
                writer.write_table(pa.table({"text": documents * megabytes}))
            assert file.stat().st_size > megabytes << 20
            assert pq.ParquetFile(file).num_row_groups == 1
        case "a.jsonl":
            file.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents) * megabytes)
        case "a.json":
            file.write_text("[" + f"{megabyte!r}, " * megabytes)
        case "a.txt.gz":
            file.write_bytes(gzip.compress(megabyte.encode(), 1) * megabytes)
        case "a.txt.zst":
            file.write_bytes(compression.zstd.compress(megabyte.encode() * megabytes))  # a frame of a few kilobytes
        case _:
            file.write_bytes(megabyte.encode() * megabytes)
    command = [sys.executable, "-c", PEAK, str(file)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    characters, growth = map(int, ended.stdout.split())
    assert characters >= megabytes << 20
    assert growth < 0.75 * (megabytes << 20)
