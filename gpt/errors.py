"""The errors that are the user's to mend, and how the command lines end on them."""

import contextlib
import os
import sys
from collections.abc import Iterator


class UserError(ValueError):
    """A mistake in what the user gave: its message is one line that names the value, the limit and the remedy."""


@contextlib.contextmanager
def command_line(program: str) -> Iterator[None]:
    """Run a command so that its expected ends are clean: no traceback, and an exit code that says what happened.

    2 for a user's mistake, with its one line on stderr; 130 for Ctrl-C; 0 where the reader of our output has gone.
    """
    try:
        yield
        sys.stdout.flush()
    except UserError as error:
        print(f"{program}: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        # Python flushes stdout once more on its way out; give it somewhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
