"""Checkpoints: single files that need no other file, written whole or not at all, and verified when they are read.

A checkpoint is a dictionary of plain types and tensors. The weights are under `state_dict`, by the model's own names.
The other keys are the configuration, the tokenizer, the optimizer's state, the step, the hash of the corpus and the
versions of the libraries. It is read with `weights_only=True`, so no file can run code.
"""

import errno
import math
import warnings
import zipfile
from collections import OrderedDict
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpt.checkpoint_formats import upgrade_config
from gpt.data.tokenizer import Tokenizer
from gpt.errors import UserError, is_disk_full, is_out_of_memory, summarize_error
from gpt.files import atomic_write, sync
from gpt.model.transformer import GPT, GPTConfig

CHECKPOINT_FORMAT = 4  # final with version 1.0; raise it when older programs cannot read what is written
REQUIRED_TYPES = {"format": int, "state_dict": dict, "config": dict, "tokenizer": dict}
# PyTorch reads all of these with `weights_only=True`.
STORABLE_TYPES = {dict, OrderedDict, list, tuple, str, int, float, bool, type(None), Tensor, torch.nn.Parameter}


class DamagedError(UserError):
    """A file is not the checkpoint that was written; another checkpoint of the run may be intact."""


class UnreadableError(UserError):
    """The disk cannot read a file; another checkpoint of the run may be intact."""


def save_checkpoint(checkpoint: dict[str, Any], path: Path) -> None:
    """Write a checkpoint. It replaces an older one only once it is complete.

    Creates the folder of the file, but not the folder's parents. Raises `UserError` on a full disk, and if the folder's
    parent is gone.
    """
    try:
        if not path.parent.exists():
            path.parent.mkdir(exist_ok=True)
            sync(path.parent.parent)
        with atomic_write(path) as temporary, temporary.open("wb") as stream:
            torch.save(checkpoint, stream)
    except FileNotFoundError:
        raise UserError(f"{path}: cannot be written, because its folder was deleted or moved: put it back") from None
    except (OSError, RuntimeError) as error:  # after an error of the stream, torch's archive writer raises its own
        if not is_disk_full(error) and not is_disk_full(error.__context__ or error):
            raise
        raise UserError(f"{path}: the disk is full: free some space; earlier checkpoints are intact") from error


def require_storable(state: Any) -> None:
    """Raise `ValueError` if a state, or any value in it, has a type that `load_checkpoint` may refuse."""
    if type(state) not in STORABLE_TYPES:
        raise ValueError(f"Unsupported: {type(state).__name__}")
    if isinstance(state, dict):
        state = [*state, *state.values()]
    if isinstance(state, list | tuple):
        for value in state:
            require_storable(value)


def load_checkpoint(path: Path, mmap: bool = False) -> dict[str, Any]:
    """Read a checkpoint onto the CPU. Raises `UserError` if it is missing, damaged, or not one of ours.

    With `mmap` its tensors stay in the file until they are copied, and several processes share what they read.
    """
    return check_checkpoint(read_archive(path, mmap), path)


def read_archive(path: Path, mmap: bool = False) -> Any:
    """Read any file that `torch.save` wrote; `UserError` as in `load_checkpoint`. Do not check what it contains."""
    try:
        if path.exists() and not path.is_file():
            raise UserError(f"{path}: a directory or a device, not a checkpoint; name a file or a run")
        _verify_archive(path)
        return _load_archive(path, mmap)
    except UserError:
        raise
    except Exception as error:  # zipfile, pickle and torch fail on foreign files in many ways
        if is_out_of_memory(error):
            raise
        raise _explain_read_error(path, error) from None


def check_checkpoint(checkpoint: Any, path: Path) -> dict[str, Any]:
    """Return a checkpoint with the configuration of this version; `UserError` if it is not one of ours."""
    for key, required_type in REQUIRED_TYPES.items():
        if not isinstance(checkpoint, dict) or not isinstance(checkpoint.get(key), required_type):
            raise UserError(f"{path}: not a checkpoint of this project (its {key!r} is missing or of another type)")
    if checkpoint["format"] > CHECKPOINT_FORMAT:
        version = f"format {checkpoint['format']}"
        raise UserError(f"{path}: written by a newer version of this project ({version}); update first")
    try:
        return checkpoint | {"config": upgrade_config(checkpoint["config"])}
    except (AttributeError, KeyError, TypeError) as error:
        raise UserError(f"{path}: not a checkpoint of this project ({summarize_error(error)})") from None


