"""Ctrl-C while a command imports its libraries."""

import signal
import subprocess
import sys
import time

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
