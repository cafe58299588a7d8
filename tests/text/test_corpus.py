"""Corpora: which files are read and in which order, their pieces, their hash, and one line for each mistake."""

import dataclasses
import errno
import functools
import glob
import gzip
import hashlib
import io
import json
import os
import random
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

import gpt.text.corpus
import gpt.text.hashes
from gpt.errors import UserError
from gpt.text.cache import read_json
from gpt.text.corpus import Corpus, DataConfig, Piece, find_text_files, open_corpus
from gpt.text.pieces import cut

ROOT = Path(__file__).parents[2]
TEXT = "Naïve text: 10 € for a café, 中文 and 😀.\r\n\tIts lines\nstay as they are. \n"
NOWHERE = Path("no cache is needed")


def open_quietly(path: object, **more) -> Corpus:
    """The corpus of the text at a path; whatever is said of it fails the test."""
    return open_corpus(DataConfig("text", path if isinstance(path, list) else str(path), **more), NOWHERE, pytest.fail)


def read(path: object, **more) -> list[str]:
    """The documents of the text at a path."""
    return list(open_quietly(path, **more).documents())


def refusal(path: object, **more) -> str:
    """The one line that refuses the text at a path."""
    with pytest.raises(UserError) as caught:
        read(path, **more)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def fill(folder: Path, **files: str | bytes) -> Path:
    """A folder with the files given, `__` in a name for a dot and `_in_` for a folder."""
    for name, content in files.items():
        file = folder / name.replace("_in_", "/").replace("__", ".")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


# --- which files ---


def test_a_file_is_one_document(tmp_path):
    """Exactly as it is: its ends of lines, its blanks, its characters of every width."""
    assert read(fill(tmp_path, a__txt=TEXT) / "a.txt") == [TEXT]


def test_a_folder_is_read_in_sorted_order(tmp_path):
    """Also below other folders, whatever the suffix; hidden files and hidden folders are passed over in silence."""
    fill(tmp_path, b__txt="b", a__md="a", c="c", d_in_a__txt="da", d_in_e_in_a__py="dea", B__txt="B")
    fill(tmp_path, __hidden="no", __git_in_config="no", d_in___x_in_y__txt="no")
    assert read(tmp_path) == ["B", "a", "b", "c", "da", "dea"]
    assert find_text_files(str(tmp_path), NOWHERE, pytest.fail) == tuple(
        tmp_path / name for name in ("B.txt", "a.md", "b.txt", "c", "d/a.txt", "d/e/a.py")
    )


def test_what_a_folder_passes_over_is_said(tmp_path):
    """In one line, with the names of the first three: what is empty, and what is not text by its beginning."""
    fill(tmp_path, a__txt="a", b__txt="", c_in_d__pdf=b"%PDF-1.7\n", __hidden="")
    said: list[str] = []
    corpus = open_corpus(DataConfig("text", str(tmp_path)), NOWHERE, said.append)
    assert list(corpus.documents()) == ["a"]
    assert said == [f"skipping 2 of 3 files below {tmp_path}, empty or not text: b.txt, c/d.pdf"]
    fill(tmp_path, d__bin=b"\0")
    find_text_files(str(tmp_path), NOWHERE, said.append)
    assert said[1:] == [f"skipping 3 of 4 files below {tmp_path}, empty or not text: b.txt, c/d.pdf, d.bin"]
    fill(tmp_path, e__png=b"\x89PNG\r\n", f__jpg=b"\xff\xd8\xff\xe0", g__docx=b"PK\x03\x04", h__gif=b"GIF89a")
    fill(tmp_path, i__npy=b"\x93NUMPY\1\0", j__txt__gz=gzip.compress(b""), k__txt__gz=gzip.compress(b"k"))
    said.clear()
    assert find_text_files(str(tmp_path), NOWHERE, said.append) == (tmp_path / "a.txt", tmp_path / "k.txt.gz")
    assert said == [f"skipping 9 of 11 files below {tmp_path}, empty or not text: b.txt, c/d.pdf, d.bin, ..."]


def test_a_folder_of_every_format(tmp_path):
    """Each file as its name says, in one order; tables that are no format of ours are named, as they are raw text."""
    fill(tmp_path, a__txt="one", b__jsonl='{"text": "two"}\n{"text": "three"}', d__json="[4]")
    pq.write_table(pa.table({"text": ["five", None, "six"]}), tmp_path / "c.parquet")
    (tmp_path / "e.ndjson.gz").write_bytes(gzip.compress(b'{"text": "seven"}'))
    said: list[str] = []
    data = DataConfig("text", str(tmp_path))
    documents = ["one", "two", "three", "five", "six", "[4]", "seven"]
    assert list(open_corpus(data, NOWHERE, said.append).documents()) == documents
    fill(tmp_path, g__csv="eight,nine")
    assert list(open_corpus(data, NOWHERE, said.append).documents()) == [*documents, "eight,nine"]
    remedy = "commas and quotes included: convert to .jsonl or .parquet and set data.text_field=COLUMN"
    assert said == [f"d.json {what}, taken as raw text, {remedy}" for what in ("is a table", "and 1 more are tables")]


def test_a_folder_with_the_name_of_a_file(tmp_path):
    """As Spark writes its tables: what is inside is read, and its mark of success is empty."""
    (tmp_path / "a.parquet").mkdir()
    for part in (0, 1):
        pq.write_table(pa.table({"text": [f"part {part}"]}), tmp_path / "a.parquet" / f"part-{part}.parquet")
    assert read(tmp_path) == read(tmp_path / "a.parquet") == ["part 0", "part 1"]
    fill(tmp_path / "x.txt", a__txt="a", __a__txt__crc=b"\0")
    assert read(tmp_path / "x.txt") == ["a"]
    fill(tmp_path / "a.parquet", _SUCCESS="")
    said: list[str] = []
    assert len(find_text_files(str(tmp_path / "a.parquet"), NOWHERE, said.append)) == 2
    assert said == [f"skipping 1 of 3 files below {tmp_path / 'a.parquet'}, empty or not text: _SUCCESS"]


