"""Checkpoints: single files that need nothing else, written whole or not at all, and verified when they are read.

A checkpoint is a dictionary of plain types and tensors. The weights are under `state_dict`, by the model's own names;
beside them are the configuration, the tokenizer, the optimizer's state, the step, the hash of the corpus and the
versions of the libraries. It is read with `weights_only=True`, so no file can run code.
"""

import errno
import pickletools
import shutil
import sys
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from gpt.errors import UserError, is_disk_full
from gpt.exchange.assembly import assemble, configure, reason
from gpt.files import replacing
from gpt.hardware import is_out_of_memory
from gpt.model.transformer import GPT
from gpt.text.tokenizer import Tokenizer

FORMAT = 1  # raise it when older programs cannot read what is written
SCHEMA: dict[str, type] = {"format": int, "state_dict": dict, "config": dict, "tokenizer": object}

# What a checkpoint may be made of. The pickle of GPT-2 XL with its optimizer has about 100,000 operations.
PLAIN = {dict, OrderedDict, list, tuple, str, int, float, bool, type(None), torch.Tensor}
GLOBALS = {"collections OrderedDict", "torch._utils _rebuild_tensor_v2"}
DTYPES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
STORAGES = ("Float", "Double", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool")
GLOBALS |= {f"torch {kind}Storage" for kind in STORAGES}
MOST_VALUES, DEEPEST = 1_000_000, 100


class DamagedError(UserError):
    """A file is not the checkpoint that was written; another checkpoint of the run may be intact."""


def save(payload: dict[str, Any], path: Path) -> None:
    """Write a checkpoint, which replaces an older one only once it is complete.

    Makes the folder it lies in, but none above. Raises `UserError` on a full disk, and if the folder above is gone.
    """
    try:
        path.parent.mkdir(exist_ok=True)
        with replacing(path) as temporary, temporary.open("wb") as stream:
            torch.save(payload, stream)
    except FileNotFoundError:
        raise UserError(f"{path}: cannot be written, because its folder was deleted or moved: put it back") from None
    except (OSError, RuntimeError) as error:  # torch wraps what goes wrong in an error of its archive writer
        needs, free = _size(payload), shutil.disk_usage(path.parent).free
        if needs >= free:
            room = f"the checkpoint needs {needs:,} bytes and there are {free:,} free"
        elif is_disk_full(error) or is_disk_full(error.__context__ or error):
            room = f"the checkpoint needs {needs:,} bytes, more than a quota or a limit on file sizes allows"
        else:
            raise
        raise UserError(f"{path}: the disk is full: {room}; earlier checkpoints are intact") from error


def _contents(payload: Any) -> Iterator[tuple[Any, int]]:
    """Yield everything in nested dictionaries, lists and tuples, with its depth; `ValueError` beyond any sane size."""
    waiting, count = [(payload, 0)], 0
    while waiting:
        value, depth = waiting.pop()
        yield value, depth
        if isinstance(value, dict):
            waiting += [(inner, depth + 1) for inner in value.values()]
        elif isinstance(value, list | tuple):
            waiting += [(inner, depth + 1) for inner in value]
        count += 1
        if depth > DEEPEST or count + len(waiting) > MOST_VALUES:
            raise ValueError(f"it is nested more than {DEEPEST} deep, or holds more than {MOST_VALUES:,} values")


def _size(payload: Any) -> int:
    """Add up the bytes of all tensors."""
    return sum(value.nbytes for value, _ in _contents(payload) if isinstance(value, torch.Tensor))


def load(path: Path) -> dict[str, Any]:
    """Read a checkpoint onto the CPU. Raises `UserError` if it is missing, damaged, or not one of ours."""
    try:
        size = path.stat().st_size
        if not path.is_file():
            raise UserError(f"{path}: a directory or a device, not a checkpoint; name a file or a run")
        with zipfile.ZipFile(path) as archive:
            _require_sound(archive, size, path)
        with warnings.catch_warnings(action="ignore"):  # about foreign files, which are refused anyway
            payload = torch.load(path, map_location="cpu", weights_only=True)
        _require_plain(payload, size)
    except FileNotFoundError:
        raise UserError(f"{path}: there is no such checkpoint") from None
    except UserError:
        raise
    except Exception as error:  # zipfile, pickle and torch each fail on foreign files in their own ways
        if is_out_of_memory(error):
            raise
        if isinstance(error, OSError) and error.errno != errno.EINVAL:  # which zipfile meets in wrong offsets
            raise UserError(f"{path}: cannot be read ({error.strerror})") from None
        raise DamagedError(f"{path}: not a checkpoint of this project ({_reason(error)})") from None
    for key, kind in SCHEMA.items():
        if not isinstance(payload, dict) or key not in payload:
            raise UserError(f"{path}: not a checkpoint of this project (it has no {key!r})")
        if not isinstance(payload[key], kind):
            raise UserError(
                f"{path}: not a checkpoint of this project (its {key!r} is of type {type(payload[key]).__name__})"
            )
    if payload["format"] > FORMAT:
        raise UserError(
            f"{path}: written by a newer version of this project (format {payload['format']}); update first"
        )
    payload["state_dict"] = dict(payload["state_dict"])  # without the attributes that a foreign one may have
    if not all(type(name) is str and type(w) is torch.Tensor for name, w in payload["state_dict"].items()):
        raise UserError(f"{path}: not a checkpoint of this project (its weights are not tensors with names)")
    return payload


def _require_sound(archive: zipfile.ZipFile, size: int, path: Path) -> None:
    """Raise an error unless every record is what was written, nothing is packed, and the pickle is harmless."""
    records = archive.infolist()
    if any(r.compress_type != zipfile.ZIP_STORED for r in records) or sum(r.file_size for r in records) > size:
        raise ValueError("its records are packed, or larger than the file")
    if len({record.filename for record in records}) < len(records):
        raise ValueError("two of its records have the same name")
    # torch.load notices neither flipped bits nor a record marked as a folder, whose tensor stays uninitialised.
    folders = [record.filename for record in records if record.is_dir() or record.external_attr & 0x10]
    if damaged := archive.testzip() or next(iter(folders), None):
        raise DamagedError(f"{path}: damaged (its record {damaged!r} is corrupt); use another checkpoint")
    for record in records:
        if record.filename.endswith("data.pkl"):
            _require_harmless(archive.read(record))


def _require_harmless(pickled: bytes) -> None:
    """Raise an error if a pickle names anything but plain tensors, or nests so deeply that hashing it would crash."""
    stack: list[int | None] = []  # the depth of each object, or None for a mark
    memo: dict[object, int | None] = {}
    for count, (opcode, argument, _) in enumerate(pickletools.genops(pickled)):
        if opcode.name == "GLOBAL" and argument not in GLOBALS:
            raise ValueError(f"Unsupported: {argument}")
        taken, depth = opcode.stack_before, -1
        if pickletools.markobject in taken:
            while (inner := stack.pop()) is not None:
                depth = max(depth, inner)
            taken = taken[: taken.index(pickletools.markobject)]
        depth = 1 + max([depth, *(stack.pop() or 0 for _ in taken)])
        if opcode.name == "MARK":
            stack.append(None)
        elif "GET" in opcode.name:
            stack.append(memo[argument])
        elif "PUT" in opcode.name:
            memo[argument] = stack[-1]
        else:
            stack += [depth] * len(opcode.stack_after)
        if depth > 10 * DEEPEST or count > MOST_VALUES:  # a long list is one deeper for every thousand of its items
            raise ValueError("it is nested too deeply or too long")


def _require_plain(payload: Any, size: int) -> None:
    """Raise an error unless a payload is made of plain types, and its tensors of bytes that the file holds."""
    for value, _ in _contents(payload):
        names = value if isinstance(value, dict) else ()
        attributes = set(getattr(value, "__dict__", ())) - {"_metadata"}
        if type(value) not in PLAIN or attributes or any(type(name) not in (str, int) for name in names):
            raise ValueError(f"Unsupported: {type(value).__name__}")
    if (needs := _size(payload)) > size:
        raise ValueError(f"its tensors have {needs:,} bytes, and the file {size:,}")


def require_storable(state: Any) -> None:
    """Raise `ValueError` if part of a payload is something that `load` would refuse."""
    for value, _ in _contents(state):
        if isinstance(value, torch.Tensor):
            known = value.layout == torch.strided and str(value.dtype).removeprefix("torch.") in DTYPES
            if not known or value.nbytes > value.untyped_storage().nbytes():
                raise ValueError(f"Unsupported: a tensor of {value.dtype} that is sparse, expanded or of a rare type")
    _require_plain(state, sys.maxsize)


def _reason(error: Exception) -> str:
    """Say in one line why a file could not be read as a checkpoint."""
    message = reason(error)
    if "weights_only" in message or "Unsupported" in message:
        return "it holds objects other than tensors and plain types, which are never loaded"
    if isinstance(error, zipfile.BadZipFile):
        return "it is cut short or in another format"
    return message


def to_model(payload: dict[str, Any]) -> tuple[GPT, Tokenizer]:
    """Build a checkpoint's model around its own weights, uncopied; `UserError` if its parts do not fit together."""
    try:
        tokenizer = Tokenizer.from_dict(payload["tokenizer"])
        config = configure({**payload["config"]["model"], "vocab_size": tokenizer.vocab_size})
        model = assemble(config, payload["state_dict"])
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise
        raise UserError(
            f"the checkpoint's tokenizer, configuration and weights do not fit together ({reason(error)})"
        ) from None
    return model, tokenizer
