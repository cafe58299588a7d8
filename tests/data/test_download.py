"""Files from a real server on loopback that cuts, stalls, lies and fails, fetched by processes that are killed."""

import gzip
import hashlib
import json
import os
import random
import re
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.registry import _registry

import gpt.data.download
from gpt.data.download import OFFLINE_HINT, RemoteFile
from gpt.data.find_files import find_remote_files
from gpt.errors import ExternalError, UserError
from gpt.files import is_program_output
from harness import ROOT, refusal
from web_server import COMMIT

CONTENT = random.Random(7).randbytes(3_000_017)
SHA256 = hashlib.sha256(CONTENT).hexdigest()
NAME = f"{SHA256[:16]}-file.txt"
TEXTS = [f"document {i}: " + "naïve € 😀 "[: i % 11] * (i % 7) for i in range(101)]


@pytest.fixture
def server(server):
    """A server whose every file has the content."""
    server.content = CONTENT
    return server


@pytest.fixture
def downloads(tmp_path) -> Path:
    """The folder of the cache that downloads go to."""
    (tmp_path / "downloads").mkdir()
    return tmp_path / "downloads"


def fetch(server, way: str, cache: Path, sha256: str = SHA256) -> Path:
    return remote(server.url(way), cache, sha256).fetch()


def remote(url: str, cache: Path, sha256: str = SHA256, print_line=[].append) -> RemoteFile:
    return RemoteFile(url, None, "", cache, 10**7, sha256, print_line)


def visible(folder: Path) -> list[Path]:
    """Return the entries of a folder, without locks and listings."""
    return [file for file in folder.iterdir() if not file.name.startswith(".")]


def is_empty(folder: Path) -> bool:
    """Return True if a folder holds no downloaded bytes."""
    return all(file.suffix == ".part" and file.stat().st_size == 0 for file in visible(folder))


def check(file: Path) -> None:
    """Assert that the file is complete, and alone in its folder."""
    assert file.name == NAME
    assert file.read_bytes() == CONTENT
    assert visible(file.parent) == [file]


