"""A path names files in one order, each once. A path without files is refused with one line."""

import errno
import glob
import gzip
import os
import random
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

from gpt.data.corpus import open_corpus
from gpt.data.data_config import DataConfig
from gpt.data.find_files import find_text_files
from gpt.errors import UserError
from gpt.files import mark_as_cache
from harness import ROOT, refusal

NOWHERE = Path("no cache is needed")
PDF_REMEDY = "convert it to text first, for example with pdftotext"
DOCX_REMEDY = "convert it to text first, for example with pandoc -t plain"
NOTHING = "names no text file: give the path of a file, a folder or a quoted glob"


def found(path: object, print_line=pytest.fail, cache: Path = NOWHERE) -> list[str]:
    """The content of the files that a path names."""
    return [file.read_text() for file in find_text_files(str(path), cache, print_line)]


def refused(path: object, print_line=pytest.fail) -> str:
    """Return the line that refuses a path. It must begin with the path."""
    line = refusal(find_text_files, str(path), NOWHERE, print_line)
    return line.removeprefix(f"data.path={str(path)!r} ")


def test_a_folder_is_read_in_sorted_order(tmp_path, fill):
    """A folder includes files of all suffixes at any depth. Hidden files and folders are skipped silently."""
    fill(tmp_path, b__txt="b", a__md="a", c="c", d_in_a__txt="da", d_in_e_in_a__py="dea", B__txt="B")
    fill(tmp_path, __hidden="no", __git_in_config="no", d_in___x_in_y__txt="no")
    assert found(tmp_path) == ["B", "a", "b", "c", "da", "dea"]
    assert found(fill(tmp_path / ".books", a__txt="a")) == ["a"]  # a hidden folder may be named
    assert found(tmp_path / ".books/a.txt") == ["a"]


def test_what_a_folder_passes_over_is_said(tmp_path, fill):
    """In one line, with the names of the first three: what is empty, and what is not text by its beginning.

    A file that may be damaged is read, so that its reader names it.
    """
    fill(tmp_path, a__txt="a", b__txt="", c_in_d__pdf=b"%PDF-1.7\n", __hidden="", d__bin=b"\0")
    fill(tmp_path, e__png=b"\x89PNG\r\n", f__jpg=b"\xff\xd8\xff\xe0", g__docx=b"PK\x03\x04", h__gif=b"GIF89a")
    fill(tmp_path, i__npy=b"\x93NUMPY\1\0", j__txt__gz=gzip.compress(b""), k__txt__gz=gzip.compress(b"k"))
    fill(tmp_path, l__gz=b"no gzip", m__parquet=b"", n__pdf__gz=gzip.compress(b"%PDF-1.7\n"), o__txt=b"caf\xe9")
    printed: list[str] = []
    files = find_text_files(str(tmp_path), NOWHERE, printed.append)
    assert [file.name for file in files] == ["a.txt", "k.txt.gz", "l.gz", "m.parquet", "o.txt"]
    assert printed == [
        f"skipping 10 of 15 files below {tmp_path}, empty or not text: b.txt, c/d.pdf, d.bin, ...",
        f"d.pdf and 1 more: a PDF, skipped; {PDF_REMEDY} {tmp_path}/c/d.pdf {tmp_path}/c/d.pdf.txt",
        f"g.docx: a zip archive, as .docx, .odt and .epub are, skipped; {DOCX_REMEDY} {tmp_path}/g.docx -o "
        f"{tmp_path}/g.docx.txt",
    ]


def test_archives_in_a_folder(tmp_path, fill):
    """A line names each kind, and the command that unpacks it. Checkpoints, which are zip archives, are not named."""
    fill(tmp_path, a__txt="a", pages_in_b__txt="b", pages_in_c__txt="c")
    for name in ("zip", "gztar", "tar", "bztar"):
        shutil.make_archive(str(tmp_path / "books"), name, tmp_path / "pages")
    shutil.copy(tmp_path / "books.zip", tmp_path / "model.pt")
    shutil.copy(tmp_path / "books.tar.gz", tmp_path / "old.tgz")
    printed: list[str] = []
    assert found(tmp_path, printed.append) == ["a", "b", "c"]
    assert len(printed) == 3
    zipped, tarred = tmp_path / "books.zip", tmp_path / "books.tar"
    assert f"books.zip: a zip archive, skipped; unpack it first, and give the folder: unzip {zipped} -d " in printed[2]
    assert (
        f"books.tar and 3 more: a tar archive, skipped; unpack it first, and give the folder: mkdir {tarred}.d"
        in (printed[1])
    )


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
@pytest.mark.parametrize("pattern", ["", "**/*.log"])
def test_the_log_of_this_program_is_no_text(tmp_path, fill, stream, pattern):
    """A line names it. Other logs are text."""
    fill(tmp_path, a__log="a", logs_in_x="x")
    program = "import sys; from pathlib import Path; from gpt.data.find_files import find_text_files\n"
    program += "files = find_text_files(sys.argv[1], Path('none'), lambda line: Path(sys.argv[2]).write_text(line))\n"
    program += "assert 'run.log' not in [file.name for file in files], files\n"
    program += "assert 'a.log' in [file.name for file in files], files"
    command = [sys.executable, "-c", program, str(tmp_path / pattern), str(tmp_path.parent / "line.txt")]
    with (tmp_path / "logs/run.log").open("w") as log:
        log.write("step 1")
        log.flush()
        subprocess.run(command, cwd=ROOT, check=True, **{stream: log})
    printed = (tmp_path.parent / "line.txt").read_text()
    assert printed.startswith(f"skipping logs/run.log below {tmp_path}, the output of this program: ")


