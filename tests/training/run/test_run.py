"""A run directory: made, found, held and given back; its newest checkpoint; and what it writes to."""

import errno
import json
import os
import shutil
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from gpt.exchange import checkpoint
from gpt.exchange.loading import SAVED, find_checkpoint, find_run
from gpt.text.corpus.corpus import DataConfig
from gpt.training.config.loading import read
from gpt.training.config.schema import Config
from gpt.training.run.code import code
from gpt.training.run.run import Run, require_empty, text_name
from harness import ROOT, refusal, refused, tiny_arguments, train, write_corpus


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
            print(error, flush=True)
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


# --- a run that leaves the machine it was made on ---


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of twelve steps whose best checkpoint is of step 6."""
    folder = tmp_path_factory.mktemp("made")
    write_corpus(folder)
    changes = ["trainer.checkpoint_every=5", "trainer.validate_every=6", "optim.lr=0.5", "optim.matrix_lr=0.5"]
    changes += ["trainer.short_window=0"]
    train(*tiny_arguments(folder, "horizon=12steps", f"run_dir={folder / 'run'}", *changes, "optim.final_lr=1"))
    assert checkpoint.load(folder / "run/checkpoints/best.ckpt")["step"] == 6
    return folder / "run"


@pytest.fixture
def copied(trained, tmp_path):
    """A copy of it, as `cp -r` makes it: every file has the time of its copying, and best.ckpt was the last."""
    run = tmp_path / "copied"
    shutil.copytree(trained, run, copy_function=shutil.copyfile)
    for i, name in enumerate(("last", "previous", "best")):
        os.utime(run / f"checkpoints/{name}.ckpt", (10**9 + i, 10**9 + i))
    return run


def test_newest_is_of_the_greatest_step(copied):
    """Not of the latest file."""
    with Run.open(copied) as run:
        assert (run.file.name, run.payload["step"]) == ("last.ckpt", 12)


def test_newest_run_is_the_one_saved_last(copied, tmp_path, monkeypatch):
    """Not the one copied last; without a record, the time of the files has to do."""
    monkeypatch.chdir(tmp_path)
    for name, when in (("a", 2000.0), ("b", 1000.0)):
        shutil.copytree(copied, tmp_path / "runs" / name)
        (tmp_path / "runs" / name / SAVED).write_text(json.dumps({"step": 12, "saved": when}))
    assert find_checkpoint().parent.parent.name == "a"
    for name in ("a", "b"):
        (tmp_path / "runs" / name / SAVED).write_text("{")
    os.utime(tmp_path / "runs/b/checkpoints/last.ckpt", (2 * 10**9, 2 * 10**9))
    assert find_checkpoint().parent.parent.name == "b"


@pytest.mark.parametrize(
    "name", ["samples.md", "metrics.csv", "metrics.json", ".lock", "checkpoints", "embeddings/new"]
)
def test_links_out_of_a_run(copied, tmp_path, name):
    """What a run would write to is its own: a link of a stranger's run is refused, and what it leads to stays."""
    target = tmp_path / "mine"
    target.write_text("my thesis")
    file = copied / name
    if file.is_dir():
        shutil.rmtree(file)
    file.parent.mkdir(exist_ok=True)
    file.unlink(missing_ok=True)
    file.symlink_to(target)
    line = refused(f"resume={copied}", "horizon=15steps")
    assert line.startswith(f"train.py: {file}: a link to {target}, and a run writes to nothing outside")
    assert target.read_text() == "my thesis"


def test_what_the_disk_cannot_read(copied, monkeypatch, capsys):
    """An error of the disk takes an older checkpoint, and keeps the file; one that may pass changes nothing."""
    real = zipfile.ZipFile

    def failing(number: int):
        def open_archive(file, *given):
            if Path(file).name == "last.ckpt":
                raise OSError(number, os.strerror(number))
            return real(file, *given)

        return open_archive

    monkeypatch.setattr(zipfile, "ZipFile", failing(errno.ESTALE))
    assert "last.ckpt: cannot be read (Stale file handle)" in refusal(Run.open, copied)
    assert (copied / "checkpoints/last.ckpt").exists()
    monkeypatch.setattr(zipfile, "ZipFile", failing(errno.EIO))
    with Run.open(copied) as run:
        assert run.payload["step"] < 12
    assert "last.ckpt: cannot be read (Input/output error); going on from" in capsys.readouterr().err
    assert (copied / "checkpoints/last.ckpt.unreadable").exists()


def test_another_directory_of_that_name(copied, tmp_path):
    """A run does not write into what has taken the place of its directory."""
    with Run.open(copied) as run:
        copied.rename(tmp_path / "moved")
        copied.mkdir()
        line = refusal(run.save, lambda path: path.touch(), 13)
    assert "was deleted or replaced while its run was training, so nothing can be saved" in line
    assert list(copied.iterdir()) == []


def test_other_code_is_told(copied, capsys):
    """A run that goes on with other code says so, and its record tells which code made which steps."""
    payload = checkpoint.load(copied / "checkpoints/last.ckpt")
    checkpoint.save(payload | {"git_commit": "0" * 40, "commits": {"0": "0" * 40}}, copied / "checkpoints/last.ckpt")
    done = train(f"resume={copied}", "horizon=14steps")
    assert f"so the run may not continue bit for bit (commit {'0' * 40} -> {code()})" in done.stderr
    figures = json.loads((copied / "metrics.json").read_text())
    assert (figures["commits"], figures["git_commit"]) == ({"0": "0" * 40, "12": code()}, code())


def test_text_that_has_moved(copied, trained, tmp_path, monkeypatch):
    """A run goes on from any folder; without its text where that is prepared, and elsewhere with a word where it is."""
    monkeypatch.chdir(tmp_path)
    text = trained.parent / "corpus.txt"
    moved = text.rename(tmp_path / "moved.txt")
    try:
        done = train(f"resume={copied}", "horizon=13steps")
        assert "going on with the prepared text in" in done.stdout
        cache = (trained.parent / "cache").rename(tmp_path / "cache-elsewhere")
        line = refused(f"resume={copied}", "horizon=14steps")
        assert line.endswith("if the text is elsewhere now, add data.path=FILE") and str(text) in line
        assert "extending" in train(f"resume={copied}", "horizon=14steps", "data.path=moved.txt").stdout
        shutil.rmtree(trained.parent / "cache")
        cache.rename(trained.parent / "cache")
    finally:
        moved.rename(text)
    config = read(copied / "config.yaml")
    assert config.data.path == str(text)  # which is where it was
    assert config.amended == [f"horizon={n}steps until step {n}" for n in (12, 13)]


def test_runs_that_lead_nowhere(tmp_path, monkeypatch):
    """A link whose disk is not mounted is one line."""
    monkeypatch.chdir(tmp_path)
    Path("runs").symlink_to("/nowhere/runs")
    assert "runs: File exists); a link may lead nowhere" in refusal(Run.create, None, "book", Config())
