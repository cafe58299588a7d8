"""Exit codes of commands, and one line for a mistake."""

import contextlib
import errno
import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gpt.console import clean_exit, print_line, shell_quote
from gpt.errors import NonFiniteError, UserError

ROOT = Path(__file__).resolve().parents[2]


class WindowsError(OSError):
    """An error of Windows, with its own number besides C's."""

    winerror = None


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (UserError("lr=-1 is wrong"), 2, "prog: lr=-1 is wrong\n"),
        (UserError("two\nlines"), 2, "prog: two\\nlines\n"),
        (UserError("\x1b[31mred\x9b\u202e é世"), 2, "prog: \\x1b[31mred\\x9b\\u202e é世\n"),
        (NonFiniteError("step 3: nan"), 3, "prog: step 3: nan\n"),
        (KeyboardInterrupt(), 130, ""),
        (MemoryError(), 2, "prog: memory has run out: choose a smaller model, or close other programs\n"),
        (OSError(errno.ENOSPC, "full", "a.txt"), 2, "prog: a.txt: the disk is full: free some space"),
        (OSError(errno.ENAMETOOLONG, "File name too long", "aaa"), 2, "prog: aaa: cannot be used (File name too long)"),
        (
            FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']"),
            2,
            "prog: No usable temporary directory found in ['/tmp']: name a folder that can be written in TMPDIR",
        ),
        (OSError(errno.EDQUOT, "quota"), 2, "prog: the disk is full: free some space"),
        (WindowsError(errno.EINVAL, "Invalid argument", "a?b"), 2, "prog: a?b: cannot be used (Invalid argument)"),
    ],
)
def test_expected_errors_have_an_exit_code_and_a_line(capsys, error, code, line):
    with pytest.raises(SystemExit) as end, clean_exit("prog"):
        raise error
    assert end.value.code == code
    assert capsys.readouterr().err.startswith(line)


@pytest.mark.parametrize(
    "error", [OSError(errno.EBADF, "a bug"), FileNotFoundError(errno.ENOENT, "a bug"), ValueError("a bug")]
)
def test_bugs_keep_their_traceback(error):
    """An unexpected error is raised unchanged."""
    with pytest.raises(type(error)), clean_exit("prog"):
        raise error


@pytest.mark.parametrize("closed", ["2>&-", ">&-", "<&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_closed_streams(tmp_path, closed):
    """A command started with closed streams keeps its exit code, and its messages go into no other file."""
    program = "from gpt.console import *\nwith clean_exit('p'), open('out', 'w') as f: raise UserError('wrong')"
    done = subprocess.run(
        f'cd {tmp_path} && PYTHONPATH={ROOT} {sys.executable} -c "{program}" {closed}', shell=True, capture_output=True
    )
    assert done.returncode == 2
    assert (tmp_path / "out").read_text() == ""
    assert done.stderr in (b"", b"p: wrong\n")


@pytest.mark.skipif(sys.platform == "win32", reason="NOT TESTED: Windows has another Ctrl-C")
def test_ctrl_c_that_an_import_swallows(tmp_path):
    """A library that catches Ctrl-C during its import would fail later. The command ends before."""
    fragile = "try: signal.raise_signal(signal.SIGINT)\nexcept KeyboardInterrupt: pass\nraise ImportError('half')"
    (tmp_path / "fragile.py").write_text(f"import signal\n{fragile}")
    start = "import signal; signal.signal(signal.SIGINT, signal.SIG_DFL)\nfrom gpt.console import *\n"
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    for work, code in (("import fragile", -signal.SIGINT), ("signal.raise_signal(signal.SIGINT)", 130)):
        program = f"{start}with clean_exit('p'): {work}"
        done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (code, "")


def test_reader_gone_on_windows(monkeypatch):
    """A pipe without a reader is an invalid argument on Windows. The command ends as on other systems."""
    muted = []
    monkeypatch.setattr("gpt.console._mute", muted.append)
    with pytest.raises(SystemExit) as end, clean_exit("prog"):
        raise WindowsError(errno.EINVAL, "Invalid argument")
    assert end.value.code == 0
    assert muted == [sys.stdout]
    with pytest.raises(OSError), clean_exit("prog"):  # a bug on other systems
        raise OSError(errno.EINVAL, "Invalid argument")


class Broken(io.StringIO):
    """A stream whose terminal was closed, or whose disk is full."""

    def __init__(self, number: int):
        super().__init__()
        self.number = number

    def write(self, text: str) -> int:
        raise OSError(self.number, "broken")


@pytest.mark.promise("runs.md#closed terminal")
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_training_survives_lost_output(monkeypatch, number):
    """With a closed terminal or a full disk for the log, a training succeeds. Other commands have lost their result."""
    muted = []
    monkeypatch.setattr("gpt.console._mute", muted.append)
    for program, code in (("train.py", None), ("gpt.compare", 2)):
        monkeypatch.setattr(sys, "stdout", Broken(number))
        done = []
        with pytest.raises(SystemExit) if code else contextlib.nullcontext() as end, clean_exit(program):
            print_line("a line")
            done.append("the work")
        assert done and (end.value.code if end else None) == code
    assert len(muted) >= 2


@pytest.mark.skipif(sys.platform == "win32", reason="NOT TESTED without pseudo terminals")
@pytest.mark.promise("security.md#escape sequences")
def test_no_escape_codes_on_a_terminal():
    """A terminal gets no control characters. A pipe gets none that start an escape sequence."""
    code = "from gpt.console import *\nwith clean_exit('p'):"
    code += " print('a\\x1b]0;b\\x07\\x9bc\\td\\f'); print_line('\\x1b[31m')"
    controller, terminal = os.openpty()
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, stdout=terminal, check=True)
    os.close(terminal)
    assert os.read(controller, 1000).replace(b"\r\n", b"\n") == b"a\\x1b]0;b\\x07\\x9bc\td\\x0c\n\\x1b[31m\n"
    os.close(controller)
    piped = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True)
    assert piped.stdout == b"a\\x1b]0;b\x07\\x9bc\td\x0c\n\\x1b[31m\n"


def test_quote(monkeypatch):
    """Commands to type are quoted for the system's shell. The shell of Windows has only double quotes."""
    assert [shell_quote(word) for word in ("plain", "it's two", "")] == ["plain", "'it'\"'\"'s two'", "''"]
    monkeypatch.setattr("os.name", "nt")
    assert [shell_quote(word) for word in (r"runs\a", "it's two", "")] == [r"runs\a", '"it\'s two"', '""']