def test_a_thousand_files_and_a_bad_one(tmp_path):
    """All of them in order; and the one that is not UTF-8 is named."""
    for i in range(1000):
        (tmp_path / f"{i:03}.txt").write_text(f"document {i}")
    assert read(tmp_path) == [f"document {i}" for i in range(1000)]
    bad = fill(tmp_path, **{"617__txt": b"caf\xe9"}) / "617.txt"
    remedy = "convert it first, for example with iconv -t utf-8, or set data.errors=replace"
    assert refusal(tmp_path) == f"{bad}: not UTF-8 (byte 0xe9 at offset 3); {remedy}"
    assert read(tmp_path, errors="replace")[616:619] == ["document 616", "caf\ufffd", "document 618"]


def test_a_hidden_folder_may_be_named(tmp_path):
    """Only what is hidden inside the folder is passed over, not the way to it."""
    assert read(fill(tmp_path / ".books", a__txt="a")) == ["a"]
    assert read(fill(tmp_path / ".books", a__txt="a") / "a.txt") == ["a"]


def test_a_glob_is_read_in_sorted_order(tmp_path):
    """What it matches, folders aside; `**` goes down."""
    fill(tmp_path, b__txt="b", a__txt="a", c__md="c", d__txt_in_e__txt="e")
    assert read(f"{tmp_path}/*.txt") == ["a", "b"]
    assert read(f"{tmp_path}/[bc].*") == ["b", "c"]
    assert read(f"{tmp_path}/**/*.txt") == ["a", "b", "e"]


def test_a_file_with_the_signs_of_a_glob(tmp_path):
    """A path that exists is that path."""
    fill(tmp_path, a="no")
    (tmp_path / "[a].txt").write_text("yes")
    assert read(tmp_path / "[a].txt") == ["yes"]


def test_a_file_whose_name_is_not_utf8(tmp_path):
    """As old archives have them: it is read and hashed like any other."""
    file = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.t\xe9xt"))
    file.write_text("a")
    assert read(tmp_path) == read(file) == ["a"]
    assert len(open_quietly(file).sha256(tmp_path / "cache")) == 64


def test_home(tmp_path, monkeypatch):
    """A path may begin with ~."""
    monkeypatch.setenv("HOME", str(fill(tmp_path, a__txt="a")))
    assert read("~/a.txt") == ["a"]


def test_several_paths(tmp_path):
    """In the order in which they are named, and what is named twice is read once, where it came first."""
    fill(tmp_path, a__txt="a", b__txt="b", c_in_a__txt="ca", c_in_b__txt="cb")
    a, b, c = (str(tmp_path / name) for name in ("a.txt", "b.txt", "c"))
    assert read([b, a]) == ["b", "a"]
    assert read([c, b, f"{tmp_path}/*.txt", f"{c}/b.txt", b]) == ["ca", "cb", "b", "a"]
    assert read([f"{c}/../a.txt"]) == ["a"]
    missing = f"{tmp_path}/missing"
    assert refusal([a, missing]).startswith(f"data.path={missing!r} is not a file, a folder or a glob")


def test_text_field_and_errors(tmp_path):
    """What is configured reaches the reader."""
    fill(tmp_path, a__jsonl=b'{"body": "caf\xe9", "text": "no"}')
    assert read(tmp_path, text_field="body", errors="replace") == ["caf\ufffd"]
    assert refusal(tmp_path, text_field="title", errors="replace") == (
        f"{tmp_path / 'a.jsonl'}: line 1 has no text under 'title'; name the key with data.text_field="
    )


# --- what this program wrote is never corpus ---


def write_run(folder: Path, mark: str = ".lock") -> Path:
    """What a run leaves behind that looks like text, and a mark."""
    fill(folder, config__yaml="seed: 1", samples__md="once upon", metrics__json="{}", notes_in_a__txt="mine")
    (folder / mark).parent.mkdir(exist_ok=True)
    (folder / mark).write_bytes(b"PK\3\4")
    return folder


def write_cache(folder: Path) -> Path:
    """What a cache may hold that looks like text."""
    prepared = {f"text-byte-0123_in_{name}": "{}" for name in ("manifest__json", "tokenizer__json")}
    fill(folder, hashes__json="{}", **{"tokenizer-0123456789abcdef__json": "{}"}, downloads_in_a__txt="far", **prepared)
    (folder / "text-byte-0123/train-00000.bin").write_bytes(b"\1\2")
    return fill(folder, **{"__preparing-text_in_plan__json": "{}"})


EVERY_WAY = pytest.mark.parametrize("way", ["", "/", "/**", "/**/*", "/*/../**/*.*"])


@EVERY_WAY
@pytest.mark.parametrize("mark", [".lock", "checkpoints/last.ckpt", "checkpoints/best.ckpt"])
def test_runs_are_not_corpus(tmp_path, monkeypatch, way, mark):
    """Wherever they lie and whatever they are called, in folders and globs; one line says so."""
    monkeypatch.chdir(fill(tmp_path, a__txt="a", z_in_config__yaml="z: 1"))
    write_run(tmp_path / "runs/2026-11-22_run", mark)
    write_run(tmp_path / "z/moved", mark)
    fill(tmp_path, multirun_in_1_in_0_in_job__log="job", multirun_in_1_in_multirun__yaml="hydra: 1")
    for place in (".", str(tmp_path)):
        said: list[str] = []
        found = find_text_files(place + way, NOWHERE, said.append)
        assert sorted(file.read_text() for file in found) == ["a", "z: 1"]
        [line] = [line for line in said if "not text" not in line]
        assert re.match(r"skipping \d+ of \d+ files below .*, of runs or the cache: (z/../)?multirun/", line), line