def start(program: str, *arguments: object) -> subprocess.Popen:
    """Start a process that ends as a command does."""
    code = "import sys; from pathlib import Path; from gpt.console import clean_exit, print_line\n"
    code += f"with clean_exit('x'):\n    {program}"
    command = [sys.executable, "-u", "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def start_fetching(server, way: str, cache: Path) -> subprocess.Popen:
    program = "from gpt.data import download; download.DOWNLOAD_BLOCK_BYTES = 1 << 18; "
    program += "print(download.RemoteFile(sys.argv[1], None, '', Path(sys.argv[3]), 10**7, sys.argv[2]).fetch())"
    return start(program, server.url(way), SHA256, cache)


# --- a file behind a URL ---


@pytest.mark.parametrize("way", ["whole", "moved", "encoded", "untold", "ignored", "less"])
def test_fetched_once(tmp_path, server, way):
    """The copy equals the content for every kind of server. The second time nothing is printed or requested."""
    cache = tmp_path / "new" / "folder"
    file = fetch(server, way, cache, SHA256.upper())
    check(file)
    assert is_program_output(cache)
    server.stop()
    assert remote(server.url(way), cache, print_line=pytest.fail).fetch() == file


@pytest.mark.parametrize("way", ["untold", "whole"])
def test_packed_by_the_server(tmp_path, server, way):
    """Whether or not it tells the size, a file is unpacked unless its name says that it is packed."""
    text = b"The quiet river.\n" * 10**5
    server.content = gzip.compress(text)
    file = remote(server.url(way), tmp_path, hashlib.sha256(server.content).hexdigest()).fetch()
    assert file.read_bytes() == text
    assert visible(file.parent) == [file]
    assert remote(f"{server.url(way)}.gz", tmp_path, "").fetch().read_bytes() == server.content
    small = RemoteFile(server.url(way), None, "", tmp_path, 10**6)
    assert refusal(small.fetch).endswith(f"does not hold {small.url}, of 1,700,000 bytes: raise it")
    server.content = server.content[:-9]
    server.tag = "cut"
    line = refusal(RemoteFile(server.url(way), None, "cut", tmp_path, 10**7).fetch)
    assert line.startswith(f"{server.url(way)}: packed with gzip, and damaged (")


@pytest.mark.parametrize(
    ("end", "name"),
    [
        ("..%2Fa%20b%C3%A9.txt.gz?raw=true/x#y", ".._a_b_.txt.gz"),
        ("7" * 211 + ".txt", "7" * 96 + ".txt"),
    ],
)
def test_name_is_safe(tmp_path, server, end, name):
    """The last component of the path, without what a file name should not have, its end kept."""
    file = remote(server.url("whole").replace("file.txt", end), tmp_path).fetch()
    assert visible(tmp_path / "downloads") == [file] == [tmp_path / f"downloads/{SHA256[:16]}-{name}"]


def test_without_a_hash(tmp_path, server):
    """The tag decides if a copy is still current, also for a URL with a query."""
    url = server.url("encoded") + "?a=[b]*&c=d/e.parquet"  # the size of the content is not known
    copies = []
    for tag in "xxy":
        server.tag = tag
        [file] = find_remote_files(url, tmp_path, 10**7, pytest.fail)
        assert (file.url, file.name, file.suffixes, file.tag) == (url, "file.txt", [".txt"], f'"{tag}"')
        assert file.size is None
        copies.append(file.fetch())
        assert copies[-1].read_bytes() == CONTENT
    assert copies[0] == copies[1] != copies[2]


@pytest.mark.parametrize("way", ["short", "stalls"])
def test_short_answers_are_joined(tmp_path, server, monkeypatch, way):
    """An answer ends early, or does not come: the next one is asked for less, and begins where the file does."""
    monkeypatch.setattr(gpt.data.download, "DOWNLOAD_BLOCK_BYTES", 1 << 21)
    monkeypatch.setattr(gpt.data.download, "STALL_SECONDS", 0.3)
    check(fetch(server, way, tmp_path))
    starts = server.request_starts()
    assert starts == sorted(starts) and len(set(starts)) < len(starts)


def test_killed_process_leaves_its_bytes(tmp_path, server):
    """SIGKILL in the middle: the one that waits for it asks for the rest only."""
    part, kept = tmp_path / f"downloads/{NAME}.part", 1 << 20
    with start_fetching(server, "stalls", tmp_path) as process:
        deadline = time.monotonic() + 30
        while not part.exists() or part.stat().st_size < kept:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        with start_fetching(server, "stalls", tmp_path) as waiting:
            line = f"process {process.pid} is downloading {server.url('stalls')}: waiting for it\n"
            assert waiting.stdout.readline() == line
            process.kill()
            process.wait(30)
            out, errors = waiting.communicate(timeout=30)
    assert (out, errors) == (f"{tmp_path / 'downloads' / NAME}\n", "")
    check(tmp_path / "downloads" / NAME)
    again = kept - (1 << 18)  # the last block may not have reached the disk
    assert server.request_starts() == [*range(0, kept + 1, 1 << 18), *range(again, len(CONTENT), 1 << 18)]


@pytest.mark.parametrize(
    ("way", "part", "asked"),
    [
        ("whole", CONTENT[:1_500_000], [451_424, 1_500_000, 2_548_576]),
        ("whole", CONTENT[:451_424] + bytes(1 << 20), [451_424, 1_500_000, 2_548_576]),
        ("whole", CONTENT[:1_000_000], [0, 1 << 20, 1 << 21]),
        ("whole", CONTENT, [1_951_441]),
        ("ignored", CONTENT[:1_500_000], [451_424]),
        ("untold", CONTENT[:101], []),
    ],
    ids=["good", "zeros", "less than a block", "complete", "no ranges", "no length"],
)
def test_part_of_an_earlier_attempt(tmp_path, server, downloads, monkeypatch, way, part, asked):
    """A download resumes before its last block, since that block may not have reached the disk."""
    monkeypatch.setattr(gpt.data.download, "DOWNLOAD_BLOCK_BYTES", 1 << 20)
    (downloads / f"{NAME}.part").write_bytes(part)
    check(fetch(server, way, tmp_path))
    assert server.request_starts() == asked


@pytest.mark.promise("security.md#Downloads")
def test_wrong_hash(tmp_path, server, downloads):
    """A wrong hash is refused, and nothing is left, so the next attempt starts from the beginning."""
    wrong = hashlib.sha256(b"another").hexdigest()
    line = refusal(fetch, server, "whole", tmp_path, wrong)
    assert re.fullmatch(
        rf"{server.url('whole')}: the SHA-256 is [0-9a-f]{{16}}\.\.\., not {wrong[:16]}\.\.\.: the file has changed, "
        r"or another server answered; check the URL and data\.sha256=, and run the command again",
        line,
    )
    assert is_empty(downloads)


@pytest.mark.parametrize(
    ("way", "more", "message"),
    [
        ("changes", 0, "size and tag are (3000017, '\"xx\"'), and were (3000017, '\"x\"'): the file has changed"),
        ("whole", -7, "size and tag are (3000017, '\"x\"'), and were (3000010, '\"x\"'): the file has changed"),
        ("whole", 7, "; the file has become shorter: run the command again"),
    ],
)
def test_changed_since_it_was_listed(tmp_path, server, way, more, message):
    """Its tag, or its size: refused in one line, and the next command takes it as it is now."""
    [file] = find_remote_files(server.url(way), tmp_path, 10**7)
    assert message in refusal(replace(file, size=file.size + more).fetch)
    [file] = find_remote_files(server.url("whole"), tmp_path, 10**7)
    assert file.fetch().read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("way", "hint"),
    [
        ("404", "there is no such file: check the spelling"),
        ("403", "log in with the store's own tool, such as aws, gcloud or hf, or check the spelling"),
        ("503", OFFLINE_HINT),
    ],
)
def test_http_errors(tmp_path, server, downloads, monkeypatch, way, hint):
    """Nothing is left, or all that was there; only what may pass is tried again."""
    monkeypatch.setattr(gpt.data.download, "MAX_ATTEMPTS", 3)
    monkeypatch.setattr("gpt.data.download.time.sleep", lambda seconds: None)
    message = rf"{server.url(way)}: cannot be used \(ClientResponseError: {way}, .*\); "
    with pytest.raises(UserError) as caught:
        fetch(server, way, tmp_path)
    assert isinstance(caught.value, ExternalError) == (way == "503")
    server.requests.clear()
    for ask in (partial(fetch, server, way, tmp_path), partial(find_remote_files, server.url(way), tmp_path, 10**7)):
        assert re.fullmatch(message + re.escape(hint), refusal(ask))
        assert is_empty(downloads)
    assert len(server.requests) == (6 if way == "503" else 2)
    (downloads / f"{NAME}.part").write_bytes(CONTENT[:101])
    assert re.fullmatch(message + re.escape(hint), refusal(fetch, server, way, tmp_path))
    assert (downloads / f"{NAME}.part").read_bytes() == CONTENT[:101]


