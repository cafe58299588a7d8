"""A run directory: how it is made, found, locked and released, its newest checkpoint, and what it writes to."""

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
import torch
from hydra.core.override_parser.overrides_parser import OverridesParser

from gpt.checkpoint import load_checkpoint, read_checkpoint_step, save_checkpoint
from gpt.data.data_config import DataConfig
from gpt.loading import SAVE_TIME_FILE, find_checkpoint, find_run, open_model
from gpt.training.config import Config, load_config
from gpt.training.run_directory import EVENTS_PATTERN, RunDirectory, require_empty, text_name
from gpt.training.versions import code_version
from harness import (
    ROOT,
    StopAt,
    begin_run,
    differences,
    fit,
    refusal,
    resume_run,
    tiny_arguments,
    tiny_config,
    train,
    train_refusal,
    write_corpus,
)


@pytest.fixture
def run_dir(tmp_path):
    """A new run directory that no process holds."""
    with RunDirectory.create(str(tmp_path / "run"), "", Config(seed=7), "python train.py seed=7") as run:
        return run.path


# --- a new directory ---


def test_new_run_has_a_configuration_and_a_lock(run_dir):
    """Its command is there too, and nothing else."""
    assert sorted(os.listdir(run_dir)) == [".lock", "command.txt", "config.yaml"]
    assert (run_dir / "command.txt").read_text() == "python train.py seed=7\n"
    assert load_config(run_dir / "config.yaml") == Config(seed=7)


def test_names_do_not_collide(tmp_path, monkeypatch):
    """Runs that begin in the same second get a number."""
    monkeypatch.chdir(tmp_path)
    folders = [RunDirectory.create(None, "text-mini", Config(), "").path for _ in range(3)]
    assert len({folder.name for folder in folders}) == 3
    assert all(folder.parent.name == "runs" and "_text-mini" in folder.name for folder in folders)
    assert "=" not in "".join(folder.name for folder in folders)


def test_names_do_not_collide_in_parallel(tmp_path, monkeypatch):
    """Runs that begin at the same moment get a number, too."""
    monkeypatch.chdir(tmp_path)
    with ThreadPoolExecutor(7) as pool:
        folders = list(pool.map(lambda _: RunDirectory.create(None, "text-mini", Config(), "").path, range(31)))
    assert len(set(folders)) == len(os.listdir("runs")) == 31


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
def test_run_is_named_after_its_text(path, name):
    """The name has only characters that are safe everywhere, also on Hydra's command line."""
    assert text_name(DataConfig("text", path)) == name
    override = f"resume=runs/2026-01-01_00-00-00_{name}-mini"
    assert OverridesParser.create().parse_override(override).value().endswith("mini")


def test_run_is_named_after_other_data():
    """A built-in corpus and a data set keep their names. A mixture has the name of its first part."""
    names = [DataConfig("python_docs"), DataConfig("text", "hf://datasets/someone/TinyStories")]
    names.append(DataConfig("mix", ["python_docs", "b.txt"], [1, 1]))
    assert [text_name(data) for data in names] == ["python_docs", "TinyStories", "python_docs+1"]


def test_name_makes_no_folder(tmp_path, monkeypatch):
    """The name of a model file in a folder contains a slash, and the run's name must not."""
    monkeypatch.chdir(tmp_path)
    assert RunDirectory.create(None, "book-mine/small", Config(), "").path.name.endswith("_book-mine_small")


def test_directory_is_for_one_run(run_dir, tmp_path):
    """A directory that holds a run or a user's file is refused, and so is a file."""
    assert "is not empty" in refusal(RunDirectory.create, str(run_dir), "", Config(), "")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.txt").touch()
    assert "is not empty" in refusal(require_empty, tmp_path / "mine")
    (tmp_path / "mine/notes.txt").rename(tmp_path / "mine/command.txt")  # without a lock, no run has left it
    assert "is not empty" in refusal(require_empty, tmp_path / "mine")
    (tmp_path / "file").touch()
    assert "cannot be made" in refusal(RunDirectory.create, str(tmp_path / "file"), "", Config(), "")
    assert (tmp_path / "mine/command.txt").exists()


