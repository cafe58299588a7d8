"""A progress bar in bytes of text."""

import sys

from tqdm import tqdm


def progress_bar(total: int | None = None, initial: int = 0, delay: float = 0) -> tqdm:
    """Show a bar on terminals only, after `delay` seconds; it disappears at the end."""
    hidden = not sys.stderr.isatty()
    return tqdm(total=total, initial=initial, unit="B", unit_scale=True, delay=delay, leave=False, disable=hidden)
