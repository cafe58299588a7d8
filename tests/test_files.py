"""Files written whole or not at all, and locks."""

import os
import subprocess
import sys

import pytest

from gpt.files import HeldError, hold, link, publish, replacing, write_text


def test_replacing_publishes_the_whole_file(tmp_path):
    """Until the block ends the old contents stay; then the new ones are there, and nothing else."""
    file = tmp_path / "a.txt"
    file.write_text("old")
    with replacing(file) as temporary:
        temporary.write_text("new")
        assert file.read_text() == "old"
    assert file.read_text() == "new"
    assert os.listdir(tmp_path) == ["a.txt"]


def test_replacing_leaves_nothing_after_an_error(tmp_path):
    """The old file is intact and the half-written one is gone."""
    file = tmp_path / "a.txt"
    file.write_text("old")
    with pytest.raises(ZeroDivisionError), replacing(file) as temporary:
        temporary.write_text("half")
        raise ZeroDivisionError
    assert file.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.txt"]


def test_write_text_and_publish(tmp_path):
    """A text replaces another; a finished file takes its final name."""
    write_text(tmp_path / "a.txt", "caf\u00e9")
    assert (tmp_path / "a.txt").read_text(encoding="utf-8") == "caf\u00e9"
    publish(tmp_path / "a.txt", tmp_path / "b.txt")
    assert os.listdir(tmp_path) == ["b.txt"]


def test_link_without_hard_links(tmp_path, monkeypatch):
    """On a file system without hard links the contents are copied."""

    def refuse(*names) -> None:
        raise OSError("no hard links here")

    monkeypatch.setattr(os, "link", refuse)
    (tmp_path / "a").write_text("x")
    link(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b").read_text() == "x"
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]


def test_hold_names_the_owner(tmp_path):
    """A second holder is refused and told the first one's process id, also from another process; then it is free."""
    file = tmp_path / ".lock"
    held = hold(file)
    with pytest.raises(HeldError, match=str(os.getpid())):
        hold(file)
    program = f"from pathlib import Path; from gpt.files import hold; hold(Path({str(file)!r}))"
    other = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert f"HeldError: {os.getpid()}" in other.stderr
    held.release()
    hold(file).release()


def test_lock_ends_with_its_process(tmp_path):
    """A process that is killed leaves a file, not a lock."""
    file = tmp_path / ".lock"
    program = f"import os, pathlib, gpt.files; held = gpt.files.hold(pathlib.Path({str(file)!r})); os._exit(9)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 9
    assert file.exists()
    hold(file).release()


def test_hold_where_nothing_can_be_written(tmp_path):
    """A place that cannot hold a file is an `OSError`, not a lock that somebody holds."""
    (tmp_path / "file").touch()
    with pytest.raises(OSError):
        hold(tmp_path / "file" / ".lock")
