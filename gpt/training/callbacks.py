"""Users' own Lightning callbacks, named on the command line as `module:name`."""

import importlib
import os
import sys
from typing import TYPE_CHECKING

from gpt.errors import UserError

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

    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        raise UserError(f"callbacks: {name!r} is not of the form module:name, as in lightning.pytorch.callbacks:Timer")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except Exception as error:
        raise UserError(f"callbacks: {name} cannot be imported ({_reason(error)})") from error
    try:
        callback = found if isinstance(found, Callback) or not callable(found) else found()
    except Exception as error:
        raise UserError(f"callbacks: {name}() fails ({_reason(error)})") from error
    if not isinstance(callback, Callback):
        kind = f"{type(callback).__module__}.{type(callback).__qualname__}"
        raise UserError(f"callbacks: {name} returns a {kind}, not a lightning.Callback")
    return callback


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
