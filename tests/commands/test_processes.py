"""Every command as a process: mistakes end with exit code 2 and one line, before slow libraries are imported."""

import signal
import subprocess
import sys
import time

import pytest

from harness import ROOT


@pytest.mark.parametrize(
    ("program", "arguments", "slow_libraries", "line"),
    [
        ("generate", ["--temp", "1"], ["torch", "numpy"], "generate.py: unrecognized arguments: --temp 1"),
        ("generate", ["--prompt", "a", "--num-samples", "0"], ["torch", "numpy"], "generate.py: --num-samples=0"),
        ("gpt.compare", ["nowhere"], ["torch", "tensorboard"], "gpt.compare: runs/nowhere: not a run directory"),
        ("gpt.evaluate", ["--text", "nowhere"], ["torch"], "gpt.evaluate: --text='nowhere' names no text file"),
        ("gpt.export", ["--to", "gpt"], ["torch"], "gpt.export: --to=gpt exists already: give another name"),
        ("gpt.tokens", ["--text", "a", "--file", "b"], ["torch"], "gpt.tokens: argument --file: not allowed with"),
    ],
)
def test_mistakes_are_reported_before_slow_imports(program, arguments, slow_libraries, line):
    """torch takes seconds to import."""
    code = "import atexit, runpy, sys\n"
    code += f"atexit.register(lambda: print([name for name in {slow_libraries} if name in sys.modules]))\n"
    code += f"runpy.run_module({program!r}, run_name='__main__')"
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.endswith("[]\n")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith(line)


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