def test_a_run_that_is_named(tmp_path):
    """A single file or an inner folder of a run is read if it is named; the run as a whole is refused."""
    run = write_run(tmp_path / "run")
    assert read(run / "samples.md") == ["once upon"]
    assert read(run / "notes") == ["mine"]
    said: list[str] = []
    for path, what in [(f"{run}", "a folder without text files"), (f"{run}/*.md", "a glob that matches only files of")]:
        with pytest.raises(UserError, match=f"is {what}"):
            find_text_files(path, NOWHERE, said.append)
    assert said == [
        f"skipping 4 of 4 files below {run}, of runs or the cache: config.yaml, metrics.json, notes/a.txt, ...",
        f"skipping 1 of 1 files below {run}, of runs or the cache: samples.md",
    ]


@EVERY_WAY
def test_the_cache_is_not_corpus(tmp_path, way):
    """Neither the one in use nor an earlier one, even in the corpus folder itself; what is beside it is read."""
    fill(tmp_path, a__txt="a", b_in_hashes__json="mine", c_in_downloads_in_c__txt="mine too")
    write_cache(tmp_path / "data/cache")
    write_cache(tmp_path)
    for cache in (NOWHERE, tmp_path / "data/cache", tmp_path):
        said: list[str] = []
        found = find_text_files(f"{tmp_path}{way}", cache, said.append)
        assert sorted(file.read_text() for file in found) == ["a", "mine", "mine too"]
        assert re.search(", of runs or the cache: (b/../)?data/cache/downloads/a.txt, ", said[0])


def test_a_cache_before_anything_is_prepared(tmp_path):
    """Only that it is the one in use tells what its files are."""
    fill(tmp_path, a__txt="a", cache_in_hashes__json="{}", cache_in_downloads_in_a__txt="far")
    assert len(find_text_files(str(tmp_path), tmp_path / "cache", [].append)) == 1
    assert len(find_text_files(str(tmp_path), NOWHERE, pytest.fail)) == 3


def test_a_link_to_a_download(tmp_path):
    """It is a name of the user's for the file, although the cache's own name comes first."""
    write_cache(tmp_path / "cache")
    (tmp_path / "link.txt").symlink_to("cache/downloads/a.txt")
    assert find_text_files(str(tmp_path), tmp_path / "cache", [].append) == (tmp_path / "link.txt",)


# --- links ---


@pytest.mark.parametrize("way", ["", "/**", "/**/*", "/**/*.txt", "/*/**/*.txt", "/**/**/*.txt"])
def test_links_in_a_circle(tmp_path, way):
    """Each file once: 2 to the 40th ways lead to these."""
    fill(tmp_path, a__txt="a", d_in_b__txt="b")
    for name in ("loop", "other", "d/up", "d/again", "self"):
        (tmp_path / name).symlink_to(name if name == "self" else tmp_path)
    start = time.monotonic()
    assert sorted(read(f"{tmp_path}{way}")) == ["a", "b"]
    assert time.monotonic() - start < 2


def test_a_file_of_several_names(tmp_path):
    """Hard links, symbolic links and links to folders: in a folder, a glob, and over the paths of a list."""
    fill(tmp_path, b__txt="b", far_in_c__txt="c")
    os.link(tmp_path / "b.txt", tmp_path / "a.txt")
    (tmp_path / "z.txt").symlink_to("far/c.txt")
    (tmp_path / "near").symlink_to("far")
    assert find_text_files(str(tmp_path), NOWHERE, pytest.fail) == (tmp_path / "a.txt", tmp_path / "far/c.txt")
    assert read(f"{tmp_path}/**/*.txt") == read(f"{tmp_path}/*") == ["b", "c"]
    assert read([f"{tmp_path}/z.txt", f"{tmp_path}/b.txt", str(tmp_path), f"{tmp_path}/near/*"]) == ["c", "b"]


def test_files_without_numbers(tmp_path, monkeypatch):
    """Some network drives of Windows give every file the number 0: each still counts, and links once."""
    fill(tmp_path, a__txt="a", d_in_b__txt="b", e_in_c__txt="c")
    (tmp_path / "z.txt").symlink_to("a.txt")
    stat = Path.stat

    def without_number(self, **options) -> os.stat_result:
        fields = list(stat(self, **options))
        fields[1] = 0
        return os.stat_result(fields)

    monkeypatch.setattr(Path, "stat", without_number)
    assert read(str(tmp_path)) == read(f"{tmp_path}/**/*.txt") == ["a", "b", "c"]


def test_globs_follow_links_to_folders(tmp_path):
    """As ever, and folders do not; a hidden folder behind a link that is not hidden counts."""
    fill(tmp_path / "far", a__txt="a", __h_in_b__txt="b")
    fill(tmp_path / "here", c__txt="c")
    (tmp_path / "here/link").symlink_to("../far")
    (tmp_path / "here/seen").symlink_to("../far/.h")
    assert read(f"{tmp_path}/here/**/*.txt") == ["c", "a", "b"]
    assert read(tmp_path / "here") == ["c"]


