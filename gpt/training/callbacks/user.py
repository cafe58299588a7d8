"""Users' own Lightning callbacks, named on the command line as `module:name`."""

import os
import pkgutil
import re
import sys
from typing import TYPE_CHECKING

from gpt.errors import UserError, reason

if TYPE_CHECKING:
    from lightning import Callback


def load_callbacks(names: list[str]) -> list["Callback"]:
    """Import each `module:name`: a function that makes a callback, a class of one, or a callback.

    Modules are found where Python finds any, which includes train.py's folder, and last in the current directory.
    Raises `UserError` if one cannot be imported or made, or is no callback.
    """
    if names and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    return [_load(name) for name in names]


def _load(name: str) -> "Callback":
    from lightning import Callback

    if not re.fullmatch("[^:]+:[^:]+", name):
        raise UserError(f"callbacks: {name!r} is not of the form module:name, as in lightning.pytorch.callbacks:Timer")
    try:
        callback = pkgutil.resolve_name(name)
        if callable(callback) and not isinstance(callback, Callback):
            callback = callback()
    except Exception as error:
        why = f"{type(error).__name__}: {reason(error)}"
        raise UserError(f"callbacks: {name} cannot be imported and made ({why})") from error
    if not isinstance(callback, Callback):
        raise UserError(f"callbacks: {name} is of type {type(callback).__name__}, not a lightning.Callback")
    return callback
