"""Encodings: UTF-8, as the byte order mark says, or as the user names it; never by a guess."""

import gzip
import json
from pathlib import Path

import pytest

from gpt.data.data_config import DataConfig
from gpt.data.prepare import prepare
from gpt.data.readers import read_documents
from gpt.data.tokenizer import TokenizerConfig
from harness import refusal

SENTENCES = {
    "gb18030": "安静的河水从石桥下流过。小船等着下雨。",
    "big5": "安靜的河水從石橋下流過。小船等著下雨。",
    "shift_jis": "静かな川が石の橋の下を流れる。",
    "windows-1251": "Тихая река течёт под каменным мостом, и лодки ждут дождя.",
    "koi8-r": "Тихая река течёт под каменным мостом, и лодки ждут дождя.",
    "windows-1252": "Le garçon était fatigué, mais il marchait à côté de la rivière où l'été finissait.",
}
BYTE = TokenizerConfig("byte")


def read(file: Path, **settings) -> str:
    return "".join(
        text for blocks, _ in read_documents(file, DataConfig("text", str(file), **settings)) for text in blocks
    )


def prepare_text(path: Path, **settings) -> str:
    """Return the training text and the validation text of a dataset, as prepared."""
    data = DataConfig("text", str(path), **settings)
    dataset = prepare(data, BYTE, 1, path.parent / "cache", [].append)
    ids = [*dataset.sources[0].train[:].tolist(), *dataset.sources[0].validation.tolist()]
    return bytes(token for token in ids if token < 256).decode()


@pytest.mark.parametrize("encoding", SENTENCES)
def test_the_refusal_shows_what_each_encoding_reads(tmp_path, encoding):
    """At most three are named. The right one comes first, with the text that it reads, and reads the whole file."""
    text = f"Chapter 1\n{SENTENCES[encoding]}\n" * 20
    file = tmp_path / "book.txt"
    file.write_bytes(text.encode(encoding))
    line = refusal(read, file)
    choices, others = line.split("choose the one that reads right: ")[1].split("; or ")
    assert others == f"convert it with iconv -f {encoding} -t utf-8, or set data.errors=replace"
    remedies = choices.split("; ")
    assert 1 <= len(remedies) <= 3
    assert remedies[0].startswith(f'data.encoding={encoding} reads "{SENTENCES[encoding][:10]}')
    assert all(len(remedy.split('"')[1]) <= 40 for remedy in remedies)
    assert read(file, encoding=encoding) == text


def test_a_text_that_no_encoding_explains_is_refused(tmp_path):
    file = tmp_path / "a.txt"
    file.write_bytes(b"\xff")
    assert refusal(read, file).startswith(f"{file}: not UTF-8 (byte 0xff at offset 0); ")


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be", "utf-8"])
def test_a_byte_order_mark_decides(tmp_path, encoding):
    """In plain text, compressed or in a folder, and in JSON lines. The mark is no part of the text."""
    text = "The quiet café.\n" * 30
    content = ("\ufeff" + text).encode(encoding)
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_bytes(content)
    (folder / "b.txt.gz").write_bytes(gzip.compress(content))
    (folder / "c.jsonl").write_bytes(("\ufeff" + json.dumps({"text": text}, ensure_ascii=False)).encode(encoding))
    for file in folder.iterdir():
        assert read(file) == text
    assert prepare_text(folder) == 3 * text


def test_a_named_encoding_is_stronger_than_a_mark(tmp_path):
    file = tmp_path / "a.txt"
    file.write_bytes("ÿþ is how it begins".encode("latin-1"))
    assert read(file, encoding="latin-1") == "ÿþ is how it begins"


def test_several_encodings_are_tried_file_by_file(tmp_path):
    """The first encoding that decodes the whole file is used. The last one reports what it cannot decode."""
    folder = tmp_path / "texts"
    folder.mkdir()
    chinese, french = SENTENCES["gb18030"] * 40, SENTENCES["windows-1252"] * 40
    (folder / "a.txt").write_bytes(chinese.encode("gb18030"))
    (folder / "b.txt").write_text(french, encoding="utf-8")
    (folder / "c.txt").write_bytes(f"\ufeff{french}".encode("utf-16-be"))
    encodings = ["utf-8", "gb18030"]
    assert prepare_text(folder, encoding=encodings) == chinese + french + french
    assert DataConfig(encoding="UTF8,gb18030").encoding == encodings
    broken = tmp_path / "broken.txt"
    broken.write_bytes(b"\xe9\xff")
    assert refusal(read, broken, encoding=encodings).startswith(f"{broken}: not gb18030 (byte 0xe9 at offset 0); ")
    assert "data.encoding='klingon' is not a text encoding" in refusal(DataConfig, encoding=["utf-8", "klingon"])


@pytest.mark.parametrize(
    ("content", "settings"),
    [
        (SENTENCES["gb18030"].encode("gb18030"), {"errors": "replace"}),  # U+FFFD
        ("“as always”, she said — and left".encode("windows-1252"), {"encoding": "latin-1"}),  # control characters
    ],
)
def test_a_text_that_was_decoded_wrongly_is_refused(tmp_path, content, settings):
    """More than 1% of a file's characters show it. Fewer of them may be in any text."""
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text("A good text before it.\n" * 1000)
    (folder / "b.txt").write_bytes(content * 20)
    line = refusal(prepare_text, folder, **settings)
    assert line.startswith(f"{folder / 'b.txt'}: ")
    assert "more than 1%: it is in another encoding: name it with data.encoding=" in line
    (folder / "b.txt").write_bytes(content + b"A good text around it.\n" * 1000)
    assert "A good text around it." in prepare_text(folder, **settings)
