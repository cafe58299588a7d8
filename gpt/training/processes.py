"""The processes of one training, and a connection between rank 0 and each other one.

torchrun or srun starts all of them; otherwise rank 0 starts the others. Either way rank 0 alone reads the command line,
prepares the text and reports, and the others follow: see following.py. The connections carry what rank 0 asks of the
others, and they break when a process dies, however it dies, so that the others can end as well.
"""

import contextlib
import json
import os
import queue
import re
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from gpt.errors import NonFiniteError, UserError, command_line, write_line
from gpt.training import ranks as numbered
from gpt.training.ranks import SHARED, Ranks, launched

if TYPE_CHECKING:
    from torch.distributed import Store  # which not every build has

GRACE = 5.0  # seconds in which a process may end by itself, when all end
JOIN_SECONDS = "MINI_GPT_JOIN_SECONDS"  # the environment variable for how long the processes wait for one another
KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}  # a machine that falls silent is lost after 20 s


def identity() -> list[str]:
    """What must be the same in all processes before they train together."""
    code, root = sha256(), Path(__file__).resolve().parents[1]
    for file in sorted(root.rglob("*.py")):
        code.update(file.read_bytes())
    ranks = launched()
    counts = [f"{ranks.world_size} processes, {ranks.devices} on each machine"] if ranks else []
    return [*sys.argv[1:], *counts, f"torch {torch.__version__}", f"train.py and gpt/ of hash {code.hexdigest()[:12]}"]


def _join_seconds() -> float:
    return float(os.environ.get(JOIN_SECONDS) or 60)


class Process:
    """One of the processes of a training, with their common store."""

    def __init__(self, ranks: Ranks, store: "Store | None"):
        self.ranks, self._store = ranks, store

    def connect(self, device: str) -> None:
        """Make the process group of all ranks, if there are several, which Lightning will find and use."""
        if self._store is None or distributed.is_initialized():
            return
        own, backend = None, "gloo"
        if device == "cuda":
            own, backend = torch.device("cuda", self.ranks.local_rank), "cpu:gloo,cuda:nccl"
            torch.cuda.set_device(own)
        distributed.init_process_group(
            backend,
            store=distributed.PrefixStore("group", self._store),
            rank=self.ranks.rank,
            world_size=self.ranks.world_size,
            device_id=own,
        )

    def _death(self, rank: int) -> str:
        return f"process {rank} of {self.ranks.world_size} died; all others were ended"


