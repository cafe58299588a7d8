"""A run directory: how it is made, found, locked and released, its newest checkpoint, and what it writes to."""

import errno
import json
import os
import re
import shutil
import subprocess
import zipfile
from collections.abc import Callable
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
    fit,
    flip_a_bit,
    python_program,
    refusal,
    resume_run,
    tiny_config,
    train,
    train_refusal,
    truncate,
)


@pytest.fixture
def run_dir(tmp_path):
    """A new run directory that no process holds."""
    with RunDirectory.create(str(tmp_path / "run"), "", Config(seed=7), "python train.py seed=7") as run:
        return run.path


# --- a new directory ---


def test_new_run_has_a_configuration_a_command_and_a_lock(run_dir):
    """Nobody else can open it until it is closed, by another name or in the same process."""
    assert sorted(os.listdir(run_dir)) == [".lock", "command.txt", "config.yaml"]
    assert (run_dir / "command.txt").read_text() == "python train.py seed=7\n"
    assert load_config(run_dir / "config.yaml") == Config(seed=7)
    with RunDirectory.open(run_dir):
        line = refusal(RunDirectory.open, run_dir.parent / "." / run_dir.name)
        assert f"process {os.getpid()} is training in it: wait, or stop that one" in line
    RunDirectory.open(run_dir).close()


def test_names_do_not_collide(tmp_path, monkeypatch):
    """Runs that begin at the same moment get a number. A slash in a name makes no folder."""
    monkeypatch.chdir(tmp_path)
    with ThreadPoolExecutor(7) as pool:
        folders = list(pool.map(lambda _: RunDirectory.create(None, "text-mine/mini", Config(), "").path, range(31)))
    assert len(set(folders)) == len(os.listdir("runs")) == 31
    assert all(folder.parent.name == "runs" and "_text-mine_mini" in folder.name for folder in folders)


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (DataConfig("text", "/a/b/book.v1.2.jsonl.gz"), "book.v1.2"),
        (DataConfig("text", "~/My Book (1st).md"), "My_Book_1st"),
        (DataConfig("text", "news/part-*.parquet"), "part"),
        (DataConfig("text", "https://example.org/a/book.txt?raw=1&x=/y"), "book"),
        (DataConfig("text", ["a/one.txt", "b/two.txt", "c"]), "one+2"),
        (DataConfig("text", "红楼梦.txt"), "text"),
        (DataConfig("text", "x" * 99 + ".txt"), "x" * 40),
        (DataConfig("text", "hf://datasets/someone/TinyStories"), "TinyStories"),
        (DataConfig("python_docs"), "python_docs"),
        (DataConfig("mix", ["python_docs", "b.txt"], [1, 1]), "python_docs+1"),
    ],
)
def test_run_is_named_after_its_text(data, name):
    """The name has only characters that are safe everywhere, also on Hydra's command line."""
    assert text_name(data) == name
    override = f"resume=runs/2026-01-01_00-00-00_{name}-mini"
    assert OverridesParser.create().parse_override(override).value().endswith("mini")


def test_directory_is_for_one_run(corpus_folder, run_dir, tmp_path):
    """A directory that holds a run or a user's file is refused, and so is a file. No text is prepared before that."""
    config = tiny_config(corpus_folder, f"run_dir={run_dir}", f"data.cache={tmp_path / 'cache'}")
    assert "is not empty: choose another, or continue the run in it with resume=" in refusal(begin_run, config)
    assert not (tmp_path / "cache").exists()
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


def test_run_is_found_by_path_and_by_name(run_dir, tmp_path, monkeypatch):
    """The run, its checkpoints folder and a file in that folder all name the run; below runs/, so does a name."""
    monkeypatch.chdir(tmp_path)
    (run_dir / "checkpoints").mkdir()
    (run_dir / "checkpoints/last.ckpt").touch()
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/book-mini").symlink_to(run_dir)
    paths = [run_dir, run_dir / "checkpoints", run_dir / "checkpoints/last.ckpt"]
    for path in (*paths, "book-mini", "book-mini/checkpoints"):
        assert find_run(path).resolve() == run_dir.resolve()


