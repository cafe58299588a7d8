"""Signals while a command imports its libraries."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness import ROOT


@pytest.mark.skipif(sys.platform == "win32", reason="NOT TESTED: Windows has another Ctrl-C")
@pytest.mark.parametrize("command", [["train.py", "--cfg", "job"], ["generate.py"], ["-m", "gpt.evaluate"]])
def test_ctrl_c_during_imports_ends_a_command_without_a_traceback(command):
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, *command], cwd=ROOT, text=True, **streams)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert "Traceback" not in error
    assert process.returncode in (0, 2, 130, -signal.SIGINT)  # the command may have ended before the signal


@pytest.mark.parametrize("command", [["train.py"], ["generate.py"], ["-m", "gpt.evaluate"], ["-m", "gpt.compare"]])
def test_without_the_required_packages_a_command_names_the_remedy(command):
    """Without site-packages, Python has only its own modules."""
    done = subprocess.run([sys.executable, "-S", *command], cwd=ROOT, env={}, capture_output=True, text=True)
    (line,) = done.stderr.splitlines()
    assert line.startswith("torch, lightning, ") and line.endswith(f"pip install -e . in {ROOT}")
    assert done.returncode == 2


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="NOT TESTED: links need rights on Windows")
def test_train_py_runs_through_a_link(tmp_path):
    link = tmp_path / "linked.py"
    link.symlink_to(ROOT / "train.py")
    done = subprocess.run([sys.executable, link, "--cfg", "job"], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "tokens_per_step" in done.stdout


def can_be_process_1() -> bool:
    """Return True if this process may start others in a namespace of their own, as a container does."""
    command = ["unshare", "--pid", "--fork", "--mount-proc", "true"]
    return shutil.which("unshare") is not None and subprocess.run(command, capture_output=True).returncode == 0


@pytest.mark.promise("runs.md#also to process 1 of a container")
@pytest.mark.skipif(not can_be_process_1(), reason="needs unshare, and the rights of root")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_process_1_of_a_container_ends_at_a_signal(number):
    """The signal arrives after the first import of gpt, and before those that take seconds."""
    unshare = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    command = [sys.executable, "-X", "importtime", "train.py", "--cfg", "job"]
    process = subprocess.Popen([*unshare, *command], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    assert process.stderr is not None
    next(line for line in process.stderr if line.endswith(b" gpt.errors\n"))
    [child] = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(child), number)
    _, error = process.communicate(timeout=60)
    assert b" hydra.main\n" not in error
    assert process.returncode == 128 + number
