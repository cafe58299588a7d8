"""Data sets by the real `datasets` library, from a folder of this machine: there is no hub without a network."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gpt.errors import UserError
from gpt.files import hold
from gpt.text import hub_datasets as hub
from gpt.text.corpus import DataConfig, open_corpus, pinned
from gpt.text.tokenizer import TokenizerConfig
from harness import ROOT

TEXTS = [f"document {i}: " + "naïve € 😀 "[: i % 11] * (i % 7) for i in range(101)]


@pytest.fixture
def data_set(tmp_path) -> str:
    """A data set of 101 rows, the way the library finds it in a folder, in two files."""
    folder = tmp_path / "set"
    folder.mkdir()
    for name, texts in (("a", TEXTS[:37]), ("b", TEXTS[37:])):
        rows = [json.dumps({"n": i, "text": text, "other": "x"}) for i, text in enumerate(texts)]
        (folder / f"{name}.jsonl").write_text("\n".join(rows) + "\n")
    return str(folder)


def read(path: str, cache: Path, **more) -> list[str]:
    """The documents of a data set."""
    return list(open_corpus(DataConfig("huggingface", path, **more), cache, [].append).documents())


def refusal(path: str, cache: Path, **more) -> str:
    """The one line that refuses a data set."""
    with pytest.raises(UserError) as caught:
        read(path, cache, **more)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_documents(data_set, tmp_path, monkeypatch):
    """All rows in order, whatever the size of the parts; another time from the files, without the library."""
    for part_bytes in (1, 307, 1 << 26):
        cache = tmp_path / str(part_bytes)
        monkeypatch.setattr(hub, "PART_BYTES", part_bytes)
        assert read(data_set, cache) == TEXTS
        parts = list(cache.glob("downloads/*/part-*.parquet"))
        assert len(parts) == {1: 101, 307: 10, 1 << 26: 1}[part_bytes]
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, "datasets", None)
            assert read(data_set, cache) == TEXTS


def test_other_column_and_limit(data_set, tmp_path):
    """`data.text_field` names the column; `data.max_bytes` is never exceeded, and ends at a document."""
    assert read(data_set, tmp_path, text_field="other") == ["x"] * 101
    sizes = [len(text.encode()) for text in TEXTS]
    for most in (sum(sizes[:7]), sum(sizes[:8]) - 1):
        assert read(data_set, tmp_path, max_bytes=most) == TEXTS[:7]


def test_limit_below_the_first_document(data_set, tmp_path):
    """A limit that lets nothing in is named; no empty data set is kept."""
    assert refusal(data_set, tmp_path, max_bytes=1) == (
        f"data.path={data_set!r}: not a single document was taken; raise data.max_bytes"
    )
    assert read(data_set, tmp_path) == TEXTS


def test_changed_data_set_is_fetched_anew(data_set, tmp_path):
    """What is on disk is never taken for another content."""
    assert read(data_set, tmp_path) == TEXTS
    (Path(data_set) / "a.jsonl").write_text('{"n": 1, "text": "new", "other": "x"}\n')
    assert read(data_set, tmp_path) == ["new", *TEXTS[37:]]


def test_pinned(data_set, tmp_path):
    """The configuration of a run gets the commit in it; that of other corpora stays as it is."""
    config = pinned(DataConfig("huggingface", data_set), tmp_path)
    assert len(config.revision) == 40
    assert pinned(config, tmp_path) == config
    named = DataConfig("huggingface", "somebody/something", revision="5" * 40)
    assert pinned(named, tmp_path) == named  # and no network was asked
    assert pinned(DataConfig(), tmp_path) == DataConfig()


KILLED = """
import sys
from pathlib import Path
from gpt.text import hub_datasets as hub
from gpt.text.corpus import DataConfig, open_corpus

hub.PART_BYTES = 1000
write = hub._write_part

def slowly(place, number, texts):
    write(place, number, texts)
    print(number, flush=True)
    if number == int(sys.argv[3]):
        sys.stdin.read()