@pytest.mark.slow
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
    done = subprocess.run([python_program(), "-c", program], capture_output=True, text=True, cwd=ROOT)
    error, closed, opened = done.stdout.splitlines()
    assert "is training in it" in error and opened.split()[1] in error, done.stderr
    assert closed == "closed"


# --- checkpoints ---


def empty(file: Path) -> None:
    file.write_bytes(b"")


# Names and steps of checkpoints, in the order in which they are written; damage to some of them; the checkpoint from
# which the run resumes; and what the warning says.
NEWEST: list[tuple[dict[str, int], dict[str, Callable], tuple[str, int] | None, str]] = [
    ({}, {}, None, ""),
    ({"previous": 5, "last": 7, "best": 9}, {}, ("best", 9), ""),  # killed before last.ckpt was written
    ({"last": 9, "previous": 5, "best": 7}, {}, ("last", 9), ""),  # a copy: the times of the files do not matter
    ({"best": 9, "last": 9}, {}, ("last", 9), ""),
    ({"previous": 5, "best": 9}, {}, ("best", 9), "is missing; resuming from best.ckpt of step 9"),
    ({"step-00000005": 5}, {}, ("step-00000005", 5), "is missing; resuming from step-00000005.ckpt of step 5"),
    ({"previous": 5, "last": 7}, {"last": truncate}, ("previous", 5), "cut short"),
    ({"previous": 5, "last": 7}, {"last": flip_a_bit}, ("previous", 5), "damaged"),
    ({"previous": 5, "last": 7}, {"last": empty}, ("previous", 5), "cut short"),
    ({"best": 5, "previous": 7, "last": 9}, {"last": empty, "previous": empty}, ("best", 5), "cut short"),
]


@pytest.mark.promise("runs.md#verified by its checksum", "runs.md#the intact checkpoint with the greatest step")
@pytest.mark.promise("runs.md#*.damaged", "security.md#CRC-32")
@pytest.mark.parametrize(("steps", "damage", "expected", "warning"), NEWEST)
def test_run_resumes_from_its_newest_intact_checkpoint(
    trained, run_dir, monkeypatch, capsys, steps, damage, expected, warning
):
    """One warning has the first damaged or missing file. What a kill left half written is removed.

    A damaged file replaces an earlier damaged one. Windows never renames onto a file, so that needs another call.
    """

    def rename(source, target) -> None:
        raise FileExistsError(17, "File exists", str(target))

    monkeypatch.setattr(os, "rename", rename)
    folder = run_dir / "checkpoints"
    folder.mkdir()
    (folder / ".last.ckpt.123").touch()
    (folder / "last.ckpt.damaged").write_text("earlier")
    stored = load_checkpoint(trained.path / "checkpoints/last.ckpt")
    for name, step in steps.items():
        save_checkpoint(stored | {"step": step}, folder / f"{name}.ckpt")
    for name, damage_file in damage.items():
        damage_file(folder / f"{name}.ckpt")
    with RunDirectory.open(run_dir) as run:
        newest = run.load_newest()
    assert (newest and (newest[0].stem, newest[1]["step"])) == expected
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == bool(warning)
    assert all(line.startswith(f"train.py: {folder}/last.ckpt") and warning in line for line in lines)
    assert not (folder / ".last.ckpt.123").exists()
    for name in damage:
        assert (folder / f"{name}.ckpt.damaged").exists() and not (folder / f"{name}.ckpt").exists()
    assert ((folder / "last.ckpt.damaged").read_bytes() == b"earlier") == ("last" not in damage)


def test_run_without_an_intact_checkpoint_is_refused(run_dir):
    """The line has the first of the damaged ones."""
    (run_dir / "checkpoints").mkdir()
    for name in ("last", "best"):
        (run_dir / f"checkpoints/{name}.ckpt").touch()
    with RunDirectory.open(run_dir) as run:
        line = refusal(run.load_newest)
    assert re.search(r"last\.ckpt: .*; and no other checkpoint of the run can be read$", line)


