"""prepare() into a directory, by any executor: the same bytes, and finished shards survive failures and kills."""

import multiprocessing
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, Executor, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from gpt.data.data_config import DataConfig
from gpt.data.prepare import prepare
from gpt.data.scan import CorpusScanner
from gpt.data.shards import encode_shard, make_shard_plan
from gpt.data.token_dataset import TokenSource
from gpt.data.tokenizer import TokenizerConfig
from gpt.errors import UserError
from harness import import_or_skip, refusal
from workshop import DOCUMENTS, read_files, split_ids, write_files

BPE = TokenizerConfig("bpe", 307)
SPAWN = multiprocessing.get_context("spawn")


@pytest.fixture(autouse=True)
def small_shards(monkeypatch):
    monkeypatch.setattr("gpt.data.scan.SHARD_BYTES", 900)


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> str:
    """Documents in 53 files."""
    return str(write_files(tmp_path_factory.mktemp("text"), [document * 3 for document in DOCUMENTS]).path)


@pytest.fixture(scope="module")
def long_texts(tmp_path_factory) -> str:
    """Three texts, too few to validate with whole ones: the end of the last does."""
    return str(write_files(tmp_path_factory.mktemp("long"), ["".join(DOCUMENTS[i::3]) for i in range(3)]).path)


def into(to: Path | str, text: str, cache: Path, executor: Executor | None = None, **more) -> TokenSource:
    """Prepare a text into a directory without printing."""
    data = DataConfig("text", text, **more)
    [source] = prepare(data, BPE, cache=cache, print_line=[].append, to=to, executor=executor).sources
    return source


def made_files(folder: Path) -> dict[str, bytes]:
    return {name: data for name, data in read_files(folder).items() if not name.startswith(".")}


