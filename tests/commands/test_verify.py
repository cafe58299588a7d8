"""python -m gpt.verify: every hash of prepared corpora, and one line about the first that is damaged."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from gpt import verify
from gpt.console import command_line
from gpt.errors import UserError
from gpt.text import shards
from gpt.text.cache import write_json
from gpt.text.tokenizer import byte_tokenizer

ROOT = Path(__file__).parents[2]
IN_ORDER = "134 tokens, vocabulary 257, every hash matches"


@pytest.fixture(autouse=True)
def small_files(monkeypatch):
    """Token files of 50 bytes."""
    monkeypatch.setattr(shards, "SHARD_BYTES", 50)


def prepare(folder: Path) -> Path:
    """Write a prepared corpus of 103 and 31 tokens."""
    folder.mkdir(parents=True)
    tokenizer, splits = byte_tokenizer(), {}
    for split, count in zip(shards.SPLITS, (103, 31), strict=True):
        with shards.Writer(folder, split, np.dtype("uint16")) as writer:
            writer.append(np.arange(count, dtype=np.uint16))
            writer.close()
        splits[split] = {"tokens": count, "sha256": writer.hashes}
    manifest = {"tokenizer": tokenizer.sha256, "dtype": "uint16", "shard_bytes": 50, "splits": splits}
    write_json(folder / "manifest.json", manifest)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer.to_dict()))
    return folder


def flip(folder: Path) -> None:
    """Flip one bit in the second file of the second split."""
    content = bytearray((folder / "validation-00001.bin").read_bytes())
    content[len(content) // 2] ^= 1
    (folder / "validation-00001.bin").write_bytes(content)


def complaint(folder: Path | str) -> str:
    """The line with which a folder is refused when it is opened."""
    with pytest.raises(UserError) as caught:
        shards.open_shards(Path(folder))
    return str(caught.value)


def run(capsys, *folders: str | Path) -> tuple[int | str | None, list[str], list[str]]:
    """Run the command in this process: its exit code, and the lines on stdout and stderr."""
    code: int | str | None = 0
    try:
        with command_line("gpt.verify"):
            verify.main([str(folder) for folder in folders])
    except SystemExit as end:
        code = end.code
    printed = capsys.readouterr()
    return code, printed.out.splitlines(), printed.err.splitlines()


def test_all_in_order(tmp_path, monkeypatch, capsys):
    """Without arguments it checks all of data/cache, in order, except what is still being prepared."""
    for name in ("b", "a", ".preparing-c"):
        prepare(tmp_path / "data/cache" / name)
    flip(tmp_path / "data/cache/.preparing-c")
    (tmp_path / "data/cache/downloads").mkdir()
    monkeypatch.chdir(tmp_path)
    assert run(capsys) == (0, [f"data/cache/a: {IN_ORDER}", f"data/cache/b: {IN_ORDER}"], [])


def test_named_folders(tmp_path, monkeypatch, capsys):
    """Folders that are named are checked wherever they are, and no others."""
    folder = prepare(tmp_path / "data/cache/b")
    flip(prepare(tmp_path / "data/cache/a"))
    monkeypatch.chdir(tmp_path)
    assert run(capsys, folder) == (0, [f"{folder}: {IN_ORDER}"], [])


def test_damage(tmp_path, monkeypatch, capsys):
    """The first damaged corpus ends the command with exit code 2 and a line that names the file."""
    for name in ("a", "b", "c"):
        prepare(tmp_path / "data/cache" / name)
    flip(tmp_path / "data/cache/b")
    monkeypatch.chdir(tmp_path)
    line = complaint("data/cache/b")
    assert line.startswith("data/cache/b/validation-00001.bin: damaged")
    assert run(capsys) == (2, [f"data/cache/a: {IN_ORDER}"], [f"gpt.verify: {line}"])


def test_nothing_to_check(tmp_path, monkeypatch, capsys):
    """No prepared corpus at all, and none in the folder named."""
    monkeypatch.chdir(tmp_path)
    nothing = "gpt.verify: data/cache holds no prepared corpus: name the folder of one"
    assert run(capsys) == (2, [], [nothing])
    for other in ("elsewhere", tmp_path, "/dev/zero", "a" * 300):  # never "delete it, and it will be made anew"
        line = f"{other}: not a prepared corpus, which has a manifest.json: name a folder of data/cache"
        assert run(capsys, other) == (2, [], [f"gpt.verify: {line}"])


def test_large_corpora_are_hashed(tmp_path, monkeypatch, capsys):
    """Corpora too large to be hashed whenever they are opened are hashed here."""
    folder = prepare(tmp_path / "folder")
    monkeypatch.setattr(shards, "VERIFY_BYTES", 0)
    assert run(capsys, folder) == (0, [f"{folder}: {IN_ORDER}"], [])
    flip(folder)
    assert isinstance(shards.open_shards(folder), shards.Shards)
    code, out, (line,) = run(capsys, folder)
    assert (code, out) == (2, [])
    assert line.startswith(f"gpt.verify: {folder}/validation-00001.bin: damaged")


def test_as_a_process(tmp_path):
    """`python -m gpt.verify` works in any folder, and imports no torch."""
    folder = prepare(tmp_path / "data/cache/a")
    code = "import runpy, sys; runpy.run_module('gpt.verify', run_name='__main__'); print('torch' in sys.modules)"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"data/cache/a: {IN_ORDER}\nFalse\n", "")
    flip(folder)
    command = [sys.executable, "-m", "gpt.verify"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("gpt.verify: data/cache/a/validation-00001.bin: damaged")
