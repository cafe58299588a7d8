"""Errors that the user can fix, and the checks that raise them."""

import errno
import math
import textwrap

_DISK_FULL_CODES = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_OUT_OF_MEMORY_MESSAGES = (
    "can't allocate memory",  # PyTorch's CPU allocator
    "Cannot allocate memory",  # the system, for example if a file cannot be mapped
    "not enough memory: you tried to allocate",  # the same on Windows
    "CUDA out of memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_NOT_INITIALIZED",  # by cuBLAS, if the GPU's memory is full
    "CUDNN_STATUS_ALLOC_FAILED",
    "Triton Error [CUDA]: out of memory",
    "MPS backend out of memory",
)


class OneLineError(Exception):
    """An error whose message is complete. IPython shows only the message, without a traceback."""

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__name__}: {self}"]


class UserError(OneLineError, ValueError):
    """A user's mistake. The message is one line with the value, the limit and the remedy."""


class ExternalError(UserError):
    """A failure of a store, a disk, a network or memory. The same command may succeed later."""


class NonFiniteError(OneLineError, ArithmeticError):
    """A gradient, weight or loss is NaN or infinite. The message names the place, and what is saved."""


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
    """Raise `UserError` unless low <= value <= high.

    Args:
        key: The name of the setting, for the message.
        value: Its value.
        low: The lower limit.
        high: The upper limit.
        above: Exclude the lower limit.
        below: Exclude the upper limit.
        note: Ends the message, for example "(0 is off)".
    """
    if not low <= value <= high or (above and value == low) or (below and value == high):
        limits = f"{'above' if above else 'at least'} {low}"
        if high < math.inf:
            limits += f" and {'below' if below else 'at most'} {high}"
        raise UserError(f"{key}={value} is out of range: it must be {limits} {note}".rstrip())


def summarize_error(error: BaseException) -> str:
    """Return the message of an error in one line of bounded length."""
    if isinstance(error, RecursionError):  # its message depends on the version of Python
        return "it is nested too deeply"
    message = f"it has no {error}" if isinstance(error, KeyError) else str(error)
    return textwrap.shorten(message, 300, placeholder=" ...") or type(error).__name__


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if memory ran out, on any device."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":  # the second is torch's
        return True
    return isinstance(error, RuntimeError) and any(message in str(error) for message in _OUT_OF_MEMORY_MESSAGES)


def is_disk_full(error: BaseException) -> bool:
    """Return True if a disk or a quota is full, or a file has reached its maximum size."""
    return isinstance(error, OSError) and error.errno in _DISK_FULL_CODES