class Leader(Process):
    """Rank 0. With a single process, nothing listens and nothing is sent."""

    def __init__(self, ranks: Ranks, store: "Store | None" = None):
        super().__init__(ranks, store)
        self.children: list[subprocess.Popen] = []
        self._others: dict[int, socket.socket] = {}
        self._failure: tuple[str, int] | None = None
        self._failed, self._over, self._lock = threading.Event(), threading.Event(), threading.Lock()
        if store is not None:
            dual = ranks.launcher != "" and socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if dual else socket.AF_INET
            place = ("" if ranks.launcher else "127.0.0.1", 0)
            self._listener = socket.create_server(place, family=family, dualstack_ipv6=dual)
            self._secret = secrets.token_hex(16)
            store.set("control", json.dumps([self._listener.getsockname()[1], self._secret]))

    def gather(self) -> None:
        """Wait until all others are there and like this one; `UserError` otherwise."""
        missing, seconds = set(range(1, self.ranks.world_size)), _join_seconds()
        deadline = time.monotonic() + seconds
        hellos: dict[int, dict[str, Any]] = {}
        self._listener.settimeout(0.2)
        while missing := missing - set(hellos):
            for rank, child in enumerate(self.children, start=1):
                if child.poll() is not None:
                    _report(self._death(rank))
                    sys.exit(1)
            if not self.children and time.monotonic() > deadline:
                raise UserError(
                    f"{len(missing)} of {self.ranks.world_size} processes did not come within {seconds:.0f} s: start "
                    f"all of them together, allow more time with {JOIN_SECONDS}, or unset WORLD_SIZE to train alone"
                )
            with contextlib.suppress(OSError, ValueError, KeyError):
                connection = _keep_alive(self._listener.accept()[0])
                connection.settimeout(5)
                stream = connection.makefile("r", encoding="utf-8")
                hello = json.loads(stream.readline())
                connection.settimeout(None)
                if hello["secret"] != self._secret or hello["rank"] not in missing:  # it is none of ours
                    stream.close()
                    connection.close()
                    continue
                hellos[hello["rank"]], self._others[hello["rank"]] = hello, connection
                threading.Thread(target=self._listen, args=(hello["rank"], stream), daemon=True).start()
        ours = set(identity())
        for rank, hello in hellos.items() if self.ranks.launcher else ():
            if different := ours ^ set(hello["identity"]):
                raise UserError(
                    f"process {rank} on {hello['host']} was not started like process 0, but differs in "
                    f"{', '.join(sorted(different))}: start all with the same arguments and the same code"
                )

    def send(self, job: dict[str, Any]) -> None:
        """Have all others do a job."""
        if self.ranks.world_size > 1 and not self._others:
            self.gather()
        self._tell(job)

    def _tell(self, message: dict[str, Any]) -> None:
        for connection in self._others.values():
            _send(connection, message)

    def _listen(self, rank: int, stream) -> None:
        with contextlib.suppress(OSError, ValueError), stream:
            for line in stream:
                self._fail(f"process {rank}: {json.loads(line)['error']}", 2)
        self._fail(self._death(rank), 1)

    def _fail(self, line: str, code: int) -> None:
        """End all processes because one has failed, this one as well if it does not notice."""
        with self._lock:
            if self._failure or self._over.is_set():
                return
            self._failure = line, code
        self._failed.set()
        self._tell({"end": code})
        if not self._over.wait(GRACE):  # it computes, or waits for the others on a GPU
            _report(line)
            os._exit(code)

    def raise_failure(self) -> None:
        """Raise what has failed in another process, if an error here may be its consequence."""
        if self._others and self._failed.wait(1.0):
            assert self._failure is not None
            self._over.set()
            line, code = self._failure
            if code == 2:
                raise UserError(line) from None
            _report(line)
            sys.exit(code)

    def end(self, code: int) -> None:
        """End the others, with the same exit code."""
        self._over.set()
        self._tell({"end": code})
        if distributed.is_available() and distributed.is_initialized():
            distributed.destroy_process_group()
        deadline = time.monotonic() + GRACE
        for child in self.children:
            if self._others:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(max(0.0, deadline - time.monotonic()))
            child.kill()
            child.wait()
        if self._store is not None:
            self._listener.close()
        for connection in self._others.values():
            with contextlib.suppress(OSError), connection:
                connection.shutdown(socket.SHUT_RDWR)  # for the thread that reads from it