def test_link_that_leads_nowhere_is_refused(tmp_path, monkeypatch):
    """runs/ may be a link to a disk that is not mounted."""
    monkeypatch.chdir(tmp_path)
    Path("runs").symlink_to("/nowhere/runs")
    assert "runs: File exists); a link may lead nowhere" in refusal(RunDirectory.create, None, "book", Config(), "")


# --- finding and locking ---


def test_run_is_found_by_its_path(run_dir):
    """The path of the run, of its checkpoints folder, and of a file in that folder all name the run."""
    (run_dir / "checkpoints").mkdir()
    (run_dir / "checkpoints/last.ckpt").touch()
    for path in (run_dir, run_dir / "checkpoints", run_dir / "checkpoints/last.ckpt"):
        assert find_run(path).resolve() == run_dir.resolve()
    assert "not a run directory" in refusal(find_run, run_dir.parent)


def test_run_is_found_by_its_name(run_dir, tmp_path, monkeypatch):
    """A run below runs/ has a name without a path."""
    monkeypatch.chdir(tmp_path)
    (run_dir / "checkpoints").mkdir()
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/book-mini").symlink_to(run_dir)
    for name in ("book-mini", "book-mini/checkpoints", "runs/book-mini"):
        assert find_run(name).resolve() == run_dir.resolve()
    line = refusal(find_run, "poem")
    assert line == "poem: not a run directory (it does not exist); give one of those below runs/"


def test_run_is_locked_until_it_is_closed(run_dir):
    """Nobody else can open it meanwhile, by another name or in the same process."""
    with RunDirectory.open(run_dir):
        line = refusal(RunDirectory.open, run_dir.parent / "." / run_dir.name)
        assert f"process {os.getpid()} is training in it: wait, or stop that one" in line
    RunDirectory.open(run_dir).close()


def test_lock_does_not_pass_to_a_child_of_a_fork(run_dir):
    """Children of a process that holds, or has held, a run do not own its lock."""
    program = f"""
import os
from gpt.training.run_directory import RunDirectory
def child():
    if not (process := os.fork()):
        try:
            RunDirectory.open({str(run_dir)!r})
        except ValueError as error:
            print(error, flush=True)
        os._exit(0)
    os.waitpid(process, 0)
run = RunDirectory.open({str(run_dir)!r})
child()
run.close()
print("closed", flush=True)
child()
with RunDirectory.open({str(run_dir)!r}):
    print("open", os.getpid())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    error, closed, opened = done.stdout.splitlines()
    assert "is training in it" in error and opened.split()[1] in error, done.stderr
    assert closed == "closed"


# --- checkpoints ---


def test_run_may_have_no_checkpoint_yet(run_dir, capsys):
    """That is not an error. A file that a kill left half written is removed."""
    (run_dir / "checkpoints").mkdir()
    (run_dir / "checkpoints/.last.ckpt.123").touch()
    with RunDirectory.open(run_dir) as run:
        assert run.load_newest() is None
    assert capsys.readouterr().err == ""
    assert list((run_dir / "checkpoints").iterdir()) == []


def test_damaged_checkpoint_replaces_an_earlier_damaged_one(run_dir, monkeypatch, capsys):
    """Windows never renames onto a file, so that needs another call."""

    def rename(source, target) -> None:
        raise FileExistsError(17, "File exists", str(target))

    monkeypatch.setattr(os, "rename", rename)
    (run_dir / "checkpoints").mkdir()
    with RunDirectory.open(run_dir) as run:
        for text in ("first", "second"):
            (run_dir / "checkpoints/last.ckpt").write_text(text)
            assert "no other checkpoint of the run can be read" in refusal(run.load_newest)
    assert capsys.readouterr().err == ""
    assert (run_dir / "checkpoints/last.ckpt.damaged").read_text() == "second"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of twelve steps whose best checkpoint is of step 6."""
    folder = tmp_path_factory.mktemp("trained")
    write_corpus(folder)
    changes = ["trainer.checkpoint_every=5", "trainer.validate_every=6", "optim.lr=0.5", "optim.matrix_lr=0.5"]
    changes += ["trainer.short_sequences=0"]
    train(*tiny_arguments(folder, "horizon=12steps", f"run_dir={folder / 'run'}", *changes, "optim.final_lr=1"))
    assert load_checkpoint(folder / "run/checkpoints/best.ckpt")["step"] == 6
    return folder / "run"


