"""The output of a command: lines, progress bars, and exit codes."""

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

_TQDM_LOCK = RLock()
CONTROL_CHARS = r"(?!\r?\n|\t)[\x00-\x1f\x7f-\x9f]"
ESCAPE_STARTERS = r"[\x1b\x90\x98\x9b\x9d-\x9f]"  # escaped in files and pipes too: a terminal may show them later
_write_errors: list[OSError] = []

# Errors of the system that are no bug of ours, such as wrong names and missing permissions.
_SYSTEM_ERRORS = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.ELOOP}
_SYSTEM_ERRORS |= {errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENFILE, errno.ENODEV, errno.ENXIO}


def print_line(line: str, stream: TextIO | None = None) -> None:
    """Print and flush a line, on stdout or the given stream, above any progress bars.

    An error does not end the program. If the reader or the terminal has gone, this and all later lines are dropped. On
    a full disk they wait for space.
    """
    stream = stream or sys.stdout
    try:
        with import_tqdm().external_write_mode(stream) if "tqdm" in sys.modules else contextlib.nullcontext():
            print(escape_control_chars(line), file=stream, flush=True)
    except OSError as error:
        if not is_disk_full(error):
            _mute(stream)
        if not _has_lost_reader(error):
            _write_errors.append(error)


def escape_control_chars(text: str, pattern: str = CONTROL_CHARS) -> str:
    """Replace control characters by their escapes, because terminals obey them. Tabs and line ends stay."""
    return re.sub(pattern, lambda match: match[0].encode("unicode_escape").decode(), text)


def print_warning(line: str, program: str = "train.py") -> None:
    """Print a line on stderr, after the name of the program."""
    print_line(f"{program}: {line}", sys.stderr)


def _has_lost_reader(error: OSError) -> bool:
    """Return True if nobody reads our output any more. On Windows that is an invalid argument without a file name."""
    return isinstance(error, BrokenPipeError) or (
        error.errno == errno.EINVAL and not error.filename and hasattr(error, "winerror")
    )


class _SafeStream:
    """A stream that escapes control characters in all text, whether from a model, a run or a file name."""

    def __init__(self, stream: TextIO):
        self._stream = stream
        self._pattern = CONTROL_CHARS if stream.isatty() else ESCAPE_STARTERS

    def write(self, text: str) -> int:
        return self._stream.write(escape_control_chars(text, self._pattern))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _mute(stream: TextIO) -> None:
    """Discard everything written to a stream from now on. Python flushes it once more when it exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def import_tqdm() -> type["tqdm"]:
    """Import tqdm, with a lock for threads. Python 3.14 would report its lock for processes as leaked after SIGKILL."""
    from tqdm import auto, tqdm

    tqdm.set_lock(_TQDM_LOCK)
    return auto.tqdm


def progress_bar(label: str, total: int | None = None, initial: int = 0, delay: float = 0) -> "tqdm":
    """Return a progress bar in bytes, for terminals and notebooks. It appears after `delay` seconds, and is erased."""
    style = {"unit": "B", "unit_scale": True, "leave": False, "disable": not (sys.stderr.isatty() or is_notebook())}
    return import_tqdm()(desc=label, total=total, initial=initial, delay=delay, **style)


def is_notebook() -> bool:
    """Return True if this process is the kernel of a notebook."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return shell is not None and "IPKernelApp" in shell.config


def format_duration(seconds: float) -> str:
    """Return a time in its two largest units, such as 2m46s."""
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
    from subprocess import list2cmdline  # the quotes of Windows

    return list2cmdline([word])


class Parser(argparse.ArgumentParser):
    """An argument parser that raises `UserError`, and accepts no abbreviated options."""

    def __init__(self, prog: str, description: str):
        super().__init__(prog=prog, description=description, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        if match := re.fullmatch(r"argument (--[\w-]+): expected (one|at least one) argument", message):
            message += f"; a value that begins with a dash is written {match[1]}=VALUE"
        raise UserError(f"{message}; see {self.prog} --help")


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt. During an import, end at once: libraries would catch it, and fail later."""
    caller = frame
    while caller:
        if caller.f_code.co_filename == "<frozen importlib._bootstrap>":
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
            os._exit(128 + number)  # process 1 of a container is still there
        caller = caller.f_back
    signal.default_int_handler(number, frame)


@contextlib.contextmanager
def clean_exit(
    program: str, memory_hint: str = "choose a smaller model", rewrite: Callable[[str], str] = str
) -> Iterator[None]:
    """Turn the expected errors of a command into one line on stderr and an exit code.

    | exit code | cause                                                              |
    | 0         | success, or the reader of the output has gone                      |
    | 2         | a user's mistake, a full disk, too little memory, an unusable file |
    | 3         | a loss, gradient or weight that is not finite                      |
    | 130       | Ctrl-C                                                             |

    Output that cannot be written is an error, except in a training.

    Args:
        program: The name of the command, for messages.
        memory_hint: What to do if memory has run out.
        rewrite: Puts the message of a `UserError` into the words of the command's options.
    """
    # Otherwise Python searches all of PyTorch for cycles when it exits, for a second. Triton would report leaks.
    atexit.register(lambda: None if "triton" in sys.modules else gc.freeze())
    _write_errors.clear()
    _open_standard_streams()
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL or os.getpid() == 1:  # set in gpt/__init__.py
        signal.signal(signal.SIGINT, _interrupt)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal may lack a character
    stdout, sys.stdout = sys.stdout, _SafeStream(sys.stdout)
    try:
        yield
        _finish(program)
    except UserError as error:
        _end(program, rewrite(str(error)), 2)
    except NonFiniteError as error:
        _end(program, str(error), 3)
    except KeyboardInterrupt:
        sys.exit(130)
    except OSError as error:
        if _has_lost_reader(error):
            _mute(stdout)
            sys.exit(0)
        file = f"{error.filename}: " if error.filename else ""
        if error.errno == errno.ENOENT and "temporary directory" in str(error.strerror):
            _end(program, f"{error.strerror}: name a folder that can be written in TMPDIR", 2)
        if is_disk_full(error):
            _end(program, f"{file}the disk is full: free some space and run the command again", 2)
        if error.errno in _SYSTEM_ERRORS or (error.errno == errno.EINVAL and file):  # Windows does not allow the name
            _end(program, f"{file}cannot be used ({error.strerror}): check the name and the permissions", 2)
        raise
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        _end(program, f"memory has run out: {memory_hint}, or close other programs", 2)
    finally:
        sys.stdout = stdout


def _finish(program: str) -> None:
    """Flush the output. `OSError` if part of it could not be written, except in a training."""
    try:
        sys.stdout.flush()
    except OSError as error:
        _write_errors.append(error)
    if _write_errors:
        _mute(sys.stdout)
        if program != "train.py":
            raise _write_errors[0]


def _end(program: str, message: str, code: int) -> None:
    """Exit with one line of printable characters."""
    print_warning("".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in message), program)
    sys.exit(code)


def _open_standard_streams() -> None:
    """Open the null device for each standard stream that was closed when the program started.

    Otherwise the next file that it opens would become its standard error, and receive its messages.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w", encoding="utf-8"))  # noqa: SIM115
