"""Interruptions, damage and concurrent processes do not change the files that preparing makes."""

import errno
import itertools
import json
import os
import random
import re
import shutil
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from gpt.data import shards
from gpt.data.data_config import DataConfig
from gpt.data.dataset_cache import write_checked_json
from gpt.data.token_dataset import SPLITS
from gpt.data.tokenizer import TokenizerConfig, byte_tokenizer
from gpt.errors import ExternalError, UserError
from harness import refusal
from workshop import (
    DOCUMENTS,
    LARGE_SHARDS,
    SMALL_SHARDS,
    Preparation,
    cache_entries,
    dataset_folder,
    expected_split_ids,
    patched_constants,
    prepare_source,
    raising_function,
    read_files,
    read_joined_files,
    record_chunks,
    remount,
    split_ids,
    write_documents,
    write_files,
    write_text,
)

# --- interrupted ---


ENDS = [KeyboardInterrupt(), MemoryError(), OSError(5, "Input/output error"), ExternalError("the store is away")]


@pytest.mark.parametrize("error", ENDS, ids=repr)
def test_a_preparation_resumes_after_any_error(tmp_path, many_files, undisturbed_files, error):
    """After an interruption finished shards are kept, a line reports it, and each other chunk is encoded once."""
    cache, printed = tmp_path / "cache", list[str]()
    with patched_constants(SMALL_SHARDS):
        with record_chunks() as all_chunks:
            prepare_source(many_files, tmp_path / "undisturbed")
        with (
            record_chunks(100, raising_function(error)),
            pytest.raises(UserError if isinstance(error, OSError) else type(error)),
        ):
            prepare_source(many_files, cache)
        working = dataset_folder(cache)
        assert working.name.startswith(".preparing-text-byte-")
        records = [json.loads(file.read_text()) for file in working.glob("shard-*.json")]
        done = sum(record["splits"][name]["bytes"] for record in records for name in SPLITS)
        with record_chunks() as remaining_chunks:
            prepare_source(many_files, cache, print_line=printed.append)
    size = sum(len(chunk.encode()) for chunk in all_chunks)
    assert 1511 <= done < size
    assert printed[0] == f"resuming the preparation of text at {done / size:.0%}"
    assert [line.split()[0] for line in printed[1:]] == ["prepared"]
    assert sum(len(chunk.encode()) for chunk in remaining_chunks) == size - done
    assert not Counter(remaining_chunks) - Counter(all_chunks)
    assert read_files(dataset_folder(cache)) == undisturbed_files


def test_shards_are_synced_before_their_record(tmp_path, many_files, monkeypatch):
    """The files of a shard are synced before its record is written, so a power cut loses nothing."""
    synced: dict[int, int] = {}
    safe: list[bool] = []
    fsync, write = os.fsync, shards.write_checked_json

    def watched_fsync(descriptor: int) -> None:
        fsync(descriptor)
        synced[os.fstat(descriptor).st_ino] = os.fstat(descriptor).st_size

    def watched_write(file: Path, stored: dict) -> None:
        for split in SPLITS if "shard" in file.name else ():
            token_file = file.with_name(f"{split}-{file.name[6:12]}.bin")
            safe.append(synced[token_file.stat().st_ino] == 2 * stored["splits"][split]["tokens"])
        write(file, stored)

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(shards, "write_checked_json", watched_write)
    with patched_constants(SMALL_SHARDS):
        prepare_source(many_files, tmp_path / "cache")
    assert len(safe) >= 4 and all(safe)


