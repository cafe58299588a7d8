"""A text prepared in parts: the same bytes however many there are, whoever makes them, and whatever kills them."""

import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import time
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest

from gpt.console import command_line
from gpt.errors import OutsideError
from gpt.prepare import main
from gpt.text.corpus.config import DataConfig
from gpt.text.prepare.prepare import prepare
from gpt.text.prepare.shard import FILES
from gpt.text.prepared import PreparedText
from gpt.text.shards import GROUP
from gpt.text.tokenizer import TokenizerConfig, gpt2_tokenizer
from harness import refusal
from workshop import DOCUMENTS, ROOT, content, write_documents, write_files

BPE = ["--tokenizer", "bpe", "--vocab-size", "307", "--shard-bytes", "300"]
START = multiprocessing.get_context("forkserver")
START.set_forkserver_preload(["gpt.prepare"])


def plan(store: Path | str, text: str, cache: Path, *more: str) -> None:
    main(["--to", str(store), "--plan", "--text", text, "--cache", str(cache), *BPE, *more])


def run(store: Path | str, cache: Path, *step: str) -> None:
    main(["--to", str(store), "--cache", str(cache), *step])


def make(store: Path | str, text: str, cache: Path, *more: str) -> None:
    """Plan, one part and publish, as one command."""
    main(["--to", str(store), "--text", text, "--cache", str(cache), *(more or BPE)])


def prepared(store: Path | str, cache: Path) -> PreparedText:
    return prepare(DataConfig("prepared", str(store)), TokenizerConfig(), 13, cache).sources[0]


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> str:
    """Documents in 53 files."""
    return str(write_files(tmp_path_factory.mktemp("files")).path)


@pytest.fixture(scope="module")
def long_texts(tmp_path_factory) -> str:
    """Three texts, too few to validate with whole ones: the end of the last does."""
    return str(write_files(tmp_path_factory.mktemp("long"), ["".join(DOCUMENTS[i::3]) for i in range(3)]).path)


@pytest.mark.parametrize("parts", [2, 3, 7, 100])
@pytest.mark.parametrize("text", ["files", "long_texts"])
def test_any_parts_make_the_same(request, tmp_path, text, parts):
    """Parts in any order, some of them twice: byte for byte what one command makes."""
    text = request.getfixturevalue(text)
    make(tmp_path / "one", text, tmp_path / "cache")
    plan(tmp_path / "many", text, tmp_path / "cache")
    order = [*range(1, parts + 1), 1, parts]
    random.Random(parts).shuffle(order)
    for part in order:
        run(tmp_path / "many", tmp_path / "another machine's", "--part", f"{part}/{parts}")
    run(tmp_path / "many", tmp_path / "cache", "--join")
    assert content(tmp_path / "many") == content(tmp_path / "one")


