"""data=tokens: the files of other programs, written here as those programs write them, and what is wrong with some."""

import json
import os
import re
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from gpt.data.data_config import DataConfig
from gpt.data.imported_tokens import MAX_VALIDATION_TOKENS
from gpt.data.prepare import TooShortError, prepare
from gpt.data.token_dataset import TokenSource
from gpt.data.tokenizer import Tokenizer, TokenizerConfig, byte_tokenizer, gpt2_tokenizer, train_bpe
from harness import refusal

GPT2, BYTE = TokenizerConfig("gpt2"), TokenizerConfig("byte")
END = 50256
DOCUMENTS = [gpt2_tokenizer().encode(f"Document {i} says: the café has {i * i} seats. 😀") for i in range(41)]
IDS = [token for document in DOCUMENTS for token in [END, *document]]


def write_raw(file: Path, ids: list[int], dtype: str = "<u2") -> None:
    """As nanoGPT's data/openwebtext/prepare.py does."""
    file.parent.mkdir(parents=True, exist_ok=True)
    np.array(ids, dtype).tofile(file)


def write_llm_c(file: Path, ids: list[int], magic: int = 20240520, version: int = 1, dtype: str = "<u2") -> None:
    """As llm.c's dev/data/data_common.py does."""
    file.parent.mkdir(parents=True, exist_ok=True)
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(ids)
    file.write_bytes(header.tobytes() + np.array(ids, dtype).tobytes())


def write_datatrove(file: Path, ids: list[int], dtype: str = "<u2", metadata: str = "gpt2|2\n{}\n0.6 kT") -> None:
    """As datatrove's DocumentTokenizer does: end-of-text after each document, whose ends are in the index."""
    write_raw(file, ids, dtype)
    ends = [i + 1 for i, token in enumerate(ids) if token == END or i == len(ids) - 1]
    np.array(ends, "<u8").tofile(f"{file}.index")
    Path(f"{file}.metadata").write_text(metadata.format(len(ids)))


def write_megatron(file: Path, ids: list[int], code: int = 8, dtype: str = "<u2") -> None:
    """As Megatron-LM's megatron/core/datasets/indexed_dataset.py does."""
    write_raw(file, ids, dtype)
    lengths = [len(ids) // 3, len(ids) - len(ids) // 3]
    head = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, code, len(lengths), len(lengths) + 1)
    body = [np.array(lengths, "<i4"), np.array([0, 2 * lengths[0]], "<i8"), np.arange(3, dtype="<i8")]
    file.with_suffix(".idx").write_bytes(head + b"".join(part.tobytes() for part in body))


WRITERS: dict[str, tuple[str, Callable[[Path, list[int]], None]]] = {
    "nanoGPT": ("{}.bin", write_raw),
    "llm.c": ("fineweb_{}_000000.bin", write_llm_c),
    "datatrove": ("{}/00000_00000_doc_shuffled.ds", write_datatrove),
    "datatrove before 0.5": ("{}/0.ds", lambda file, ids: write_datatrove(file, ids, metadata="gpt2\n{}\n0.6 kT")),
    "datatrove with 4 bytes": ("{}/0.ds", lambda file, ids: write_datatrove(file, ids, "<u4", "x|4\n{}\n1 kT")),
    "Megatron": ("{}_text_document.bin", write_megatron),
    "Megatron with int32": ("{}_text.bin", lambda file, ids: write_megatron(file, ids, 4, "<i4")),
    "Megatron with int64": ("{}_text.bin", lambda file, ids: write_megatron(file, ids, 5, "<i8")),
}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    """The cache of `open_tokens`."""
    monkeypatch.setenv("TOKEN_CACHE", str(tmp_path / "a cache"))
    return tmp_path / "a cache"


def open_tokens(
    path: Path | str, tokenizer: TokenizerConfig | Tokenizer = GPT2, print_line=[].append, **settings
) -> TokenSource:
    """Open the token files that a path names."""
    data = DataConfig("tokens", str(path), **settings)
    [source] = prepare(data, tokenizer, 5, Path(os.environ["TOKEN_CACHE"]), print_line).sources
    return source


