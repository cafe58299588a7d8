"""Corpora: which files are read and how, one line for each mistake, the library's own English, and the split."""

import bz2
import dataclasses
import gzip
import io
import json
import lzma
import os
import re
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt.corpus import (
    ENOUGH_DOCUMENTS,
    DataConfig,
    Split,
    builtin_docs,
    find_text_files,
    open_corpus,
    read_docstrings,
    read_source,
    read_text,
    standard_library,
)
from gpt.errors import UserError

TEXT = "Naïve text: 10 € for a café, 中文 and 😀.\r\n\tIts lines\nstay as they are. \n"
LINES = '{"text": "first", "more": 1}\n\n{"text": "a\\nsecond", "other": "x"}\r\n{"text": ""}\n  \n{"text": "😀"}'
PACKERS = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}


def read(path: Path | str, **changes) -> list[str]:
    """The documents of the text at a path."""
    return list(open_corpus(DataConfig("text", str(path), **changes)).documents())


def refusal(path: Path | str, **changes) -> str:
    """The one line that refuses the text at a path."""
    with pytest.raises(UserError) as caught:
        read(path, **changes)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def fill(folder: Path, **files: str | bytes) -> Path:
    """A folder with the files given, `__` in a name for a dot and `_in_` for a folder."""
    for name, content in files.items():
        file = folder / name.replace("_in_", "/").replace("__", ".")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


# --- reading ---


def test_a_file_is_one_document(tmp_path):
    """Exactly as it is: its ends of lines, its blanks, its characters of every width."""
    assert read(fill(tmp_path, a__txt=TEXT) / "a.txt") == [TEXT]


def test_a_folder_is_read_in_sorted_order(tmp_path):
    """Also below other folders, whatever the suffix; hidden files, hidden folders and binary files are passed over."""
    fill(tmp_path, b__txt="b", a__md="a", c="c", d_in_a__txt="da", d_in_e_in_a__py="dea", B__txt="B")
    fill(tmp_path, __hidden="no", __git_in_config="no", d_in___x_in_y__txt="no", image__png=b"\x89PNG\r\n\0\0no")
    assert read(tmp_path) == ["B", "a", "b", "c", "da", "dea"]
    assert find_text_files(str(tmp_path)) == tuple(
        tmp_path / name for name in ("B.txt", "a.md", "b.txt", "c", "d/a.txt", "d/e/a.py")
    )


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


def test_home(tmp_path, monkeypatch):
    """A path may begin with ~."""
    monkeypatch.setenv("HOME", str(fill(tmp_path, a__txt="a")))
    assert read("~/a.txt") == ["a"]


@pytest.mark.parametrize("suffix", [".jsonl", ".ndjson"])
def test_json_lines(tmp_path, suffix):
    """A document a line, under the key named; blank lines and empty documents give none."""
    file = tmp_path / f"a{suffix}"
    file.write_text(LINES, newline="")
    assert read(file) == ["first", "a\nsecond", "😀"]
    file.write_text('{"body": "x", "text": "y"}\n')
    assert read(file, text_field="body") == ["x"]


def test_json_lines_keep_odd_line_ends(tmp_path):
    """Only a newline ends a line: Unicode's other separators may stand inside a string of JSON."""
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps({"text": "a\u2028b\x85c"}, ensure_ascii=False) + "\n")
    assert read(file) == ["a\u2028b\x85c"]


@pytest.mark.parametrize("suffix", PACKERS)
def test_packed_files(tmp_path, suffix):
    """Text and JSON lines alike, by name and in a folder, where they are not taken for binary files."""
    pack = PACKERS[suffix]
    (tmp_path / f"b.txt{suffix}").write_bytes(pack(TEXT.encode()))
    (tmp_path / f"c.jsonl{suffix}").write_bytes(pack(LINES.encode()))
    (tmp_path / f"a{suffix}").write_bytes(pack(b"a"))
    assert read(tmp_path / f"b.txt{suffix}") == [TEXT]
    assert read(tmp_path) == ["a", TEXT, "first", "a\nsecond", "😀"]


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_byte_order_mark_is_dropped(tmp_path, name):
    """The mark that some editors put first is no text; elsewhere the character stays."""
    content = '{"text": "a\ufeff"}' if name == "a.jsonl" else "a\ufeff"
    (tmp_path / name).write_text("\ufeff" + content, encoding="utf-8")
    assert read(tmp_path / name) == ["a\ufeff"]


# --- mistakes ---


