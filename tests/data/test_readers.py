"""Formats: every compression and block size gives the same documents, and damage gives one line."""

import bz2
import gzip
import json
import lzma
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gpt.data.readers
import harness
from gpt.data.compression import COMPRESSED_SUFFIXES, zstd
from gpt.data.data_config import DataConfig
from gpt.data.encodings import encoding_of_mark
from gpt.data.readers import detect_markup, format_suffix, looks_like_text, read_documents
from gpt.errors import UserError

LINES = (
    '{"text": "first", "more": 1}\n\n{"text": "a\\nsecond", "other": "x"}\r\n{"text": ""}\n  \n{"text": "\\ud83d 😀"}'
)
DOCUMENTS = ["first", "a\nsecond", "", "\ufffd 😀"]  # JSON can spell half a character
TINY = (2, 3, 5, 7, 1 << 20)  # bytes to read at once: fewer than a character has, and what is used


def zst(content: bytes, **options: int) -> bytes:
    """As the command line packs: with a hash of the content."""
    options = {"checksum_flag": 1} | options
    return zstd.compress(content, options={zstd.CompressionParameter[name]: value for name, value in options.items()})


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": lambda content: gzip.compress(content, mtime=0),
    ".bz2": lambda content: bz2.compress(content, 1),
    ".xz": lambda content: lzma.compress(content, preset=0),
    ".zst": zst,
}
EVERY_PACKING = pytest.mark.parametrize("suffix", COMPRESSED_SUFFIXES)
EVERY_TEXT = pytest.mark.parametrize("suffix", PACKERS)


def read(file: Path, block: int | None = None, **more) -> list[str]:
    """The documents of a file, read in blocks of so many bytes."""
    with pytest.MonkeyPatch.context() as patch:
        if block is not None:
            patch.setattr(gpt.data.readers, "READ_BLOCK_BYTES", block)
        return ["".join(blocks) for blocks, _ in read_documents(file, DataConfig(**more))]


def refusal(file: Path, block: int | None = None, **more) -> str:
    """The one line that refuses a file, without the name of the file that it begins with."""
    line = harness.refusal(read, file, block, **more)
    assert line.startswith(f"{file}: ")
    return line.removeprefix(f"{file}: ")


def write(file: Path, content: bytes | str) -> Path:
    """A file with this content."""
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    return file


def is_damage(message: str, content: int | None = None) -> bool:
    """Return True if a line reports a damaged compressed file, beyond byte `content` of its content."""
    place = r"[\d,]+" if content is None else f"{content:,}"
    return bool(
        re.fullmatch(
            rf"cannot be decompressed beyond byte {place} of its content \([^\n]+\): "
            "the file is damaged, truncated, or of another format; fetch it again",
            message,
        )
    )


# --- text ---


def test_markup(tmp_path):
    """CSV by its name, the others by how they begin, packed or not; no JSON lines by that name, and no code."""
    contents = {"a.csv": "x,y\n", "a.CSV": "x", "a.tsv.gz": "x\ty", "a.json": "[1]", "b.json": "\ufeff \r\n\t[\n{}]"}
    contents |= {"c.json": " " * 70 + "[", "d.json.gz": "[1]", "h.json": '{\n "a": 1}', "h.txt": '\n[{"a": 1}]'}
    contents |= {
        "i.data": LINES,
        "i.txt.gz": LINES,
        "j": "<!DOCTYPE HTML>",
        "k": " <html>",
        "l": "<?xml",
        "m": "{\\rtf1",
    }
    others = {"a.jsonl": LINES, "e.json": LINES, "f.json": "{\n}", "a.txt": "[1]", "a.csv.txt": "x,y", "g.json": ""}
    others |= {
        "n.json": f"\n{LINES}",
        "n.jl": LINES,
        "n.c": "{ x = 1; }",
        "n.md": "[[a]] [b]",
        "n.txt": "It has <html>",
    }
    files = {name: write(tmp_path / name, text) for name, text in (contents | others).items() if ".gz" not in name}
    files |= {n: write(tmp_path / n, gzip.compress(contents[n].encode())) for n in contents if n.endswith(".gz")}
    assert {name for name, file in files.items() if detect_markup(file, DataConfig())} == contents.keys()