def test_a_small_text_resumes_after_an_interruption(tmp_path, many_files, undisturbed_joined):
    """A text that fits into the sample is encoded from memory the first time, and read again after an interruption."""
    cache = tmp_path / "cache"
    with patched_constants(LARGE_SHARDS):
        with record_chunks(100, raising_function(MemoryError())), pytest.raises(MemoryError):
            prepare_source(many_files, cache)
        assert (dataset_folder(cache) / "plan.json").exists()
        prepare_source(many_files, cache)
    assert read_joined_files(dataset_folder(cache)) == undisturbed_joined


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tokenizer", "ends", "code"),
    [("byte", signal.SIGKILL, -9), ("bpe", signal.SIGKILL, -9), ("byte", signal.SIGINT, 130)],
    ids=["kill", "kill with bpe", "Ctrl-C"],
)
@pytest.mark.parametrize("first", [1, *(pytest.param(i, marks=pytest.mark.faults) for i in (2, 3))])
def test_a_kill_at_every_third_file_access_changes_nothing(tmp_path, many_files, first, tokenizer, ends, code):
    """A kill at any access to the file system prints nothing, and does not change the result.

    Every third access is tried, from the first on. `pytest -m faults` tries the others.
    """
    with patched_constants(SMALL_SHARDS):
        prepare_source(many_files, tmp_path / "undisturbed", TokenizerConfig(tokenizer, 307))
    expected = read_joined_files(dataset_folder(tmp_path / "undisturbed"))
    for number in itertools.count(first, 3):
        is_one_shard = number % 5 == 0 and tokenizer == "byte"  # all of the text would train another tokenizer
        values = LARGE_SHARDS if is_one_shard else SMALL_SHARDS
        cache = tmp_path / str(number)
        ended, printed = Preparation(many_files, cache, values, at=("", number, ends), tokenizer=tokenizer).wait()
        assert ended in (0, code), printed
        first_words = {line.split()[0] for line in printed.splitlines()}
        assert first_words <= {"reading", "the", "training", "resuming", "prepared"}
        if ended == 0:
            break
        ended, printed = Preparation(many_files, cache, values, tokenizer=tokenizer).wait()
        assert ended == 0, printed
        assert read_joined_files(dataset_folder(cache)) == expected, number
        shutil.rmtree(cache)
    assert number > 30


def test_random_kills_change_nothing(tmp_path, many_files, undisturbed_joined):
    """Killed at random moments, each process resumes the work of the last one. The result is the same."""
    cache, chooser, outputs = tmp_path / "cache", random.Random(11), []
    values = SMALL_SHARDS | {"gpt.data.scan.SHARD_BYTES": 101}
    for attempt in itertools.count(1):
        preparation = Preparation(many_files, cache, values)
        preparation.wait_until_ready()
        time.sleep(chooser.random() * 0.01 * attempt)
        preparation.send_signal(signal.SIGKILL)
        code, output = preparation.wait()
        outputs.append(output)
        assert code in (0, -signal.SIGKILL), outputs[-1]
        if code == 0:
            break
    assert attempt > 2
    assert read_joined_files(dataset_folder(cache)) == undisturbed_joined
    shares = [int(share) for output in outputs for share in re.findall(r"resuming .* at (\d+)%", output)]
    assert shares == sorted(shares)


@pytest.mark.parametrize("number", [1, 2, 3, 4, 5, 6])
def test_a_kill_while_deleting_leaves_nothing_usable(tmp_path, many_files, undisturbed_files, number):
    """The rest of a failed preparation that was being deleted is never resumed."""
    cache = tmp_path / "cache"
    code, _ = Preparation(many_files, cache, at=("os.remove ('", number, signal.SIGKILL), context_length=100_000).wait()
    assert code == -signal.SIGKILL
    code, printed = Preparation(many_files, cache).wait()
    assert code == 0, printed
    assert read_files(dataset_folder(cache)) == undisturbed_files


def test_work_of_an_earlier_version_is_discarded(tmp_path, many_files, undisturbed_files):
    """A plan of another format is discarded with everything that belongs to it."""
    cache = tmp_path / "cache"
    with patched_constants(SMALL_SHARDS):
        prepare_source(many_files, cache)
        folder = dataset_folder(cache)
        folder = folder.rename(folder.with_name(f".preparing-{folder.name}"))
        (folder / "dataset.json").unlink()
        (folder / "train.bin").write_bytes(b"half")
        write_checked_json(folder / "plan.json", {"plan": 1, "format": 3, "split": {}, "places": [], "bytes": 7})
        prepare_source(many_files, cache)
    assert read_files(dataset_folder(cache)) == undisturbed_files


# --- text that changes ---


CHANGED = (
    "has changed since the preparation of the text began: put it back, or if a program writes to it, such as a log, "
)
CHANGED += "leave it out of data.path"


