"""Atomic files and locks."""

import contextlib
import errno
import os
import subprocess
import sys
import time

import pytest

from gpt.data.find_files import find_text_files
from gpt.errors import UserError
from gpt.files import (
    LockedError,
    acquire_lock,
    atomic_rename,
    atomic_write,
    expand_path,
    hard_link,
    sync,
    write_text,
)
from gpt.loading import find_path, open_tokenizer
from gpt.sampling.arguments import parse_arguments


def test_expand_path(tmp_path, monkeypatch):
    """`~` is the home directory in every option that names a file, and from Python. Inside a name it is a letter."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a~").write_text("a")
    assert expand_path("~/a~") == expand_path(tmp_path / "a~") == find_path("~/a~") == tmp_path / "a~"
    assert str(expand_path("a~/~")) == os.path.join("a~", "~")
    assert find_text_files("~/a*", tmp_path / "cache") == (tmp_path / "a~",)
    args = parse_arguments(["--prompt-file=~/a~", "--insight=~/a.html"])
    assert (args.prompt_file, args.insight) == (tmp_path / "a~", tmp_path / "a.html")
    (tmp_path / "model").mkdir()
    with pytest.raises(UserError, match=str(tmp_path)):
        open_tokenizer("~/model")


def test_atomic_write_replaces_the_whole_file(tmp_path):
    """The old content stays until the block ends. Then only the new content is there."""
    file = tmp_path / "a.txt"
    file.write_text("old")
    with atomic_write(file) as temporary:
        temporary.write_text("new")
        assert file.read_text() == "old"
    assert file.read_text() == "new"
    assert os.listdir(tmp_path) == ["a.txt"]


def test_atomic_write_leaves_nothing_after_an_error(tmp_path):
    """The old file is intact and the half-written one is gone."""
    file = tmp_path / "a.txt"
    file.write_text("old")
    with pytest.raises(ZeroDivisionError), atomic_write(file) as temporary:
        temporary.write_text("half")
        raise ZeroDivisionError
    assert file.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.txt"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="Windows has no pipes with names")
def test_atomic_write_writes_into_a_pipe(tmp_path):
    """A pipe stays a pipe, and its reader gets the text. A folder is refused."""
    os.mkfifo(tmp_path / "pipe")
    with subprocess.Popen(["cat", tmp_path / "pipe"], stdout=subprocess.PIPE, text=True) as reader:
        write_text(tmp_path / "pipe", "new")
        assert reader.communicate()[0] == "new"
    assert (tmp_path / "pipe").is_fifo()
    with pytest.raises(IsADirectoryError):
        write_text(tmp_path, "new")
    assert os.listdir(tmp_path) == ["pipe"]


def test_atomic_write_follows_a_link(tmp_path):
    """A link to a file stays a link."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "folder/a.txt")
    write_text(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert ((tmp_path / "folder/a.txt").read_text(), os.listdir(tmp_path / "folder")) == ("new", ["a.txt"])


@pytest.mark.parametrize("number", [errno.EACCES, errno.EINVAL])
def test_folders_that_cannot_be_synced(tmp_path, monkeypatch, number):
    """A folder that a system cannot sync is no error. A file is."""

    def refuse(*arguments) -> int:
        raise OSError(number, "no")

    (tmp_path / "a.txt").touch()
    monkeypatch.setattr(os, "open" if number == errno.EACCES else "fsync", refuse)
    sync(tmp_path)
    with pytest.raises(OSError):
        sync(tmp_path / "a.txt")


def test_a_disk_that_fails_is_noticed(tmp_path, monkeypatch):
    """A disk error is raised for folders too."""

    def fail(descriptor) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="Input/output"):
        sync(tmp_path)


@pytest.mark.parametrize(
    ("refusals", "on_windows", "waits", "succeeds"),
    [(3, True, 3, True), (99, True, 41, False), (3, False, 0, False)],
    ids=["windows", "windows, at length", "other systems"],
)
def test_atomic_rename_waits_for_other_programs(tmp_path, monkeypatch, refusals, on_windows, waits, succeeds):
    """Windows refuses to replace a file that another program has open. On other systems a refusal is final."""
    replace = os.replace
    refused = []
    slept = []

    def refuse(source, target) -> None:
        if len(refused) == refusals:
            return replace(source, target)
        refused.append(PermissionError(errno.EACCES, "in use"))
        if on_windows:
            refused[-1].winerror = 32
        raise refused[-1]

    monkeypatch.setattr(os, "replace", refuse)
    monkeypatch.setattr(time, "sleep", slept.append)
    monkeypatch.setattr(time, "monotonic", lambda: sum(slept))
    (tmp_path / "new").write_text("new")
    with contextlib.nullcontext() if succeeds else pytest.raises(PermissionError):
        atomic_rename(tmp_path / "new", tmp_path / "old")
    assert os.listdir(tmp_path) == ["old" if succeeds else "new"]
    assert len(slept) == pytest.approx(waits, abs=1)


@pytest.mark.parametrize("possible", [True, False])
def test_hard_link(tmp_path, monkeypatch, possible):
    """Both names are one file, also when linked twice. Without hard links, the files are equal.

    The target's former file keeps its other name.
    """

    def refuse(*names) -> None:
        raise OSError("no hard links here")

    if not possible:
        monkeypatch.setattr(os, "link", refuse)
    best, last, previous = (tmp_path / name for name in ("best", "last", "previous"))
    best.write_text("new")
    last.write_text("old")
    for source, target in ((last, previous), (best, last), (best, last)):
        hard_link(source, target)
        assert source.samefile(target) is possible
    assert (last.read_text(), previous.read_text()) == ("new", "old")
    assert sorted(os.listdir(tmp_path)) == ["best", "last", "previous"]


def test_a_lock_names_its_owner(tmp_path):
    """A second holder is refused with the first holder's process id, also from another process. Then it is free."""
    file = tmp_path / ".lock"
    lock = acquire_lock(file)
    with pytest.raises(LockedError, match=str(os.getpid())):
        acquire_lock(file)
    program = f"from pathlib import Path; from gpt.files import acquire_lock; acquire_lock(Path({str(file)!r}))"
    other = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert f"LockedError: {os.getpid()}" in other.stderr
    lock.release()
    acquire_lock(file).release()


@pytest.fixture(params=["with locks", "without locks"])
def file_system(request, monkeypatch) -> str:
    """Return Python code for a file system with locks, or without, like Lustre without -o flock."""
    if request.param == "with locks":
        return "import os\n"
    fcntl = pytest.importorskip("fcntl")

    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", flock)
    return "import fcntl, os\ndef flock(*given): raise OSError(38, 'no')\nfcntl.flock = flock\n"


def test_a_lock_ends_with_its_process(tmp_path, file_system):
    """A killed process leaves a file, but no lock."""
    file = tmp_path / ".lock"
    program = f"{file_system}import gpt.files, pathlib; held = gpt.files.acquire_lock(pathlib.Path({str(file)!r}))\n"
    first = subprocess.Popen(
        [sys.executable, "-c", program + "print('held', flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert first.stdout.readline() == b"held\n"
    with pytest.raises(LockedError, match=str(first.pid)):
        acquire_lock(file)
    first.kill()
    first.wait()
    for stream in (first.stdin, first.stdout):
        stream.close()
    acquire_lock(file).release()


def test_a_lock_that_cannot_be_written_is_an_error(tmp_path):
    """A path that cannot be written is an `OSError`, not a held lock."""
    (tmp_path / "file").touch()
    with pytest.raises(OSError):
        acquire_lock(tmp_path / "file" / ".lock")