@pytest.mark.parametrize(
    ("name", "suffix"),
    [
        ("a.gz", ""),
        ("A.JSONL.GZ", ".jsonl"),
        ("c4-train.00000-of-01024.json.zst", ".json"),
        ("a.jsonl.old", ".old"),
    ],
)
def test_suffix_of_the_format(name, suffix):
    """The last suffix that is no packing, whatever its case."""
    assert format_suffix(Path("a.folder.gz") / name) == suffix


WHOLE_CHARACTERS = ["a", "\n", "é", "€", "😀", "\ufeff"]
# One by one: st.binary also draws the beginnings of refused formats, which Hypothesis finds in the code.
ANY_BYTES = st.lists(st.integers(0, 255), min_size=1, max_size=23).map(bytes)
BROKEN = b"\xff \xfe \x80 \xc0\xaf \xe2\x82 \xed\xa0\x80 \xf0\x9f \xf0\x9f\x98 \xf4\x90".split()
FRAGMENTS = [character.encode() for character in WHOLE_CHARACTERS] + BROKEN


@settings(deadline=None, max_examples=150)
@given(
    st.one_of(ANY_BYTES, st.lists(st.sampled_from(FRAGMENTS), min_size=1).map(b"".join)),
    st.sampled_from(TINY),
)
def test_any_bytes(folder, content, block):
    """In blocks as Python makes of them at once: the text without its mark, the error or the replacements."""
    file = write(folder / "a.txt", content)
    if encoding_of_mark(content):
        return  # another encoding: test_encodings
    if 0 in content:
        if block > len(content):
            assert refusal(file, block, errors="replace").startswith("a binary file")
        return
    assert read(file, block, errors="replace") == [content.decode(errors="replace").removeprefix("\ufeff")]
    try:
        expected = content.decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        where = f"(byte 0x{content[error.start]:02x} at offset {error.start})"
        assert refusal(file, block).startswith(f"not UTF-8 {where}; ")
    else:
        assert read(file, block) == [expected]


@EVERY_TEXT
def test_empty_file(tmp_path, suffix):
    """An empty file, also inside a packed one."""
    for content in (b"", PACKERS[suffix](b"")):
        file = write(tmp_path / f"a.txt{suffix}", content)
        assert refusal(file) == "the file is empty; give a file with text in it"
        assert not looks_like_text(file)


@EVERY_TEXT
@pytest.mark.parametrize("errors", ["strict", "replace"])
def test_binary_file(tmp_path, suffix, errors):
    """A zero byte near the start, with its offset; further on it is a character."""
    file = tmp_path / f"a.txt{suffix}"
    for offset in (0, 4, 4095):
        write(file, PACKERS[suffix](b"a" * offset + b"\0more\0"))
        assert refusal(file, errors=errors) == (
            f"a binary file (a zero byte at offset {offset}); give a text file in UTF-8"
        )
        assert not looks_like_text(file)
    assert read(write(file, PACKERS[suffix](b"a" * 4096 + b"\0"))) == ["a" * 4096 + "\0"]
    assert looks_like_text(file)


@pytest.mark.parametrize("name", ["plain.pdf", "a.txt.gz", "a.docx"])
def test_no_text_can_come_of_it(tmp_path, name):
    """A PDF and a zip archive, whatever their bytes, are refused with the command that makes text of them."""
    content = b"PK\x03\x04 a b" if name == "a.docx" else b"\n%PDF-1.4\nThe quiet river"
    file = write(tmp_path / name, gzip.compress(content) if name.endswith(".gz") else content)
    command = f"pandoc -t plain {file} -o {file}.txt" if name == "a.docx" else f"pdftotext {file} {file}.txt"
    for errors in ("strict", "replace"):
        line = refusal(file, errors=errors)
        assert re.fullmatch(rf"a (PDF|zip archive, .*); convert it to text first, for example with {command}", line)