@pytest.mark.parametrize("name", WRITERS)
def test_each_format(tmp_path, name):
    """The ids of several files in the order of their names; a file or folder named val is for validation."""
    pattern, write = WRITERS[name]
    folder = tmp_path / "tokens"
    parts = IDS[:97], IDS[97:500], IDS[500:]
    for word, ids in zip(("train_a", "train_b", "val"), parts, strict=True):
        write(folder / pattern.format(word), ids)
    printed: list[str] = []
    for path in (folder, f"{folder}/**/*{Path(pattern).suffix}"):
        source = open_tokens(path, print_line=printed.append)
        assert source.train[:].tolist() == parts[0] + parts[1]
        assert source.validation.tolist() == parts[2]
        text = gpt2_tokenizer().decode_bytes([token for token in parts[2] if token != END])
        assert b"".join(source.validation_text()) == text
        counts = {"tokens": len(parts[2]), "bytes": len(text), "documents": parts[2].count(END)}
        assert source.metadata["splits"]["validation"] == counts
    assert printed == []


def test_one_file(tmp_path):
    """The last of it validates, at most a tenth, from an end-of-text on, and that is said."""
    write_raw(tmp_path / "train.bin", IDS)
    printed: list[str] = []
    source = open_tokens(tmp_path / "train.bin", print_line=printed.append)
    length = len(source.validation)
    assert source.train[:].tolist() + source.validation.tolist() == IDS
    assert 0 < length <= len(IDS) // 10 < MAX_VALIDATION_TOKENS and source.validation[0] == END
    what = f"validating on the last {length} tokens: no file is named val, valid, validation or dev"
    assert printed == [f"{what}; data.validation_path= names others"]


def test_validation_that_is_named(tmp_path):
    """validation_path overrides names. Of a large file the first tokens are used, and a line reports it."""
    for name, ids in (("a.bin", IDS[:400]), ("val.bin", IDS[400:500]), ("c.bin", IDS[500:])):
        write_raw(tmp_path / name, ids)
    printed: list[str] = []
    source = open_tokens(
        tmp_path, print_line=printed.append, validation_path=str(tmp_path / "c.bin"), validation_bytes=37
    )
    assert source.train[:].tolist() == IDS[:400]
    assert source.validation.tolist() == IDS[500:537]
    what = f"validating on the first 37 of {len(IDS) - 500} tokens of c.bin"
    assert printed == [f"{what}: data.validation_bytes= sets how many"]
    write_raw(tmp_path / "more/d.bin", IDS[300:])
    source = open_tokens(tmp_path, validation_path=str(tmp_path / "more"))
    assert source.train[:].tolist() == IDS[:400] + IDS[500:]
    assert source.validation.tolist() == IDS[300:]
    (tmp_path / "a.bin").unlink()
    assert "names token files for validation only" in refusal(open_tokens, tmp_path / "val.bin")


def test_empty_files_and_others(tmp_path):
    """datatrove writes empty files if there are more tasks than files; hidden and other files are passed over."""
    write_datatrove(tmp_path / "0.ds", [])
    write_datatrove(tmp_path / "1.ds", IDS)
    (tmp_path / ".hidden.ds").write_bytes(b"x")
    (tmp_path / "notes.txt").write_text("none")
    source = open_tokens(tmp_path)
    assert source.train[:].tolist() + source.validation.tolist() == IDS


def test_without_end_of_text(tmp_path):
    """One line reports it, and the run continues: DocumentTokenizer's default writes none."""
    write_raw(tmp_path / "train.bin", [token for token in IDS if token != END])
    printed: list[str] = []
    open_tokens(tmp_path / "train.bin", print_line=printed.append)
    assert printed[-1].startswith("no end-of-text (id 50,256) in the first ")


@pytest.mark.promise("security.md#Token files of other programs")
def test_what_identifies_a_dataset(tmp_path, cache):
    """Names, sizes and content, so that no run goes on with files that have changed; not the folder or the times."""
    write_llm_c(tmp_path / "one/a.bin", IDS)
    key = open_tokens(tmp_path / "one").metadata["key"]
    write_llm_c(tmp_path / "two/a.bin", IDS)
    os.utime(tmp_path / "two/a.bin", (1, 1))
    assert open_tokens(tmp_path / "two").metadata["key"] == key
    changed = [*IDS]
    changed[100] ^= 1
    write_llm_c(tmp_path / "two/a.bin", changed)
    keys = [key, open_tokens(tmp_path / "two").metadata["key"]]
    write_llm_c(tmp_path / "three/b.bin", IDS)
    keys.append(open_tokens(tmp_path / "three").metadata["key"])
    assert len({json.dumps(one) for one in keys}) == 3
    assert len(list((cache / "checked").iterdir())) == 4


