"""Every command as a process: mistakes end with exit code 2 and one line, before slow libraries are imported."""

import signal
import subprocess
import sys
import time

import pytest

from harness import ROOT


@pytest.mark.parametrize(
    ("program", "arguments", "slow", "line"),
    [
        ("generate", ["--temp", "1"], ["torch", "numpy"], "generate.py: unrecognized arguments: --temp 1"),
        ("generate", ["--prompt", "a", "--num-samples", "0"], ["torch", "numpy"], "generate.py: --num-samples=0"),
        ("generate", ["--help"], ["torch", "numpy"], ""),
        ("gpt.compare", ["nowhere"], ["torch", "tensorboard"], "gpt.compare: runs/nowhere: not a run directory"),
        ("gpt.evaluate", ["--text", "nowhere"], ["torch"], "gpt.evaluate: --text='nowhere' names no text file"),
        ("gpt.export", ["--to", "gpt"], ["torch"], "gpt.export: --to=gpt exists already: give another name"),
        ("gpt.tokens", ["--text", "a", "--file", "b"], ["torch"], "gpt.tokens: argument --file: not allowed with"),
    ],
)
def test_mistakes_come_before_slow_imports(program, arguments, slow, line):
    """A mistyped option is answered at once, without waiting seconds for torch."""
    code = (
        f"import atexit, runpy, sys; atexit.register(lambda: print([name for name in {slow} if name in sys.modules]))"
    )
    code += f"\nrunpy.run_module({program!r}, run_name='__main__')"
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.endswith("[]\n")
    assert (done.returncode, done.stderr.count("\n")) == ((2, 1) if line else (0, 0))
    assert done.stderr.startswith(line)


@pytest.mark.skipif(sys.platform == "win32", reason="NOT TESTED: Windows has another Ctrl-C")
@pytest.mark.parametrize("command", [["train.py", "--cfg", "job"], ["generate.py"], ["-m", "gpt.evaluate"]])
@pytest.mark.parametrize("delay", [0.3, 0.8])
def test_ctrl_c_while_it_imports(command, delay):
    """It ends at once, and nothing is said of what was being imported."""
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, *command], cwd=ROOT, text=True, **streams)
    time.sleep(delay)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert "Traceback" not in error
    assert process.returncode in (0, 2, 130, -signal.SIGINT)  # it may have been faster