def test_globs(tmp_path, fill, monkeypatch):
    """Folders and hidden files are left out. A path that exists is that path, with ~ for home."""
    fill(tmp_path, a__txt="a", d__txt_in_e__txt="e", __h_in_f__txt="hidden")
    assert found(f"{tmp_path}/**/*.txt") == ["a", "e"]
    monkeypatch.setenv("HOME", str(tmp_path))
    assert found("~/a.txt") == ["a"]
    (tmp_path / "[a].txt").write_text("yes")
    assert found(tmp_path / "[a].txt") == ["yes"]


@pytest.mark.parametrize("seed", range(5))
def test_globs_are_those_of_python(tmp_path, monkeypatch, seed):
    """Without links and hidden files, a glob gives what `glob.glob` gives, for every kind of pattern."""
    monkeypatch.chdir(tmp_path)
    chooser = random.Random(seed)
    for _ in range(31):
        file = Path(*chooser.choices(["a", "b", "a b", "[c]"], k=chooser.randint(0, 4)), "x.txt")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("x")
    for _ in range(67):
        inner = ["**", *chooser.choices(["*", "a", "?", "[ab]", "[[]c]", "a*"], k=chooser.randint(0, 2))]
        pattern = os.path.join(*chooser.sample(inner, len(inner)), chooser.choice(["*.txt", "**", "x*"]))
        pattern = chooser.choice(["", "./", f"{tmp_path}/"]) + pattern
        expected = [name for name in glob.glob(pattern, recursive=True) if os.path.isfile(name)]
        try:
            files = find_text_files(pattern, NOWHERE, pytest.fail)
        except UserError:
            files = ()
        assert [*map(str, files)] == sorted(map(str, map(Path, set(expected)))), pattern


def test_several_paths(tmp_path, fill):
    """A list keeps its order. A file that is named twice is read once, at its first place."""

    def read(*paths: str) -> list[str]:
        corpus = open_corpus(DataConfig("text", [str(tmp_path / path) for path in paths]), NOWHERE, pytest.fail)
        return [file.read_text() for file in corpus.files]

    fill(tmp_path, a__txt="a", b__txt="b", c_in_a__txt="ca", c_in_b__txt="cb")
    assert read("b.txt", "a.txt") == ["b", "a"]
    assert read("c", "b.txt", "*.txt", "c/b.txt", "c/../b.txt") == ["ca", "cb", "b", "a"]


def test_a_file_whose_name_is_not_utf8(tmp_path):
    """As old archives have them: it is read and hashed like any other."""
    file = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.t\xe9xt"))
    file.write_text("a")
    assert found(tmp_path) == found(file) == ["a"]
    assert len(open_corpus(DataConfig("text", str(file)), NOWHERE).sha256(tmp_path / "cache")) == 64


# --- runs and caches ---


@pytest.mark.parametrize("way", ["", "/", "/**", "/**/*", "/*/**/*.*"])
def test_runs_and_caches_are_not_corpus(tmp_path, monkeypatch, fill, way):
    """Folders and globs skip marked folders at any depth, and one line reports it."""
    monkeypatch.chdir(fill(tmp_path, a_in_a__txt="a", b_in_hashes__json="mine", cache_in_downloads_in_a__txt="far"))
    for marked in ("runs/1", "b/moved"):
        mark_as_cache(fill(tmp_path / marked, config__yaml="seed: 1", notes_in_a__txt="no"))
    for place in (".", str(tmp_path)):
        printed: list[str] = []
        assert found(place + way, printed.append, tmp_path / "cache") == ["a", "mine"]
        [line] = printed
        assert re.fullmatch(
            rf"skipping 3 folders below {place}/?, of runs, packages or the cache: (\S+, ){{2}}\S+", line
        )
        assert {*line.split(": ")[1].split(", ")} == {"b/moved", "cache", "runs/1"}


def test_installed_packages_are_not_corpus(tmp_path, fill):
    """Environments and node_modules below a folder are skipped and named. They are read if the user names them."""
    fill(
        tmp_path,
        a__txt="a",
        venv_in_pyvenv__cfg="home = /usr",
        venv_in_lib_in_b__py="b",
        app_in_node_modules_in_c__js="c",
    )
    fill(tmp_path / "env", d__py="d")
    (tmp_path / "env/conda-meta").mkdir()
    for way in ("", "/**/*"):
        printed: list[str] = []
        assert found(f"{tmp_path}{way}", printed.append) == ["a"]
        assert {*printed[0].split(": ")[1].split(", ")} == {"venv", "env", "app/node_modules"}
    assert found(tmp_path / "venv/lib") == ["b"]
    assert sorted(found(tmp_path / "venv")) == ["b", "home = /usr"]
    assert found(tmp_path / "app/node_modules") == ["c"]