@pytest.mark.parametrize("name", ["zip", "tar", "tar.gz", "tgz", "tar.bz2", "tar.xz", "download"])
def test_archives(tmp_path, name):
    """The line names a command that unpacks the archive, whatever its name is."""
    (tmp_path / "in").mkdir()
    write(tmp_path / "in/page.txt", "The quiet river.")
    kind = {"zip": "zip", "tar.gz": "gztar", "tgz": "gztar", "tar.bz2": "bztar", "tar.xz": "xztar"}.get(name, "tar")
    file = tmp_path / f"my books.{name}"
    shutil.move(shutil.make_archive(str(tmp_path / "made"), kind, tmp_path / "in"), file)
    line = refusal(file)
    kind = "zip" if kind == "zip" else "tar"
    assert line.startswith(f"a {kind} archive; unpack it first, and give the folder: ")
    if shutil.which("unzip") or kind == "tar":
        subprocess.run(line.partition("folder: ")[2], shell=True, check=True, capture_output=True)
        assert read(tmp_path / f"{file.name}.d/page.txt") == ["The quiet river."]


@pytest.mark.parametrize(("beginning", "kind"), [(b"7z\xbc\xaf\x27\x1c\0\4", "7z"), (b"Rar!\x1a\x07\x01\0", "rar")])
def test_archives_of_other_programs(tmp_path, beginning, kind):
    file = write(tmp_path / f"a.{kind}", beginning + bytes(99))
    assert refusal(file).startswith(f"a {kind} archive; unpack it first, and give the folder: ")


@EVERY_PACKING
def test_compressed_without_the_suffix(tmp_path, suffix):
    """After the command of the line, the file is read."""
    file = write(tmp_path / "book", PACKERS[suffix](b"The quiet river."))
    line = refusal(file)
    assert line.startswith("compressed with ")
    subprocess.run(line.partition("name: ")[2], shell=True, check=True)
    assert read(tmp_path / f"book{suffix}") == ["The quiet river."]


# --- separators and encodings ---


@settings(deadline=None, max_examples=211)
@given(
    st.lists(st.sampled_from(["a", "é", "\n", "\r\n", "<|", "|>", "<||>", "<||>", "\n<||>\n", "\r"]), min_size=1),
    st.sampled_from(["<||>", "a", "\n\n", "<", "[|", "a\n"]),
    st.sampled_from(TINY),
)
def test_separator(folder, parts, separator, block):
    """In blocks of any size, as Python splits the whole text; the ends of lines around it go with it."""
    text = "".join(parts)
    expected = re.split(rf"(?:\r?\n)?{re.escape(separator)}(?:\r?\n)?", text)
    assert read(write(folder / "a.txt", text), block, separator=separator) == expected


@pytest.mark.parametrize("block", range(1, 20))
def test_separator_between_windows_lines(tmp_path, block):
    """Wherever a block ends, the four characters of the ends of lines go with the separator."""
    assert read(write(tmp_path / "a.txt", "ab\r\n<||>\r\ncd"), block, separator="<||>") == ["ab", "cd"]


@EVERY_TEXT
def test_separator_in_every_plain_text(tmp_path, suffix):
    """Packed or not, and not between JSON lines, whose texts may spell it."""
    packed = PACKERS[suffix]("\ufeffOne.\n<|endoftext|>\nTwo\n\nthree.<|endoftext|><|endoftext|>\n".encode())
    file = write(tmp_path / f"a.txt{suffix}", packed)
    assert read(file, 3, separator="<|endoftext|>") == ["One.", "Two\n\nthree.", "", ""]
    lines = write(tmp_path / f"a.jsonl{suffix}", PACKERS[suffix](LINES.encode()))
    assert read(lines, separator="a") == DOCUMENTS


