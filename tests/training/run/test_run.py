"""A run directory: made, found, held and given back; its newest checkpoint; and what it writes to."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from gpt.exchange.loading import find_run
from gpt.text.corpus.corpus import DataConfig
from gpt.training.config.loading import read
from gpt.training.config.schema import Config
from gpt.training.run.run import Run, require_empty, text_name
from harness import ROOT, refusal


@pytest.fixture
def run_dir(tmp_path):
    """A new run directory, which nobody holds."""
    with Run.create(str(tmp_path / "run"), "", Config(seed=7)) as run:
        return run.directory


def test_create(run_dir):
    """It has the configuration and a lock, and nothing else."""
    assert sorted(os.listdir(run_dir)) == [".lock", "config.yaml"]
    assert read(run_dir / "config.yaml") == Config(seed=7)


def test_names_do_not_collide(tmp_path, monkeypatch):
    """Runs begun in the same second get a number."""
    monkeypatch.chdir(tmp_path)
    made = [Run.create(None, "text-mini", Config()).directory for _ in range(3)]
    assert len({folder.name for folder in made}) == 3
    assert all(folder.parent.name == "runs" and "_text-mini" in folder.name for folder in made)
    assert "=" not in "".join(folder.name for folder in made)


def test_names_do_not_collide_in_parallel(tmp_path, monkeypatch):
    """Neither do those that begin together, which only one of them can have made."""
    monkeypatch.chdir(tmp_path)
    with ThreadPoolExecutor(7) as pool:
        made = list(pool.map(lambda _: Run.create(None, "text-mini", Config()).directory, range(31)))
    assert len(set(made)) == len(os.listdir("runs")) == 31


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("book.txt", "book"),
        ("/a/b/book.v1.2.jsonl.gz", "book.v1.2"),
        ("~/My Book (1st).md", "My_Book_1st"),
        ("books/", "books"),
        ("articles/*.jsonl", "articles"),
        ("news/part-*.parquet", "part"),
        ("https://example.org/a/book.txt?raw=1&x=/y", "book"),
        (["a/one.txt", "b/two.txt", "c"], "one+2"),
        ("红楼梦.txt", "text"),
        ("x" * 99 + ".txt", "x" * 40),
        ("..", "text"),
    ],
)
def test_name_of_the_text(path, name):
    """The file's or folder's name in characters that are safe everywhere, also on Hydra's command line."""
    assert text_name(DataConfig("text", path)) == name
    assert (
        OverridesParser.create().parse_override(f"resume=runs/2026-01-01_00-00-00_{name}-mini").value().endswith("mini")
    )


def test_name_of_other_data():
    """A corpus that is built in keeps its name, a data set has its own, a mixture that of its first part."""
    names = [DataConfig("python_docs"), DataConfig("text", "hf://datasets/someone/TinyStories")]
    names.append(DataConfig("mix", ["python_docs", "b.txt"], [1, 1]))
    assert [text_name(data) for data in names] == ["python_docs", "TinyStories", "python_docs+1"]


def test_names_are_safe(tmp_path, monkeypatch):
    """A model file in a folder makes no folder of the run's name."""
    monkeypatch.chdir(tmp_path)
    assert Run.create(None, "book-mine/small", Config()).directory.name.endswith("_book-mine_small")


def test_a_directory_is_for_one_run(run_dir, tmp_path):
    """A directory that holds a run or anything of the user's is refused, and so is a file."""
    assert "is not empty" in refusal(Run.create, str(run_dir), "", Config())
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.txt").touch()
    assert "is not empty" in refusal(require_empty, tmp_path / "mine")
    (tmp_path / "file").touch()
    assert "cannot be made" in refusal(Run.create, str(tmp_path / "file"), "", Config())
    assert (tmp_path / "mine/notes.txt").exists()