@pytest.fixture
def copied(trained, tmp_path):
    """A copy of it by `cp -r`: the files have the times of copying, and best.ckpt was copied last."""
    run = tmp_path / "copied"
    shutil.copytree(trained, run, copy_function=shutil.copyfile)
    for i, name in enumerate(("last", "previous", "best")):
        os.utime(run / f"checkpoints/{name}.ckpt", (10**9 + i, 10**9 + i))
    return run


@pytest.mark.promise("runs.md#the intact checkpoint with the greatest step")
def test_newest_checkpoint_has_the_greatest_step(copied):
    """The times of the files do not matter."""
    with RunDirectory.open(copied) as run:
        file, newest = run.load_newest()
    assert (file.name, newest["step"]) == ("last.ckpt", 12)


def test_newest_run_is_the_one_saved_last(copied, tmp_path, monkeypatch):
    """It need not be the one copied last. Without a record of that, the time of the files decides."""
    monkeypatch.chdir(tmp_path)
    for name, when in (("a", 2000.0), ("b", 1000.0)):
        shutil.copytree(copied, tmp_path / "runs" / name)
        (tmp_path / "runs" / name / SAVE_TIME_FILE).write_text(json.dumps({"step": 12, "saved": when}))
    assert find_checkpoint().parent.parent.name == "a"
    for name in ("a", "b"):
        (tmp_path / "runs" / name / SAVE_TIME_FILE).write_text("{")
    os.utime(tmp_path / "runs/b/checkpoints/last.ckpt", (2 * 10**9, 2 * 10**9))
    assert find_checkpoint().parent.parent.name == "b"


@pytest.mark.promise("runs.md#*.damaged", "runs.md#An error that may pass")
def test_unreadable_checkpoint_is_kept_and_an_older_one_is_used(copied, monkeypatch, capsys):
    """That is for an error of the disk. An error that may pass changes nothing."""
    real = zipfile.ZipFile

    def failing(number: int):
        def open_archive(file, *arguments):
            if Path(file).name == "last.ckpt":
                raise OSError(number, os.strerror(number))
            return real(file, *arguments)

        return open_archive

    with RunDirectory.open(copied) as run:
        monkeypatch.setattr(zipfile, "ZipFile", failing(errno.ESTALE))
        assert "last.ckpt: cannot be read (Stale file handle)" in refusal(run.load_newest)
        assert (copied / "checkpoints/last.ckpt").exists()
        monkeypatch.setattr(zipfile, "ZipFile", failing(errno.EIO))
        _, newest = run.load_newest()
    assert newest["step"] < 12
    assert "last.ckpt: cannot be read (Input/output error); resuming from" in capsys.readouterr().err
    assert (copied / "checkpoints/last.ckpt.unreadable").exists()


KEEP = ["trainer.keep_every=5", "data.prompts=[]"]


