"""Errors that the user can fix, and the checks that raise them."""

import errno
import math
import textwrap

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_OUT_OF_MEMORY = (
    "can't allocate memory",  # PyTorch's CPU allocator
    "Cannot allocate memory",  # the system's words, as where a file cannot be mapped
    "not enough memory: you tried to allocate",  # the same on Windows
    "CUDA out of memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "MPS backend out of memory",
)


class OneLineError(Exception):
    """An error that says everything in its message: IPython shows that alone, without a traceback."""

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__name__}: {self}"]


class UserError(OneLineError, ValueError):
    """A user's mistake; the message is one line with the value, the limit and the remedy."""


class ExternalError(UserError):
    """Something outside of the program fails: a store, a disk, a network, memory. It may work again later."""


class NonFiniteError(OneLineError, ArithmeticError):
    """A gradient, weight or loss is NaN or infinite; the message says where, and what is safe."""


def require_choice(key: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise `UserError` unless the value is one of `choices`."""
    if value not in choices:
        raise UserError(f"{key}={value!r} is not known: choose from {', '.join(choices)}")


def require_range(
    key: str,
    value: float,
    low: float,
    high: float = math.inf,
    *,
    above: bool = False,
    below: bool = False,
    note: str = "",
) -> None:
    """Raise `UserError` unless low <= value <= high; `above` and `below` exclude the limits themselves.

    `note` follows the limits in the message, such as "(0 is off)".
    """
    if not low <= value <= high or (above and value == low) or (below and value == high):
        limits = f"{'above' if above else 'at least'} {low}"
        if high < math.inf:
            limits += f" and {'below' if below else 'at most'} {high}"
        raise UserError(f"{key}={value} is out of range: it must be {limits}{' ' * bool(note)}{note}")


def summarize_error(error: BaseException) -> str:
    """Put what an error says into one line of bounded length."""
    if isinstance(error, RecursionError):  # each version of Python has words of its own
        return "it is nested too deeply"
    said = f"it has no {error}" if isinstance(error, KeyError) else str(error)
    return textwrap.shorten(said, 300, placeholder=" ...") or type(error).__name__


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an error means that memory ran out, on any device."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":  # which is torch's
        return True
    return isinstance(error, RuntimeError) and any(message in str(error) for message in _OUT_OF_MEMORY)


def is_disk_full(error: BaseException) -> bool:
    """Tell whether an error says that a disk, a quota or the greatest size of a file is exhausted."""
    return isinstance(error, OSError) and error.errno in _FULL