@pytest.mark.parametrize("block", TINY)
@pytest.mark.parametrize("encoding", ["windows-1252", "latin-1", "utf-16", "utf-16-be", "utf-8-sig", "utf-7"])
def test_encoding(tmp_path, encoding, block):
    """In plain text, with a separator or without, and in JSON lines."""
    text = "10 € a café" if encoding != "latin-1" else "café río"
    file = write(tmp_path / "a.txt", f"{text}|b".encode(encoding))
    assert read(file, block, encoding=encoding) == [f"{text}|b"]
    assert read(file, block, encoding=encoding, separator="|") == [text, "b"]
    lines = f'\n{{"text": "{text}"}}\n{{"text": "b"}}'.encode(encoding)
    for name in ("a.json", "a.jsonl"):
        assert read(write(tmp_path / name, lines), block, encoding=encoding) == [text, "b"]


def test_another_encoding(tmp_path):
    """Bytes that are not of it are named, or replaced."""
    file = write(tmp_path / "a.txt", b"caf\x81")
    line = "not cp1252 (byte 0x81 at offset 3); set another data.encoding=, or data.errors=replace"
    assert refusal(file, encoding="windows-1252") == line
    assert read(file, encoding="windows-1252", errors="replace") == ["caf\ufffd"]


# --- chats ---

CHAT = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": [{"type": "text", "text": "Hi!"}]}]
SHARED = [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": None}]


def test_chats(tmp_path):
    """Lists of messages under the named key, of both kinds, are paragraphs: in JSON lines and in a column."""
    file = write(tmp_path / "a.jsonl", "\n".join(json.dumps({"id": 1, "turns": turns}) for turns in (CHAT, SHARED, [])))
    assert read(file, text_field="turns") == ["user: Hello\n\nassistant: Hi!", "human: Hello\n\ngpt: ", ""]
    assert refusal(file) == "line 1 has no text under 'text'; name the key with data.text_field= (id, turns)"
    turns = [[{"role": "user", "content": "Hello"}, {"role": "system", "content": None}], None]
    file = write_table(tmp_path / "a.parquet", {"n": [1, 2], "turns": turns})
    assert read(file, text_field="turns") == ["user: Hello\n\nsystem: ", ""]
    assert refusal(file) == "'text' is not a column of text; name one with data.text_field= (turns)"


# --- JSON lines ---


def test_json_lines(tmp_path):
    """Each line that is not blank is a document. Only a newline ends a line, and a byte order mark is not text."""
    for name in ("a.jsonl", "a.ndjson", "a.json", "a.jl", "A.JSONL.GZ"):
        content = ("\ufeff" + "\n \r\n" * (name == "a.json") + LINES).encode()
        file = write(tmp_path / name, gzip.compress(content) if name.endswith("GZ") else content)
        assert read(file) == read(file, 3) == DOCUMENTS


def test_json_text_field(tmp_path):
    """The key that is named, whatever else is there; null is an empty document."""
    file = write(tmp_path / "a.jsonl", '{"body": "x", "text": "y"}\n{"text": [7], "body": null}\n')
    assert read(file, text_field="body") == ["x", ""]
    line = "line 2 has no text under 'text'; name the key with data.text_field= (text, body)"
    assert refusal(file) == line
    write(file, json.dumps({f"c{i}": i for i in range(11)}))
    assert refusal(file, text_field="n").endswith(
        " under 'n'; name the key with data.text_field= (c0, c1, c2, c3, c4, c5, c6, c7, ...)"
    )


NO_JSON = "; every line must be one JSON object"
NO_TEXT = " has no text under 'text'; name the key with data.text_field="


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "é" x}', " is not JSON (Expecting ',' delimiter, column 14)" + NO_JSON),
        ("\ufeff{}", " is not JSON (Unexpected UTF-8 BOM (decode using utf-8-sig), column 1)" + NO_JSON),
        ("[" * 100_000, " is not JSON (too large or too deeply nested)" + NO_JSON),
        ('{"body": "a"}', NO_TEXT + " (body)"),
        ('{"text": 7}', NO_TEXT + " (text)"),
        ('{"text": [{"role": 7, "content": "a"}], "n": 7}', NO_TEXT + " (text, n)"),
        ("{}", NO_TEXT + " (it has none)"),
        ("7", " is a number, true, false or null; every line must be one JSON object, or a string"),
        ("null", " is a number, true, false or null; every line must be one JSON object, or a string"),
        (
            b'{"text": "caf\xe9"}',
            ": not UTF-8 (byte 0xe9 at offset 13); choose the one that reads right: data.encoding=",
        ),
    ],
    ids=lambda value: ascii(value)[:23],
)
def test_broken_json_line(tmp_path, line, message):
    """The line's number counts blank lines too, and the column is that in the line."""
    line = line if isinstance(line, bytes) else line.encode()
    file = write(tmp_path / "a.jsonl", b'{"text": "a"}\n\n' + line + b'\n{"text": "b"}\n')
    assert refusal(file).startswith(f"line 3{message}")