def test_every_fifth_checkpoint_is_kept(corpus_folder, tmp_path, capfd):
    """An interruption makes no difference. A kept checkpoint opens as a model, and resuming takes the newest one."""
    run_dir = tmp_path / "run"
    fit(begin_run(tiny_config(corpus_folder, *KEEP, "horizon=13steps", "logger=[]", f"run_dir={run_dir}")), [StopAt(7)])
    fifth = run_dir / "checkpoints/step-00000005.ckpt"
    content = fifth.read_bytes()
    fit(resume_run(run_dir))
    assert "at step 7 of 13" in capfd.readouterr().out
    kept = sorted(run_dir.glob("checkpoints/step-*"))
    assert [file.name for file in kept] == ["step-00000005.ckpt", "step-00000010.ckpt"]
    assert [load_checkpoint(file)["step"] for file in kept] == [5, 10]
    assert fifth.read_bytes() == content
    weights = load_checkpoint(fifth)["state_dict"]
    model = open_model(str(fifth))[0]
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


def test_newest_checkpoint_need_not_be_last_ckpt(corpus_folder, tmp_path):
    """A kill may come between best.ckpt and last.ckpt, and only a kept checkpoint may be left."""
    run_dir, kept = tmp_path / "run", tmp_path / "run/checkpoints/step-00000005.ckpt"
    changes = [*KEEP, "horizon=5steps", "trainer.checkpoint_every=3"]
    fit(begin_run(tiny_config(corpus_folder, *changes, f"run_dir={run_dir}")))
    last, previous, best = (run_dir / f"checkpoints/{name}.ckpt" for name in ("last", "previous", "best"))
    assert [read_checkpoint_step(file) for file in (previous, best, last)] == [3, 5, 5]
    copied = Path(shutil.copytree(run_dir, tmp_path / "copied"))
    previous.replace(last)
    kept.unlink()
    fit(resume_run(run_dir, "7steps"))
    assert [load_checkpoint(file)["step"] for file in (kept, last)] == [5, 7]
    for name in ("last", "previous", "best"):
        (copied / f"checkpoints/{name}.ckpt").unlink()
    fit(resume_run(copied / "checkpoints" / kept.name, "7steps"))
    assert differences(copied, run_dir) == []


# --- the logs, and other files that a run writes ---


def test_logs_are_truncated_to_their_checkpoint(run_dir, tmp_path):
    """They are never made longer. Later ones are deleted, and files of others are not touched.

    If a log has a second name elsewhere, as in a copy by `cp -l`, it becomes a file of its own.
    """
    names = ["samples.md", *(f"events.out.tfevents.{i}.host.1.0.run" for i in (1000, 2000)), "events.out.tfevents.3000"]
    for name in names:
        (run_dir / name).write_bytes(b"0123456789")
    (tmp_path / "backup.md").hardlink_to(run_dir / "samples.md")
    with RunDirectory.open(run_dir) as run:
        run.truncate_logs({"samples.md": 4, names[1]: 17})
    assert [len((run_dir / name).read_bytes()) for name in (names[0], names[1], names[3])] == [4, 10, 10]
    assert not (run_dir / names[2]).exists()
    assert (tmp_path / "backup.md").read_bytes() == b"0123456789"


@pytest.mark.promise("runs.md#The logs of a run")
def test_logs_are_synced_before_a_checkpoint_refers_to_them(corpus_folder, tmp_path, monkeypatch):
    """Each log is synced to disk, and then the folder that has its name, and only then the checkpoint."""
    synced: list[int] = []  # inodes, in order
    fsync = os.fsync

    def record(descriptor: int) -> None:
        fsync(descriptor)
        synced.append(os.fstat(descriptor).st_ino)

    monkeypatch.setattr(os, "fsync", record)
    run_dir = tmp_path / "run"
    fit(begin_run(tiny_config(corpus_folder, "horizon=1steps", f"run_dir={run_dir}")))
    file = run_dir / "checkpoints/best.ckpt"
    [events] = run_dir.glob(EVENTS_PATTERN)
    logs = [run_dir / "metrics.csv", run_dir / "samples.md", events]
    offsets = load_checkpoint(file)["state"]["log_offsets"]
    assert offsets == {log.name: log.stat().st_size for log in logs}
    until_checkpoint = synced[: synced.index(file.stat().st_ino)]
    last_sync = {inode: i for i, inode in enumerate(until_checkpoint)}
    assert all(last_sync[log.stat().st_ino] < last_sync[run_dir.stat().st_ino] for log in logs)


