"""Downloads from a real server on loopback that cuts, stalls, lies and fails, by processes that are killed."""

import contextlib
import hashlib
import http.server
import itertools
import os
import pty
import random
import re
import socket
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import gpt.text.url
from gpt.errors import UserError
from gpt.text.url import BLOCK, OFFLINE, fetch

ROOT = Path(__file__).parents[2]
CONTENT = random.Random(7).randbytes(300_007)
SHA256 = hashlib.sha256(CONTENT).hexdigest()
CUT = 65_537  # bytes that an answer has before it fails
NAME = f"{SHA256[:16]}-file.txt"
PART = f"{NAME}.part"


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers with the content, in the way that the first part of the path says."""

    server: "Server"

    def do_GET(self) -> None:
        way, asked = self.path.split("/")[1], self.headers["Range"]
        self.server.asked.append(asked)
        self.server.encodings.add(self.headers["Accept-Encoding"])
        first = len(self.server.asked) == 1
        start = int(re.fullmatch(r"bytes=(\d+)-", asked)[1]) if asked and not way.startswith("ignores") else 0
        status = 416 if start >= len(CONTENT) else 206 if start else 200
        if way.startswith("gated"):
            self.server.gate.wait(60)
        if way == "moved" or (way.isdigit() and (way != "503" or first)):
            status = 302 if way == "moved" else int(way)
        if way == "gated-failing" and first:
            status = 404
        content = CONTENT[start:] if status in (200, 206) else b""
        self.send_response(status)
        self.send_header("Location", "/whole/file.txt")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Content-Encoding", "gzip" if way == "encoded" else "identity")
        self.send_header("Content-Range", f"bytes {start + 2 * (way == 'shifted')}-{len(CONTENT) - 1}/{len(CONTENT)}")
        self.end_headers()
        if way in ("short", "ignores-short", "resets") or (way == "stalls" and first):
            content = content[:CUT]
        with contextlib.suppress(ConnectionError):  # the reader was killed
            self.wfile.write(content)
        if way == "stalls" and first:
            self.server.gate.wait(60)
        if way == "resets":
            time.sleep(0.05)  # what has not been read is lost with the connection
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            socket.close(self.connection.detach())

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


class Server(http.server.ThreadingHTTPServer):
    """A server of a thread's own, which remembers the Range of each request."""

    daemon_threads = False  # so that closing waits for all of them

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[str | None] = []
        self.encodings: set[str] = set()
        self.gate = threading.Event()  # until it is set, an answer that stalls does
        self._thread = threading.Thread(target=self.serve_forever, args=(0.01,))
        self._thread.start()

    def url(self, way: str) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/{way}/file.txt"

    def stop(self) -> None:
        self.gate.set()
        self.shutdown()
        self._thread.join()
        self.server_close()