def test_json_lines_without_keys(tmp_path):
    """A string and a chat need no key. They may be mixed with objects."""
    lines = ["first\n", {"text": "second"}, "", "\ud83d 😀", CHAT]
    file = write(tmp_path / "a.jsonl", "\n".join(map(json.dumps, lines)))
    assert read(file) == ["first\n", "second", "", "\ufffd 😀", "user: Hello\n\nassistant: Hi!"]


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ([{"text": "a"}, {"text": "b"}], "line 1 is an array"),
        (["a", "b"], "line 1 is an array"),
        ([1, "a"], "line 1 is an array"),
        ([["a", 1], ["b", 2]], "line 1 is an array"),
        ('[\n{"text": "a"},\n{"text": "b"}\n]', "line 1 is not JSON (Expecting value, column 2)"),
        ('[{\n"text": "a"},\n{"text": "b"}]', "line 1 is not JSON (Expecting property name"),
        ('{\n"text": "a"\n}\n{\n"text": "b"\n}', "line 1 is not JSON (Expecting property name"),
    ],
    ids=lambda value: ascii(value)[:23],
)
@pytest.mark.skipif(shutil.which("jq") is None, reason="the remedy is a command of jq")
def test_other_json_becomes_lines(tmp_path, content, line):
    """The line names a command, and running it until no line is an array gives lines that are read."""
    file = write(tmp_path / "my a.jsonl", content if isinstance(content, str) else json.dumps(content))
    message = refusal(file)
    assert message.startswith(line)
    documents = []
    for _ in range(2):
        subprocess.run(message.partition("for example with ")[2], shell=True, check=True)
        file = file.with_name(f"{file.name}.jsonl")
        try:
            documents = read(file)
            break
        except UserError as error:
            message = str(error)
    assert documents == (["a"] if content == [1, "a"] else ["a", "b"])


@pytest.mark.parametrize("block", [3, None])
@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_replaced_in_json_lines(tmp_path, name, block):
    """Also in the first line, which decides how a .json file is read."""
    file = write(tmp_path / name, b'{"text": "caf\xe9"}\n{"text": "\xf0\x9f\x98"}')
    assert read(file, block, errors="replace") == ["caf\ufffd", "\ufffd"]
    assert refusal(file, block).startswith("line 1: not UTF-8 (byte 0xe9 at offset 13); ")


@pytest.mark.parametrize("block", [3, None])
@pytest.mark.parametrize(
    "content",
    [
        '{\n  "text": "a"\n}\n',
        '[{"text": "a"},\n {"text": "b"}]',
        '{"text": "a"} {"text": "b"}\n{"text": "c"}',
        '{"a": ' + "[" * 100_000,
        '{"n": ' + "1" * 5000 + "}\n",
    ],
    ids=lambda content: ascii(content)[:23],
)
def test_json_that_is_no_lines(tmp_path, content, block):
    """If the first line is not a complete object, the file is plain text, byte for byte."""
    assert read(write(tmp_path / "a.json", content), block) == [content]


# --- packed ---


@EVERY_PACKING
def test_members_of_many_sizes(tmp_path, suffix):
    """Boundaries between members do not depend on the size of blocks."""
    documents = ["", "first €", *("abcdefg" * size + "\n" for size in range(1, 400, 13)), ""]
    content = b"".join(PACKERS[suffix](document.encode()) for document in documents)
    file = write(tmp_path / f"a{suffix}", content)
    assert read(file) == read(file, 3) == ["".join(documents)]
    assert looks_like_text(file)