def test_nothing_at_the_path(tmp_path):
    """Neither file, folder nor glob, or a folder in which all is hidden or binary."""
    what = "is neither a file, a folder, nor a glob that matches any: give the path of your text"
    for path in (f"{tmp_path}/missing.txt", f"{tmp_path}/*.txt", f"{tmp_path}/a\0b"):
        assert refusal(path) == f"data.path={path!r} {what}"
    folder = fill(tmp_path / "folder", __hidden="no", image__png=b"\0")
    assert refusal(folder) == f"data.path={str(folder)!r} is a folder without text files: give the path of your text"


@pytest.mark.parametrize("path", ["a" * 300, "~nobody-of-this-name/a.txt"], ids=["long", "no such home"])
def test_impossible_path(path):
    """A path that the system itself refuses is as missing as any other."""
    assert path in refusal(path)


@pytest.mark.parametrize("suffix", ["", *PACKERS])
def test_empty_file(tmp_path, suffix):
    """An empty file, also inside a packed one."""
    file = tmp_path / f"a.txt{suffix}"
    file.write_bytes(PACKERS.get(suffix, bytes)(b""))
    assert refusal(file) == f"{file}: the file is empty; give a file with text in it"


@pytest.mark.parametrize("suffix", ["", *PACKERS])
def test_binary_file(tmp_path, suffix):
    """A zero byte near the start, with its offset."""
    file = tmp_path / f"a.txt{suffix}"
    file.write_bytes(PACKERS.get(suffix, bytes)(b"text" + b"\0more"))
    assert refusal(file) == f"{file}: a binary file (a zero byte at offset 4); give a text file in UTF-8"


@pytest.mark.parametrize(
    ("content", "byte", "offset"),
    [(b"caf\xe9", "0xe9", 3), (b"a" * 5003 + b"\xff" + b"a\xff", "0xff", 5003), (b"\xe2\x82", "0xe2", 0)],
    ids=["latin-1", "far", "cut short"],
)
@pytest.mark.parametrize(
    "mark",
    [
        pytest.param(b"", id="plain"),
        pytest.param(
            b"\xef\xbb\xbf",
            id="after a mark",
        ),
    ],
)
def test_other_encoding(tmp_path, content, byte, offset, mark):
    """The first byte that is not UTF-8 and where it lies in the file."""
    file = tmp_path / "a.txt"
    file.write_bytes(mark + content)
    where = f"byte {byte} at offset {len(mark) + offset}"
    assert refusal(file) == f"{file}: not UTF-8 ({where}); convert it first, for example with iconv -t utf-8"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "a"', "line 3 is not JSON (Expecting ',' delimiter); every line must be one JSON object"),
        ("plain text", "line 3 is not JSON (Expecting value); every line must be one JSON object"),
        ('{"body": "a"}', "line 3 has no text under 'text'; name the key with data.text_field="),
        ('{"text": 7}', "line 3 has no text under 'text'; name the key with data.text_field="),
        ('["text"]', "line 3 has no text under 'text'; name the key with data.text_field="),
        ('"text"', "line 3 has no text under 'text'; name the key with data.text_field="),
    ],
)
def test_broken_json_line(tmp_path, line, message):
    """The line's number counts blank lines too."""
    file = tmp_path / "a.jsonl"
    file.write_text(f'{{"text": "a"}}\n\n{line}\n{{"text": "b"}}\n')
    assert refusal(file) == f"{file}: {message}"


@pytest.mark.parametrize(
    "line", ["[" * 100_000, '{"text": "a", "id": ' + "1" * 5000 + "}"], ids=["deep", "long number"]
)
def test_hostile_json_line(tmp_path, line):
    """What Python's reader gives up on is not JSON to us."""
    file = tmp_path / "a.jsonl"
    file.write_text(line)
    assert refusal(file).startswith(f"{file}: line 1 ")


@pytest.mark.parametrize(
    "suffix",
    [
        ".gz",
        ".bz2",
        ".xz",
    ],
)
def test_damaged_packed_file(tmp_path, suffix):
    """Cut short, never packed, or with any one byte changed between its header and its end: one line names the file."""
    content = PACKERS[suffix]("".join(f"line {i} of the text\n" for i in range(101)).encode())
    changed = [content[:i] + bytes([content[i] ^ 0xFF]) + content[i + 1 :] for i in range(31, len(content) - 31, 7)]
    file = tmp_path / f"a.txt{suffix}"
    for damaged in [content[:-11], content[:11], b"plain text", *changed]:
        file.write_bytes(damaged)
        assert re.fullmatch(re.escape(str(file)) + r": cannot be (unpacked|read) \(.+\).*", refusal(file))