@pytest.mark.parametrize(("text", "shard_bytes"), [("files", "300"), ("files", "2000"), ("long_texts", "1")])
def test_equals_one_machine(request, tmp_path, monkeypatch, text, shard_bytes):
    """Shards hold what train.py makes of the text, those of more than one group in blocks; the corpus is the same."""
    monkeypatch.setattr("gpt.text.prepare.shard.LEAST", 8)
    text = request.getfixturevalue(text)
    make(tmp_path / "store", text, tmp_path / "cache", *BPE[:-1], shard_bytes)
    there = prepared(tmp_path / "store", tmp_path / "cache")
    how = TokenizerConfig("bpe", 307)
    [here] = prepare(DataConfig("text", text), how, 13, tmp_path / "cache", lambda line: None).sources
    files = [sorted(group) for _, group in groupby(sorted((tmp_path / "store").glob("train-*")), lambda f: f.name[:12])]
    start, many = 0, len(files) > 10
    assert many == (shard_bytes == "300")
    for shard in files:
        found = np.concatenate([np.fromfile(file, there.validation.dtype) for file in shard])
        count = min(256 if many else 16, -(-len(found) // 8))
        blocks = np.array_split(here.at_hand[start : start + len(found)], count)
        assert len(shard) == min(16, len(blocks))
        assert found.tolist() == np.concatenate([block for n in range(16) for block in blocks[n::16]]).tolist()
        start += len(found)
    assert start == len(here.train)
    assert there.validation.tolist() == here.validation.tolist()
    assert there.manifest["splits"]["validation"] == here.manifest["splits"]["validation"]
    key = dict(there.manifest["key"])
    assert ("shards" in key) == many
    key.pop("shards", None)
    assert key == here.manifest["key"]


def test_separators_and_encodings(tmp_path):
    """In parts as on one machine, from the plan on."""
    for i in range(7):
        text = "<|endoftext|>".join(f"Café {i}, table {j * j}." for j in range(31))
        (tmp_path / f"{i}.txt").write_text(text, encoding="latin-1")
    how, store = {"separator": "<|endoftext|>", "encoding": "latin-1"}, tmp_path / "store"
    plan(store, f"{tmp_path}/?.txt", tmp_path / "cache", *(f"--{key}={value}" for key, value in how.items()))
    for part in (2, 1):
        run(store, tmp_path / "cache", "--part", f"{part}/2")
    run(store, tmp_path / "cache", "--join")
    data = DataConfig("text", f"{tmp_path}/?.txt", **how)
    [here] = prepare(data, TokenizerConfig("bpe", 307), 13, tmp_path / "cache", lambda line: None).sources
    assert sum(here.manifest["splits"][name]["documents"] for name in here.manifest["splits"]) == 7 * 31
    published = prepared(store, tmp_path / "cache").manifest
    assert published["key"]["corpus"] == here.manifest["key"]["corpus"]
    for name, split in here.manifest["splits"].items():
        assert published["splits"][name]["documents"] == split["documents"]


def test_what_is_published(files, tmp_path, capsys):
    """The store says what it does, is marked as made, and can be planned again if that changes nothing."""
    make(tmp_path / "store", files, tmp_path / "cache", "--shard-bytes", "300")
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(rf"planned [\d,]+ shards of 53 files, [\d,]+ bytes, in {tmp_path}/store", lines[-2])
    assert re.fullmatch(rf"published [\d,]+ tokens in \d+ shards: data=prepared data.path={tmp_path}/store", lines[-1])
    before = content(tmp_path / "store")
    make(tmp_path / "store", files, tmp_path / "cache", "--shard-bytes", "300")
    assert content(tmp_path / "store") == before
    assert prepared(tmp_path / "store", tmp_path / "cache").tokenizer.sha256 == gpt2_tokenizer().sha256
    line = refusal(plan, tmp_path / "store", files, tmp_path / "cache")
    assert line == f"{tmp_path}/store: holds another plan: name an empty folder"


def test_of_a_large_text_the_plan_reads_some(files, tmp_path, monkeypatch):
    """Files at even distances; of all of it, about as much is for validation as would be otherwise."""
    monkeypatch.setattr("gpt.text.prepare.plan.READ", 4000)
    for i in range(20):
        write_documents(tmp_path / f"text/{i:02}", [f"{i} {document}" for document in DOCUMENTS])
    make(tmp_path / "store", str(tmp_path / "text"), tmp_path / "cache")
    splits = prepared(tmp_path / "store", tmp_path / "cache").manifest["splits"]
    share = splits["validation"]["bytes"] / (splits["train"]["bytes"] + splits["validation"]["bytes"])
    assert 0.001 < share < 0.02  # a tenth of one file in about twenty
    monkeypatch.setattr("gpt.text.prepare.split.ENOUGH_DOCUMENTS", 10**6)
    line = refusal(plan, tmp_path / "other", str(tmp_path / "text"), tmp_path / "cache")
    assert "has too few short documents to choose validation text from 4,000 bytes" in line


def test_mistakes(files, tmp_path):
    """Each is one line, and nothing is published."""
    store, cache = tmp_path / "store", tmp_path / "cache"

    def refused(*step: str) -> str:
        return refusal(run, store, cache, *step)

    assert refused("--join") == f"{store}: holds no plan: begin with python -m gpt.prepare --plan --text TEXT"
    assert "give --text FILE" in refused("--plan")
    assert "the plan says which text" in refused("--part", "1/1", "--text", "x")
    for part in ("0/3", "4/3", "3", "-1/2", "1/2/3"):
        assert f"{part!r} is not such as 3/64" in refused(f"--part={part}")
    copy = tmp_path / "files"
    shutil.copytree(files, copy)
    plan(store, str(copy), cache)
    run(store, cache, "--part", "2/3")
    line = refused("--join")
    assert re.search(
        r"lacks \d+ of \d+ shards \(0, 2, 3, 5, 6, \.\.\.\): run the missing parts again, or --part 1/1", line
    )
    assert not (store / "manifest.json").exists()
    assert "holds no prepared text; python -m gpt.prepare" in refusal(prepared, store, cache)
    record = json.loads((store / "part-000001.json").read_text())
    os.utime(copy / "000.txt", (1, 1))
    assert "000.txt: is not as it was when the preparation of the text began" in refused("--part", "1/1")
    (store / "part-000001.json").write_text(json.dumps(record | {"plan": "other"}))  # without its seal
    assert "lacks 2 of 18 shards (0, 1): run" in refused("--join")
    (store / "tokenizer.json").unlink()
    assert "holds no plan" in refused("--join")


def test_parts_of_another_plan_or_version(files, tmp_path, monkeypatch):
    """They are told apart, by the plan's hash and the format."""
    for shard_bytes in ("300", "400"):
        make(tmp_path / shard_bytes, files, tmp_path / "cache", "--tokenizer", "byte", "--shard-bytes", shard_bytes)
    shutil.copy(tmp_path / "300/part-000003.json", tmp_path / "400")
    line = refusal(run, tmp_path / "400", tmp_path / "cache", "--join")
    assert line == f"{tmp_path}/400: shard 3 is of another plan: name an empty folder"
    monkeypatch.setattr("gpt.text.prepare.plan.FORMAT", 99)
    line = refusal(run, tmp_path / "300", tmp_path / "cache", "--part", "1/1")
    assert line == f"{tmp_path}/300: was planned by another version of this program: plan it again, elsewhere"


def test_damage_in_the_store(files, tmp_path):
    """A shard that is shorter or gone is made again, and a reader says which file it is."""
    store, cache = tmp_path / "store", tmp_path / "cache"
    make(store, files, cache)
    whole = content(store)
    (store / "train-000002-00.bin").write_bytes(b"")
    assert "lacks 1 of" in refusal(run, store, cache, "--join")
    with pytest.raises(OutsideError, match=r"train-000002-00.bin: cannot be read"):
        prepared(store, cache).train[2]
    assert not (store / "part-000002.json").exists()
    run(store, cache, "--part", "1/1")
    run(store, cache, "--join")
    assert content(store) == whole
    damaged = next(store.glob("validation-*"))
    damaged.write_bytes(bytes(damaged.stat().st_size))
    line = refusal(run, store, cache, "--join")
    assert re.fullmatch(rf"{damaged}: is damaged .*: run --part 1/1, which makes its shard again, and .*", line)
    run(store, cache, "--part", "1/1")
    run(store, cache, "--join")
    assert content(store) == whole
    (store / "manifest.json").write_text("{}")
    assert "is damaged" in refusal(prepared, store, cache)


def prepare_apart(arguments: list[str], log: str) -> None:
    """What a process of a part does."""
    stream = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(stream, 1)
    os.dup2(stream, 2)
    with command_line("gpt.prepare"):
        main(arguments)


@pytest.mark.slow
def test_a_hundred_kills(tmp_path):
    """Two processes at a time, at random parts, each killed at any moment: in the end the same bytes."""
    chance = random.Random(3)
    text = str(write_files(tmp_path / "text", [document * 20 for document in DOCUMENTS]).path)
    make(tmp_path / "one", text, tmp_path / "cache")
    plan(tmp_path / "store", text, tmp_path / "cache")
    kills = 0
    while kills < 100:
        running = []
        for cache in chance.choices(["this machine's", "another's"], k=2):
            arguments = ["--to", str(tmp_path / "store"), "--cache", str(tmp_path / cache)]
            part = f"{chance.randint(1, 5)}/5"
            process = START.Process(target=prepare_apart, args=([*arguments, "--part", part], str(tmp_path / "log")))
            process.start()
            running.append(process)
        time.sleep(chance.uniform(0, 0.3))
        for process in running:
            process.kill()
            process.join()
            kills += process.exitcode == -signal.SIGKILL
        if chance.random() < 0.1:  # so that there is always something left to make
            for file in sorted((tmp_path / "store").glob("part-*.json"))[::3]:
                file.unlink()
    run(tmp_path / "store", tmp_path / "this machine's", "--part", "1/1")
    run(tmp_path / "store", tmp_path / "cache", "--join")
    made = {name: data for name, data in content(tmp_path / "store").items() if not name.startswith(".")}
    assert made == content(tmp_path / "one")
    assert "Traceback" not in "".join(log.read_text() for log in tmp_path.glob("log"))


def test_on_paper(files, tmp_path):
    """The table in docs/data.md follows from the numbers of files, bytes and operations."""
    make(tmp_path / "store", files, tmp_path / "cache")
    shards = json.loads((tmp_path / "store/manifest.json").read_text())["shards"]
    entry = len(json.dumps(shards, indent=2)) / len(shards)
    assert 100 < entry < 170
    rows = [line.split("|")[1:-1] for line in (ROOT / "docs/data.md").read_text().splitlines() if "illion |" in line]
    assert len(rows) == 3
    for row, tokens, shard_bytes in zip(rows, (1e10, 1e12, 1.5e13), (1 << 28, 1 << 28, 4e9), strict=True):
        found = [float(cell.split()[0].replace(",", "")) for cell in row]
        number = 4.5 * tokens / shard_bytes * FILES
        seconds = 4.5 * tokens / 1000 / 2.3e6  # 308 MB take two cores 67 s
        groups = 3 * GROUP * 2 * tokens / number
        unit = {"s": 1, "min": 60, "h": 3600}[row[5].split()[1]]
        assert found[2] == pytest.approx(number, rel=1e-3)
        assert found[3] == pytest.approx(135 * number / 1e6, rel=0.12)
        assert found[4] == pytest.approx(groups / 1e9, rel=0.03)
        assert found[5] == pytest.approx(seconds / unit, rel=0.03)
        for cell, parameters in zip(found[6:], (124e6, 1.5e9), strict=True):
            assert cell == pytest.approx(2 * 0.5 * 989e12 / (6 * parameters) / 1e6, rel=0.05)
