"""The errors that are the user's to mend, and how the command lines end on them."""

import argparse
import contextlib
import errno
import io
import os
import sys
from collections.abc import Iterator
from typing import NoReturn, TextIO


class UserError(ValueError):
    """A mistake in what the user gave: its message is one line that names the value, the limit and the remedy."""


class NonFiniteError(ArithmeticError):
    """Training has left the finite numbers: its message says where, and what is safe."""


def require_choice(key: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise `ValueError` where a value is none of its choices."""
    if value not in choices:
        raise ValueError(f"{key}={value!r} is not known: choose from {', '.join(choices)}")


def write_line(line: str, stream: TextIO) -> None:
    """Print a line at once; where its reader has gone, this one and all later ones go nowhere, and the work goes on."""
    try:
        print(line, file=stream, flush=True)
    except BrokenPipeError:
        _mute(stream)


def _mute(stream: TextIO) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # Python flushes once more on its way out


class Parser(argparse.ArgumentParser):
    """An argument parser whose complaints are a `UserError`, and which takes no abbreviated options."""

    def __init__(self, prog: str, description: str):
        super().__init__(prog=prog, description=description, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see {self.prog} --help")


@contextlib.contextmanager
def command_line(program: str) -> Iterator[None]:
    """Run a command so that its expected ends are clean: no traceback, and an exit code that says what happened.

    2 for a user's mistake or a full disk, with its one line on stderr; 3 where training left the finite numbers; 130
    for Ctrl-C; 0 where the reader of our output has gone.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that lacks a character is no reason to stop
    try:
        yield
        if sys.stdout is not None:
            sys.stdout.flush()
    except UserError as error:
        line = str(error).replace("\n", "\\n")
        print(f"{program}: {line}", file=sys.stderr)
        sys.exit(2)
    except NonFiniteError as error:
        print(f"{program}: {error}", file=sys.stderr)
        sys.exit(3)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        _mute(sys.stdout)
        sys.exit(0)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        where = f" ({error.filename})" if error.filename else ""
        print(f"{program}: the disk is full{where}: free some space and run the command again", file=sys.stderr)
        sys.exit(2)