CONTENT = "".join(f"line {i} of the text\n" for i in range(23)).encode()


@EVERY_PACKING
def test_cut_short_at_every_length(tmp_path, suffix):
    """A file that is cut at any length, but between its two members, is refused as damaged."""
    file = tmp_path / f"a.txt{suffix}"
    first, second = PACKERS[suffix](b"first\n"), PACKERS[suffix](CONTENT)
    packed = first + second
    for length in range(1, len(packed)):
        write(file, packed[:length])
        assert length == len(first) or is_damage(refusal(file)), length
    assert read(write(file, packed)) == ["first\n" + CONTENT.decode()]


@EVERY_PACKING
def test_every_byte_changed(tmp_path, suffix):
    """A changed byte is detected, or it is harmless, like gzip's time. It never gives another text."""
    file = tmp_path / f"a.txt{suffix}"
    first, second = PACKERS[suffix](b"first\n"), PACKERS[suffix](CONTENT)
    harmless = 0
    for changed in range(len(second)):
        for bits in (1, 128, 255):
            damaged = bytearray(second)
            damaged[changed] ^= bits
            try:
                assert read(write(file, first + damaged)) == ["first\n" + CONTENT.decode()]
                harmless += 1
            except UserError as error:
                assert is_damage(str(error).removeprefix(f"{file}: "))
    assert harmless <= {".gz": 31, ".bz2": 5}.get(suffix, 0)


@EVERY_PACKING
@pytest.mark.parametrize("garbage", [b"x", bytes(7), b"plain text " * 200])
def test_more_after_the_end(tmp_path, suffix, garbage):
    """Bytes after the last member are damage. Only gzip may end in zeros."""
    file = write(tmp_path / f"a.txt{suffix}", PACKERS[suffix](CONTENT) + garbage)
    if suffix == ".gz" and not any(garbage):
        assert read(file) == [CONTENT.decode()]
    else:
        assert is_damage(refusal(file), 0 if suffix == ".gz" else len(CONTENT))


@EVERY_PACKING
def test_not_packed_that_way(tmp_path, suffix):
    """A file that is not in the format of its suffix is refused: plain text, zeros, or another compression."""
    others = [PACKERS[other](CONTENT) for other in COMPRESSED_SUFFIXES if other != suffix]
    for content in (b"x", b"plain text " * 200, b"\x1f\x8b", b"BZh9", bytes(101), *others):
        assert is_damage(refusal(write(tmp_path / f"a.txt{suffix}", content)), 0)


def test_zstd_of_other_makers(tmp_path):
    """Frames to be skipped, as pzstd and seekable files have them, without a hash of the content or its size.

    A frame by hand has the wide window of zstd --long=31, which large collections are published in.
    """
    skipped = struct.pack("<II", 0x184D2A50, 5) + b"12345"
    first, second = zst(b"first ", checksum_flag=0), zst(b"second", checksum_flag=0, content_size_flag=0)
    raw_block = struct.pack("<I", len(b" third") << 3 | 1)[:3] + b" third"
    wide = struct.pack("<IBB", 0xFD2FB528, 0, (31 - 10) << 3) + raw_block
    file = write(tmp_path / "a.txt.zst", skipped + first + skipped * 2 + second + wide + skipped)
    assert read(file) == ["first second third"]
    assert looks_like_text(file)
    assert is_damage(refusal(write(file, skipped[:-1])), 0)


# --- parquet ---


def write_table(file: Path, columns: dict, **more) -> Path:
    """A parquet file with these columns."""
    pq.write_table(pa.table(columns), file, **more)
    return file


def as_strings(content: list[bytes | None], kind: pa.DataType | None = None) -> pa.Array:
    """An array that claims to hold UTF-8, whatever it holds."""
    wide = kind == pa.large_string()
    return pa.Array.from_buffers(
        kind or pa.string(), len(content), pa.array(content, pa.large_binary() if wide else pa.binary()).buffers()
    )