@pytest.mark.promise("runs.md#does not answer for two minutes")
def test_away_for_a_while(tmp_path, server, monkeypatch):
    """One line reports the wait. The pauses grow up to a bound, and then one line ends the command."""
    pauses, printed = [], []
    clock = SimpleNamespace(sleep=pauses.append, monotonic=lambda: sum(pauses), time=time.time, time_ns=time.time_ns)
    monkeypatch.setattr(gpt.data.download, "time", clock)
    server.next_statuses = [503] * 15
    assert remote(server.url("whole"), tmp_path, print_line=printed.append).fetch().read_bytes() == CONTENT
    assert len(printed) == 1 and re.fullmatch(
        rf"{server.url('whole')}: does not answer \(503, .*\): waiting for it, for about two minutes at most",
        printed[0],
    )
    pauses.clear()
    line = refusal(remote(server.url("503"), tmp_path / "new", print_line=printed.append).fetch)
    assert line.endswith(OFFLINE_HINT) and len(printed) == 2
    assert 100 < sum(pauses) < 130 and max(pauses) <= 15 and pauses == sorted(pauses)
    monkeypatch.setattr(gpt.data.download, "MAX_WAIT_SECONDS", 1)  # seconds, as if each attempt took long
    pauses.clear()
    assert refusal(remote(server.url("503"), tmp_path / "new", print_line=printed.append).fetch).endswith(OFFLINE_HINT)
    assert len(printed) == 2 and sum(pauses) < 2
    for way in ("400", "401", "403", "404", "410", "451"):
        server.requests.clear()
        refusal(find_remote_files, server.url(way), tmp_path, 10**7)
        assert len(server.requests) <= 1
    server.next_statuses = [429]
    [file] = find_remote_files(server.url("whole"), tmp_path, 10**7)
    server.next_statuses = [503] * 2  # in the midst of the file
    assert file.fetch().read_bytes() == CONTENT