BY_NAME_AND_IN_A_FOLDER = pytest.mark.parametrize(
    "named", [pytest.param(True, id="by name"), pytest.param(False, id="in a folder")]
)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file: run the tests as another user as well")
@BY_NAME_AND_IN_A_FOLDER
def test_file_without_permission(tmp_path, named):
    """A file that may not be read."""
    file = fill(tmp_path, a__txt="a", b__txt="b") / "b.txt"
    file.chmod(0)
    assert refusal(file if named else tmp_path) == f"{file}: cannot be read (Permission denied)"


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="needs a file that fails on being read: /proc/self/mem")
@BY_NAME_AND_IN_A_FOLDER
def test_file_that_fails(tmp_path, named):
    """A device that gives an error in mid-read, which stops root as well."""
    file = fill(tmp_path, a__txt="a") / "b.txt"
    file.symlink_to("/proc/self/mem")
    assert refusal(file if named else tmp_path) == f"{file}: cannot be read (Input/output error)"


def test_file_that_goes_away(tmp_path):
    """A file that vanishes after it was found."""
    file = fill(tmp_path, a__txt="a") / "a.txt"
    corpus = open_corpus(DataConfig("text", str(tmp_path)))
    file.unlink()
    for attempt in (corpus.sha256, lambda: list(corpus.documents()), lambda: list(read_text(file))):
        with pytest.raises(UserError) as caught:
            attempt()
        assert str(caught.value) == f"{file}: cannot be read (No such file or directory)"


def test_config_ranges():
    """The default is valid; what contradicts itself is named with its remedy."""
    assert dataclasses.asdict(DataConfig())["name"] == "python_docs"
    assert DataConfig("text", "a", validation_bytes=1).validation_bytes == 1
    for arguments, message in [
        ({"name": "bible"}, "data.name='bible' is not known: choose from python_docs, python_stdlib, text"),
        ({"name": "text"}, "data=text needs data.path=FILE"),
        ({"name": "text", "path": ""}, "data=text needs data.path=FILE"),
        ({"path": "a.txt"}, "data.path='a.txt' is read only with data=text"),
        ({"validation_bytes": 0}, "data.validation_bytes=0 is out of range: it must be at least 1"),
    ]:
        with pytest.raises(ValueError, match=re.escape(message)):
            DataConfig(**arguments)


# --- the hash ---


def test_hash_follows_the_documents(tmp_path):
    """Another text, order or key is another hash; the same text elsewhere is the same."""

    def hashed(name: str, text_field: str = "text", **files: str) -> str:
        folder = fill(tmp_path / name, **files)
        return open_corpus(DataConfig("text", str(folder), text_field)).sha256()

    first = hashed("1", a__txt="a", b__txt="b")
    assert first == hashed("1", a__txt="a", b__txt="b") == hashed("2", a__txt="a", b__txt="b")
    others = [
        hashed("3", a__txt="b", b__txt="a"),
        hashed("4", a__txt="a", b__txt="c"),
        hashed("5", a__txt="ab"),
        hashed("6", a__txt="a", b__txt="b", c__txt="c"),
        hashed("7", a__txt="a"),
        hashed("8", "body", a__txt="a", b__txt="b"),
        open_corpus(DataConfig()).sha256(),
        open_corpus(DataConfig("python_stdlib")).sha256(),
    ]
    assert len({first, *others}) == 9


def test_hash_follows_the_suffix(tmp_path):
    """The same bytes are other documents under a name that is read in another way."""
    lines = '{"text": "a"}\n'
    fill(tmp_path, a__txt=lines, a__jsonl=lines)
    assert read(tmp_path / "a.txt") == [lines]
    assert read(tmp_path / "a.jsonl") == ["a"]
    hashes = {open_corpus(DataConfig("text", str(tmp_path / name))).sha256() for name in ("a.txt", "a.jsonl")}
    assert len(hashes) == 2


# --- the standard library ---


@pytest.fixture(scope="module")
def python_docs() -> list[str]:
    """The documents of the default corpus."""
    return list(open_corpus(DataConfig()).documents())


def assert_english(documents: list[str]) -> None:
    """Nearly all ASCII, and the commonest words are those of English."""
    text = "".join(documents)
    assert sum(character.isascii() for character in text) > 0.99 * len(text)
    assert "the" in [word for word, _ in Counter(re.findall("[a-z]+", text)).most_common(3)]


