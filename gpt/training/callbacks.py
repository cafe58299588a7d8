"""Callbacks: a user's objects with hooks. Each hook declares the arguments that it needs.

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

_COMMON_ARGUMENTS = ("step", "module", "log", "stop")
HOOKS = {  # hook -> the arguments that it may declare
    "on_train_start": _COMMON_ARGUMENTS,
    "on_train_step_end": (*_COMMON_ARGUMENTS, "loss"),
    "on_validation_end": (*_COMMON_ARGUMENTS, "score"),
    "on_train_end": _COMMON_ARGUMENTS,
}


def load_callbacks(names: Sequence[str]) -> list[Any]:
    """Import each `module:name`: a callback, a class of callbacks, or a function that returns a callback.

    Modules are searched on Python's path, and last in the current directory.

    Raises:
        UserError: A name cannot be imported, or is not a callback.
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
    """Raise `UserError` if an object has no hooks, or a hook needs an argument that `HOOKS` does not have.

    `source` names the callback in the message. By default, its class does.
    """
    for callback in callbacks:
        if inspect.isclass(callback):
            raise UserError(f"callbacks: {callback.__name__} is a class: give an object, as in {callback.__name__}()")
        name = source or type(callback).__name__
        packages = {base.__module__.partition(".")[0] for base in type(callback).mro()}
        if packages & {"lightning", "pytorch_lightning"}:
            raise UserError(
                f"callbacks: {name} is a callback of lightning.Trainer: train GPTModule with a Trainer to use it, as "
                "docs/experiments.md shows"
            )
        hooks = _hooks(callback)
        if not hooks:
            raise UserError(f"callbacks: {name} is of type {type(callback).__name__}, with none of {', '.join(HOOKS)}")
        for hook in hooks:
            for parameter in inspect.signature(getattr(callback, hook)).parameters.values():
                is_variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
                is_required = parameter.default is parameter.empty and not is_variadic
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
        callbacks: The objects. `fabric` was built with the same.
        fabric: Calls the hooks.
        module: An argument of the hooks.
        logger: Writes the curves that hooks log.
    """

    def __init__(self, callbacks: Sequence[Any], fabric: "Fabric", module: "GPTModule", logger: "MetricLogger"):
        self._callbacks = callbacks
        self._fabric = fabric
        self._module = module
        self._logger = logger
        self.stop_requested = False  # by a callback on this rank

    def call(self, hook: str, step: int, **arguments: Any) -> None:
        """Call a hook of all callbacks, each with the arguments that it declares.

        `log(name, value)` writes a point of a curve at this step. `stop()` ends the run after this step, or
        with several devices at the next log point or validation.
        """
        log = partial(self._log, step)
        self._fabric.call(hook, step=step, module=self._module, log=log, stop=self._request_stop, **arguments)

    def _log(self, step: int, name: str, value: float) -> None:
        self._logger.write({name: float(value)}, step)

    def _request_stop(self) -> None:
        self.stop_requested = True

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the callbacks by class name.

        Raises:
            UserError: A state has a value of a type that checkpoints cannot store.
        """
        states = {}
        for callback in self._callbacks:
            if hasattr(callback, "state_dict"):
                state = callback.state_dict()
                name = _state_name(callback)
                try:
                    require_storable(state)
                except ValueError as error:
                    raise UserError(
                        f"callback {name}: its state cannot be stored ({error}): change its state_dict"
                    ) from None
                states[name] = state
        return states

    def load_state_dict(self, states: dict[str, Any]) -> None:
        """Restore each callback whose state is in the checkpoint. Other callbacks are new to the run."""
        for callback in self._callbacks:
            name = _state_name(callback)
            if name in states and hasattr(callback, "load_state_dict"):
                callback.load_state_dict(deepcopy(states[name]))