def _verify_archive(path: Path) -> None:
    """Raise `DamagedError` if a record of the archive is corrupt.

    torch.load does not notice flipped bits. It leaves a tensor uninitialized if its record is marked as a folder.
    """
    with zipfile.ZipFile(path) as archive:
        folders = [record.filename for record in archive.infolist() if record.is_dir() or record.external_attr & 16]
        damaged = archive.testzip() or next(iter(folders), None)
    if damaged:
        raise DamagedError(f"{path}: damaged (its record {damaged!r} is corrupt); use another checkpoint")


def _load_archive(path: Path, mmap: bool) -> Any:
    with warnings.catch_warnings(action="ignore"):  # about foreign files, for which an error follows
        try:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
        except RuntimeError as error:
            if not (mmap and is_out_of_memory(error)):
                raise
            # Without a mapping, memory that this process has already allocated may suffice.
            return torch.load(path, map_location="cpu", weights_only=True)


def _explain_read_error(path: Path, error: Exception) -> UserError:
    """Return the `UserError` for an exception of zipfile, pickle or torch."""
    # Where the system refuses to read, zipfile raises BadZipFile in the context of an OSError. The exception is EINVAL:
    # zipfile causes that itself when it seeks to the wrong offsets of a damaged file.
    system_error = error if isinstance(error, OSError) else error.__context__
    if isinstance(system_error, OSError) and system_error.errno != errno.EINVAL:
        error_type = UnreadableError if system_error.errno == errno.EIO else UserError
        return error_type(f"{path}: cannot be read ({system_error.strerror})")
    reason = summarize_error(error)
    if isinstance(error, zipfile.BadZipFile):
        reason = "it is cut short or in another format"
    elif "weights_only" in reason:
        reason = "it holds objects other than tensors and plain types, which are never loaded"
    return DamagedError(f"{path}: not a checkpoint of this project ({reason})")


def read_checkpoint_step(path: Path) -> float:
    """Return a checkpoint's step without reading a tensor; infinity if the file cannot be read."""
    try:
        return int(torch.load(path, map_location="cpu", weights_only=True, mmap=True)["step"])
    except Exception:  # `load_checkpoint` reports what is wrong
        return math.inf


def restore_model(checkpoint: dict[str, Any], path: Path) -> tuple[GPT, Tokenizer]:
    """Build a checkpoint's model around its own weights, without a copy, and its tokenizer.

    Raises `UserError` with `path` if the parts do not fit together.
    """
    try:
        tokenizer = Tokenizer.from_dict(checkpoint["tokenizer"])
        config = build_config({**checkpoint["config"]["model"], "vocab_size": tokenizer.vocab_size})
        model = build_model(config, checkpoint["state_dict"])
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise
        parts = "the checkpoint's tokenizer, configuration and weights"
        raise UserError(f"{path}: {parts} do not fit together ({summarize_error(error)})") from None
    return model, tokenizer


# --- from the parts of a model, which are not trusted, to the model ---


def build_config(shape: dict[str, Any]) -> GPTConfig:
    """Turn the shape of a model into a configuration; `ValueError` if a name, a type or a range is wrong."""
    types = {field.name: field.type for field in fields(GPTConfig)}
    for name, value in shape.items():
        if name not in types:
            raise ValueError(f"its configuration has an unknown key {name!r}")
        required_type = types[name]
        is_required_type = type(value) is required_type or (type(value), required_type) == (int, float)
        if isinstance(required_type, type) and not is_required_type:
            raise ValueError(f"its {name} is {value!r}, of type {type(value).__name__}")
    return GPTConfig(**shape)


def build_model(config: GPTConfig, weights: dict[str, Tensor]) -> GPT:
    """Build the fp32 model of a configuration in eval mode around its weights. fp32 weights are not copied.

    Raises `ValueError` or `RuntimeError` if the weights do not fit, or are not finite.
    """
    num_weights = sum(weight.numel() for weight in weights.values())
    if config.num_parameters > num_weights:
        needed = f"its configuration describes {config.num_parameters:,} weights"
        raise ValueError(f"{needed}, and there are {num_weights:,}")
    for name, weight in weights.items():
        if not weight.is_floating_point():
            raise ValueError(f"its {name} is of type {weight.dtype}, and weights are floating-point numbers")
    model = GPT.from_state_dict(config, weights).eval()
    for name, parameter in model.named_parameters():
        if not is_finite(parameter):
            raise ValueError(f"its {name} is not finite")
    return model


def is_finite(tensor: Tensor) -> bool:
    """Return True if a tensor has neither NaN nor infinite elements."""
    # A sum takes a twentieth of the time of `isfinite`, but may overflow.
    return bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all())