hub._write_part = slowly
print(len(list(open_corpus(DataConfig("huggingface", sys.argv[1]), Path(sys.argv[2]), print).documents())))
"""


@pytest.mark.slow
def test_killed_download_goes_on(data_set, tmp_path):
    """After SIGKILL between a part and its note, only that part is fetched again, and nothing is lost or doubled."""
    command = [sys.executable, "-c", KILLED, data_set, str(tmp_path)]
    with subprocess.Popen([*command, "2"], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        for line in child.stdout:
            if line == "2\n":
                child.send_signal(signal.SIGKILL)
    assert child.returncode == -signal.SIGKILL
    done = subprocess.run([*command, "-1"], cwd=ROOT, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert ", from byte 2,0" in lines[0]
    assert lines[1] == "2"  # parts 0 and 1 were kept
    assert read(data_set, tmp_path) == TEXTS


@pytest.mark.parametrize(
    "content", [b"", b"\xff", b"[7]", b"{", b'{"parts": 1, "bytes": 7, "seal": "0"}', b"[" * 10**5]
)
def test_damaged_note_of_a_download(data_set, tmp_path, content):
    """Everything is fetched again, and nothing is lost or doubled."""
    assert read(data_set, tmp_path) == TEXTS
    [complete] = tmp_path.glob("downloads/*/complete")
    complete.unlink()
    complete.with_name("state.json").write_bytes(content)
    assert read(data_set, tmp_path) == TEXTS


def test_waiting_for_another_download(data_set, tmp_path):
    """Where another process is fetching it, that is said once, and what it has fetched is read."""
    assert read(data_set, tmp_path) == TEXTS
    [complete] = tmp_path.glob("downloads/*/complete")
    complete.unlink()
    lock = hold(complete.with_name(".lock"))
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        complete.touch()
        lock.release()

    assert list(open_corpus(DataConfig("huggingface", data_set), tmp_path, say).documents()) == TEXTS
    assert said == [f"process {os.getpid()} is fetching {data_set}: waiting for it"]


def test_mistakes(data_set, tmp_path, monkeypatch):
    """Each is one line that names the data set and what there is."""
    line = refusal(data_set, tmp_path, text_field="n")
    assert (
        line
        == f"data.path={data_set!r} has no text under 'n'; name another column with data.text_field= (n, text, other)"
    )
    assert "Bad split: nothing. Available splits: ['train']" in refusal(data_set, tmp_path, split="nothing")
    assert "'nothing' not found" in refusal(data_set, tmp_path, subset="nothing")
    monkeypatch.setitem(sys.modules, "datasets", None)
    line = refusal(data_set, tmp_path / "other")
    assert line.endswith("this needs datasets, which is not installed: pip install -e '.[huggingface]'")


def test_vanished_network(tmp_path):
    """The line says what works without it, and which commit was fetched earlier."""
    environment = os.environ | {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_DISABLE_TELEMETRY": "1"}
    code = (
        "import sys; from pathlib import Path; from gpt.text.corpus import *; from gpt.errors import command_line\n"
        "with command_line('x'): open_corpus(DataConfig('huggingface', 'somebody/something'), Path(sys.argv[1]))"
    )

    def refused() -> str:
        start = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 2, done.stderr
        assert time.monotonic() - start < 30
        return done.stderr

    line = refused()
    assert line.startswith("x: data.path='somebody/something': the hub does not provide it (")
    assert line.endswith("without a network, use data=python_docs, data=python_stdlib or data=text data.path=FILE\n")
    assert line.count("\n") == 1
    before = tmp_path / "downloads/somebody_something-0123456789abcdef"
    before.mkdir(parents=True)
    (before / "revision").write_text("7" * 40)
    assert f"already fetched: data.revision={'7' * 40};" in refused()


def test_prepared(data_set, tmp_path):
    """A data set goes all the way to tokens."""
    from gpt.text.prepare import prepare

    corpora = prepare(DataConfig("huggingface", data_set), TokenizerConfig("byte"), 7, tmp_path, say=[].append)
    splits = corpora.sources[0].manifest["splits"]
    assert splits["train"]["documents"] + splits["validation"]["documents"] == 101
    assert splits["train"]["bytes"] + splits["validation"]["bytes"] == sum(len(text.encode()) for text in TEXTS)
