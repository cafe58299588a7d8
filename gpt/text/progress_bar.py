"""Progress bars, and lines above them."""

import sys
from typing import TextIO

from tqdm import tqdm

from gpt.errors import write_line


def progress_bar(total: int | None = None, initial: int = 0, delay: float = 0) -> tqdm:
    """Show a bar in bytes of text on terminals only, after `delay` seconds; it disappears at the end."""
    hidden = not sys.stderr.isatty()
    return tqdm(total=total, initial=initial, unit="B", unit_scale=True, delay=delay, leave=False, disable=hidden)


def write_above(line: str, stream: TextIO) -> None:
    """Print a line as `write_line` does, above the progress bars if there are any."""
    with tqdm.external_write_mode(stream):
        write_line(line, stream)