def test_python_docs(python_docs):
    """More than a megabyte of English in hundreds of documents, none of them blank."""
    assert sum(len(document.encode()) for document in python_docs) > 1_000_000
    assert len(python_docs) > 300
    assert all(document.strip() for document in python_docs)
    assert all(document.endswith("\n") for document in python_docs)
    assert_english(python_docs)


def test_python_docs_hold_every_kind(python_docs):
    """Docstrings of Python, the topics of the language reference, and docstrings of what is written in C."""
    assert sum(document.startswith('The "assert" statement\n') for document in python_docs) == 1
    assert sum(document.startswith("json\n\nJSON (JavaScript Object Notation)") for document in python_docs) == 1
    assert sum("\n\nbuiltins.len\n\nReturn the number of items in a container." in d for d in python_docs) == 1


def test_docstrings_by_hand():
    """A module is one document: titles with their signatures, in the order of the source, and cleaned docstrings."""
    [document] = read_docstrings(Path(json.__file__))
    assert document.startswith(
        "json\n\nJSON (JavaScript Object Notation) <https://json.org> is a subset of\nJavaScript syntax"
    )
    titles = re.findall(r"^json\.\w+\(.*\)$", document, re.MULTILINE)
    assert [title.split("(")[0] for title in titles] == ["json.dump", "json.dumps", "json.load", "json.loads"]
    assert titles[3].startswith("json.loads(s, *, cls=None, object_hook=None,")
    assert "\n\njson.loads(s, *, cls=None" in document
    assert (
        "\n\nDeserialize ``s`` (a ``str``, ``bytes`` or ``bytearray`` instance\ncontaining a JSON document)" in document
    )


def test_python_docs_do_not_depend_on_the_process(monkeypatch):
    """The documents are those that the hash stands for, whatever runs in this process: here another stderr."""
    monkeypatch.setattr(sys, "stderr", sys.__stderr__)
    first = list(builtin_docs())
    assert first == list(builtin_docs())
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert first == list(builtin_docs())


def test_python_stdlib():
    """More than five megabytes of source, without tests, the same each time."""
    corpus = open_corpus(DataConfig("python_stdlib"))
    documents = list(corpus.documents())
    assert documents == list(corpus.documents())
    assert sum(len(document.encode()) for document in documents) > 5_000_000
    assert all(documents)
    assert Path(json.__file__).read_text(encoding="utf-8") in documents
    assert_english(documents)


def test_standard_library_has_no_tests():
    """Sorted, and without the folders of tests and of installed packages."""
    files = standard_library()
    assert list(files) == sorted(files)
    assert not {"test", "tests", "site-packages", "dist-packages"} & {
        part for file in files for part in file.parts[-3:]
    }
    assert {"json", "asyncio", "pydoc_data"} <= {file.parent.name for file in files}


def test_source_in_its_own_encoding(tmp_path):
    """A module says in which encoding it is written."""
    file = tmp_path / "a.py"
    file.write_bytes(b"# -*- coding: latin-1 -*-\nname = 'caf\xe9'\n")
    assert list(read_source(file)) == ["# -*- coding: latin-1 -*-\nname = 'café'\n"]


# --- training and validation ---


def split(documents: list[str], validation_bytes: int = 1_000_000) -> tuple[list[str], list[str]]:
    """Both parts, after a check that they are the same the second time and over another list."""
    halves = Split(lambda: documents, validation_bytes)
    parts = list(halves.train()), list(halves.validation())
    assert parts == (list(halves.train()), list(halves.validation()))
    again = Split(lambda: iter(documents), validation_bytes)
    assert parts == (list(again.train()), list(again.validation()))
    return parts


def size(documents: list[str]) -> int:
    """Their bytes in UTF-8."""
    return sum(len(document.encode()) for document in documents)


DOCUMENTS = [f"document {i:03} " + "é" * (i % 7) for i in range(101)]


def test_whole_documents():
    """A tenth of many documents, each whole, both parts in the order of the corpus."""
    train, validation = split(DOCUMENTS)
    assert Counter(train) + Counter(validation) == Counter(DOCUMENTS)
    assert train == [document for document in DOCUMENTS if document not in validation]
    assert validation == [document for document in DOCUMENTS if document not in train]
    assert 0.08 * size(DOCUMENTS) < size(validation) <= 0.1 * size(DOCUMENTS)
    assert validation != DOCUMENTS[-len(validation) :]


def test_whole_documents_by_hand():
    """A hundred of equal length give ten."""
    documents = [f"{i:07}" for i in range(100)]
    train, validation = split(documents)
    assert (len(train), len(validation)) == (90, 10)
    assert [len(part) for part in split(documents, 7 * 3 + 6)] == [97, 3]


