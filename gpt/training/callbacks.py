"""Callbacks of a run: a user's objects with hooks, each of which declares the arguments that it needs.

Hooks: `on_train_start`, `on_train_step_end`, `on_validation_end`, `on_train_end`. docs/experiments.md has examples.
"""

import inspect
import os
import pkgutil
import re
import sys
from collections.abc import Sequence
from copy import deepcopy
from functools import partial
from typing import TYPE_CHECKING, Any

from gpt.checkpoint import require_storable
from gpt.errors import UserError, summarize_error

if TYPE_CHECKING:
    from lightning import Fabric

    from gpt.training.metric_logger import MetricLogger
    from gpt.training.module import GPTModule

_ALWAYS = ("step", "module", "log", "stop")
HOOKS = {  # the arguments that each offers
    "on_train_start": _ALWAYS,
    "on_train_step_end": (*_ALWAYS, "loss"),
    "on_validation_end": (*_ALWAYS, "score"),
    "on_train_end": _ALWAYS,
}


def load_callbacks(names: Sequence[str]) -> list[Any]:
    """Import each `module:name`: a callback, its class, or a function that returns one.

    Modules are found where Python finds any, which includes train.py's folder, and last in the current directory.

    Raises:
        UserError: One cannot be imported or made, or is no callback.
    """
    if names and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    callbacks = [_load(name) for name in names]
    check_callbacks(callbacks)
    return callbacks


def _load(name: str) -> Any:
    if not re.fullmatch("[^:]+:[^:]+", name):
        raise UserError(f"callbacks: {name!r} is not of the form module:name, as in my_callbacks:PrintNorm")
    try:
        callback = pkgutil.resolve_name(name)
        if inspect.isclass(callback) or (callable(callback) and not _hooks(callback)):
            callback = callback()
    except Exception as error:
        cause = f"{type(error).__name__}: {summarize_error(error)}"
        raise UserError(f"callbacks: {name} cannot be imported and made ({cause})") from error
    check_callbacks([callback], name)
    return callback


def check_callbacks(callbacks: Sequence[Any], source: str = "") -> None:
    """Raise `UserError` unless each object has hooks, all of whose arguments are offered.

    `source` is where a callback comes from, for the message; by default its class.
    """
    for callback in callbacks:
        if inspect.isclass(callback):
            raise UserError(f"callbacks: {callback.__name__} is a class: give an object, as in {callback.__name__}()")
        name = source or type(callback).__name__
        if any(
            base.__module__.partition(".")[0] in ("lightning", "pytorch_lightning") for base in type(callback).mro()
        ):
            raise UserError(
                f"callbacks: {name} is a callback of lightning.Trainer: train GPTModule with a Trainer to use it, as "
                "docs/experiments.md shows"
            )
        hooks = _hooks(callback)
        if not hooks:
            raise UserError(f"callbacks: {name} is of type {type(callback).__name__}, with none of {', '.join(HOOKS)}")
        for hook in hooks:
            for parameter in inspect.signature(getattr(callback, hook)).parameters.values():
                is_required = parameter.default is parameter.empty and parameter.kind not in (
                    parameter.VAR_POSITIONAL,
                    parameter.VAR_KEYWORD,
                )
                if is_required and (parameter.name not in HOOKS[hook] or parameter.kind is parameter.POSITIONAL_ONLY):
                    offered = ", ".join(HOOKS[hook])
                    raise UserError(f"callbacks: {name}.{hook} needs {parameter.name!r}: choose from {offered}")
    names = [_state_name(callback) for callback in callbacks if hasattr(callback, "state_dict")]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"callbacks: {names.count(name)} of class {name} have a state_dict: give each a class name")


def _hooks(callback: Any) -> list[str]:
    return [hook for hook in HOOKS if callable(getattr(callback, hook, None))]


def _state_name(callback: Any) -> str:
    return type(callback).__name__


class Callbacks:
    """Calls the hooks of a run's callbacks, collects their requests to stop, and stores their states.

    Args:
        callbacks: The objects, which `fabric` has as well.
        fabric: Calls a hook of each of them.
        module: Is given to hooks.
        logger: Writes the curves that hooks log.
    """

    def __init__(self, callbacks: Sequence[Any], fabric: "Fabric", module: "GPTModule", logger: "MetricLogger"):
        self._callbacks, self._fabric, self._module, self._logger = callbacks, fabric, module, logger
        self.stop_requested = False  # by one of them, on this rank

    def call(self, hook: str, step: int, **arguments: Any) -> None:
        """Call a hook of each callback that has it, with those of its arguments that it names.

        `log(name, value)` writes a point of a curve at this step, and `stop()` ends the run after it.
        """
        log = partial(self._log, step)
        self._fabric.call(hook, step=step, module=self._module, log=log, stop=self._request_stop, **arguments)

    def _log(self, step: int, name: str, value: float) -> None:
        self._logger.write({name: float(value)}, step)

    def _request_stop(self) -> None:
        self.stop_requested = True

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each callback that has one, by the name of its class.

        Raises:
            UserError: Part of a state is of a type that checkpoints do not store.
        """
        states = {}
        for callback in self._callbacks:
            if hasattr(callback, "state_dict"):
                state, name = callback.state_dict(), _state_name(callback)
                try:
                    require_storable(state)
                except ValueError as error:
                    raise UserError(
                        f"callback {name}: its state cannot be stored ({error}): change its state_dict"
                    ) from None
                states[name] = state
        return states

    def load_state_dict(self, states: dict[str, Any]) -> None:
        """Give each callback its state, if the checkpoint has one: a callback may be new to a run."""
        for callback in self._callbacks:
            name = _state_name(callback)
            if name in states and hasattr(callback, "load_state_dict"):
                callback.load_state_dict(deepcopy(states[name]))