@pytest.mark.parametrize("seed", range(7))
def test_globs_are_those_of_python(tmp_path, monkeypatch, seed):
    """Without links, a glob gives what `glob.glob` gives, in that order, for every kind of pattern."""
    monkeypatch.chdir(tmp_path)
    chooser = random.Random(seed)
    for _ in range(31):
        file = Path(*chooser.choices(["a", "b", ".h", "a b", "[c]", "**"], k=chooser.randint(0, 4)), "x.txt")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("x")
    parts = ["*", "a", "?", "[ab]", ".h", "[.]*", "[[]c]", "a*", "***"]
    for _ in range(67):
        inner = ["**", *chooser.choices(parts, k=chooser.randint(0, 2))]
        pattern = os.path.join(*chooser.sample(inner, len(inner)), chooser.choice(["*.txt", "**", "x*"]))
        pattern = chooser.choice(["", "./", f"{tmp_path}/"]) + pattern
        if os.path.exists(pattern):
            continue  # a path that exists is that path
        expected = [name for name in glob.glob(str(Path(pattern)), recursive=True) if os.path.isfile(name)]
        expected = sorted({os.path.realpath(name) for name in expected})
        try:
            found = find_text_files(pattern, NOWHERE, pytest.fail)
        except UserError:
            found = ()
        assert sorted(os.path.realpath(file) for file in found) == expected, pattern


# --- mistakes ---


def test_devices_and_pipes(tmp_path):
    """They are refused in a line where they are named, and passed over in a folder; nothing waits for them."""
    os.mkfifo(tmp_path / "pipe.txt")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket.txt"))
        for path in (tmp_path / "pipe.txt", tmp_path / "socket.txt", Path("/dev/zero")):
            what = "is a device, a pipe or a socket, not a file: give the path of your text"
            assert refusal(path) == f"data.path={str(path)!r} {what}"
        fill(tmp_path, a__txt="a")
        assert read(tmp_path) == read(f"{tmp_path}/*") == ["a"]


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="this system has no /proc")
@pytest.mark.parametrize("kernels", ["/proc/kmsg", "/proc/self/mem", "/proc/cpuinfo", "/sys/kernel/uevent_seqnum"])
def test_files_of_the_kernel(tmp_path, kernels):
    """Some wait for ever, or never end: they are refused, by whatever name."""
    (tmp_path / "link.txt").symlink_to(kernels)
    for path in (kernels, tmp_path / "link.txt", tmp_path, f"{tmp_path}/*"):
        assert "is made up by the kernel as it is read, and may never end" in refusal(path)


@pytest.mark.parametrize("way", ["", "/**/*.txt"])
def test_folder_that_cannot_be_listed(tmp_path, monkeypatch, way):
    """Its files are not left out without a word."""
    fill(tmp_path, a__txt="a", bad_in_b__txt="b")
    scandir = os.scandir

    def failing(path):
        if str(path).endswith("bad"):
            raise OSError(errno.ESTALE, "Stale file handle", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", failing)
    reason = "cannot be read (Stale file handle); fix that, or move the folder away"
    assert refusal(f"{tmp_path}{way}") == f"{tmp_path / 'bad'}: {reason}"


def test_no_home(monkeypatch):
    """Without HOME a path below it is found as the system has it, or refused in a line."""
    monkeypatch.delenv("HOME")
    assert "is not a file" in refusal("~/no/such/file.txt")
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    assert "Could not determine home directory" in refusal("~/a.txt")


def test_language_c(tmp_path):
    """Names, texts and messages do not depend on the language of the system."""
    fill(tmp_path, **{"café__txt": TEXT, "中文__jsonl": '{"text": "一"}'})
    code = (
        "import sys; from pathlib import Path; from gpt.errors import command_line; from gpt.text.corpus import *\n"
        "with command_line('x'):\n"
        "    corpus = open_corpus(DataConfig('text', sys.argv[1]), Path(sys.argv[2]))\n"
        "    print(corpus.sha256(Path(sys.argv[2])), ascii(list(corpus.documents())))\n"
        "    find_text_files(sys.argv[1] + '/\\xe9', Path())"
    )
    for more in ({}, {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}):
        done = subprocess.run(
            [sys.executable, "-c", code, tmp_path, tmp_path / "cache"],
            env={"PATH": os.environ["PATH"], "LC_ALL": "C", "PYTHONPATH": str(ROOT), **more},
            capture_output=True,
        )
        expected = f"{open_quietly(tmp_path).sha256(tmp_path / 'cache')} {[TEXT, '一']!a}"
        assert done.stdout.decode("ascii").splitlines() == [expected]
        assert done.returncode == 2
        assert done.stderr.count(b"\n") == 1 and done.stderr.startswith(b"x: data.path=")


def test_a_file_from_the_future(tmp_path, clock, large):
    """Where the clock was put back, it is read each time rather than taken for unchanged."""
    os.utime(large, (time.time() + 10**6,) * 2)
    clock.ahead = 3
    true = open_quietly(large).sha256(tmp_path)
    assert not (tmp_path / "hashes.json").exists()
    clock.ahead = -(10**6)
    assert open_quietly(large).sha256(tmp_path) == true
    assert not (tmp_path / "hashes.json").exists()


def test_nothing_at_the_path(tmp_path):
    """Neither file, folder nor glob."""
    what = "is not a file, a folder or a glob that matches any file: give the path of your text"
    for path in (f"{tmp_path}/missing.txt", f"{tmp_path}/*.txt", f"{tmp_path}/a\0b"):
        assert refusal(path) == f"data.path={path!r} {what}"


def test_folder_without_text(tmp_path):
    """Empty, or all in it is hidden or no text, which is said as well."""
    remedy = "is a folder without text files: give the path of your text"
    empty = tmp_path / "empty"
    empty.mkdir()
    hidden = fill(tmp_path / "hidden", __a__txt="no", __b_in_a__txt="no")
    for folder in (empty, hidden):
        assert refusal(folder) == f"data.path={str(folder)!r} {remedy}"
    folder = fill(tmp_path / "folder", image__png=b"\0", b__txt="")
    said: list[str] = []
    with pytest.raises(UserError, match=re.escape(f"data.path={str(folder)!r} {remedy}")):
        find_text_files(str(folder), NOWHERE, said.append)
    assert said == [f"skipping 2 of 2 files below {folder}, empty or not text: b.txt, image.png"]


@pytest.mark.parametrize("path", ["a" * 300, "~nobody-of-this-name/a.txt"], ids=["long", "no such home"])
def test_impossible_path(path):
    """A path that the system itself refuses is as missing as any other."""
    assert path in refusal(path)


def test_url_without_a_hash():
    """What is fetched is checked, so its hash has to be known."""
    assert refusal("https://example.com/a.txt") == (
        "data.path='https://example.com/a.txt' needs the hash of its file: data.sha256="
    )


BY_NAME_AND_IN_A_FOLDER = pytest.mark.parametrize(
    "named", [pytest.param(True, id="by name"), pytest.param(False, id="in a folder")]
)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file: run the tests as another user as well")
@BY_NAME_AND_IN_A_FOLDER
def test_file_without_permission(tmp_path, named):
    """A file that may not be read is not passed over."""
    file = fill(tmp_path, a__txt="a", b__txt="b") / "b.txt"
    file.chmod(0)
    reason = "cannot be read (Permission denied); fix that, or move the file away"
    assert refusal(file if named else tmp_path) == f"{file}: {reason}"


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE], ids=["broken disk", "stale handle"])
@BY_NAME_AND_IN_A_FOLDER
def test_file_that_fails(tmp_path, named, number, monkeypatch):
    """A file that can be opened but not read is named, and not passed over."""
    file = fill(tmp_path, a__txt="a", b__txt="b") / "b.txt"

    class Failing(io.FileIO):
        def readinto(self, buffer):
            raise OSError(number, os.strerror(number))

    opened = Path.open

    def open_failing(path: Path, *how, **more):
        return io.BufferedReader(Failing(path)) if path == file else opened(path, *how, **more)

    monkeypatch.setattr(Path, "open", open_failing)
    reason = f"cannot be read ({os.strerror(number)}); fix that, or move the file away"
    assert refusal(file if named else tmp_path) == f"{file}: {reason}"
    with pytest.raises(UserError, match=re.escape(f"{file}: {reason}")):
        open_quietly(tmp_path).sha256(tmp_path / "cache")