@pytest.fixture
def server(monkeypatch) -> Iterator[Server]:
    """A server, no proxy before it, and tries that follow each other at once."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(gpt.text.url, "WAITS", (0.01,) * 5)
    monkeypatch.setattr(gpt.text.url, "FIRST_WAITS", (0.01,) * 2)
    started = Server()
    yield started
    started.stop()


def visible(folder: Path) -> list[Path]:
    """All that is in a folder, but for the lock."""
    return [file for file in folder.iterdir() if file.suffix != ".lock"]


def check(file: Path, folder: Path) -> None:
    """The file is whole, and nothing else is in its folder."""
    assert file == folder / NAME
    assert file.read_bytes() == CONTENT
    assert visible(folder) == [file]


def refusal(*arguments) -> str:
    """The one line that refuses to fetch."""
    with pytest.raises(UserError) as caught:
        fetch(*arguments, say=[].append)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def start(url: str, folder: Path, stderr: int = subprocess.PIPE) -> subprocess.Popen:
    """A process that fetches the file, and prints what is said and then the path."""
    program = "import sys, pathlib, gpt.text.url as d; print(d.fetch(*sys.argv[1:3], pathlib.Path(sys.argv[3])))"
    command = [sys.executable, "-u", "-c", program, url, SHA256, str(folder)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=stderr, text=True)


def waiting_for(process: subprocess.Popen, url: str) -> str:
    """The line of a process that waits for another."""
    return f"process {process.pid} is downloading {url}: waiting for it\n"


def wait_until(condition: Callable[[], bool]) -> None:
    """Look again and again."""
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# --- all is well ---


@pytest.mark.parametrize("way", ["whole", "moved", "encoded", "503"])
def test_fresh(tmp_path, server, way):
    """The bytes as they are, also behind a redirect, under a header that names a packing, and after a refusal."""
    said: list[str] = []
    folder = tmp_path / "new" / "folder"
    check(fetch(server.url(way), SHA256.upper(), folder, said.append), folder)
    assert said == [f"downloading {server.url(way)} (0.3 MB)"]
    assert server.asked == [None] * (2 if way in ("moved", "503") else 1)
    assert server.encodings == {"identity"}


def test_second_time_needs_no_network(tmp_path, server):
    """Nothing is said, asked or touched."""
    file = fetch(server.url("whole"), SHA256, tmp_path, [].append)
    server.stop()
    time_before, said = file.stat().st_mtime_ns, []
    assert fetch(server.url("whole"), SHA256, tmp_path, said.append) == file
    assert (said, server.asked, file.stat().st_mtime_ns) == ([], [None], time_before)


@pytest.mark.parametrize(
    ("end", "name"),
    [
        ("a%20b%C3%A9.txt.gz?raw=true/x#y", "a_b_.txt.gz"),
        ("..%2F..%2Fetc", ".._.._etc"),
        ("7" * 211 + ".txt", "7" * 96 + ".txt"),
    ],
)
def test_name_is_safe(tmp_path, server, end, name):
    """The last component of the path, without what a file name should not have, its end kept."""
    file = fetch(server.url("whole").replace("file.txt", end), SHA256, tmp_path, [].append)
    assert visible(tmp_path) == [file] == [tmp_path / f"{SHA256[:16]}-{name}"]


def test_progress_only_on_a_terminal(tmp_path, server):
    """A bar in bytes where stderr is a terminal; elsewhere nothing."""
    (tmp_path / PART).write_bytes(CONTENT[:100_003])
    terminal, end = pty.openpty()
    termios.tcsetwinsize(end, (23, 89))
    os.set_blocking(terminal, False)
    with start(server.url("whole"), tmp_path, stderr=end) as process:
        assert process.wait(30) == 0
    shown = os.read(terminal, 10_007).decode()
    os.close(terminal)
    os.close(end)
    assert re.search(r"\| 100k/300k \[", shown)
    assert shown.endswith("\r")
    (tmp_path / NAME).unlink()
    with start(server.url("whole"), tmp_path) as process:
        out, errors = process.communicate(timeout=30)
    assert (out, errors) == (f"downloading {server.url('whole')} (0.3 MB)\n{tmp_path / NAME}\n", "")


def test_requests_is_imported_late():
    """Most trainings download nothing, and start without waiting for it."""
    program = "import sys, gpt.text.url; print('requests' in sys.modules, 'tqdm' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", program], cwd=ROOT, text=True) == "False True\n"


# --- cut, stalled, killed ---


def test_short_answers_are_joined(tmp_path, server):
    """Each answer ends after 65,537 bytes of what it announced: the next begins exactly there, and one line is said."""
    said: list[str] = []
    check(fetch(server.url("short"), SHA256, tmp_path, said.append), tmp_path)
    assert server.asked == [None, *(f"bytes={i * CUT}-" for i in range(1, 5))]
    assert said == [f"downloading {server.url('short')} (0.3 MB)"]


@pytest.mark.parametrize("way", ["resets", "stalls"])
def test_broken_connections_are_joined(tmp_path, server, monkeypatch, way):
    """A connection that is reset, or gives no more bytes, costs a block at most."""
    monkeypatch.setattr(gpt.text.url, "TIMEOUT", 0.5)
    check(fetch(server.url(way), SHA256, tmp_path, [].append), tmp_path)
    starts = [0, *(int(asked[6:-1]) for asked in server.asked[1:])]
    assert len(starts) == 2 if way == "stalls" else len(starts) >= 5
    assert all(CUT - BLOCK <= there - here <= CUT for here, there in itertools.pairwise(starts))


def test_killed_process_leaves_its_bytes(tmp_path, server):
    """SIGKILL in the middle: the next process asks for the rest only, and so does one that was waiting."""
    with start(server.url("stalls"), tmp_path) as process:
        wait_until(lambda: (tmp_path / PART).exists() and (tmp_path / PART).stat().st_size >= CUT - BLOCK)
        with start(server.url("stalls"), tmp_path) as waiting:
            assert waiting.stdout.readline() == waiting_for(process, server.url("stalls"))
            process.kill()
            assert process.wait(30) == -9
            out, errors = waiting.communicate(timeout=30)
    assert (out, errors) == (f"downloading {server.url('stalls')} (0.3 MB)\n{tmp_path / NAME}\n", "")
    check(tmp_path / NAME, tmp_path)
    [_, asked] = server.asked
    assert CUT - BLOCK <= int(asked[6:-1]) <= CUT


@pytest.mark.parametrize("way", ["gated", "gated-failing"])
def test_two_processes_at_once(tmp_path, server, way):
    """The second waits for the first and takes what it made; where that has given up, it makes the file itself."""
    with start(server.url(way), tmp_path) as process:
        wait_until(lambda: server.asked == [None])
        with start(server.url(way), tmp_path) as waiting:
            assert waiting.stdout.readline() == waiting_for(process, server.url(way))
            server.gate.set()
            (out, errors), (other_out, other_errors) = (one.communicate(timeout=30) for one in (process, waiting))
    said, path = f"downloading {server.url(way)} (0.3 MB)\n", f"{tmp_path / NAME}\n"
    if way == "gated":
        assert (out, errors, other_out, other_errors) == (said + path, "", path, "")
    else:
        assert (out, other_out, other_errors) == ("", said + path, "")
        assert "HTTP 404 Not Found" in errors
    assert len(server.asked) == (1 if way == "gated" else 2)
    check(tmp_path / NAME, tmp_path)


# --- what an earlier try has left ---


@pytest.mark.parametrize(
    ("way", "part", "asked"),
    [
        ("whole", CONTENT[:101], ["bytes=101-"]),
        ("whole", CONTENT, ["bytes=300007-"]),
        ("whole", bytes(101), ["bytes=101-", None]),
        ("whole", bytes(300_007), ["bytes=300007-", None]),
        ("whole", CONTENT + b"more", ["bytes=300011-", None]),
        ("ignores", CONTENT[:101], ["bytes=101-"]),
        ("ignores", CONTENT + b"more", ["bytes=300011-"]),
        ("shifted", CONTENT[:101], ["bytes=101-", None]),
    ],
    ids=["good", "complete", "wrong", "wrong, complete", "too long", "no ranges", "no ranges, long", "another range"],
)
def test_part_of_an_earlier_try(tmp_path, server, way, part, asked):
    """It is gone on from where that is possible and right, and else all is downloaded anew."""
    (tmp_path / PART).write_bytes(part)
    check(fetch(server.url(way), SHA256, tmp_path, [].append), tmp_path)
    assert server.asked == asked


# --- refused ---


@pytest.mark.parametrize(("part", "asked"), [(b"", [None]), (bytes(101), ["bytes=101-", None])], ids=["fresh", "part"])
def test_wrong_hash(tmp_path, server, part, asked):
    """Refused only when all bytes were of one download, and nothing is left of them."""
    wrong = hashlib.sha256(b"another").hexdigest()
    (tmp_path / f"{wrong[:16]}-file.txt.part").write_bytes(part)
    assert refusal(server.url("whole"), wrong, tmp_path) == (
        f"{server.url('whole')}: the SHA-256 is {SHA256[:16]}..., not {wrong[:16]}...: the file has changed, "
        "or another server answered; check the URL and data.sha256="
    )
    assert server.asked == asked
    assert visible(tmp_path) == []


@pytest.mark.parametrize(
    ("way", "reason", "tries"), [("404", "Not Found", 1), ("403", "Forbidden", 1), ("500", "Internal Server Error", 3)]
)
def test_http_errors(tmp_path, server, way, reason, tries):
    """Only those that may pass are tried again; nothing is left, or all that was there."""
    message = f"{server.url(way)}: cannot be downloaded (HTTP {way} {reason}); "
    assert refusal(server.url(way), SHA256, tmp_path) == message + OFFLINE
    assert (len(server.asked), visible(tmp_path)) == (tries, [])
    (tmp_path / PART).write_bytes(CONTENT[:101])
    kept = "101 bytes are kept for the next attempt; "
    assert refusal(server.url(way), SHA256, tmp_path) == message + kept + OFFLINE
    assert (tmp_path / PART).read_bytes() == CONTENT[:101]


def test_unreachable(tmp_path, server):
    """No server at all: the reason is the system's own."""
    server.stop()
    reason = f"{server.url('whole')}: cannot be downloaded (Connection refused); {OFFLINE}"
    assert refusal(server.url("whole"), SHA256, tmp_path) == reason
    assert visible(tmp_path) == []