def test_which_tokenizer(tmp_path):
    """No format names one: gpt2, byte, the one of a model, or the tokenizer.json of a prepared text beside them."""
    own = train_bpe(["the café has seats " * 50], 300)
    write_raw(tmp_path / "train.bin", own.encode("the café has seats " * 50))
    line = refusal(open_tokens, tmp_path / "train.bin", TokenizerConfig())
    assert re.search(
        "a token file does not name its tokenizer.*: set tokenizer=gpt2 or byte, or put the tokenizer", line
    )
    assert open_tokens(tmp_path / "train.bin", own).metadata["key"]["tokenizer"] == {"given": own.sha256}
    (tmp_path / "tokenizer.json").write_text(json.dumps(own.to_dict()))
    assert open_tokens(tmp_path / "train.bin", TokenizerConfig()).tokenizer.sha256 == own.sha256
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", "model": {}}')
    line = refusal(open_tokens, tmp_path / "train.bin", TokenizerConfig())
    assert "tokenizer.json: is not a tokenizer of this project" in line
    write_raw(tmp_path / "bytes/train.bin", [*"naïve ".encode()] * 20)
    assert open_tokens(tmp_path / "bytes", BYTE).tokenizer.sha256 == byte_tokenizer().sha256


def cut(file: Path, size: int) -> None:
    os.truncate(file, file.stat().st_size - size)


def damaged_index(file: Path) -> None:
    write_megatron(file, IDS)
    file.with_suffix(".idx").write_bytes(b"nothing")


WRONG: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "an id beyond the vocabulary": ("a.bin", lambda f: write_raw(f, [*IDS, 50257]), "has the id 50,257, but the voca"),
    "half an id": ("a.bin", lambda f: f.write_bytes(b"abcde"), "it has 5 bytes, for ids of 2 bytes: it was"),
    "uint32 in a raw file": ("a.bin", lambda f: write_raw(f, IDS, "<u4"), "every second id is 0, .* 4 bytes, not 2"),
    "llm.c, cut off": (
        "a.bin",
        lambda f: [write_llm_c(f, IDS), cut(f, 2)],
        rf"bytes, not {1024 + 2 * len(IDS):,}, for",
    ),
    "llm.c, its head alone": ("a.bin", lambda f: [write_llm_c(f, IDS), os.truncate(f, 512)], "it has 512 bytes, not"),
    "llm.c, version 2": ("a.bin", lambda f: write_llm_c(f, IDS, version=2), "header has version 2, and .* are known"),
    "llm.c, Llama 3": ("a.bin", lambda f: write_llm_c(f, [*IDS, 90000], 20240801, 7, "<u4"), "has the id 90,000"),
    "an evaluation": ("a.bin", lambda f: write_llm_c(f, IDS, 20240522), "the questions of an evaluation, not text"),
    "datatrove, cut off": ("a.ds", lambda f: [write_datatrove(f, IDS), cut(f, 2)], "bytes, not [0-9,]+, for ids of 2"),
    "datatrove, unfinished": ("a.ds", lambda f: write_raw(f, IDS), "neither .index nor .metadata beside it"),
    "datatrove, other index": (
        "a.ds",
        lambda f: [write_datatrove(f, IDS), np.array([7], "<u8").tofile(f"{f}.index")],
        "ids, and 7 by its .index",
    ),
    "Megatron, cut off": ("a.bin", lambda f: [write_megatron(f, IDS), cut(f, 2)], "bytes, not [0-9,]+, for ids of 2"),
    "Megatron, other index": ("a.bin", damaged_index, "not an index of Megatron-LM of version 1"),
    "Megatron, floats": ("a.bin", lambda f: write_megatron(f, IDS, 6, "<f8"), "of version 1 with whole numbers"),
    "Megatron, negative": ("a.bin", lambda f: write_megatron(f, [5, -1, 7], 4, "<i4"), "has the id 4,294,967,295, but"),
}


@pytest.mark.promise("security.md#Token files of other programs")
@pytest.mark.parametrize("mistake", WRONG)
def test_what_is_wrong_is_one_line(tmp_path, mistake):
    """It names the file, what is wrong, and what to do about it."""
    name, write, reason = WRONG[mistake]
    write(tmp_path / name)
    line = refusal(open_tokens, tmp_path)
    assert re.search(reason, line), line
    assert line.startswith(f"{tmp_path / name}: cannot be read (") and line.endswith("; fetch or write it again")


def test_mistakes(tmp_path):
    """Nothing of the kind, or too little of it."""
    (tmp_path / "a.txt").write_text("text")
    for path in (tmp_path, tmp_path / "a.txt", tmp_path / "*.bin"):
        assert f"data.path={str(path)!r} names no file whose name ends in .bin or .ds" in refusal(open_tokens, path)
    write_raw(tmp_path / "train.bin", IDS[:4])
    with pytest.raises(TooShortError):
        open_tokens(tmp_path)
    assert "data=tokens needs data.path=DIR" in refusal(DataConfig, "tokens")
