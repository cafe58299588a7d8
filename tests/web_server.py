"""A web server on loopback that cuts, stalls, lies and fails, as its paths ask. It is a small Hugging Face hub as well.

The first part of a path names the behaviour: `/whole/file.txt`, `/short/file.txt`, `/503/file.txt`.
"""

import contextlib
import hashlib
import http.server
import json
import threading
from collections.abc import Mapping
from urllib.parse import unquote

ANSWER_BYTES = 1_000_003  # of an answer that ends early
COMMIT = "5" * 40  # of every repository of the hub


class Handler(http.server.BaseHTTPRequestHandler):
    """Answer with the server's content as the first part of the path asks, or as the hub does."""

    server: "WebServer"

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        server = self.server
        content = server.content
        headers = {"ETag": f'"{server.tag}"'}
        behavior = self.path.split("/")[1]
        is_get = self.command == "GET"
        is_hub = behavior in ("api", "datasets") or "/resolve/" in self.path
        range_header = self.headers["Range"]
        if is_get:
            server.requests.append(f"{self.path} {range_header}" if is_hub else range_header)
        if server.next_statuses or behavior.isdigit():
            return self.answer(server.next_statuses.pop() if server.next_statuses else int(behavior), b"", {})
        if behavior == "moved":
            return self.answer(302, b"", {"Location": "/whole/file.txt"})
        if is_hub:
            path = unquote(self.path.partition("?")[0])
            if path not in server.hub_files:
                is_known = any(f"{repository}/" in path for repository in server.repositories)
                return self.answer(404, b"", {"X-Error-Code": "EntryNotFound" if is_known else "RepoNotFound"})
            content = server.hub_files[path]
            headers = {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": COMMIT}
        if behavior == "encoded":
            headers["Content-Encoding"] = "gzip"
        if behavior == "changes" and is_get:
            server.tag += "x"
        start, last = 0, len(content) - 1
        if range_header and behavior != "ignored":
            start, last = map(int, range_header.removeprefix("bytes=").split("-"))
        if behavior == "less" and range_header:
            last = min(last, start + 100_002)
        limit = ANSWER_BYTES if behavior == "short" else None
        stalls = behavior == "stalls" and is_get and start >= ANSWER_BYTES and not server.has_stalled
        if stalls:
            server.has_stalled = True
            limit = 1003
        status = 416 if start >= len(content) else 206 if range_header else 200
        self.answer(status, content[start : last + 1], headers, limit)
        if stalls:
            server.gate.wait(60)

    def answer(self, status: int, content: bytes, headers: Mapping[str, str], limit: int | None = None) -> None:
        self.send_response(status)
        if "untold" not in self.path:
            self.send_header("Content-Length", str(len(content)))
        for key, value in headers.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            with contextlib.suppress(ConnectionError):  # the reader was killed
                self.wfile.write(content[:limit])

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


class WebServer(http.server.ThreadingHTTPServer):
    """A server in its own thread. It records the Range of each GET, and of the hub's files the path as well."""

    daemon_threads = False  # so that closing waits for all of them

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests: list[str | None] = []
        self.content = b""  # of every file, except those of the hub
        self.tag = "x"  # of every file, except those of the hub
        self.next_statuses: list[int] = []  # the next requests get these statuses
        self.repositories: set[str] = set()
        self.hub_files: dict[str, bytes] = {}  # path -> content
        self.has_stalled = False
        self.gate = threading.Event()  # until it is set, an answer that stalls does
        self._thread = threading.Thread(target=self.serve_forever, args=(0.01,))
        self._thread.start()

    def url(self, behavior: str = "") -> str:
        return f"http://127.0.0.1:{self.server_address[1]}" + f"/{behavior}/file.txt" * bool(behavior)

    def request_starts(self) -> list[int]:
        """Return where in the file each answer was to begin."""
        return [int(request.removeprefix("bytes=").split("-")[0]) for request in self.requests if request]

    def add_repository(self, name: str, files: Mapping[str, bytes]) -> None:
        """Serve a repository as the Hugging Face hub does. Files are in it, or in its folder data/.

        Args:
            name: "datasets/OWNER/NAME" or "OWNER/NAME", which is a model.
            files: the content of each file, by its path.
        """
        self.repositories.add(name)
        api = f"/api/{name}" if name.startswith("datasets/") else f"/api/models/{name}"
        info = json.dumps({"id": name.removeprefix("datasets/"), "sha": COMMIT, "siblings": []}).encode()
        entries = [{"type": "file", "oid": path, "size": len(data), "path": path} for path, data in files.items()]
        folder = [entry for entry in entries if str(entry["path"]).startswith("data/")]
        if folder:
            entries.append({"type": "directory", "oid": "data", "path": "data"})
        self.hub_files[api] = info
        for revision in (COMMIT, "main"):
            self.hub_files[f"{api}/revision/{revision}"] = info
            self.hub_files[f"{api}/tree/{revision}"] = json.dumps(entries).encode()
            self.hub_files[f"{api}/tree/{revision}/data"] = json.dumps(folder).encode()
            for path, content in files.items():
                self.hub_files[f"/{name}/resolve/{revision}/{path}"] = content

    def stop(self) -> None:
        self.gate.set()
        self.shutdown()
        self._thread.join()
        self.server_close()