@pytest.mark.parametrize("rows", [1, 2, 3, 1000])
def test_parquet(tmp_path, rows):
    """A document a row, over row groups of any size; null is an empty document, and other columns are nothing."""
    documents = ["one", None, "", "naïve 😀\r\n", "\ufeffmark\0", "five", None]
    columns = {"n": list(range(7)), "text": documents, "body": ["no"] * 7}
    file = write_table(tmp_path / "a.parquet", columns, row_group_size=rows)
    assert pq.ParquetFile(file).num_row_groups == -(-7 // rows)
    assert read(file) == [document or "" for document in documents]
    assert read(file, text_field="body") == ["no"] * 7


@pytest.mark.parametrize(
    ("kind", "read_as"),
    [
        (pa.string(), "string"),
        (pa.large_string(), "large_string"),
        (pa.dictionary(pa.int8(), pa.string()), "dictionary<values=string, indices=int8, ordered=0>"),
        (pa.dictionary(pa.int32(), pa.large_string()), "dictionary<values=string, indices=int32, ordered=0>"),
        (pa.string_view(), "string_view"),
    ],
    ids=str,
)
def test_kinds_of_text(tmp_path, kind, read_as):
    """Every way in which a column may hold text, with nulls, in more than one batch."""
    documents = ["one", "two", None, "one", "", "naïve 😀"] * 211
    try:
        write_table(tmp_path / "a.parquet", {"text": pa.array(documents, kind)}, row_group_size=619)
    except pa.ArrowNotImplementedError:
        pytest.skip(f"this pyarrow writes no {kind}")
    assert str(pq.read_schema(tmp_path / "a.parquet").field("text").type) == read_as
    assert read(tmp_path / "a.parquet") == [document or "" for document in documents]


def test_parquet_without_the_column(tmp_path):
    """The line names the columns of text, at most eight, or else the types of the others."""
    others = {"n": [7], "bytes": [b"a"], "list": [["a"]], "struct": [{"text": "a"}]}
    file = write_table(tmp_path / "a.parquet", {f"c{i}": ["a"] for i in range(11)} | others)
    for name in ("text", "struct.text", *others):
        hint = "; name one with data.text_field= (c0, c1, c2, c3, c4, c5, c6, c7, ...)"
        assert refusal(file, text_field=name) == f"{name!r} is not a column of text{hint}"
    types = "n is int64, bytes is binary, list is list<"
    assert refusal(write_table(file, others)).startswith(f"'text' is not a column of text; it has none ({types}")


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string()], ids=str)
def test_parquet_that_is_not_utf8(tmp_path, kind):
    """The row, counted from 0, and the byte; or what stands for it."""
    content = [b"ok", None] * 71 + ["naïve ".encode() + b"caf\xe9!", b"\xe2\x82"]
    file = write_table(tmp_path / "a.parquet", {"text": as_strings(content, kind)}, row_group_size=73)
    assert refusal(file) == "row 142: not UTF-8 (byte 0xe9 at offset 10); set data.errors=replace"
    assert read(file, errors="replace") == ["ok", ""] * 71 + ["naïve caf\ufffd!", "\ufffd"]


def is_parquet_damage(message: str) -> bool:
    """Return True if a line reports a damaged parquet file."""
    hint = "the file is damaged, compressed or not parquet; fetch it again"
    return bool(re.fullmatch(rf"cannot be read \([^\n]+\): {hint}", message))


@pytest.mark.parametrize("content", [b"", b"PAR1", b"plain text " * 7, b"PAR1PAR1", b"PAR1" + bytes(23) + b"PAR1"])
def test_not_parquet_at_all(tmp_path, content):
    """A name that promises what the file is not."""
    assert is_parquet_damage(refusal(write(tmp_path / "a.parquet", content)))


