"""A text prepared by every engine: the same bytes, and what is made is kept whatever fails or is killed."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, Executor, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

import psutil
import pytest

from gpt.errors import UserError
from gpt.prepare import encode, encode_all, join, plan, prepare
from harness import ROOT, needs
from workshop import DOCUMENTS, content, write_files

HOW = {"tokenizer": "bpe", "vocab_size": 307, "shard_bytes": 300}
SPAWN = multiprocessing.get_context("spawn")


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> str:
    """Documents in 53 files."""
    return str(write_files(tmp_path_factory.mktemp("text"), [document * 3 for document in DOCUMENTS]).path)


@pytest.fixture(scope="module")
def undisturbed(text, tmp_path_factory) -> dict[str, bytes]:
    """What it comes to in this process."""
    folder = tmp_path_factory.mktemp("undisturbed")
    prepare(text, folder / "store", cache=folder / "cache", **HOW)
    return content(folder / "store")


ENGINES: dict[str, Callable[[], Executor]] = {
    "threads": lambda: ThreadPoolExecutor(3),
    "processes": lambda: ProcessPoolExecutor(2, SPAWN),
}


@pytest.mark.parametrize("engine", ENGINES)
def test_every_executor_makes_the_same(tmp_path, text, undisturbed, engine):
    """Byte for byte, and a second time nothing changes."""
    with ENGINES[engine]() as executor:
        for _ in range(2):
            prepare(text, tmp_path / "store", executor=executor, cache=tmp_path / "cache", **HOW)
            assert content(tmp_path / "store") == undisturbed


@pytest.mark.slow
def test_into_a_store(s3, tmp_path, text, undisturbed):
    """The very files, by processes that all reach an S3 server."""
    with ENGINES["processes"]() as executor:
        prepare(text, "s3://texts/made", executor=executor, cache=tmp_path / "cache", **HOW)
    made = {Path(name).name: s3.cat_file(name) for name in s3.find("texts/made")}
    assert made == {name: bytes for name, bytes in undisturbed.items() if name != "CACHEDIR.TAG"}


def test_an_executor_that_is_broken(tmp_path, text):
    """One line, and what is planned stays."""
    with ProcessPoolExecutor(1, SPAWN) as executor:
        with pytest.raises(BrokenExecutor):
            executor.submit(os.kill, executor.submit(os.getpid).result(), signal.SIGKILL).result()
        with pytest.raises(UserError, match=r"store: nothing was encoded .*: give another executor"):
            prepare(text, tmp_path / "store", executor=executor, cache=tmp_path / "cache", **HOW)
    assert (tmp_path / "store/plan.json").exists()


def test_a_queue_of_ones_own(tmp_path, text, undisturbed):
    """`plan`, `encode` and `join` are plain functions: whoever takes numbers from anywhere, and some of them twice."""
    store, cache = tmp_path / "store", tmp_path / "cache"
    count = plan(text, store, cache=cache, **HOW)
    numbers: SimpleQueue[int] = SimpleQueue()
    for number in [*range(count), 0, count - 1]:
        numbers.put(number)

    def work() -> None:
        while not numbers.empty():
            assert encode(store, numbers.get(), cache) > 0

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    join(store)
    assert content(store) == undisturbed


@pytest.mark.parametrize("executor", [None, ThreadPoolExecutor(2)], ids=["none", "threads"])
def test_shards_that_fail(tmp_path, text, undisturbed, executor):
    """They are named with their reason, in one line, and the others are kept."""
    copy, store, cache = tmp_path / "text", tmp_path / "store", tmp_path / "cache"
    copy.mkdir()
    for file in Path(text).iterdir():
        os.link(file, copy / file.name)
    count = plan(str(copy), store, cache=cache, **HOW)
    lost = copy / "007.txt"
    lost.rename(tmp_path / "lost")
    line = rf"{store}: 1 of {count} shards failed \(shard \d+: {lost}: cannot be read \(No such file or directory\)"
    with pytest.raises(UserError, match=line) as caught:
        encode_all(store, executor, cache=cache)
    assert str(caught.value).endswith("mend that and run the command again, which keeps the others")
    assert len(list(store.glob("part-*.json"))) == count - 1
    (tmp_path / "lost").rename(lost)
    encode_all(store, executor, cache=cache)
    join(store)
    names = {name for name in undisturbed if name.startswith(("train", "validation", "tokenizer"))}
    assert {name: content(store)[name] for name in names} == {name: undisturbed[name] for name in names}


def test_a_process_that_dies(tmp_path, text, undisturbed):
    """One line, and the next call makes the rest."""
    store, cache = tmp_path / "store", tmp_path / "cache"

    def kill() -> None:
        while not list(store.glob("part-*.json")):
            time.sleep(0.001)
        for child in multiprocessing.active_children():
            child.kill()

    thread = threading.Thread(target=kill)
    thread.start()
    died = pytest.raises(UserError, match=r"shards failed \(shard \d+: A process in the process pool was terminated")
    with ProcessPoolExecutor(1, SPAWN) as executor, died:
        prepare(text, store, executor=executor, cache=cache, **HOW)
    thread.join()
    prepare(text, store, cache=cache, **HOW)
    assert content(store) == undisturbed


# --- the command, on all cores ---


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> Path:
    """A text for two processes, in one file."""
    file = tmp_path_factory.mktemp("large") / "text.txt"
    sentences = "".join(DOCUMENTS)
    with file.open("w", encoding="utf-8") as stream:
        for i in range(150_000_000 // len(sentences.encode())):
            stream.write(f"{i} {sentences}")
    return file


@pytest.fixture(scope="module")
def of_large(tmp_path_factory, large) -> dict:
    """What one process makes of it, undisturbed."""
    folder = tmp_path_factory.mktemp("of_large")
    prepare(str(large), folder / "store", shard_bytes=10_000_000, cache=folder / "cache")
    return content(folder / "store")


@pytest.mark.slow
@pytest.mark.parametrize("ends", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_command_ends_with_its_processes(tmp_path, large, of_large, ends):
    """Whichever signal ends it, in two seconds no process of it is left; repeated, it makes the rest and the same."""
    store, cache = tmp_path / "store", tmp_path / "cache"
    command = [sys.executable, "-m", "gpt.prepare", "--shard-bytes", "10000000"]
    command += ["--text", str(large), "--to", str(store), "--cache", str(cache)]
    heard = lambda: signal.signal(signal.SIGINT, signal.default_int_handler)  # noqa: E731 - a script's & ignores it
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, preexec_fn=heard)
    deadline = time.monotonic() + 120
    while len(list(store.glob("part-*.json"))) < 2:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.01)
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) >= 2
    process.send_signal(ends)
    _, errors = process.communicate(timeout=30)
    assert process.returncode in (-ends, 128 + ends)
    assert "Traceback" not in errors
    _, alive = psutil.wait_procs(children, timeout=2)
    assert alive == []
    made = {file.name: file.stat().st_mtime_ns for file in store.glob("part-*.json")}
    assert subprocess.run(command, cwd=ROOT, timeout=120).returncode == 0
    assert {name: (store / name).stat().st_mtime_ns for name in made} == made
    assert content(store) == of_large


@pytest.mark.slow
def test_dask_with_a_worker_that_is_killed(tmp_path, text, undisturbed):
    """A real cluster of two workers; Dask makes elsewhere what the killed one had in hand."""
    distributed = needs("distributed")
    store = tmp_path / "store"
    with (
        distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster,
        distributed.Client(cluster) as client,
    ):
        [worker, _] = client.run(os.getpid).values()

        def kill() -> None:
            while len(list(store.glob("part-*.json"))) < 3:
                time.sleep(0.001)
            os.kill(worker, signal.SIGKILL)

        thread = threading.Thread(target=kill)
        thread.start()
        prepare(text, store, executor=client.get_executor(), cache=tmp_path / "cache", **HOW)
        thread.join()
    assert content(store) == undisturbed
