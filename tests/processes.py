"""Processes that tests start and kill. A server imports the slow libraries once, and forks a child for each command.

`ForkServer` starts a server. A child runs a command as `python` would: its arguments, folder, environment, streams,
signals and exit code are its own. What Python and its libraries read from the environment when they are loaded, such as
OMP_NUM_THREADS, is as in the server.
"""

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

HEADER_BYTES = 9


class ForkServer:
    """A server of forked processes. It imports modules. None of them may start a thread."""

    def __init__(self, modules: Sequence[str]):
        self._folder = tempfile.TemporaryDirectory(prefix="gpt-")  # a socket's path has at most 107 characters
        self.socket = f"{self._folder.name}/socket"
        self._server = subprocess.Popen(
            [sys.executable, __file__, self.socket, json.dumps(sys.path), *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._server.stdout is not None
        assert self._server.stdout.readline() == b"ready\n"

    def python(self) -> Path:
        """Return the path of a program that runs commands as `python` does, in a child of the server."""
        program = Path(self._folder.name, "python")
        if not program.exists():
            call = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import processes as p"
            program.write_text(f"#!{sys.executable} -SE\n{call}; p.run_in_child({self.socket!r}, sys.argv[1:])\n")
            program.chmod(0o700)
        return program

    def close(self) -> None:
        """End the server, and kill the children that still run."""
        self._server.communicate()
        self._folder.cleanup()


class ForkedProcess:
    """A child of a server, with nothing on its stdin.

    Args:
        server: the server.
        words: what follows `python` in the command: a file or -c and code, and the arguments.
        output: a file, open for appending, for stdout and stderr.
        folder: the current folder.
        environment: the environment.
    """

    def __init__(
        self, server: ForkServer, words: Sequence[str], output: IO, folder: Path, environment: Mapping[str, str]
    ):
        self.returncode: int | None = None
        with open(os.devnull) as stdin:
            streams = [stdin.fileno(), output.fileno(), output.fileno()]
            self._connection = request_child(server.socket, words, str(folder), dict(environment), streams)
        self._replies = self._connection.makefile()
        self.pid = int(self._replies.readline())

    def poll(self) -> int | None:
        """Return the exit code, negative if a signal ended the process, or None while it runs."""
        if self.returncode is None and select.select([self._connection], [], [], 0)[0]:
            self.returncode = int(self._replies.readline())
            self._replies.close()
            self._connection.close()
        return self.returncode

    def wait(self, seconds: float = 300.0) -> int:
        """Return the exit code, once the process has ended."""
        if self.returncode is None:
            assert select.select([self._connection], [], [], seconds)[0], f"it runs after {seconds} s"
        code = self.poll()
        assert code is not None
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)


def request_child(
    socket_path: str, words: Sequence[str], folder: str, environment: dict[str, str], streams: list[int]
) -> socket.socket:
    """Ask a server for a child, and return the connection. It sends the process id, and later the exit code.

    Args:
        socket_path: the socket of the server.
        words: what follows `python` in the command.
        folder: the current folder of the child.
        environment: its environment.
        streams: the file descriptors of its stdin, stdout and stderr.
    """
    request = json.dumps({"words": list(words), "folder": folder, "environment": environment}).encode()
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(socket_path)
    socket.send_fds(connection, [b"%*d" % (HEADER_BYTES, len(request))], streams)
    connection.sendall(request)
    return connection


def run_in_child(socket_path: str, words: Sequence[str]) -> None:
    """Run a command in a child of the server, wait until it has ended, and end in the same way."""
    if words[0].startswith("-") and words[0] not in ("-c", "-m"):
        os.execv(sys.executable, [sys.executable, *words])
    with request_child(socket_path, words, os.getcwd(), dict(os.environ), [0, 1, 2]).makefile() as replies:
        replies.readline()
        code = int(replies.readline())
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


# --- in the server ---


def serve(socket_path: str) -> dict:
    """Fork a child for each request, and return the request, in the child only.

    A child is killed when its connection is closed. The server ends when its stdin is closed.
    """
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(socket_path)
    listener.listen(64)
    wakeup, wakeup_writer = os.pipe()
    os.set_blocking(wakeup_writer, False)
    signal.set_wakeup_fd(wakeup_writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    connections: dict[socket.socket, int] = {}  # to the process id
    print("ready", flush=True)
    while True:
        ready, _, _ = select.select([0, wakeup, listener, *connections], [], [])
        if wakeup in ready:
            os.read(wakeup, 4096)
            report_exit_codes(connections)
        abandoned = [connection for connection in connections if connection in ready]
        for connection in connections if 0 in ready else abandoned:
            for kill in (os.kill, os.killpg):  # it leads a group a moment after it was forked
                with contextlib.suppress(ProcessLookupError):
                    kill(connections[connection], signal.SIGKILL)
        if 0 in ready:
            with contextlib.suppress(ChildProcessError):
                while os.wait():
                    pass
            sys.exit()
        for connection in abandoned:
            del connections[connection]
            connection.close()
        if listener in ready:
            connection, _ = listener.accept()
            header, streams, _, _ = socket.recv_fds(connection, HEADER_BYTES, 3)
            request = json.loads(connection.makefile("rb").read(int(header)))
            process_id = os.fork()
            if process_id == 0:
                become_child(streams, [wakeup, wakeup_writer], [listener, connection, *connections])
                return request
            for descriptor in streams:
                os.close(descriptor)
            connections[connection] = process_id
            connection.sendall(b"%d\n" % process_id)


def report_exit_codes(connections: dict[socket.socket, int]) -> None:
    """Send the exit code of each child that has ended, and close its connection."""
    with contextlib.suppress(ChildProcessError):
        while True:
            process_id, status = os.waitpid(-1, os.WNOHANG)
            if process_id == 0:
                return
            for connection in [key for key, value in connections.items() if value == process_id]:
                del connections[connection]
                with contextlib.suppress(BrokenPipeError), connection:
                    connection.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))


def become_child(streams: list[int], descriptors: list[int], sockets: list[socket.socket]) -> None:
    """Take the streams of the client, lead a process group, and close what belongs to the server.

    In a session of its own, the system would ignore SIGTSTP.
    """
    os.setpgid(0, 0)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number, descriptor in enumerate(streams):
        os.dup2(descriptor, number)
    for descriptor in (*streams, *descriptors):
        os.close(descriptor)
    for connection in sockets:
        connection.close()
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", buffering=1 if os.isatty(1) else -1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)


def set_up_interpreter(words: list[str], folder: str, environment: dict[str, str], library_path: list[str]) -> None:
    """Set the folder, environment, arguments and import path of a command as `python` would.

    Args:
        words: what follows `python` in the command.
        folder: the current folder.
        environment: the environment.
        library_path: where Python and its packages are.
    """
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    is_file = words[0] not in ("-c", "-m")
    sys.argv = words if is_file else [words[0], *words[2:]]
    script_folder = os.path.dirname(os.path.abspath(words[0])) if is_file else folder
    python_path = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [script_folder, *python_path, *library_path]


def main() -> None:
    """Serve; in a child, run the command of its request."""
    _, socket_path, import_path, *modules = sys.argv
    library_path = sys.path[1:]
    sys.path[:1] = json.loads(import_path)
    for module in modules:
        importlib.import_module(module)
    gc.freeze()
    request = serve(socket_path)
    words = request["words"]
    set_up_interpreter(library_path=library_path, **request)
    if words[0] == "-c":
        exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})
    elif words[0] == "-m":
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    main()