def test_parquet_with_any_byte_changed(tmp_path):
    """Damage ends in documents or in one line, never in an exception of the library. A page's hash finds it in text."""
    options = {"compression": "none", "use_dictionary": False, "write_statistics": False, "write_page_checksum": True}
    columns = {"text": [f"document {i} " * 3 for i in range(23)]}
    file = write_table(tmp_path / "a.parquet", columns, row_group_size=13, **options)
    content = file.read_bytes()
    pages = [range(content.index(b"document 0 "), content.index(b"document 12 "))]
    pages.append(range(content.index(b"document 13 "), content.index(b"document 22 ")))
    refused = 0
    for position in range(0, len(content), 3):
        is_text = any(position in page for page in pages)
        changed = content[position] ^ (1 if is_text else 0xFF)  # one bit leaves the text UTF-8
        write(file, content[:position] + bytes([changed]) + content[position + 1 :])
        try:
            read(file)
            assert not is_text
        except UserError as error:
            message = str(error).removeprefix(f"{file}: ")
            assert is_parquet_damage(message) or message.startswith("'text' is not a column of text; ")
            assert not is_text or message.startswith("cannot be read (could not verify page integrity")
            refused += 1
    assert refused > len(content) / 3 / 3


def test_without_pyarrow(tmp_path, monkeypatch):
    """One line names the package to install."""
    file = write_table(tmp_path / "a.parquet", {"text": ["a"]})
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    assert refusal(file) == "this needs pyarrow, which is not installed: pip install pyarrow"


def test_arrow(tmp_path):
    """The files and streams that pyarrow and datasets write: every batch, other columns, and one line for damage."""
    batches = pa.table({"n": range(7), "text": [f"text {i}" for i in range(7)]}).to_batches(max_chunksize=3)
    for name, new_writer in (("stream.arrow", pa.ipc.new_stream), ("file.arrow", pa.ipc.new_file)):
        with new_writer(tmp_path / name, batches[0].schema) as writer:
            for batch in batches:
                writer.write_batch(batch)
        assert read(tmp_path / name) == [f"text {i}" for i in range(7)]
        assert refusal(tmp_path / name, text_field="n").startswith("'n' is not a column of text; name one with ")
        content = (tmp_path / name).read_bytes()
        damaged = write(tmp_path / f"damaged-{name}", content[: len(content) // 2])
        assert refusal(damaged).endswith("the file is damaged, compressed or not Arrow; fetch it again")


# --- all of them ---


@pytest.mark.slow
@settings(deadline=None, max_examples=67)
@given(
    st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=23), min_size=1, max_size=7),
    st.sampled_from(TINY),
    st.booleans(),
    st.sampled_from(["\n", "\r\n", "\n\n"]),
)
def test_the_same_documents_in_every_format(folder, documents, block, ascii_only, newline):
    """Neither the compression nor the size of blocks changes the documents."""
    lines = newline.join(json.dumps({"text": text}, ensure_ascii=ascii_only) for text in documents).encode()
    text = documents[0].replace("\0", "")
    for suffix, pack in PACKERS.items():
        for name in ("a.jsonl", "a.json"):
            assert read(write(folder / f"{name}{suffix}", pack(lines)), block) == documents
        if text:
            assert read(write(folder / f"a.txt{suffix}", pack(text.encode())), block) == [text.removeprefix("\ufeff")]
    assert read(write_table(folder / "a.parquet", {"text": documents}, row_group_size=3)) == documents


# --- what cannot be read ---


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.json", "a.parquet", *("a" + s for s in COMPRESSED_SUFFIXES)])
def test_file_that_cannot_be_read(tmp_path, name):
    """A file that vanished, is a folder or fails while it is read is refused, but not as damaged."""
    file = tmp_path / name
    hint = "; fix that, or move the file away"
    assert looks_like_text(file)
    assert refusal(file) == f"cannot be read (No such file or directory){hint}"
    file.mkdir()
    assert refusal(file) == f"cannot be read (Is a directory){hint}"
    if Path("/proc/self/mem").exists() and name != "a.parquet":
        file.rmdir()
        file.symlink_to("/proc/self/mem")  # an error that stops root as well
        assert refusal(file) == f"cannot be read (Input/output error){hint}"
        assert looks_like_text(file)