@pytest.mark.promise("security.md#only files of its own")
@pytest.mark.parametrize("name", ["samples.md", "metrics.csv", "metrics.json", ".lock", "checkpoints"])
def test_link_out_of_a_run_is_refused(copied, tmp_path, name):
    """A run writes only to its own files. A link in a stranger's run is refused, and its target stays as it was."""
    target = tmp_path / "mine"
    target.write_text("my thesis")
    file = copied / name
    if file.is_dir():
        shutil.rmtree(file)
    file.parent.mkdir(exist_ok=True)
    file.unlink(missing_ok=True)
    file.symlink_to(target)
    line = train_refusal(f"resume={copied}", "horizon=15steps")
    assert line.startswith(f"train.py: {file}: a link to {target}, and a run writes to nothing outside")
    assert target.read_text() == "my thesis"


def test_run_does_not_write_into_another_directory_of_its_name(copied, tmp_path):
    """Its own directory may have been replaced meanwhile."""
    with RunDirectory.open(copied) as run:
        copied.rename(tmp_path / "moved")
        copied.mkdir()
        line = refusal(run.save_last, lambda path: path.touch(), 13)
    assert "was deleted or replaced while its run was training, so nothing can be saved" in line
    assert list(copied.iterdir()) == []


# --- a run that leaves the machine that it began on ---


@pytest.mark.promise("runs.md#the code or the libraries")
def test_resuming_with_other_code_is_reported(copied):
    """A warning names both versions, and metrics.json tells which of them trained which steps."""
    last = copied / "checkpoints/last.ckpt"
    payload = load_checkpoint(last)
    payload["git_commit"] = "0" * 40
    payload["state"]["commits"] = {"0": "0" * 40}
    save_checkpoint(payload, last)
    done = train(f"resume={copied}", "horizon=14steps")
    assert f"so the run may not continue bit for bit (commit {'0' * 40} -> {code_version()})" in done.stderr
    figures = json.loads((copied / "metrics.json").read_text())
    assert (figures["commits"], figures["git_commit"]) == ({"0": "0" * 40, "12": code_version()}, code_version())


@pytest.mark.promise("runs.md#from any folder", "runs.md#does not need its text")
def test_text_may_have_moved(copied, trained, tmp_path, monkeypatch):
    """A run continues from any folder, without its text if that is prepared, and otherwise with data.path=."""
    monkeypatch.chdir(tmp_path)
    text = trained.parent / "corpus.txt"
    moved = text.rename(tmp_path / "moved.txt")
    try:
        done = train(f"resume={copied}", "horizon=13steps")
        assert "continuing with the prepared text in" in done.stdout
        cache = (trained.parent / "cache").rename(tmp_path / "cache-elsewhere")
        line = train_refusal(f"resume={copied}", "horizon=14steps")
        assert line.endswith("if the text is elsewhere now, add data.path=FILE") and str(text) in line
        assert "extending" in train(f"resume={copied}", "horizon=14steps", "data.path=moved.txt").stdout
        shutil.rmtree(trained.parent / "cache")
        cache.rename(trained.parent / "cache")
    finally:
        moved.rename(text)
    config = load_config(copied / "config.yaml")
    assert config.data.path == str(text)  # the old place
    lines = (copied / "command.txt").read_text().splitlines()
    assert [line for line in lines if line.startswith("#")] == [
        f"# after step {n}: horizon={n + 1}steps, was {n}steps" for n in (12, 13)
    ]
    assert lines[-2] == f"python train.py resume={copied} horizon=14steps data.path=moved.txt"