@pytest.fixture(scope="module")
def undisturbed(text, tmp_path_factory) -> dict[str, bytes]:
    """The files that this process makes."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gpt.data.scan.SHARD_BYTES", 900)
        into(folder / "made", text, folder / "cache")
    made = made_files(folder / "made")
    assert len([name for name in made if name.startswith("shard-")]) > 10
    return made


ENGINES: dict[str, Callable[[], Executor]] = {
    "threads": lambda: ThreadPoolExecutor(3),
    "processes": lambda: ProcessPoolExecutor(2, SPAWN),
}


@pytest.mark.parametrize("engine", ENGINES)
def test_every_executor_makes_the_same(tmp_path, text, undisturbed, engine):
    """All executors write the same bytes, and a second call changes nothing."""
    with ENGINES[engine]() as executor:
        for _ in range(2):
            into(tmp_path / "made", text, tmp_path / "cache", executor)
            assert made_files(tmp_path / "made") == undisturbed


@pytest.mark.parametrize("name", ["text", "long_texts"])
def test_the_cache_holds_the_same(request, tmp_path, name):
    """A directory and the cache hold the same tokens and metadata, with and without an executor."""
    path = request.getfixturevalue(name)
    there = into(tmp_path / "made", path, tmp_path / "cache")
    for executor in (None, ThreadPoolExecutor(2)):
        cache = tmp_path / f"cache {executor is None}"
        data = DataConfig("text", path)
        [here] = prepare(data, BPE, 13, cache, [].append, executor=executor).sources
        assert split_ids(here) == split_ids(there)
        assert here.metadata == there.metadata


def test_shards_from_anywhere(tmp_path, text, undisturbed):
    """`encode_shard` is a plain function of a planned directory: in any order, some twice; prepare() then publishes."""
    made, cache = tmp_path / "made", tmp_path / "cache"
    scanner = CorpusScanner(DataConfig("text", text), cache, [].append)
    plan, _ = make_shard_plan(scanner, BPE, hash_all=False)
    plan.write(made)
    numbers = [*range(len(plan.shard_starts)), 0, 3]
    random.Random(3).shuffle(numbers)
    for number in numbers:
        assert encode_shard(made, number, tmp_path / "another machine's") > 0
    assert not (made / "dataset.json").exists()
    into(made, text, cache)
    assert made_files(made) == undisturbed


def test_an_executor_that_is_broken(tmp_path, text):
    """One line reports a broken executor, and the plan stays."""
    with ProcessPoolExecutor(1, SPAWN) as executor:
        with pytest.raises(BrokenExecutor):
            executor.submit(os.kill, executor.submit(os.getpid).result(), signal.SIGKILL).result()
        with pytest.raises(UserError, match=r"made: nothing was encoded .*: give another executor"):
            into(tmp_path / "made", text, tmp_path / "cache", executor)
    assert (tmp_path / "made/plan.json").exists()


def test_shards_that_fail(tmp_path, text, undisturbed):
    """One line names the failed shards with their reasons. The others are kept."""
    copy, made, cache = tmp_path / "text", tmp_path / "made", tmp_path / "cache"
    shutil.copytree(text, copy)
    lost = copy / "007.txt"

    class Losing(ThreadPoolExecutor):
        def submit(self, *arguments, **more):
            if lost.exists():
                lost.rename(tmp_path / "lost")
            return super().submit(*arguments, **more)

    line = rf"{made}: 1 of \d+ shards failed \(shard \d+: {lost}: cannot be read \(No such file or directory\)"
    with pytest.raises(UserError, match=line) as caught:
        into(made, str(copy), cache, Losing(2))
    assert str(caught.value).endswith("fix that and prepare it again, which keeps the others")
    kept = {file.name: file.stat().st_mtime_ns for file in made.glob("shard-*.json")}
    (tmp_path / "lost").rename(lost)
    into(made, str(copy), cache)
    assert {name: (made / name).stat().st_mtime_ns for name in kept} == kept
    names = [name for name in undisturbed if name.endswith(".bin")]
    assert {name: read_files(made)[name] for name in names} == {name: undisturbed[name] for name in names}


def kill_after(made: Path, count: int, kill: Callable[[], object]) -> threading.Thread:
    """Start a thread that calls `kill` once there are `count` records."""

    def wait() -> None:
        while len(list(made.glob("shard-*.json"))) < count:
            time.sleep(0.001)
        kill()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


@pytest.mark.slow
def test_dask_with_a_worker_that_is_killed(tmp_path, text, undisturbed):
    """Of a real cluster of two workers one is killed. Dask repeats its shards on the other."""
    distributed = import_or_skip("distributed")
    with (
        distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster,
        distributed.Client(cluster) as client,
    ):
        [worker, _] = client.run(os.getpid).values()
        thread = kill_after(tmp_path / "made", 3, lambda: os.kill(worker, signal.SIGKILL))
        into(tmp_path / "made", text, tmp_path / "cache", client.get_executor())
        thread.join()
    assert made_files(tmp_path / "made") == undisturbed


def test_what_is_there_is_checked(tmp_path, text, undisturbed):
    """Only a shard that is gone, shorter or changed is encoded again."""
    made, cache = tmp_path / "made", tmp_path / "cache"
    into(made, text, cache)
    (made / "train-000001.bin").unlink()
    os.truncate(made / "train-000003.bin", 10)
    tokens = np.fromfile(made / "train-000005.bin", "uint16")
    tokens[7] ^= 1
    tokens.tofile(made / "train-000005.bin")
    before = {file.name: file.stat().st_mtime_ns for file in made.glob("train-*.bin")}
    into(made, text, cache)
    changed = {file.name for file in made.glob("train-*.bin") if before.get(file.name) != file.stat().st_mtime_ns}
    assert changed == {"train-000001.bin", "train-000003.bin", "train-000005.bin"}
    assert made_files(made) == undisturbed


def test_another_text_in_the_directory(tmp_path, text, long_texts):
    """Another text, or a changed one, is refused, and nothing is overwritten."""
    made, cache = tmp_path / "made", tmp_path / "cache"
    into(made, text, cache)
    before = made_files(made)
    for other in (lambda: into(made, long_texts, cache), lambda: into(made, text, cache, errors="replace")):
        printed = refusal(other)
        assert printed == f"{made}: holds another text, or one that has changed since: name an empty folder"
    assert made_files(made) == before


def test_a_folder_of_ones_own_takes_one_text(tmp_path, text):
    """A mixture and a URL are refused before anything is read."""
    data = DataConfig("mix", ["python_docs", text], [1, 1])
    assert "takes one text, not a mixture" in refusal(prepare, data, BPE, 13, tmp_path, to=tmp_path / "made")
    assert "to='s3://texts/made' is a URL: name a folder" in refusal(
        prepare, text, BPE, 13, tmp_path, to="s3://texts/made"
    )
    assert list(tmp_path.iterdir()) == []


def test_separators_and_encodings(tmp_path):
    """Separators and encodings reach the shards through the plan."""
    (tmp_path / "text").mkdir()
    for i in range(7):
        text = "<|endoftext|>".join(f"Café {i}, table {j * j}." for j in range(31))
        (tmp_path / f"text/{i}.txt").write_text(text, encoding="latin-1")
    how = {"separator": "<|endoftext|>", "encoding": "latin-1"}
    with ENGINES["processes"]() as executor:
        there = into(tmp_path / "made", str(tmp_path / "text"), tmp_path / "cache", executor, **how)
    data = DataConfig("text", f"{tmp_path}/text/?.txt", **how)
    [here] = prepare(data, BPE, 13, tmp_path / "cache", [].append).sources
    assert sum(split["documents"] for split in here.metadata["splits"].values()) == 7 * 31
    assert there.metadata == here.metadata


@pytest.mark.slow
def test_a_hundred_kills(tmp_path, text, undisturbed):
    """Two processes encode random shards and are killed at random moments. The result is the same bytes."""
    chance, made, kills = random.Random(3), tmp_path / "made", 0
    scanner = CorpusScanner(DataConfig("text", text), tmp_path / "cache", [].append)
    plan, _ = make_shard_plan(scanner, BPE, hash_all=False)
    plan.write(made)
    context = multiprocessing.get_context("fork")
    while kills < 100:
        running = []
        for _ in range(2):
            number, cache = chance.randrange(len(plan.shard_starts)), tmp_path / chance.choice(["one", "another"])
            running.append(context.Process(target=encode_shard, args=(made, number, cache)))
            running[-1].start()
        time.sleep(chance.uniform(0, 0.03))
        for process in running:
            process.kill()
            process.join()
            kills += process.exitcode == -signal.SIGKILL
        if chance.random() < 0.5:  # so that there is always something left to make
            for file in sorted(made.glob("shard-*.json"))[::3]:
                file.unlink()
    into(made, text, tmp_path / "cache")
    assert made_files(made) == undisturbed
    assert list(made.glob(".*.bin.*")) == []