@pytest.mark.parametrize("when", ["read", "encoded"])
@pytest.mark.parametrize("change", ["longer", "as long", "gone"])
def test_a_text_that_changes_is_refused(tmp_path, change, when):
    """A file that changes is named and nothing is kept. The next preparation reads the new text."""
    data, cache = write_files(tmp_path / "text"), tmp_path / "cache"
    file = tmp_path / "text/041.txt"

    def happen() -> None:
        if change == "gone":
            file.unlink()
        else:
            file.write_text(DOCUMENTS[41].swapcase() + "!" * (change == "longer"), encoding="utf-8")

    with patched_constants(SMALL_SHARDS | {"gpt.data.scan.SHARD_BYTES": 10**9}):
        with record_chunks(when == "encoded", happen):
            printed = refusal(prepare_source, data, cache, print_line=lambda line: happen() if when == "read" else None)
        gone = f"{file}: cannot be read (No such file or directory)"
        assert printed.startswith(gone if change == "gone" else f"{file}: {CHANGED}")
        assert cache_entries(cache) == []
        assert split_ids(prepare_source(data, cache)) == expected_split_ids(data, byte_tokenizer())


@pytest.mark.parametrize("when", ["read", "encoded"])
def test_text_that_changes_and_changes_back(tmp_path, many_files, undisturbed_files, when):
    """Work on a changed text is not resumed after the change is undone."""
    cache = tmp_path / "cache"
    shutil.copytree(many_files.path, tmp_path / "text")
    data, file = DataConfig("text", str(tmp_path / "text")), tmp_path / "text/4/text.jsonl"
    before = file.read_text()

    def change(line: str = "") -> None:
        file.write_text(before.replace("caf", "CAF") + before)

    with patched_constants(SMALL_SHARDS):
        ends = pytest.raises((MemoryError, UserError))
        at = 150 if when == "encoded" else 60  # after the file was read again, or before
        with ends, record_chunks(at, raising_function(MemoryError())), record_chunks(when == "encoded", change):
            prepare_source(data, cache, print_line=change if when == "read" else [].append)
        assert file.read_text() != before
        file.write_text(before)
        prepare_source(data, cache)
    assert read_files(dataset_folder(cache)) == undisturbed_files


# --- several processes at once ---


def two_at_once(
    data: DataConfig, cache: Path, at: tuple[str, int] = ("shard-000001.json", 3)
) -> tuple[Preparation, Preparation]:
    """Return a process that is paused while it prepares, and one that waits for it."""
    first = Preparation(data, cache, at=(*at, signal.SIGSTOP))
    first.wait_until_ready()
    second = Preparation(data, cache)
    second.wait_until_printed("waiting")
    return first, second


@pytest.mark.parametrize("ends", [False, True], ids=["waits", "Ctrl-C"])
def test_two_processes_at_once(tmp_path, many_files, undisturbed_files, ends):
    """The second process waits, prints that, and uses the result. Ctrl-C ends it without disturbing the first."""
    cache = tmp_path / "cache"
    first, second = two_at_once(many_files, cache)
    if ends:
        second.send_signal(signal.SIGINT)
        assert second.wait()[0] == 130
    first.resume()
    code, output = first.wait()
    assert code == 0
    assert [line.split()[0] for line in output.splitlines()] == ["reading", "the", "prepared"]
    waiting = f"process {first.pid} is preparing this text: waiting for it\n"
    assert second.wait() == (130 if ends else 0, waiting)
    assert read_files(dataset_folder(cache)) == undisturbed_files


@pytest.mark.parametrize(("at", "next_says"), [(("plan.json", 1), "reading"), (("shard-000001.json", 3), "resuming")])
def test_waiting_for_one_that_is_killed(tmp_path, many_files, undisturbed_files, at, next_says):
    """The waiting process resumes what the killed one has left, even if that is nothing."""
    cache = tmp_path / "cache"
    first, second = two_at_once(many_files, cache, at)
    first.send_signal(signal.SIGKILL)
    assert first.wait()[0] == -signal.SIGKILL
    code, output = second.wait()
    assert code == 0
    waiting_line, next_line, *_ = output.splitlines()
    assert waiting_line == f"process {first.pid} is preparing this text: waiting for it"
    assert next_line.split()[0] == next_says
    assert read_files(dataset_folder(cache)) == undisturbed_files


# --- the disk ---


REMEDY = "fix that or name another folder with data.cache=, and run the command again"