class Follower(Process):
    """A rank above 0: `jobs` holds what rank 0 has asked for, and at last {"end": exit code}."""

    def __init__(self, ranks: Ranks, store: "Store"):
        super().__init__(ranks, store)
        self.jobs: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.ended = threading.Event()
        port, secret = json.loads(store.get("control"))
        self._connection = _keep_alive(socket.create_connection((os.environ["MASTER_ADDR"], port), timeout=60))
        self._connection.settimeout(None)
        hello = {"secret": secret, "rank": ranks.rank, "host": socket.gethostname(), "identity": identity()}
        _send(self._connection, hello)
        threading.Thread(target=self._listen, daemon=True).start()

    def report(self, error: str) -> None:
        """Have rank 0 print a line and end all processes."""
        _send(self._connection, {"error": error})

    def _listen(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            for line in self._connection.makefile("r", encoding="utf-8"):
                self.jobs.put(job := json.loads(line))
                if "end" in job:
                    self.ended.set()
                    orderly = job["end"] == 0 or job["end"] >= 128  # and not because a process has failed
                    time.sleep(GRACE if orderly else 0.0)
                    os._exit(job["end"])
        if self.ranks.rank == 1:
            _report(self._death(0))
        os._exit(1)


def _report(line: str) -> None:
    write_line(f"train.py: {line}", sys.stderr)


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # the thread that listens on this connection sees that it is broken
        connection.sendall(json.dumps(message).encode() + b"\n")


def _keep_alive(connection: socket.socket) -> socket.socket:
    """Have the system notice when the other machine falls silent."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        if hasattr(socket, name):  # not on every system
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return connection


_LAUNCHED: Leader | None = None  # of processes that torchrun or srun has started


def lead_or_follow(main: Callable[[], None], follow: Callable[[Follower], int]) -> None:
    """Run `main`; in a process above rank 0, `follow` instead, and end with its exit code.

    Raises `UserError` if the processes do not find one another.
    """
    global _LAUNCHED
    ranks = launched()
    if ranks is None:
        return main()
    store = _meet(ranks)
    if ranks.rank:
        sys.exit(follow(Follower(ranks, store)))
    _LAUNCHED, code = Leader(ranks, store), 1
    numbered.joined = True
    try:
        with command_line("train.py"):
            _LAUNCHED.gather()
            main()
        code = 0
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else 1
        raise
    finally:
        _LAUNCHED.end(code)


def _meet(ranks: Ranks) -> "Store":
    """The store of all processes, at the address that the launcher has told them."""
    if ranks.launcher == "srun":
        nodes, job, step = (os.environ.get(f"SLURM_{name}", "") for name in ("STEP_NODELIST", "JOB_ID", "STEP_ID"))
        first = re.sub(r"\[(\w+)[^\]]*\]", r"\1", nodes).split(",")[0]  # a01 of a[01-04,07],b[1-3]
        os.environ.setdefault("MASTER_ADDR", first)
        os.environ.setdefault("MASTER_PORT", str(15_000 + (int(job or 0) + int(step or 0)) % 10_000))
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    seconds = _join_seconds()
    try:
        deadline = time.monotonic() + seconds
        while ranks.rank:  # PyTorch itself would print more than one line about it
            try:
                socket.create_connection((address, int(port)), timeout=max(1.0, seconds)).close()
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.5)
        wait = timedelta(seconds=seconds)
        return next(distributed.rendezvous("env://", ranks.rank, ranks.world_size, timeout=wait))[0]
    except (distributed.DistError, OSError, ValueError) as error:
        raise UserError(
            f"process {ranks.rank} of {ranks.world_size} did not meet the others at MASTER_ADDR={address} MASTER_PORT="
            f"{port} within {seconds:.0f} s ({' '.join(str(error).split())}): start all together on a free port, "
            f"allow more time with {JOIN_SECONDS}, or unset WORLD_SIZE to train alone"
        ) from None


@contextlib.contextmanager
def leading(world_size: int) -> Iterator[Leader]:
    """Run the block as rank 0 of all processes: those that were launched, or else some that start and end here."""
    environment, threads = dict(os.environ), torch.get_num_threads()
    leader, code = _LAUNCHED or _start(world_size), 1
    try:
        yield leader
        code = 0
    except Exception as error:
        if not isinstance(error, UserError | NonFiniteError):
            leader.raise_failure()
        raise
    finally:
        if leader is not _LAUNCHED:
            leader.end(code)
        # Lightning sets variables, and both set the number of threads: another training must not inherit them.
        os.environ.clear()
        os.environ.update(environment)
        torch.set_num_threads(threads)


def _start(world_size: int) -> Leader:
    """Start all processes but this one."""
    ranks = Ranks(0, world_size, 0, world_size)
    if world_size == 1:
        return Leader(ranks)
    store = distributed.TCPStore("127.0.0.1", 0, world_size, is_master=True, wait_for_workers=False)
    leader = Leader(ranks, store)
    shared = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), JOIN_SECONDS: "10"}
    for rank in range(1, world_size):
        numbers = dict(zip(SHARED, map(str, (rank, world_size, rank, world_size)), strict=True))
        command = [sys.executable, "-m", "gpt.training.following"]
        # In a session of its own, Ctrl-C does not reach it: it stops when rank 0 does.
        leader.children.append(
            subprocess.Popen(command, stdin=subprocess.DEVNULL, env=shared | numbers, start_new_session=True)
        )
    return leader


def use_threads(count: int | None) -> None:
    """Compute with `count` threads if it is given, and keep Lightning from changing that."""
    if count:
        torch.set_num_threads(count)
        os.environ["OMP_NUM_THREADS"] = str(count)
