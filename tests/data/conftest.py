"""Fixtures for the tests of data: files, servers that answer badly, processes that prepare, and a small disk."""

import contextlib
import http.server
import logging
import os
import re
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from gpt.data.data_config import DataConfig
from gpt.data.tokenizer import byte_tokenizer
from harness import import_or_skip
from workshop import (
    DOCUMENTS,
    SMALL,
    constants,
    content,
    expected_ids,
    lists,
    make,
    only_folder,
    split_documents,
    whole,
    write_documents,
)

CUT = 1_000_003  # bytes that an answer has before it fails


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """One for all examples of a property."""
    return tmp_path_factory.mktemp("examples")


@pytest.fixture(scope="session")
def fill() -> Callable[..., Path]:
    """A function that writes files, `__` in a name for a dot and `_in_` for a folder, and returns their folder."""

    def fill(folder: Path, **files: str | bytes) -> Path:
        for name, written in files.items():
            file = folder / name.replace("_in_", "/").replace("__", ".")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(written.encode() if isinstance(written, str) else written)
        return folder

    return fill


@pytest.fixture
def s3(monkeypatch, tmp_path) -> Iterator[Any]:
    """An S3 server on loopback, where programs find it too, as a file system with the empty bucket `texts`."""
    ThreadedMotoServer, S3FileSystem = (
        import_or_skip("moto.server").ThreadedMotoServer,
        import_or_skip("s3fs").S3FileSystem,
    )
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    for key in ("PROFILE", "SESSION_TOKEN"):
        monkeypatch.delenv(f"AWS_{key}", raising=False)
    for key in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "CONFIG_FILE", "SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(f"AWS_{key}", str(tmp_path / "nothing"))
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://{}:{}".format(*server.get_host_and_port()))
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    S3FileSystem.clear_instance_cache()
    system = S3FileSystem()
    system.mkdir("texts")
    yield system
    system.rm("texts", recursive=True)
    S3FileSystem.clear_instance_cache()
    server.stop()


# --- a web server on loopback for downloads: it cuts, stalls, lies and fails, as its paths say ---


class Handler(http.server.BaseHTTPRequestHandler):
    """Answer with the content as the first part of the path asks, or as the hub does."""

    server: "Server"

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        server, content, asked = self.server, self.server.content, self.headers["Range"]
        way, is_hub = self.path.split("/")[1], self.path.startswith(("/api", "/datasets"))
        if self.command == "GET":
            server.asked.append(f"{self.path} {asked}" if is_hub else asked)
        if server.fails or way.isdigit():
            return self.answer(server.fails.pop() if server.fails else int(way), b"", {})
        if way == "moved":
            return self.answer(302, b"", {"Location": "/whole/file.txt"})
        if is_hub:
            name = re.sub(r"^/(api/)?datasets/me/", "", unquote(self.path.partition("?")[0]))
            if (found := server.hub.get(name)) is None:
                code = "RevisionNotFound" if "revision" in name else "EntryNotFound" if "/" in name else "RepoNotFound"
                return self.answer(404, b"", {"X-Error-Code": code})
            content = found
        start, last = map(int, asked[6:].split("-")) if asked and "ignore" not in way else (0, len(content) - 1)
        last = min(last, start + 100_002) if asked and way == "less" else last
        status = 416 if start >= len(content) else 206 if asked else 200
        headers = {"ETag": f'"{server.tag}"'}
        if way == "encoded":
            headers["Content-Encoding"] = "gzip"
        server.tag += "x" * (way == "changes" and self.command == "GET")
        stalls = way == "stalls" and self.command == "GET" and start >= CUT and not server.stalled
        cut = 1003 if stalls else CUT if way in ("short", "ignored-cut") else None
        server.stalled |= stalls
        self.answer(status, content[start : last + 1] if status < 400 else b"", headers, cut)
        if stalls:
            server.gate.wait(60)

    def answer(self, status: int, content: bytes, headers: dict[str, str], cut: int | None = None) -> None:
        self.send_response(status)
        if "untold" not in self.path:
            headers["Content-Length"] = str(len(content))
        for key, value in headers.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            with contextlib.suppress(ConnectionError):  # the reader was killed
                self.wfile.write(content[:cut])

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


class Server(http.server.ThreadingHTTPServer):
    """A server in its own thread. It records the Range of each GET."""

    daemon_threads = False  # so that closing waits for all of them

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[str | None] = []
        self.content = b""  # of every file
        self.fails: list[int] = []  # how the next requests are answered
        self.hub: dict[str, bytes] = {}  # path below a data set's name -> content
        self.tag = "x"  # likewise
        self.stalled = False
        self.gate = threading.Event()  # until it is set, an answer that stalls does
        self._thread = threading.Thread(target=self.serve_forever, args=(0.01,))
        self._thread.start()

    def url(self, way: str = "") -> str:
        return f"http://127.0.0.1:{self.server_address[1]}" + f"/{way}/file.txt" * bool(way)

    def starts(self) -> list[int]:
        """Where in the file each answer was to begin."""
        return [int(asked[6:].split("-")[0]) for asked in self.asked if asked]

    def stop(self) -> None:
        self.gate.set()
        self.shutdown()
        self._thread.join()
        self.server_close()


@pytest.fixture
def server(monkeypatch) -> Iterator[Server]:
    """A server, and no proxy before it."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    started = Server()
    yield started
    started.stop()


# --- preparing ---


@pytest.fixture
def disk(tmp_path) -> Iterator[Path]:
    """A small disk, to run full or to become read-only."""
    place = tmp_path / "disk"
    place.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", place]).returncode:
        pytest.skip("SKIPPED LOUDLY: only root can mount the small disk that is to run full")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True)


@pytest.fixture(scope="module")
def many(tmp_path_factory) -> DataConfig:
    """Documents in five files; one document is long."""
    parts = [DOCUMENTS[:11], ["".join(DOCUMENTS[11:23])], DOCUMENTS[23:29], DOCUMENTS[29:31], DOCUMENTS[31:]]
    folder = tmp_path_factory.mktemp("many")
    for i, part in enumerate(parts):
        write_documents(folder / str(i), part)
    return DataConfig("text", str(folder))


@pytest.fixture(scope="module")
def undisturbed(many, tmp_path_factory) -> dict[str, bytes]:
    """The files of an uninterrupted preparation."""
    cache = tmp_path_factory.mktemp("undisturbed")
    with constants(SMALL):
        prepared = make(many, cache)
        expected = tuple(expected_ids(documents, byte_tokenizer()) for documents in split_documents(many))
    assert lists(prepared) == expected
    return content(only_folder(cache))


@pytest.fixture(scope="module")
def undisturbed_whole(many, tmp_path_factory) -> dict[str, bytes]:
    """The same files with the training files joined."""
    cache = tmp_path_factory.mktemp("whole")
    with constants(SMALL):
        make(many, cache)
    return whole(only_folder(cache))