def test_kill_between_best_and_last_checkpoint_leaves_a_complete_run(run_copy, capsys):
    """The last step was also the best, and the kill came before last.ckpt was written. Resuming writes it."""
    best, last, previous = (run_copy / f"checkpoints/{name}.ckpt" for name in ("best", "last", "previous"))
    save_checkpoint(load_checkpoint(last), best)
    previous.replace(last)
    step_before = read_checkpoint_step(last)
    assert resume_run(run_copy) is None
    assert "is complete" in capsys.readouterr().out
    assert [read_checkpoint_step(file) for file in (previous, last)] == [step_before, 13]


def test_newest_run_is_the_one_saved_last(run_copy, tmp_path, monkeypatch):
    """It need not be the one run_copy last. Without a record of that, the time of the files decides."""
    monkeypatch.chdir(tmp_path)
    for name, when in (("a", 2000.0), ("b", 1000.0)):
        shutil.copytree(run_copy, tmp_path / "runs" / name)
        (tmp_path / "runs" / name / SAVE_TIME_FILE).write_text(json.dumps({"step": 12, "saved": when}))
    assert find_checkpoint().parent.parent.name == "a"
    for name in ("a", "b"):
        (tmp_path / "runs" / name / SAVE_TIME_FILE).write_text("{")
    os.utime(tmp_path / "runs/b/checkpoints/last.ckpt", (2 * 10**9, 2 * 10**9))
    assert find_checkpoint().parent.parent.name == "b"


@pytest.mark.promise("runs.md#*.damaged", "runs.md#An error that may pass")
def test_unreadable_checkpoint_is_kept_and_an_older_one_is_used(run_copy, monkeypatch, capsys):
    """That is for an error of the disk. An error that may pass changes nothing."""
    real = zipfile.ZipFile

    def failing(number: int):
        def open_archive(file, *arguments):
            if Path(file).name == "last.ckpt":
                raise OSError(number, os.strerror(number))
            return real(file, *arguments)

        return open_archive

    (run_copy / "checkpoints/best.ckpt").unlink()
    with RunDirectory.open(run_copy) as run:
        monkeypatch.setattr(zipfile, "ZipFile", failing(errno.ESTALE))
        assert "last.ckpt: cannot be read (Stale file handle)" in refusal(run.load_newest)
        assert (run_copy / "checkpoints/last.ckpt").exists()
        monkeypatch.setattr(zipfile, "ZipFile", failing(errno.EIO))
        _, newest = run.load_newest()
    assert newest["step"] < 13
    assert "last.ckpt: cannot be read (Input/output error); resuming from" in capsys.readouterr().err
    assert (run_copy / "checkpoints/last.ckpt.unreadable").exists()


def test_every_fifth_checkpoint_is_kept(corpus_folder, tmp_path, capfd):
    """An interruption makes no difference. A kept checkpoint opens as a model, and resuming takes the newest one."""
    run_dir = tmp_path / "run"
    changes = ["trainer.keep_every=5", "horizon=11steps", "data.prompts=[]", "logger=[]", f"run_dir={run_dir}"]
    fit(begin_run(tiny_config(corpus_folder, *changes)), [StopAt(7)])
    fifth = run_dir / "checkpoints/step-00000005.ckpt"
    content = fifth.read_bytes()
    fit(resume_run(run_dir))
    assert "at step 7 of 11" in capfd.readouterr().out
    kept = sorted(run_dir.glob("checkpoints/step-*"))
    assert [file.name for file in kept] == ["step-00000005.ckpt", "step-00000010.ckpt"]
    assert [load_checkpoint(file)["step"] for file in kept] == [5, 10]
    assert fifth.read_bytes() == content
    weights = load_checkpoint(fifth)["state_dict"]
    model = open_model(str(fifth))[0]
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


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