def test_directory_of_a_path(run_dir):
    """A run may be named by itself, by its checkpoints folder, or by a file in that."""
    (run_dir / "checkpoints").mkdir()
    (run_dir / "checkpoints/last.ckpt").touch()
    for path in (run_dir, run_dir / "checkpoints", run_dir / "checkpoints/last.ckpt"):
        assert find_run(path).resolve() == run_dir.resolve()
    assert "not a run directory" in refusal(find_run, run_dir.parent)


def test_directory_of_a_name(run_dir, tmp_path, monkeypatch):
    """So may one below runs/ by its name."""
    monkeypatch.chdir(tmp_path)
    (run_dir / "checkpoints").mkdir()
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/book-mini").symlink_to(run_dir)
    for name in ("book-mini", "book-mini/checkpoints", "runs/book-mini"):
        assert find_run(name).resolve() == run_dir.resolve()
    line = refusal(find_run, "poem")
    assert line == "poem: not a run directory (it does not exist); give one of those below runs/"


def test_held_until_it_is_closed(run_dir):
    """Nobody else may open what is held, by any name and in this process or a child of it, until it is given back."""
    with Run.open(run_dir):
        line = refusal(Run.open, run_dir.parent / "." / run_dir.name)
        assert f"process {os.getpid()} is training in it: wait, or stop that one" in line
    Run.open(run_dir).close()


def test_held_by_one_child_of_a_fork(run_dir):
    """Children of a process that holds, or has held, a run do not take its lock for theirs."""
    program = f"""
import os
from gpt.training.run.run import Run
def child():
    if not (process := os.fork()):
        try:
            Run.open({str(run_dir)!r})
        except ValueError as error:
            print(error)
        os._exit(0)
    os.waitpid(process, 0)
run = Run.open({str(run_dir)!r})
child()
run.close()
print("closed", flush=True)
child()
with Run.open({str(run_dir)!r}):
    print("open", os.getpid())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    said, closed, opened = done.stdout.splitlines()
    assert "is training in it" in said and opened.split()[1] in said, done.stderr
    assert closed == "closed"


def test_no_checkpoint_yet(run_dir, capsys):
    """Nothing to load is not an error, and what a kill left half written is removed."""
    (run_dir / "checkpoints").mkdir()
    (run_dir / "checkpoints/.last.ckpt.123").touch()
    with Run.open(run_dir) as run:
        assert run.file is run.payload is None
    assert capsys.readouterr().err == ""
    assert list((run_dir / "checkpoints").iterdir()) == []


def test_damaged_again(run_dir, monkeypatch, capsys):
    """A damaged checkpoint takes the place of an earlier damaged one, though Windows never renames onto a file."""

    def rename(source, target) -> None:
        raise FileExistsError(17, "File exists", str(target))

    monkeypatch.setattr(os, "rename", rename)
    (run_dir / "checkpoints").mkdir()
    for text in ("first", "second"):
        (run_dir / "checkpoints/last.ckpt").write_text(text)
        assert "no other checkpoint of the run can be read" in refusal(Run.open, run_dir)
    assert capsys.readouterr().err == ""
    assert (run_dir / "checkpoints/last.ckpt.damaged").read_text() == "second"


def test_cut_back(run_dir, tmp_path):
    """Files get their lengths of the checkpoint back, and are never lengthened; later ones go, others' stay.

    What is another name of a file elsewhere, as in a copy by `cp -l`, becomes a file of its own.
    """
    names = ["samples.md", *(f"events.out.tfevents.{i}.host.1.0.run" for i in (1000, 2000)), "events.out.tfevents.3000"]
    for name in names:
        (run_dir / name).write_bytes(b"0123456789")
    (tmp_path / "backup.md").hardlink_to(run_dir / "samples.md")
    with Run.open(run_dir) as run:
        run.cut_back({"samples.md": 4, names[1]: 17})
    assert [len((run_dir / name).read_bytes()) for name in (names[0], names[1], names[3])] == [4, 10, 10]
    assert not (run_dir / names[2]).exists()
    assert (tmp_path / "backup.md").read_bytes() == b"0123456789"
