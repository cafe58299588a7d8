"""The output of a command: its lines, its progress bars, and the way it ends."""

import argparse
import atexit
import contextlib
import errno
import gc
import io
import os
import re
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from threading import RLock
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

from gpt.errors import NonFiniteError, UserError, is_disk_full, is_out_of_memory

if TYPE_CHECKING:
    from tqdm import tqdm

_LOCK = RLock()  # of all bars
CONTROLS = r"(?!\r?\n|\t)[\x00-\x1f\x7f-\x9f]"
SEQUENCES = r"[\x1b\x90\x98\x9b\x9d-\x9f]"  # what begins one: a file or a pipe may end on a terminal as well
_unwritten: list[OSError] = []  # what kept lines from being written

# What the surroundings do to a program, as opposed to a bug in it: wrong names, missing permissions.
_OUTSIDE = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.ELOOP}
_OUTSIDE |= {errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENFILE, errno.ENODEV, errno.ENXIO}


def print_line(line: str, stream: TextIO | None = None) -> None:
    """Print a line at once, on stdout or the given stream, above the progress bars if there are any.

    Where it cannot be written the program goes on: if the reader or the terminal has gone, this and all later lines
    are dropped, and on a full disk they wait for space.
    """
    stream = stream or sys.stdout
    try:
        with import_tqdm().external_write_mode(stream) if "tqdm" in sys.modules else contextlib.nullcontext():
            print(visible(line), file=stream, flush=True)
    except OSError as error:
        if not is_disk_full(error):
            _mute(stream)
        if not _has_lost_reader(error):
            _unwritten.append(error)


def visible(text: str, codes: str = CONTROLS) -> str:
    """Show control characters, which terminals obey, by their escapes; tabs and line ends stay."""
    return re.sub(codes, lambda found: found[0].encode("unicode_escape").decode(), text)


def print_warning(line: str, program: str = "train.py") -> None:
    """Print a line on stderr, with the name of the program that says it."""
    print_line(f"{program}: {line}", sys.stderr)


def _has_lost_reader(error: OSError) -> bool:
    """Whether an error means that nobody reads our output any more; on Windows it may be any invalid argument."""
    return isinstance(error, BrokenPipeError) or (
        error.errno == errno.EINVAL and not error.filename and hasattr(error, "winerror")
    )


class _Visible:
    """A stream that makes every text `visible`, whoever wrote it: a model, a stranger's run, a file's name."""

    def __init__(self, stream: TextIO):
        self._stream, self._codes = stream, CONTROLS if stream.isatty() else SEQUENCES

    def write(self, text: str) -> int:
        return self._stream.write(visible(text, self._codes))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _mute(stream: TextIO) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # Python flushes once more on its way out


def import_tqdm() -> type["tqdm"]:
    """Import tqdm, with a lock of threads: Python 3.14 reports its own, of processes, as leaked after a SIGKILL."""
    from tqdm import auto, tqdm

    tqdm.set_lock(_LOCK)
    return auto.tqdm


def progress_bar(label: str, total: int | None = None, initial: int = 0, delay: float = 0) -> "tqdm":
    """Show a bar in bytes, and its label, on terminals and in notebooks, after `delay` seconds; it goes at the end."""
    style = {"unit": "B", "unit_scale": True, "leave": False, "disable": not (sys.stderr.isatty() or is_notebook())}
    return import_tqdm()(desc=label, total=total, initial=initial, delay=delay, **style)


def is_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return shell is not None and "IPKernelApp" in shell.config


def format_duration(seconds: float) -> str:
    """Write a time in its two largest units, such as 2m46s."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d{hour:02}h"
    if hours:
        return f"{hours}h{minute:02}m"
    return f"{minutes}m{second:02}s" if minutes else f"{second}s"


def shell_quote(word: str) -> str:
    """Quote a word for this system's shell."""
    if os.name != "nt":
        return shlex.quote(word)
    from subprocess import list2cmdline  # knows the only quotes of Windows

    return list2cmdline([word])


class Parser(argparse.ArgumentParser):
    """An argument parser whose complaints are a `UserError`, and which takes no abbreviated options."""

    def __init__(self, prog: str, description: str):
        super().__init__(prog=prog, description=description, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see {self.prog} --help")


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt, but end at once amid an import, where libraries catch it and fail at something else."""
    above = frame
    while above:
        if above.f_code.co_filename == "<frozen importlib._bootstrap>":
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        above = above.f_back
    signal.default_int_handler(number, frame)


@contextlib.contextmanager
def clean_exit(
    program: str, memory: str = "choose a smaller model", told: Callable[[str], str] = str
) -> Iterator[None]:
    """Run a command so that its expected ends are clean: no traceback, and an exit code that says what happened.

    2 for a user's mistake, a full disk, too little memory or a file that cannot be used, with one line on stderr; 3 if
    training left the finite numbers; 130 for Ctrl-C; 0 if the reader of our output has gone. A training ends well
    whatever became of its lines; for other commands they are the result.

    `memory` is what to do where memory has run out, and `told` has a mistake's message in the words of the command.
    """
    # Without it Python looks through all of PyTorch for cycles at its end, for a second; Triton reports what is left.
    atexit.register(lambda: None if "triton" in sys.modules else gc.freeze())
    _unwritten.clear()
    _open_standard_streams()
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # as gpt/__init__.py has left it
        signal.signal(signal.SIGINT, _interrupt)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that lacks a character is no reason to stop
    stdout, sys.stdout = sys.stdout, _Visible(sys.stdout)
    try:
        yield
        _finish(program)
    except UserError as error:
        _end(program, told(str(error)), 2)
    except NonFiniteError as error:
        _end(program, str(error), 3)
    except KeyboardInterrupt:
        sys.exit(130)
    except OSError as error:
        if _has_lost_reader(error):
            _mute(stdout)
            sys.exit(0)
        where = f"{error.filename}: " if error.filename else ""
        if error.errno == errno.ENOENT and "temporary directory" in str(error.strerror):
            _end(program, f"{error.strerror}: name a folder that can be written in TMPDIR", 2)
        if is_disk_full(error):
            _end(program, f"{where}the disk is full: free some space and run the command again", 2)
        if error.errno in _OUTSIDE or (error.errno == errno.EINVAL and where):  # a name that Windows does not allow
            _end(program, f"{where}cannot be used ({error.strerror}): check the name and the permissions", 2)
        raise
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        _end(program, f"memory has run out: {memory}, or close other programs", 2)
    finally:
        sys.stdout = stdout


def _finish(program: str) -> None:
    """Flush the output; `OSError` if part of it could not be written."""
    try:
        sys.stdout.flush()
    except OSError as error:
        _unwritten.append(error)
    if _unwritten:
        _mute(sys.stdout)
        if program != "train.py":
            raise _unwritten[0]


def _end(program: str, message: str, code: int) -> None:
    """Exit with one line, in which nothing is unprintable."""
    print_warning("".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in message), program)
    sys.exit(code)


def _open_standard_streams() -> None:
    """Open standard streams that lead nowhere where a program was started with closed ones.

    Otherwise the next file that it opens would become its standard error, and messages would go into that file.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w", encoding="utf-8"))  # noqa: SIM115