def test_no_progress(tmp_path, server):
    """A server that starts over each time, and gets no further, is given up after the waits."""
    assert refusal(server.url("ignores-short"), SHA256, tmp_path) == (
        f"{server.url('ignores-short')}: cannot be downloaded (the connection was cut); "
        f"65,537 bytes are kept for the next attempt; {OFFLINE}"
    )
    assert server.asked == [None] + ["bytes=65537-"] * 5


@pytest.mark.parametrize("url", ["http://", "http://[::1/file", "http://127.0.0.1:99999/file", "ftp://127.0.0.1/file"])
def test_no_such_url(tmp_path, server, url):
    """What is no URL to ask is one line as well."""
    assert refusal(url, SHA256, tmp_path).startswith(f"{url}: cannot be downloaded (")
    assert visible(tmp_path) == []


@pytest.mark.parametrize("value", ["", "abc", SHA256[:-1], SHA256 + "0", SHA256[:-1] + "g", SHA256 + "\n"])
def test_no_such_hash(tmp_path, server, value):
    """Refused before anything is asked or made."""
    message = f"data.sha256={value!r} is not 64 hex digits: give what sha256sum FILE prints for {server.url('whole')}"
    assert refusal(server.url("whole"), value, tmp_path / "folder") == message
    assert (server.asked, visible(tmp_path)) == ([], [])


@pytest.mark.parametrize(("below", "reason"), [("", "File exists"), ("folder", "Not a directory")])
def test_folder_that_cannot_be_written(tmp_path, server, below, reason):
    """A file where the folder should be: the line says which, and how to choose another."""
    folder = tmp_path / "file" / below
    (tmp_path / "file").write_text("in the way")
    message = f"{folder}: cannot be written ({reason}); name another folder with data.cache="
    assert refusal(server.url("whole"), SHA256, folder) == message
    assert (server.asked, (tmp_path / "file").read_text()) == ([], "in the way")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no device that is always full")
def test_full_disk(tmp_path, server):
    """One line names the folder and the remedy; it is not taken for a fault of the network."""
    (tmp_path / PART).symlink_to("/dev/full")
    said = refusal(server.url("whole"), SHA256, tmp_path)
    assert said.startswith(f"{tmp_path}: the disk is full (No space left on device): free some space and run")
    assert server.asked == [None]