def test_file_that_goes_away(tmp_path):
    """A file that vanishes after it was found."""
    file = fill(tmp_path, a__txt="a", b__txt="b") / "b.txt"
    corpus = open_quietly(tmp_path)
    file.unlink()
    for attempt in (
        corpus.stamp,
        lambda: corpus.sha256(tmp_path),
        lambda: list(corpus.documents()),
        lambda: list(corpus.pieces()),
    ):
        with pytest.raises(UserError) as caught:
            attempt()
        reason = "cannot be read (No such file or directory); fix that, or move the file away"
        assert str(caught.value) == f"{file}: {reason}"


# --- the configuration ---


def test_config_that_is_valid():
    """The default, and the least of each."""
    assert dataclasses.asdict(DataConfig())["name"] == "python_docs"
    assert DataConfig("text", "a", validation_bytes=1).paths == ["a"]
    assert DataConfig("text", ["a", None, 1984, ""], validation_bytes=1_000_000_000).paths == ["a", "1984"]
    assert DataConfig("text", 0).paths == ["0"]
    assert DataConfig().paths == []
    assert DataConfig("tinyshakespeare", errors="replace").paths == []
    assert DataConfig("huggingface", "a/b", max_bytes=1).paths == ["a/b"]
    assert DataConfig("mix", ["a.txt", "python_docs"], [0.001, 3]).paths == ["a.txt", "python_docs"]


NEEDS_A_FILE = "data=text needs data.path=FILE: a file, a folder or a quoted glob such as 'books/*.txt'"
NEEDS_A_NAME = "data=huggingface needs data.path=NAME: a data set such as roneneldan/TinyStories"
NEEDS_A_MIX = "data=mix needs at least two different corpora, such as data.path='[python_docs, FILE]'"
ONLY_WITH_TEXT = "works only with data=text: add that, or leave the path out"
NO_FIT = "does not fit: only data=mix takes weights, one for each data.path"
RANGE = "is out of range: it must be at least 1"


@pytest.mark.parametrize(
    ("message", "arguments"),
    [
        (
            "data.name='bible' is not known: choose from "
            "python_docs, python_stdlib, tinyshakespeare, text, huggingface, mix",
            {"name": "bible"},
        ),
        ("data.errors='ignore' is not known: choose from strict, replace", {"errors": "ignore"}),
        ("data.path={'a': 7} is not a path, nor a list of paths", {"name": "text", "path": {"a": 7}}),
        ("data.path=[['a']] is not a path, nor a list of paths", {"name": "text", "path": [["a"]]}),
        (NEEDS_A_FILE, {"name": "text"}),
        (NEEDS_A_FILE, {"name": "text", "path": ""}),
        (NEEDS_A_FILE, {"name": "text", "path": []}),
        (NEEDS_A_FILE, {"name": "text", "path": [""]}),
        (NEEDS_A_NAME, {"name": "huggingface"}),
        (NEEDS_A_NAME, {"name": "huggingface", "path": ["a", "b"]}),
        (f"data.path='a.txt' {ONLY_WITH_TEXT}", {"path": "a.txt"}),
        (f"data.path=['a', 'b'] {ONLY_WITH_TEXT}", {"name": "tinyshakespeare", "path": ["a", "b"]}),
        (NEEDS_A_MIX, {"name": "mix"}),
        (NEEDS_A_MIX, {"name": "mix", "path": "a.txt", "weights": [1]}),
        (NEEDS_A_MIX, {"name": "mix", "path": ["a.txt", "a.txt"], "weights": [1, 2]}),
        (f"data.weights=[] {NO_FIT}", {"name": "mix", "path": ["a", "b"]}),
        (f"data.weights=[1, 2, 3] {NO_FIT}", {"name": "mix", "path": ["a", "b"], "weights": [1, 2, 3]}),
        (f"data.weights=[1] {NO_FIT}", {"name": "text", "path": "a", "weights": [1]}),
        *(
            (
                f"data.weights=[3, {weight}] is out of range: each must be above 0",
                {"name": "mix", "path": ["a", "b"], "weights": [3, weight]},
            )
            for weight in (0, -0.5, float("inf"), float("nan"))
        ),
        (f"data.validation_bytes=0 {RANGE} and at most 1000000000", {"validation_bytes": 0}),
        (f"data.validation_bytes=1000000001 {RANGE} and at most 1000000000", {"validation_bytes": 1_000_000_001}),
        (f"data.max_bytes=0 {RANGE}", {"name": "huggingface", "path": "a", "max_bytes": 0}),
    ],
    ids=lambda value: str(value)[:37],
)
def test_config_that_contradicts_itself(message, arguments):
    """What is wrong is named with its remedy."""
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        DataConfig(**arguments)