def test_what_datasets_writes_beside_a_text(tmp_path):
    """A folder of `save_to_disk` has its Arrow files read, and not the JSON files about them, nor cached copies."""
    table = pa.table({"text": ["first", "second"]})
    for split in ("train", "test"):
        (tmp_path / split).mkdir()
        for name in ("data-00000-of-00001.arrow", "cache-12ab.arrow"):
            with pa.ipc.new_stream(tmp_path / split / name, table.schema) as writer:
                writer.write_table(table)
        for name in ("dataset_info.json", "state.json"):
            (tmp_path / split / name).write_text('{"a": 1}')
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    (tmp_path / "state.json").write_text('{"text": "a text of the user"}')
    printed: list[str] = []
    files = find_text_files(str(tmp_path), NOWHERE, printed.append)
    arrow = "data-00000-of-00001.arrow"
    assert [str(file.relative_to(tmp_path)) for file in files] == ["state.json", f"test/{arrow}", f"train/{arrow}"]
    assert printed[0].startswith(f"skipping 7 of 10 files below {tmp_path}, ")


def test_a_run_that_is_named(tmp_path, fill):
    """A single file or an inner folder of a run is read if it is named; the run as a whole is refused."""
    run = fill(tmp_path / "run", samples__md="once upon", notes_in_a__txt="mine")
    mark_as_cache(run)
    assert found(run / "samples.md") == ["once upon"]
    assert found(run / "notes") == ["mine"]
    printed: list[str] = []
    assert refused(run, printed.append) == refused(f"{run}/*.md", printed.append) == NOTHING
    assert printed == [f"skipping 1 folder below {run}, of runs, packages or the cache: ."] * 2


# --- links ---


@pytest.mark.parametrize("way", ["", "/**", "/**/*", "/**/*.txt", "/**/**/*.txt"])
def test_links_in_a_circle(tmp_path, fill, way):
    """Each file once: 2 to the 40th ways lead to these."""
    fill(tmp_path, a__txt="a", d_in_b__txt="b")
    for name in ("loop", "other", "d/up", "d/again", "self"):
        (tmp_path / name).symlink_to(name if name == "self" else tmp_path)
    assert sorted(found(f"{tmp_path}{way}")) == ["a", "b"]


def test_a_file_of_several_names(tmp_path, fill):
    """Links: in a folder, a glob, and through a link to a folder."""
    fill(tmp_path, b__txt="b", far_in_c__txt="c")
    (tmp_path / "a.txt").symlink_to("b.txt")
    (tmp_path / "z.txt").symlink_to("far/c.txt")
    (tmp_path / "near").symlink_to("far")
    assert find_text_files(str(tmp_path), NOWHERE, pytest.fail) == (tmp_path / "a.txt", tmp_path / "far/c.txt")
    assert found(f"{tmp_path}/**/*.txt") == found(f"{tmp_path}/*") == ["b", "c"]
    assert found(f"{tmp_path}/near/*") == found(tmp_path / "near") == ["c"]


# --- mistakes ---


def test_nothing_at_the_path(tmp_path, fill):
    """Neither file, folder nor glob; or a folder without text."""
    for path in ("missing.txt", "*.txt", "**/*.txt", "a***b", "a\0b", "missing/*.txt"):
        assert refused(f"{tmp_path}/{path}") == NOTHING
    fill(tmp_path / "hidden", __a__txt="no", __b_in_a__txt="no")
    assert refused(tmp_path / "hidden") == NOTHING
    for path in ("a" * 300, "~nobody-of-this-name/a.txt"):
        assert path in refusal(find_text_files, path, NOWHERE)


def test_devices_and_pipes(tmp_path, fill):
    """They are refused in a line where they are named, and passed over in a folder; nothing waits for them."""
    os.mkfifo(tmp_path / "pipe.txt")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket.txt"))
        for path in (tmp_path / "pipe.txt", tmp_path / "socket.txt", Path("/dev/zero")):
            assert refused(path) == NOTHING
        fill(tmp_path, a__txt="a")
        assert found(tmp_path) == found(f"{tmp_path}/*") == ["a"]


@pytest.mark.parametrize("way", ["", "/**/*.txt"])
def test_folder_that_cannot_be_listed(tmp_path, monkeypatch, fill, way):
    """Its files are not left out without a word."""
    fill(tmp_path, a__txt="a", bad_in_b__txt="b")
    scandir = os.scandir

    def failing(path):
        if str(path).endswith("bad"):
            raise OSError(errno.ESTALE, "Stale file handle", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", failing)
    reason = "cannot be read (Stale file handle); fix that, or move the folder away"
    assert refused(f"{tmp_path}{way}") == f"{tmp_path / 'bad'}: {reason}"
