"""A web server on loopback for downloads: it cuts, stalls, lies and fails, as its paths say."""

import contextlib
import http.server
import re
import threading
from collections.abc import Iterator
from urllib.parse import unquote

import pytest

CUT = 1_000_003  # bytes that an answer has before it fails


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers with the content, in the way that the first part of the path says; or as the hub does."""

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
        """Say nothing."""


class Server(http.server.ThreadingHTTPServer):
    """A server of a thread's own, which remembers the Range that each GET asked for."""

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