# --- the hash ---


def test_hash_by_hand(tmp_path):
    """Of the corpus and how it is read, then the suffixes and the hash of each file; the empty one is public."""
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    fill(tmp_path, a__txt="", b__jsonl__gz="")
    expected = hashlib.sha256(f"text\nbody\nreplace\n.txt\n{empty}\n.jsonl.gz\n{empty}\n".encode()).hexdigest()
    corpus = open_quietly(f"{tmp_path}/*", text_field="body", errors="replace")
    assert corpus.sha256(tmp_path / "cache") == expected
    assert not (tmp_path / "cache").exists()


def test_hash_follows_the_documents(tmp_path):
    """Another text, order, key or way to decode is another hash; the same text elsewhere is the same."""

    def hashed(name: str, files: dict[str, str], **more: str) -> str:
        return open_quietly(fill(tmp_path / name, **files), **more).sha256(tmp_path / "cache")

    two = {"a__txt": "a", "b__txt": "b"}
    first = hashed("1", two)
    assert first == hashed("1", two) == hashed("2", two) == hashed("3", {"c__txt": "a", "d__txt": "b"})
    others = [
        hashed("4", {"a__txt": "b", "b__txt": "a"}),
        hashed("5", {"a__txt": "a", "b__txt": "c"}),
        hashed("6", {"a__txt": "ab"}),
        hashed("7", {**two, "c__txt": "c"}),
        hashed("8", {"a__txt": "a"}),
        hashed("9", {"a__txt": "a", "b__jsonl": "b"}),
        hashed("1", two, text_field="body"),
        hashed("1", two, errors="replace"),
    ]
    assert len({first, *others}) == 9
    turned = [str(tmp_path / "1" / name) for name in ("b.txt", "a.txt")]
    assert open_quietly(turned).sha256(tmp_path / "cache") == others[0]


def test_hash_follows_the_suffix(tmp_path):
    """The same bytes are other documents under a name that is read in another way."""
    lines = '{"text": "a"}\n'
    fill(tmp_path, a__txt=lines, a__jsonl=lines)
    assert read(tmp_path / "a.txt") == [lines]
    assert read(tmp_path / "a.jsonl") == ["a"]
    assert len({open_quietly(tmp_path / name).sha256(tmp_path) for name in ("a.txt", "a.jsonl")}) == 2


def test_stamp_follows_every_file(tmp_path):
    """Size and time, in the order of the files: what tells that one has changed while it was read."""
    fill(tmp_path, a__txt="one", b__txt="seven")
    os.utime(tmp_path / "a.txt", ns=(7, 11))
    os.utime(tmp_path / "b.txt", ns=(7, 13))
    assert open_quietly(tmp_path).stamp() == [(3, 11), (5, 13)]


class Clock:
    """The time as the hash memory sees it, seconds ahead of the real one."""

    ahead = 0

    def time(self) -> float:
        """Seconds since the epoch."""
        return time.time() + self.ahead


@pytest.fixture
def clock(monkeypatch) -> Clock:
    """One that can be put ahead, over files of which eleven bytes are much."""
    clock = Clock()
    monkeypatch.setattr(gpt.text.hashes, "time", clock)
    monkeypatch.setattr(gpt.text.hashes, "REMEMBERED", 11)
    return clock


def remembered(file: Path, digest: str | None = None) -> dict:
    """What is to be kept of a file: its size, inode and times, with its hash or another one."""
    status = file.stat()
    stamp = [status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns]
    return {str(file): [stamp, digest or hashlib.sha256(file.read_bytes()).hexdigest()]}


@pytest.fixture
def large(tmp_path) -> Path:
    """A file of eleven bytes, in a folder with a smaller one."""
    return fill(tmp_path / "text", a__txt="hello world", b__txt="small") / "a.txt"


def test_large_files_are_remembered(tmp_path, clock, large):
    """Once it has stood still for some seconds; another corpus with the file knows it, and adds its own."""
    cache = tmp_path / "made" / "for it"
    clock.ahead = 3
    first = open_quietly(large.parent).sha256(cache)
    assert read_json(cache / "hashes.json") == remembered(large)
    assert [file.name for file in cache.iterdir()] == ["hashes.json"]
    other = fill(tmp_path / "other", c__txt="hello again") / "c.txt"
    open_quietly(other).sha256(cache)
    assert read_json(cache / "hashes.json") == remembered(large) | remembered(other)
    assert open_quietly(large.parent).sha256(cache) == first