@pytest.mark.promise("runs.md#A copy of a run that is training", "runs.md#It resumes, and a line names")
def test_logs_that_are_older_than_their_checkpoint(run_dir, capsys):
    """A line names them, and later rows do not join a half written one. Complete logs are passed over in silence."""
    rows = b"step,tag,value\n10,train/loss,4.5\n20,train/lo"
    (run_dir / "metrics.csv").write_bytes(rows)
    (run_dir / "samples.md").write_bytes(b"0123456789")
    with RunDirectory.open(run_dir) as run:
        run.truncate_logs({"samples.md": 10, "metrics.csv": len(rows)})
        assert capsys.readouterr().err == ""
        run.truncate_logs({"samples.md": 7, "metrics.csv": 997, "events.out.tfevents.1.host.1.0.run": 5})
    assert (run_dir / "metrics.csv").read_bytes() == b"step,tag,value\n10,train/loss,4.5\n"
    assert (run_dir / "samples.md").read_bytes() == b"0123456"
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"train.py: {run_dir}: the checkpoint is newer than metrics.csv, events.out.tfevents.1.host")
    assert line.endswith("copy these files again before you resume")


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
def test_link_out_of_a_run_is_refused(run_copy, tmp_path, name):
    """A run writes only to its own files. A link in a stranger's run is refused, and its target stays as it was."""
    target = tmp_path / "mine"
    target.write_text("my thesis")
    file = run_copy / name
    if file.is_dir():
        shutil.rmtree(file)
    file.parent.mkdir(exist_ok=True)
    file.unlink(missing_ok=True)
    file.symlink_to(target)
    line = refusal(resume_run, run_copy, "15steps")
    assert line.startswith(f"{file}: a link to {target}, and a run writes only inside its directory")
    assert target.read_text() == "my thesis"


def test_run_does_not_write_into_another_directory_of_its_name(run_dir, tmp_path):
    """Its own directory may have been replaced meanwhile."""
    with RunDirectory.open(run_dir) as run:
        run_dir.rename(tmp_path / "moved")
        run_dir.mkdir()
        line = refusal(run.save_last, lambda path: path.touch(), 13)
    assert "was deleted or replaced while its run was training, so nothing can be saved" in line
    assert list(run_dir.iterdir()) == []


# --- a run that leaves the machine that it began on ---


@pytest.mark.promise("runs.md#the code or the libraries")
def test_resuming_with_other_code_is_reported(run_copy):
    """A warning names both versions, and metrics.json tells which of them trained which steps."""
    last = run_copy / "checkpoints/last.ckpt"
    payload = load_checkpoint(last)
    payload["git_commit"] = "0" * 40
    payload["state"]["commits"] = {"0": "0" * 40}
    save_checkpoint(payload, last)
    done = train(f"resume={run_copy}", "horizon=15steps")
    assert f"so the run may not continue bit for bit (commit {'0' * 40} -> {code_version()})" in done.stderr
    figures = json.loads((run_copy / "metrics.json").read_text())
    assert (figures["commits"], figures["git_commit"]) == ({"0": "0" * 40, "13": code_version()}, code_version())


@pytest.mark.promise("runs.md#from any folder", "runs.md#does not need its text")
def test_text_may_have_moved(run_copy, trained, tmp_path, monkeypatch):
    """A run continues from any folder, without its text if that is prepared, and otherwise with data.path=."""
    monkeypatch.chdir(tmp_path)
    folder = trained.path.parent
    text = folder / "corpus.txt"
    moved = text.rename(tmp_path / "moved.txt")
    try:
        done = train(f"resume={run_copy}", "horizon=14steps")
        assert "continuing with the prepared text in" in done.stdout
        cache = (folder / "cache").rename(tmp_path / "cache-elsewhere")
        line = train_refusal(f"resume={run_copy}", "horizon=15steps")
        assert line.endswith("if the text is elsewhere now, add data.path=FILE") and str(text) in line
        assert "extending" in train(f"resume={run_copy}", "horizon=15steps", "data.path=moved.txt").stdout
        shutil.rmtree(folder / "cache")
        cache.rename(folder / "cache")
    finally:
        moved.rename(text)
    config = load_config(run_copy / "config.yaml")
    assert config.data.path == str(text)  # the old place
    lines = (run_copy / "command.txt").read_text().splitlines()
    assert [line for line in lines if line.startswith("#")] == [
        f"# after step {n}: horizon={n + 1}steps, was {n}steps" for n in (13, 14)
    ]
    assert lines[-2] == f"python train.py resume={run_copy} horizon=15steps data.path=moved.txt"