def test_unreachable(tmp_path, server, monkeypatch):
    """No server at all, or no URL to ask: one line, and nothing is left."""
    monkeypatch.setattr(gpt.data.download, "MAX_ATTEMPTS", 2)
    server.stop()
    for url in (server.url("whole"), "http://", "http://[::1/file", "http://127.0.0.1:99999/file"):
        line = refusal(remote(url, tmp_path).fetch)
        assert line.startswith(f"{url}: cannot be used (")
        assert line.endswith(OFFLINE_HINT if "whole" in url else "; check the spelling")
        assert is_empty(tmp_path / "downloads")


def test_down_after_a_first_listing(tmp_path, server, monkeypatch):
    """Without a server, the last listing and its copies are used. A file without a copy is refused."""
    monkeypatch.setattr(gpt.data.download, "MAX_ATTEMPTS", 2)
    url, printed = server.url("whole"), []
    [file] = find_remote_files(url, tmp_path, 10**7)
    copy = file.fetch()
    server.next_statuses = [404] * 2
    assert "there is no such file" in refusal(find_remote_files, url, tmp_path, 10**7)
    server.stop()
    [again] = find_remote_files(url, tmp_path, 10**7, printed.append)
    assert again.fetch() == copy
    assert len(printed) == 1 and printed[0].endswith(f"{OFFLINE_HINT}; using the list of files of the last time")
    copy.unlink()
    assert refusal(again.fetch).startswith(f"{url}: cannot be used (ClientConnectorError: ")
    [listing] = (tmp_path / "downloads").glob(".*.json")
    listing.write_text("{}")
    assert refusal(find_remote_files, url, tmp_path, 10**7).startswith(f"{url}: cannot be used (ClientConnectorError: ")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no device that is always full")
def test_full_disk(tmp_path, server, downloads):
    """One line names the folder and the remedy; it is not taken for a fault of the network."""
    (downloads / f"{NAME}.part").symlink_to("/dev/full")
    printed = refusal(fetch, server, "whole", tmp_path)
    assert printed.startswith(f"{downloads}: the disk is full (No space left on device); fix that or name another")


def test_room(tmp_path, server, downloads):
    """The copies used longest ago go, and parts that nobody adds to; a file larger than all the room is refused."""
    files = [RemoteFile(f"{server.url('whole')[:-4]}{i}.json", None, "", tmp_path, 7_000_000) for i in range(4)]
    (downloads / "abandoned.part").write_bytes(bytes(10**6))
    os.utime(downloads / "abandoned.part", (0, 0))
    (downloads / "another's.part").write_bytes(b"fresh")
    for use, there in [(0, {0}), (1, {0, 1}), (0, {0, 1}), (2, {0, 2}), (3, {2, 3})]:
        assert files[use].fetch().read_bytes() == CONTENT
        parts = {file.name for file in downloads.glob("*.part")}
        assert parts == {"another's.part"} | ({"abandoned.part"} if there == {0} else set())
        assert {i for i in range(4) if files[i].target.exists()} == there
    assert sum(file.stat().st_size for file in downloads.iterdir()) <= 7_000_000
    for way in ("whole", "untold"):
        line = refusal(RemoteFile(server.url(way), None, "", tmp_path, 10**6).fetch)
        assert line == f"data.cache_bytes=1000000 does not hold {server.url(way)}, of 3,000,017 bytes: raise it"
    assert {i for i in range(4) if files[i].target.exists()} == {2, 3}


# --- data sets of the hub ---


def parquet(folder: Path, texts: list[str]) -> bytes:
    pq.write_table(pa.table({"text": texts, "other": ["x"] * len(texts)}), folder / "rows.parquet", row_group_size=13)
    return (folder / "rows.parquet").read_bytes()