def test_documents_are_drawn_by_what_they_say():
    """Another order draws the same documents, so that text which is added moves few of the others."""
    _, validation = split(DOCUMENTS)
    _, reverse = split(DOCUMENTS[::-1])
    assert reverse == validation[::-1]


@pytest.mark.parametrize("validation_bytes", [31, 101, 150])
def test_whole_documents_within_the_limit(validation_bytes):
    """At most what was asked for, and at least half of it, where that is less than a tenth."""
    train, validation = split(DOCUMENTS, validation_bytes)
    assert Counter(train) + Counter(validation) == Counter(DOCUMENTS)
    assert validation_bytes / 2 <= size(validation) <= validation_bytes < 0.1 * size(DOCUMENTS)


def test_number_of_documents_decides():
    """One document fewer than enough, and the end of the text validates."""
    documents = ["longer", *(f"{i:05}" for i in range(ENOUGH_DOCUMENTS - 1))]  # a tenth begins within a document
    train, validation = split(documents)
    assert sorted(train + validation) == sorted(documents)
    assert 5 <= size(validation) <= 10
    train, validation = split(documents[1:])
    assert (train, validation) == (documents[1:18], documents[18:])


def test_documents_of_very_unequal_length():
    """Where no whole documents make about a tenth, the end of the text does."""
    documents = [*(f"{i:02}" for i in range(23)), "x" * 1000]
    assert split(documents) == ([*documents[:23], "x" * 895], ["x" * 105])


@pytest.mark.parametrize(("length", "cut"), [(1000, 900), (1009, 908), (11, 9), (10, 9), (7, 6), (2, 1)])
@pytest.mark.parametrize("alphabet", ["ab", "a€"])
def test_single_text_gives_its_last_tenth(length, cut, alphabet):
    """To the character, whatever the characters weigh."""
    text = "".join(alphabet[i * i % 7 % 2] for i in range(length))
    assert split([text]) == ([text[:cut]], [text[cut:]])


def test_cut_between_documents():
    """A cut at the end of a document leaves no empty one behind."""
    assert split(["abc", "defghi", "j"]) == (["abc", "defghi"], ["j"])
    assert split(["abcdefgh", "ij"]) == (["abcdefgh", "i"], ["j"])


def test_least_texts():
    """One character can only validate, and nothing gives nothing."""
    assert split(["a"]) == ([], ["a"])
    assert split([]) == ([], [])


@pytest.mark.parametrize(("length", "validation_bytes"), [(1000, 1), (1000, 7), (1000, 50), (1000, 99)])
def test_single_text_within_the_limit(length, validation_bytes):
    """The end of a plain text, exactly as long as asked for where that is less than a tenth."""
    text = "".join(chr(97 + i % 23) for i in range(length))
    cut = length - validation_bytes
    assert split([text], validation_bytes) == ([text[:cut]], [text[cut:]])


@pytest.mark.parametrize(("length", "validation_bytes"), [(260, 12), (274, 25), (498, 29), (505, 33)])
def test_the_limit_is_exact(length, validation_bytes):
    """Also for lengths whose share floating point cannot hold."""
    train, validation = split(["x" * length], validation_bytes)
    assert (size(train), size(validation)) == (length - validation_bytes, validation_bytes)


@pytest.mark.parametrize("validation_bytes", [100, 1000, 1999, 2000])
def test_limit_is_in_bytes(validation_bytes):
    """Also where the end of the text has wider characters than its beginning, and the other way round."""
    for text in ("a" * 10_000 + "😀" * 2500, "😀" * 2500 + "a" * 10_000):
        train, validation = split([text], validation_bytes)
        assert "".join(train + validation) == text
        assert 0 < size(validation) <= validation_bytes


@settings(deadline=None, max_examples=200)
@given(st.lists(st.text("aé😀", min_size=1, max_size=29), max_size=60), st.integers(1, 200))
def test_nothing_is_lost_or_doubled(documents, validation_bytes):
    """Both parts together are the corpus: its documents, or its text up to the cut and from there on."""
    train, validation = split(documents, validation_bytes)
    assert all(train) and all(validation)
    if Counter(train) + Counter(validation) == Counter(documents):
        assert size(validation) <= size(documents) / 10 or "".join(train + validation) == "".join(documents)
    else:
        assert "".join(train + validation) == "".join(documents)
        whole = train[:-1] + validation[1:]
        assert whole == documents[: len(train) - 1] + documents[len(train) :]
