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