def test_a_remembered_file_is_not_read(tmp_path, clock, large):
    """Another hash under its stamp is taken for its own, which without the memory it is not."""
    true = open_quietly(large).sha256(tmp_path)
    (tmp_path / "hashes.json").write_text(json.dumps(remembered(large, "0" * 64)))
    expected = hashlib.sha256(f"text\ntext\nstrict\n.txt\n{'0' * 64}\n".encode()).hexdigest()
    assert open_quietly(large).sha256(tmp_path) == expected != true
    clock.ahead = 3
    assert open_quietly(large).sha256(tmp_path) == expected
    (tmp_path / "hashes.json").unlink()
    assert open_quietly(large).sha256(tmp_path) == true


def test_a_small_file_is_read_each_time(tmp_path, clock):
    """Also where its hash is in the memory."""
    clock.ahead = 3
    small = fill(tmp_path, a__txt="0123456789") / "a.txt"
    true = open_quietly(small).sha256(tmp_path)
    assert not (tmp_path / "hashes.json").exists()
    (tmp_path / "hashes.json").write_text(json.dumps(remembered(small, "0" * 64)))
    assert open_quietly(small).sha256(tmp_path) == true


def test_a_file_just_written_is_not_remembered(tmp_path, clock, large):
    """It could change once more within the same tick of the clock, also where it was given the time of long ago."""
    first = open_quietly(large).sha256(tmp_path)
    assert not (tmp_path / "hashes.json").exists()
    clock.ahead = 1
    os.utime(large, ns=(7, 11))
    assert open_quietly(large).sha256(tmp_path) == first
    assert not (tmp_path / "hashes.json").exists()


def test_a_file_that_takes_long_to_read_is_not_settled_by_that(tmp_path, clock, large, monkeypatch):
    """What counts is how long it had stood still when it was opened."""
    file_digest = hashlib.file_digest

    def slow(*arguments):
        clock.ahead += 60
        return file_digest(*arguments)

    monkeypatch.setattr(hashlib, "file_digest", slow)
    open_quietly(large).sha256(tmp_path)
    assert clock.ahead == 60
    assert not (tmp_path / "hashes.json").exists()


def test_a_changed_file_is_read_again(tmp_path, clock, large):
    """Of the same size and with its time put back: the time of change of the file itself cannot be."""
    clock.ahead = 3
    first = open_quietly(large).sha256(tmp_path)
    before = large.stat()
    while large.stat().st_ctime_ns == before.st_ctime_ns:  # until the clock ticks
        large.write_text("HELLO WORLD")
        os.utime(large, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = large.stat()
    assert (after.st_size, after.st_ino, after.st_mtime_ns) == (11, before.st_ino, before.st_mtime_ns)
    second = open_quietly(large).sha256(tmp_path)
    assert second != first
    assert read_json(tmp_path / "hashes.json") == remembered(large)
    replacement = fill(tmp_path, new="hello world") / "new"
    replacement.replace(large)
    assert open_quietly(large).sha256(tmp_path) == first


DAMAGED = [
    b"",
    b"garbage",
    b"\xff\xfe",
    b"[" * 100_000,
    b'{"a": ' + b"1" * 5000 + b"}",
    b"7",
    b"null",
    b'"text"',
    b"[7]",
    b'["ab"]',
    b'[["PATH", 7]]',
    b"{}",
    b'{"PATH": 7}',
    b'{"PATH": null}',
    b'{"PATH": "text"}',
    b'{"PATH": []}',
    b'{"PATH": {}}',
    b'{"PATH": {"0": 7}}',
    b'{"PATH": [STAMP]}',
    b'{"PATH": [STAMP, 7]}',
    b'{"PATH": [STAMP, null]}',
    b'{"PATH": [STAMP, ["text"]]}',
    b'{"PATH": [STAMP, "text", 7]}',
    b'{"PATH": [7, "text"]}',
]


@pytest.mark.parametrize("content", DAMAGED, ids=lambda content: ascii(content)[:37])
def test_damaged_memory_is_made_anew(tmp_path, clock, large, content):
    """Whatever it has become, the file is read again, and remembered again."""
    true = open_quietly(large).sha256(tmp_path)
    [(path, (stamp, _))] = remembered(large).items()
    content = content.replace(b"PATH", path.encode()).replace(b"STAMP", json.dumps(stamp).encode())
    (tmp_path / "hashes.json").write_bytes(content)
    clock.ahead = 3
    assert open_quietly(large).sha256(tmp_path) == true
    assert json.loads((tmp_path / "hashes.json").read_text())[path] == [
        stamp,
        hashlib.sha256(b"hello world").hexdigest(),
    ]


def test_memory_that_cannot_be_written(tmp_path, clock, large):
    """The hash is the same, whether the cache is a file or the memory a folder, or nothing may be written in it."""
    clock.ahead = 3
    true = open_quietly(large).sha256(tmp_path)
    fill(tmp_path / "2", cache="a file")
    assert open_quietly(large).sha256(tmp_path / "2" / "cache") == true
    assert (tmp_path / "2" / "cache").read_text() == "a file"
    (tmp_path / "3" / "hashes.json").mkdir(parents=True)
    assert open_quietly(large).sha256(tmp_path / "3") == true
    assert [file.name for file in (tmp_path / "3").iterdir()] == ["hashes.json"]
    assert open_quietly(large).sha256(Path("/proc/cache")) == true


# --- pieces ---


def whole(pieces: list[tuple[int, int, Piece]]) -> list[tuple[int, str]]:
    """The documents that pieces make, each with the number of its file, after a check of their numbers and flags."""
    documents: list[tuple[int, str]] = []
    numbers: dict[int, int] = {}
    open_document = False
    for number, count, piece in pieces:
        assert count == numbers.get(number, 0)
        assert number >= max(numbers, default=0)
        numbers[number] = count + 1
        assert piece.begins != open_document
        documents.append((number, piece.text) if piece.begins else (number, documents.pop()[1] + piece.text))
        assert documents[-1][0] == number
        assert piece.text
        open_document = not piece.ends
    assert not open_document
    return documents


def test_short_documents_are_one_piece_each(tmp_path):
    """Empty ones none; the number of a piece counts on within its file."""
    fill(tmp_path, a__txt="one", b__jsonl='{"text": "two"}\n{"text": ""}\n{"text": "three"}', c__jsonl='{"text": null}')
    fill(tmp_path, d__txt="four")
    assert list(open_quietly(tmp_path).pieces()) == [
        (0, 0, Piece("one", True, True)),
        (1, 0, Piece("two", True, True)),
        (1, 1, Piece("three", True, True)),
        (3, 0, Piece("four", True, True)),
    ]
    assert [number for number, _, _ in open_quietly(tmp_path).pieces(2)] == [3]
    assert list(open_quietly(tmp_path).pieces(4)) == []


def test_pieces_by_hand(tmp_path, monkeypatch):
    """A cut is before the first space with a word after it, from five characters on, or else after twenty."""
    monkeypatch.setattr(gpt.text.corpus, "cut", functools.partial(cut, size=5))
    fill(tmp_path, a__txt="ab cd  ef  gh ij", b__jsonl=json.dumps({"text": "x" * 23}) + '\n{"text": "a b"}')
    assert list(open_quietly(tmp_path).pieces()) == [
        (0, 0, Piece("ab cd ", True, False)),
        (0, 1, Piece(" ef  gh", False, False)),
        (0, 2, Piece(" ij", False, True)),
        (1, 0, Piece("x" * 20, True, False)),
        (1, 1, Piece("xxx", False, True)),
        (1, 2, Piece("a b", True, True)),
    ]


WORDS = st.text(st.sampled_from("ab é\n"), max_size=31)


@settings(deadline=None)
@given(st.lists(st.lists(st.lists(WORDS, max_size=3), max_size=5), max_size=4), st.lists(WORDS, max_size=3))
def test_pieces_are_the_documents(files, builtin):
    """Whatever the documents and their blocks, and from whichever file on; what is built in comes after all files."""

    def open_file(file: Path) -> Iterator[Iterator[str]]:
        return (iter(blocks) for blocks in files[int(file.name)])

    paths = tuple(Path(str(number)) for number in range(len(files)))
    corpus = Corpus("examples", paths, open_file, lambda: ((text,) for text in builtin))
    documents = [(number, "".join(blocks)) for number, file in enumerate(files) for blocks in file]
    documents += [(len(files), text) for text in builtin]
    documents = [(number, text) for number, text in documents if text]
    assert list(corpus.documents()) == [text for _, text in documents]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpt.text.corpus, "cut", functools.partial(cut, size=5))
        pieces = list(corpus.pieces())
        assert whole(pieces) == documents
        assert all(len(piece.text) <= 20 for _, _, piece in pieces)
        for start in range(len(files) + 2):
            assert list(corpus.pieces(start)) == [piece for piece in pieces if piece[0] >= start]


