"""Threads sleep at barriers while other programs need the processors, and no result depends on it."""

import contextlib
import math
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from unittest import mock

import pytest
import torch

import generate
from gpt.hardware import threads
from gpt.hardware.threads import limit_threads
from gpt.model.fast.chunked_loss import chunked_next_token_loss
from gpt.model.transformer import GPT, GPTConfig
from harness import begin_run, fit, tiny_config, write_corpus

# OpenMP's threads, besides the thread that leads them.
SLEEPERS = len(os.sched_getaffinity(0)) - 1 if hasattr(os, "sched_getaffinity") else 0


@pytest.fixture
def two_threads():
    """Give PyTorch two threads. Skip the test if `limit_threads` does nothing on this machine."""
    torch.set_num_threads(2)
    try:
        if threads._libgomp() is None:
            pytest.skip("needs Linux, a PyTorch that computes with libgomp, and two processors")
        yield
    finally:
        torch.set_num_threads(1)


@pytest.fixture
def contended(monkeypatch):
    """Let `limit_threads` find contention at every poll."""
    monkeypatch.setattr(threads, "MAX_WAITING_THREADS", -1.0)
    monkeypatch.setattr(threads, "POLL_SECONDS", 0.01)


def teams() -> int:
    """Count the threads of this process that are not Python's."""
    return len(os.listdir("/proc/self/task")) - threading.active_count()


def wait_until(condition, seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    return condition()


def test_spinning_is_tried_again(two_threads, contended, monkeypatch):
    """The threads sleep for `SLEEP_SECONDS`, spin until contention shows, and sleep again. They end awake."""
    monkeypatch.setattr(threads, "SLEEP_SECONDS", 0.1)
    num_threads = teams()
    with limit_threads():
        for _ in range(3):
            assert wait_until(lambda: teams() == num_threads + SLEEPERS)
            assert wait_until(lambda: teams() == num_threads)
    assert wait_until(lambda: teams() == num_threads)


def test_threads_spin_without_contention(two_threads, monkeypatch):
    monkeypatch.setattr(threads, "MAX_WAITING_THREADS", 1e9)
    monkeypatch.setattr(threads, "POLL_SECONDS", 0.01)
    num_threads = teams()
    with limit_threads():
        assert not wait_until(lambda: teams() > num_threads, seconds=0.5)


def weights_after(steps: int) -> list[torch.Tensor]:
    torch.manual_seed(7)
    model = GPT(GPTConfig(context_length=64, d_model=66, num_layers=1, num_heads=3, vocab_size=331))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(steps):
        idx = torch.randint(331, (11, 65))
        chunked_next_token_loss(*model.features_and_head(idx[:, :-1]), idx[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return list(model.parameters())


def test_no_bit_depends_on_sleeping_threads(two_threads, contended):
    expected = weights_after(2)
    assert torch.get_num_threads() == 2
    num_threads = teams()
    with limit_threads():
        assert wait_until(lambda: teams() == num_threads + SLEEPERS)
        weights = weights_after(2)
    assert all(map(torch.equal, expected, weights))
    assert torch.get_num_threads() == 2


def is_watched() -> bool:
    """Return True if `limit_threads` does anything."""
    with limit_threads():
        return "pace" in [thread.name for thread in threading.enumerate()]


@pytest.mark.parametrize("variable", ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT"])
def test_what_the_user_has_set_is_honoured(two_threads, monkeypatch, variable):
    assert is_watched()
    monkeypatch.setenv(variable, "1")
    assert not is_watched()


def test_one_thread_has_no_barriers():
    assert torch.get_num_threads() == 1
    assert not is_watched()


def test_machines_without_libgomp_are_left_alone(two_threads, monkeypatch):
    class LLVMLibrary:
        """It has libgomp's functions too."""

        GOMP_parallel = omp_pause_resource_all = kmp_set_blocktime = None

    monkeypatch.setattr(threads.ctypes, "CDLL", lambda _: LLVMLibrary())
    assert threads._libgomp() is None
    monkeypatch.undo()
    monkeypatch.setattr(threads, "_TASKS", Path("/dev/null/task"))
    assert threads._libgomp() is None


def test_training_and_sampling_give_way(two_threads, tmp_path, capsys, monkeypatch):
    names: list[str] = []

    class Look:
        def on_train_step_end(self) -> None:
            names.extend(thread.name for thread in threading.enumerate())

    write_corpus(tmp_path)
    fit(begin_run(tiny_config(tmp_path, "horizon=2steps", f"run_dir={tmp_path / 'run'}")), [Look()])
    assert "pace" in names
    assert "pace" not in [thread.name for thread in threading.enumerate()]

    entered = mock.Mock(return_value=contextlib.nullcontext())
    monkeypatch.setattr(threads, "limit_threads", entered)
    generate.main(["--checkpoint", str(tmp_path / "run"), "--prompt", "a", "--max-new-tokens", "2"])
    entered.assert_called_once()
    capsys.readouterr()


@pytest.mark.slow
def test_real_contention_is_seen(two_threads):
    """With as many busy processes as processors, the threads sleep within seconds."""
    x = torch.zeros(2, 40_000).add_(1)
    before, deadline = teams(), time.monotonic() + 30
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    try:
        with limit_threads():
            while teams() == before and time.monotonic() < deadline:
                x.add_(1)
            assert teams() == before + SLEEPERS
    finally:
        for process in busy:
            process.kill()
            process.wait()


# --- quotas of containers ---


@pytest.mark.parametrize(
    ("groups", "files", "quota"),
    [
        ("0::/job/step", {"job/cpu.max": "150000 100000"}, 1.5),
        ("0::/job/step", {"job/cpu.max": "800000 100000", "job/step/cpu.max": "250000 50000"}, 5.0),
        ("0::/", {"cpu.max": "max 100000"}, math.inf),
        ("0::/", {"cpu.max": "50000 100000"}, 0.5),  # a container that sees its own group as the root
        ("4:cpu,cpuacct:/a", {"cpu/a/cpu.cfs_quota_us": "300000", "cpu/a/cpu.cfs_period_us": "100000"}, 3.0),
        ("4:cpu,cpuacct:/a", {"cpu/a/cpu.cfs_quota_us": "-1", "cpu/a/cpu.cfs_period_us": "100000"}, math.inf),
        ("4:cpu,cpuacct:/host/a", {"cpu/cpu.cfs_quota_us": "70000", "cpu/cpu.cfs_period_us": "10000"}, 7.0),
    ],
)
def test_quota_of_control_groups(tmp_path, groups, files, quota):
    """Versions 1 and 2, the least of all groups that hold this process, and no limit."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(f"{groups}\n")
    for name, content in files.items():
        file = tmp_path / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{content}\n")
    assert threads.cpu_quota(tmp_path) == quota
    assert threads.cpu_quota(tmp_path / "another system") == math.inf


@pytest.mark.parametrize(("quota", "expected"), [(0.5, 1), (1.5, 1), (2.0, 2), (7.9, 3), (math.inf, 3)])
def test_threads_fit_into_the_quota(monkeypatch, quota, expected):
    """They are limited within the block only. OMP_NUM_THREADS has precedence."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(threads, "cpu_quota", lambda: quota)
    torch.set_num_threads(3)
    try:
        with limit_threads():
            assert torch.get_num_threads() == expected
        assert torch.get_num_threads() == 3
        monkeypatch.setenv("OMP_NUM_THREADS", "3")
        with limit_threads():
            assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(1)