@pytest.mark.parametrize("below", ["", "cache"])
def test_cache_that_cannot_be_written(tmp_path, below):
    """A file in place of the cache folder is named, with the key that chooses another folder."""
    data, cache = write_documents(tmp_path), tmp_path / "file" / below
    (tmp_path / "file").write_text("in the way")
    reason = "Not a directory" if below else "File exists"
    assert refusal(prepare_source, data, cache) == f"{cache}: cannot be written ({reason}); {REMEDY}"
    assert (tmp_path / "file").read_text() == "in the way"


def test_read_only_cache(tmp_path, disk):
    """On a read-only disk prepared text is used, and new text is refused with one line."""
    data, cache = write_text(tmp_path, "a text " * 101), disk / "cache"
    ids = split_ids(prepare_source(data, cache))
    remount(disk, "ro")
    assert split_ids(prepare_source(data, cache)) == ids
    reason = f"cannot be written (Read-only file system); {REMEDY}"
    for place in (cache, disk / "other"):
        assert refusal(prepare_source, write_documents(tmp_path), place) == f"{place}: {reason}"


@pytest.mark.parametrize("half", [0, 1])
def test_full_disk(disk, many_files, undisturbed_files, half):
    """A full disk gives one line at any point. The preparation resumes once there is room."""
    cache, outputs = disk / "cache", []
    for pages in itertools.count(1 + half, 2):
        remount(disk, f"size={4096 * pages}")
        code, printed = Preparation(many_files, cache).wait()
        if code == 0:
            break
        lines = [line for line in printed.splitlines() if line.split()[0] not in ("reading", "resuming", "the")]
        assert code == 2
        assert len(lines) == 1, printed
        assert re.match(rf"prepare: {cache}: the disk is full \(No space left on device\); {REMEDY}", lines[0])
        remount(disk, "size=8m")
        code, printed = Preparation(many_files, cache).wait()
        assert code == 0, printed
        assert read_files(dataset_folder(cache)) == undisturbed_files
        outputs.append(printed.split()[0])
        shutil.rmtree(cache)
    assert pages > 7
    assert {"reading", "resuming"} <= set(outputs)


@pytest.mark.parametrize(("number", "what"), [(errno.EDQUOT, "the disk is full"), (errno.EIO, "cannot be written")])
@pytest.mark.parametrize("call", ["fsync", "replace", "mkdir"])
def test_disk_that_fails(tmp_path, many_files, undisturbed_files, monkeypatch, call, number, what):
    """A failure of any system call gives one line with the cache, and the next preparation resumes."""
    cache, real, failed = tmp_path / "cache", getattr(os, call), 0
    with patched_constants(SMALL_SHARDS):
        for at in (1, 2, 4, 7):
            calls = itertools.count(1)

            def fail(*arguments, calls=calls, at=at):
                if next(calls) == at:
                    raise OSError(number, os.strerror(number))
                return real(*arguments)

            with monkeypatch.context() as patch:
                patch.setattr(os, call, fail)
                try:
                    prepare_source(many_files, cache)
                except UserError as caught:
                    failed += 1
                    assert str(caught).startswith(str(cache))
                    assert f": {what} ({os.strerror(number)}); {REMEDY}" in str(caught)
        prepare_source(many_files, cache)
    assert failed
    assert read_files(dataset_folder(cache)) == undisturbed_files


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("plan.json", "garbage"),
        ("plan.json", "flipped"),
        ("tokenizer.json", "gone"),
        ("tokenizer.json", "flipped"),
        ("shard-000000.json", "another"),
        ("shard-000000.json", "flipped"),
        ("train-000000.bin", "gone"),
        ("train-000000.bin", "flipped"),
    ],
)
def test_damaged_unfinished_work_is_made_again(tmp_path, many_files, undisturbed_files, name, damage):
    """Damaged files of an interrupted preparation are detected and made again."""
    cache = tmp_path / "cache"
    with patched_constants(SMALL_SHARDS):
        with record_chunks(100, raising_function(MemoryError())), pytest.raises(MemoryError):
            prepare_source(many_files, cache)
        file = dataset_folder(cache) / name
        content = file.read_bytes()
        flipped = content.replace(b"1", b"2") if name.endswith(".json") else bytes([content[0] ^ 1]) + content[1:]
        if damage == "gone":
            file.unlink()
        else:
            file.write_bytes({"garbage": b"\xff\xfe{", "another": b"{}", "flipped": flipped}[damage])
        prepare_source(many_files, cache)
    assert read_files(dataset_folder(cache)) == undisturbed_files