def test_a_long_document_is_cut(tmp_path):
    """At its real size too, and the cuts do not depend on what the file is packed in."""
    text = "".join(f"word {i * i % 1009}\n" for i in range(200_003))
    fill(tmp_path / "1", a__txt=text)
    fill(tmp_path / "2", a__jsonl=json.dumps({"text": text}))
    (tmp_path / "3").mkdir()
    pq.write_table(pa.table({"text": [text]}), tmp_path / "3" / "a.parquet")
    pieces = [list(open_quietly(tmp_path / name).pieces()) for name in "123"]
    assert len(pieces[0]) > 11
    assert pieces[0] == pieces[1] == pieces[2]
    assert whole(pieces[0]) == [(0, text)]


# --- memory ---


PEAK = """if True:
    import sys
    from pathlib import Path
    import pyarrow.parquet  # what is imported later is not what reading takes
    from gpt.text.corpus import DataConfig, open_corpus

    def peak() -> int:
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) << 10

    corpus = open_corpus(DataConfig("text", sys.argv[1]), Path("cache"), lambda line: None)
    before = peak()
    characters = sum(len(piece.text) for _, _, piece in corpus.pieces())
    print(characters, peak() - before)
"""
MEGABYTES = 64


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs the peak of memory from /proc/self/status")
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.parquet", "a.txt.gz", "a.txt.zst", "a.json"])
def test_memory_does_not_grow_with_the_file(tmp_path, name):
    """64 megabytes of text are read in less than 48 megabytes of memory above what the process had before."""
    megabyte = "".join(f"line {i * i % 1009} of the text\n" for i in range(60_000))[: 1 << 20]
    documents = [megabyte[i : i + 4096] for i in range(0, len(megabyte), 4096)]
    file = tmp_path / name
    match name:
        case "a.parquet":
            how = {"compression": "none", "use_dictionary": False}
            with pq.ParquetWriter(file, pa.schema({"text": pa.string()}), **how) as writer:
                writer.write_table(pa.table({"text": documents * MEGABYTES}))
            assert file.stat().st_size > MEGABYTES << 20
            assert pq.ParquetFile(file).num_row_groups == 1
        case "a.jsonl":
            file.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents) * MEGABYTES)
        case "a.json":
            file.write_text("[" + f"{megabyte!r}, " * MEGABYTES)
        case "a.txt.gz":
            file.write_bytes(gzip.compress(megabyte.encode(), 1) * MEGABYTES)
        case "a.txt.zst":
            file.write_bytes(zstandard.compress(megabyte.encode() * MEGABYTES))  # a frame of a few kilobytes
        case _:
            file.write_bytes(megabyte.encode() * MEGABYTES)
    command = [sys.executable, "-c", PEAK, str(file)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    characters, growth = map(int, ended.stdout.split())
    assert characters >= MEGABYTES << 20
    assert growth < 48_000_000
