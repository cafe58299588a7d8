"""Checkpoints: single files that need nothing else, written whole or not at all, and verified when they are read.

A checkpoint is a dictionary of plain types and tensors. The weights are under `state_dict`, by the model's own names;
beside them are the configuration, the tokenizer, the optimizer's state, the step, the hash of the corpus and the
versions of the libraries. It is read with `weights_only=True`, so no file can run code.
"""

import errno
import shutil
import zipfile
from pathlib import Path
from typing import Any

import torch

from gpt.errors import UserError
from gpt.files import replacing
from gpt.hardware import is_out_of_memory
from gpt.model.transformer import GPT, GPTConfig
from gpt.text.tokenizer import Tokenizer

FORMAT = 1  # raise it when older programs cannot read what is written


class DamagedError(UserError):
    """A file is not the checkpoint that was written; another checkpoint of the run may be intact."""


def save(payload: dict[str, Any], path: Path) -> None:
    """Write a checkpoint, which replaces an older one only once it is complete. Raises `UserError` on a full disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with replacing(path) as temporary, temporary.open("wb") as stream:
            torch.save(payload, stream)
    except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError of its archive writer
        needs, free = _size(payload), shutil.disk_usage(path.parent).free
        if needs < free:
            raise
        raise UserError(
            f"{path}: the disk is full: the checkpoint needs {needs:,} bytes and there are {free:,} free; "
            "earlier checkpoints are intact"
        ) from error


def _size(payload: Any) -> int:
    """Add up the bytes of all tensors in nested dictionaries and lists."""
    if isinstance(payload, torch.Tensor):
        return payload.nbytes
    parts = payload.values() if isinstance(payload, dict) else payload if isinstance(payload, list | tuple) else ()
    return sum(map(_size, parts))


def load(path: Path) -> dict[str, Any]:
    """Read a checkpoint onto the CPU. Raises `UserError` if it is missing, damaged, or not one of ours."""
    try:
        with zipfile.ZipFile(path) as archive:
            # torch.load notices neither flipped bits nor a record marked as a folder, whose tensor stays uninitialised.
            damaged = archive.testzip()
            folders = [i.filename for i in archive.infolist() if i.is_dir() or i.external_attr & 0x10]
        if damaged := damaged or next(iter(folders), None):
            raise DamagedError(f"{path}: damaged (its record {damaged} is corrupt); use another checkpoint")
        payload = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise UserError(f"{path}: there is no such checkpoint") from None
    except UserError:
        raise
    except Exception as error:  # zipfile, pickle and torch each fail on foreign files in their own ways
        if is_out_of_memory(error):
            raise
        if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EPERM, errno.EIO, errno.ESTALE):
            raise UserError(f"{path}: cannot be read ({error.strerror})") from None
        raise DamagedError(f"{path}: not a checkpoint of this project ({_reason(error)})") from None
    missing = [
        key
        for key in ("format", "state_dict", "config", "tokenizer")
        if not isinstance(payload, dict) or key not in payload
    ]
    if missing or not isinstance(payload["format"], int):
        what = f"has no {missing[0]!r}" if missing else f"has the format {payload['format']!r}"
        raise UserError(f"{path}: not a checkpoint of this project (it {what})")
    if payload["format"] > FORMAT:
        raise UserError(
            f"{path}: written by a newer version of this project (format {payload['format']}); update first"
        )
    return payload


def _reason(error: Exception) -> str:
    """Say in one line why a file could not be read as a checkpoint."""
    message = str(error)
    if "weights_only" in message or "Unsupported" in message:
        return "it holds objects other than tensors and plain types, which are never loaded"
    if isinstance(error, zipfile.BadZipFile):
        return "it is cut short or in another format"
    return message.splitlines()[0] if message else type(error).__name__


def to_model(payload: dict[str, Any]) -> tuple[GPT, Tokenizer]:
    """Build a checkpoint's model around its own weights, uncopied; `UserError` if its parts do not fit together."""
    try:
        tokenizer = Tokenizer.from_dict(payload["tokenizer"])
        config = GPTConfig(vocab_size=tokenizer.vocab_size, **payload["config"]["model"])
        model = GPT.from_state_dict(config, payload["state_dict"])
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise
        reason = " ".join(str(error).split())
        raise UserError(
            f"the checkpoint's tokenizer, configuration and weights do not fit together ({reason})"
        ) from None
    return model.eval(), tokenizer
