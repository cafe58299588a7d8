"""Checkpoints: single files that need nothing else, written whole or not at all, and verified when they are read.

A checkpoint is a dictionary of plain types and tensors. The weights are under `state_dict`, by the model's own names;
beside them are the configuration, the tokenizer, the optimizer's state, the step, the hash of the corpus and the
versions of the libraries. It is read with `weights_only=True`, so no file can run code.
"""

import errno
import math
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Iterator
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
SCHEMA = {"format": int, "state_dict": dict, "config": dict, "tokenizer": dict}
# The types that `require_storable` lets into a checkpoint. PyTorch reads all of them with `weights_only=True`.
STORABLE_TYPES = {dict, OrderedDict, list, tuple, str, int, float, bool, type(None), Tensor, torch.nn.Parameter}


class DamagedError(UserError):
    """A file is not the checkpoint that was written; another checkpoint of the run may be intact."""


class UnreadableError(UserError):
    """The disk cannot read a file; another checkpoint of the run may be intact."""


def save_checkpoint(payload: dict[str, Any], path: Path) -> None:
    """Write a checkpoint, which replaces an older one only once it is complete.

    Makes the folder it lies in, but none above. Raises `UserError` on a full disk, and if the folder above is gone.
    """
    try:
        if not path.parent.exists():
            path.parent.mkdir(exist_ok=True)
            sync(path.parent.parent)
        with atomic_write(path) as temporary, temporary.open("wb") as stream:
            torch.save(payload, stream)
    except FileNotFoundError:
        raise UserError(f"{path}: cannot be written, because its folder was deleted or moved: put it back") from None
    except (OSError, RuntimeError) as error:  # torch's archive writer raises one of its own after that of the stream
        if not is_disk_full(error) and not is_disk_full(error.__context__ or error):
            raise
        raise UserError(f"{path}: the disk is full: free some space; earlier checkpoints are intact") from error


def _parts(value: Any) -> Iterator[Any]:
    """Yield a value and, if it is a dictionary, a list or a tuple, all that is in it, keys included."""
    yield value
    inner = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list | tuple) else []
    for part in inner:
        yield from _parts(part)


def require_storable(state: Any) -> None:
    """Raise `ValueError` if part of a state is something that `load_checkpoint` may refuse."""
    for part in _parts(state):
        if type(part) not in STORABLE_TYPES:
            raise ValueError(f"Unsupported: {type(part).__name__}")


def load_checkpoint(path: Path, mmap: bool = False) -> dict[str, Any]:
    """Read a checkpoint onto the CPU. Raises `UserError` if it is missing, damaged, or not one of ours.

    With `mmap` its tensors stay in the file until they are copied, and several processes share what they read.
    """
    try:
        if path.exists() and not path.is_file():
            raise UserError(f"{path}: a directory or a device, not a checkpoint; name a file or a run")
        with zipfile.ZipFile(path) as archive:
            # torch.load notices neither flipped bits nor a record marked as a folder, whose tensor stays uninitialised.
            folders = [record.filename for record in archive.infolist() if record.is_dir() or record.external_attr & 16]
            if damaged := archive.testzip() or next(iter(folders), None):
                raise DamagedError(f"{path}: damaged (its record {damaged!r} is corrupt); use another checkpoint")
        with warnings.catch_warnings(action="ignore"):  # about foreign files, which are refused anyway
            try:
                payload = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
            except RuntimeError as error:
                if not (mmap and is_out_of_memory(error)):
                    raise
                payload = torch.load(path, map_location="cpu", weights_only=True)  # into memory that is held already
    except UserError:
        raise
    except Exception as error:  # zipfile, pickle and torch each fail on foreign files in their own ways
        if is_out_of_memory(error):
            raise
        refused = error if isinstance(error, OSError) else error.__context__  # zipfile takes some for another format
        if isinstance(refused, OSError) and refused.errno != errno.EINVAL:  # which it meets in wrong offsets
            kind: type[UserError] = UnreadableError if refused.errno == errno.EIO else UserError
            raise kind(f"{path}: cannot be read ({refused.strerror})") from None
        why = (
            "it is cut short or in another format" if isinstance(error, zipfile.BadZipFile) else summarize_error(error)
        )
        if "weights_only" in why:
            why = "it holds objects other than tensors and plain types, which are never loaded"
        raise DamagedError(f"{path}: not a checkpoint of this project ({why})") from None
    for key, kind in SCHEMA.items():
        if not isinstance(payload, dict) or not isinstance(payload.get(key), kind):
            raise UserError(f"{path}: not a checkpoint of this project (its {key!r} is missing or of another type)")
    if payload["format"] > CHECKPOINT_FORMAT:
        newer = f"written by a newer version of this project (format {payload['format']})"
        raise UserError(f"{path}: {newer}; update first")
    try:
        return payload | {"config": upgrade_config(payload["config"])}
    except (AttributeError, KeyError, TypeError) as error:
        raise UserError(f"{path}: not a checkpoint of this project ({summarize_error(error)})") from None


def read_checkpoint_step(path: Path) -> float:
    """Return a checkpoint's step without reading a tensor; infinity if the file cannot be read."""
    try:
        return int(torch.load(path, map_location="cpu", weights_only=True, mmap=True)["step"])
    except Exception:  # of zipfile, pickle, torch or the system, as in `load_checkpoint`
        return math.inf


def restore_model(payload: dict[str, Any], path: Path) -> tuple[GPT, Tokenizer]:
    """Build a checkpoint's model around its own weights, uncopied; `UserError` with `path` if its parts do not fit."""
    try:
        tokenizer = Tokenizer.from_dict(payload["tokenizer"])
        config = build_config({**payload["config"]["model"], "vocab_size": tokenizer.vocab_size})
        model = build_model(config, payload["state_dict"])
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise
        parts = "the checkpoint's tokenizer, configuration and weights"
        raise UserError(f"{path}: {parts} do not fit together ({summarize_error(error)})") from None
    return model, tokenizer


# --- from the parts of a model, which may come from anybody, to the model ---


def build_config(shape: dict[str, Any]) -> GPTConfig:
    """Turn the shape of a model into a configuration; `ValueError` if a name, a type or a range is wrong."""
    kinds = {field.name: field.type for field in fields(GPTConfig)}
    for name, value in shape.items():
        if name not in kinds:
            raise ValueError(f"its configuration has an unknown key {name!r}")
        kind = kinds[name]
        if isinstance(kind, type) and type(value) is not kind and (type(value), kind) != (int, float):
            raise ValueError(f"its {name} is {value!r}, of type {type(value).__name__}")
    return GPTConfig(**shape)


def build_model(config: GPTConfig, weights: dict[str, Tensor]) -> GPT:
    """Build the fp32 model of a configuration in eval mode around its weights, uncopied where they are in fp32.

    `ValueError` or `RuntimeError` if they do not fit, or are not finite.
    """
    needed, held = config.num_parameters, sum(weight.numel() for weight in weights.values())
    if needed > held:
        raise ValueError(f"its configuration describes {needed:,} weights, and there are {held:,}")
    for name, weight in weights.items():
        if not weight.is_floating_point():
            raise ValueError(f"its {name} is of type {weight.dtype}, and weights are floating-point numbers")
    model = GPT.from_state_dict(config, weights).eval()
    for name, parameter in model.named_parameters():
        if not is_finite(parameter):
            raise ValueError(f"its {name} is not finite")
    return model


def is_finite(tensor: Tensor) -> bool:
    """Whether a tensor has neither NaN nor infinite elements."""
    # A sum takes a twentieth of the time of `isfinite`, but may overflow.
    return bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all())