@pytest.fixture
def hub(server, tmp_path, monkeypatch):
    """A hub with the data set me/set, of two splits."""
    files = {
        "data/train-00000-of-00002.parquet": parquet(tmp_path, TEXTS[:37]),
        "data/train-00001-of-00002.parquet": parquet(tmp_path, TEXTS[37:]),
        "data/test-00000-of-00001.parquet": parquet(tmp_path, ["test"]),
        "README.md": b"",
    }
    server.add_repository("datasets/me/set", files)
    for key, value in {"HF_ENDPOINT": server.url(), "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}.items():
        monkeypatch.setenv(key, value)
    return server


OPEN = """
    import json
    from gpt.data import download
    from gpt.data.corpus import *
    from gpt.data.prepare import prepare
    from gpt.data.tokenizer import TokenizerConfig
    download.MAX_ATTEMPTS = 2
    found = []
    for settings in json.loads(sys.argv[1]):
        try:
            corpus = open_corpus(DataConfig("text", **settings), Path(sys.argv[2]))
            texts = ["".join(blocks) for file in corpus.files for blocks, _ in corpus.read(file, 0)]
            cache = Path(sys.argv[2])
            [source] = prepare(DataConfig("text", **settings), TokenizerConfig("byte"), 7, cache).sources
            found.append([texts, corpus.sha256(cache), source.metadata["splits"]])
        except UserError as error:
            found.append(str(error))
    print(json.dumps(found))
"""


def read(cache: Path, *configs: dict) -> list:
    """The documents, the hash and the tokens of data sets, or the line that refuses one.

    They are read by one fresh process, since the library reads its settings once.
    """
    with start(OPEN.strip(), json.dumps(configs), cache) as process:
        out, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    return json.loads(out.splitlines()[-1])


@pytest.mark.slow
def test_data_set(hub, tmp_path):
    """A glob gives the rows of its files in order, equal to local files. The second time needs no network.

    Without a commit the data set is read as it is now. Of its folder, hidden and empty files are left out.
    """
    there = {"path": f"hf://datasets/me/set@{COMMIT}/data/train-*.parquet"}
    folder = {"path": "hf://datasets/me/set"}
    found, column, (folder_texts, *_) = read(tmp_path / "cache", there, there | {"text_field": "other"}, folder)
    assert (found[0], column[0]) == (TEXTS, ["x"] * 101)
    assert folder_texts == ["test", *TEXTS]
    fetched = [line.split()[0][-16:] for line in hub.requests if f"/resolve/{COMMIT}/" in line]
    assert fetched == ["of-00002.parquet"] * 2
    files = []
    for i in range(2):
        content = hub.hub_files[f"/datasets/me/set/resolve/{COMMIT}/data/train-0000{i}-of-00002.parquet"]
        files.append(tmp_path / f"{i}.parquet")
        files[i].write_bytes(content)
    hub.stop()
    assert read(tmp_path / "cache", there) == read(tmp_path / "new", {"path": list(map(str, files))}) == [found]


def test_data_sets_that_are_not(hub, tmp_path):
    """Each mistake gives one line with its remedy."""
    expected = [
        ("me/nothing/*.parquet", "there is no such file: check the spelling"),
        (f"me/set@{COMMIT}/nothing", "there is no such file: check the spelling"),
        (f"me/set@{COMMIT}/data/dev-*", "names no file: give the URL of a file, a folder or a quoted glob"),
    ]
    lines = read(tmp_path, *({"path": f"hf://datasets/{path}"} for path, _ in expected))
    for line, (path, message) in zip(lines, expected, strict=True):
        assert f"hf://datasets/{path}" in line and line.endswith(message) and "\n" not in line


@pytest.mark.parametrize(("scheme", "library"), [("hf", "huggingface_hub"), ("s3", "s3fs"), ("gs", "gcsfs")])
def test_without_the_library(tmp_path, monkeypatch, scheme, library):
    """The line names the package to install."""
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.delitem(_registry, scheme, raising=False)
    url = f"{scheme}://datasets/me/set"
    line = refusal(find_remote_files, url, tmp_path, 10**7)
    assert line.startswith(f"{url}: needs a driver that is not installed: pip install {library} (")
