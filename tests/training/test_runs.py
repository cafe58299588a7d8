"""Run directories: made, found, locked; and the newest intact checkpoint of one."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from gpt.text.corpus.corpus import DataConfig
from gpt.training import runs
from harness import refusal, release


@pytest.fixture
def run_dir(tmp_path):
    """A new run directory, released at the end."""
    made = runs.make(str(tmp_path / "run"), "", "seed: 1\n")
    yield made
    release(made)


def test_make(run_dir):
    """It holds the configuration and a lock, and nothing else."""
    assert sorted(os.listdir(run_dir)) == [".lock", "config.yaml"]
    assert (run_dir / "config.yaml").read_text() == "seed: 1\n"


def test_names_do_not_collide(tmp_path, monkeypatch):
    """Runs begun in the same second get a number."""
    monkeypatch.chdir(tmp_path)
    made = [runs.make(None, "text-mini", "") for _ in range(3)]
    assert len({folder.name for folder in made}) == 3
    assert all(folder.parent.name == "runs" and "_text-mini" in folder.name for folder in made)
    assert "=" not in "".join(folder.name for folder in made)


def test_names_do_not_collide_in_parallel(tmp_path, monkeypatch):
    """Neither do those that begin together, which only one of them can have made."""
    monkeypatch.chdir(tmp_path)
    with ThreadPoolExecutor(7) as pool:
        made = list(pool.map(lambda _: runs.make(None, "text-mini", ""), range(31)))
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
    assert runs.text_name(DataConfig("text", path)) == name
    assert (
        OverridesParser.create().parse_override(f"resume=runs/2026-01-01_00-00-00_{name}-mini").value().endswith("mini")
    )


def test_name_of_other_data():
    """A corpus that is built in keeps its name, a data set has its own, a mixture that of its first part."""
    names = [DataConfig("python_docs"), DataConfig("text", "hf://datasets/someone/TinyStories")]
    names.append(DataConfig("mix", ["python_docs", "b.txt"], [1, 1]))
    assert [runs.text_name(data) for data in names] == ["python_docs", "TinyStories", "python_docs+1"]


def test_names_are_safe(tmp_path, monkeypatch):
    """A model file in a folder makes no folder of the run's name."""
    monkeypatch.chdir(tmp_path)
    assert runs.make(None, "book-mine/small", "").name.endswith("_book-mine_small")


def test_a_directory_is_for_one_run(run_dir, tmp_path):
    """A directory that holds a run or anything of the user's is refused, and so is a file."""
    assert "is not empty" in refusal(runs.make, str(run_dir), "", "")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.txt").touch()
    assert "is not empty" in refusal(runs.require_empty, tmp_path / "mine")
    (tmp_path / "file").touch()
    assert "cannot be made" in refusal(runs.make, str(tmp_path / "file"), "", "")
    assert (tmp_path / "mine/notes.txt").exists()


def test_directory_of_a_path(run_dir):
    """A run may be named by itself, by its checkpoints folder, or by a file in that."""
    (run_dir / "checkpoints").mkdir()
    (run_dir / "checkpoints/last.ckpt").touch()
    for path in (run_dir, run_dir / "checkpoints", run_dir / "checkpoints/last.ckpt"):
        assert runs.directory(path).resolve() == run_dir.resolve()
    assert "not a run directory" in refusal(runs.directory, run_dir.parent)


def test_directory_of_a_name(run_dir, tmp_path, monkeypatch):
    """So may one below runs/ by its name."""
    monkeypatch.chdir(tmp_path)
    (run_dir / "checkpoints").mkdir()
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/book-mini").symlink_to(run_dir)
    for name in ("book-mini", "book-mini/checkpoints", "runs/book-mini"):
        assert runs.directory(name).resolve() == run_dir.resolve()
    line = refusal(runs.directory, "poem")
    assert line == "poem: not a run directory (it does not exist); give one of those below runs/"


def test_lock_once_a_process(run_dir):
    """The process that holds a run may take it again, by any name."""
    runs.lock(run_dir)
    runs.lock(run_dir / "." / "checkpoints" / "..")


def test_no_checkpoint_yet(run_dir, capsys):
    """Nothing to load is not an error, and what a kill left half written is removed."""
    (run_dir / "checkpoints").mkdir()
    (run_dir / "checkpoints/.last.ckpt.123").touch()
    assert runs.load_newest(run_dir) is None
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
        assert "no other checkpoint of the run can be read" in refusal(runs.load_newest, run_dir)
    assert capsys.readouterr().err == ""
    assert (run_dir / "checkpoints/last.ckpt.damaged").read_text() == "second"
