"""Checkpoints: one file that stands alone, written whole or not at all, and checked when it is read.

A checkpoint is a dictionary of plain types and tensors. The weights lie under `state_dict` by the model's own names;
with them come the configuration, the tokenizer, the optimizer's state, the step, the hash of the corpus and the
versions of what made it. It is read with `weights_only=True`, so that no file can run code.
"""

import errno
import os
import platform
import shutil
import subprocess
import zipfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from gpt.errors import UserError
from gpt.files import sync
from gpt.hardware import is_out_of_memory
from gpt.model.transformer import GPT, GPTConfig
from gpt.text.tokenizer import Tokenizer


class DamagedError(UserError):
    """A checkpoint that is not what was written: another one may serve."""


FORMAT = 1  # raise it when an older program could not read what is written


def save(payload: dict[str, Any], path: Path) -> None:
    """Write a checkpoint under another name in its folder, then rename it. Raises `UserError` on a full disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as stream:
            torch.save(payload, stream)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
        sync(path.parent)
    except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError of its archive writer
        needs, has = _size(payload), shutil.disk_usage(path.parent).free
        has += temporary.stat().st_size if temporary.exists() else 0
        if needs < has:
            raise
        raise UserError(
            f"{path}: the disk is full: the checkpoint needs {needs:,} bytes and there are {has:,} free; "
            "what was saved before is intact"
        ) from error
    finally:
        temporary.unlink(missing_ok=True)


def _size(payload: Any) -> int:
    """The bytes of all tensors in nested dictionaries and lists."""
    if isinstance(payload, torch.Tensor):
        return payload.nbytes
    parts = payload.values() if isinstance(payload, dict) else payload if isinstance(payload, list | tuple) else ()
    return sum(map(_size, parts))


def load(path: Path) -> dict[str, Any]:
    """Read a checkpoint onto the CPU. Raises `UserError` where it is missing, damaged, or not one of ours."""
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()  # torch.load itself does not notice flipped bits
            # ... nor that a record has become a folder, whose tensor it leaves uninitialised.
            folders = [i.filename for i in archive.infolist() if i.is_dir() or i.external_attr & 0x10]
        if damaged := damaged or next(iter(folders), None):
            raise DamagedError(f"{path}: damaged (the checksum of {damaged} does not fit); use another checkpoint")
        payload = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise UserError(f"{path}: there is no such checkpoint") from None
    except UserError:
        raise
    except Exception as error:  # zipfile, pickle and torch each have their own ways to fail on a foreign file
        if is_out_of_memory(error):
            raise
        if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EPERM, errno.EIO, errno.ESTALE):
            raise UserError(f"{path}: cannot be read ({error.strerror})") from None
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        if isinstance(error, zipfile.BadZipFile):
            reason = "it is cut short or of another format"
        if "weights_only" in str(error) or "Unsupported" in str(error):
            reason = "it holds objects other than tensors and plain types, which are never loaded"
        raise DamagedError(f"{path}: not a checkpoint of this project ({reason})") from None
    missing = [key for key in ("format", "state_dict", "config", "tokenizer") if not _has(payload, key)]
    if missing or not isinstance(payload["format"], int):
        what = f"has no {missing[0]!r}" if missing else f"is of format {payload['format']!r}"
        raise UserError(f"{path}: not a checkpoint of this project (it {what})")
    if payload["format"] > FORMAT:
        raise UserError(
            f"{path}: written by a newer version of this project (format {payload['format']}); update first"
        )
    return payload


def _has(payload: Any, key: str) -> bool:
    return isinstance(payload, dict) and key in payload


def load_newest(run_dir: Path, warn: Callable[[str], None]) -> tuple[Path, dict[str, Any]] | None:
    """The checkpoint of a run that is furthest on among those that can be read; None where there is none at all.

    A damaged one is named by `warn` and put aside as *.damaged, so that it never takes the place of a good one; what a
    kill has left half written is swept away. The caller holds the run directory.
    """
    for left in run_dir.glob("checkpoints/.*.ckpt.*"):
        left.unlink()
    good: list[tuple[Path, dict[str, Any]]] = []
    damaged: list[str] = []
    for name in ("last", "previous", "best"):
        file = run_dir / "checkpoints" / f"{name}.ckpt"
        if not file.exists():
            continue
        try:
            good.append((file, load(file)))
        except DamagedError as error:
            damaged.append(str(error))
            file.rename(file.with_suffix(".ckpt.damaged"))
        if name == "last" and good:
            break
    if not good:
        if damaged:
            raise UserError(f"{damaged[0]}; and no other checkpoint of the run can be read")
        return None
    newest = max(good, key=lambda found: found[1].get("step", -1))
    if newest[0].name != "last.ckpt":
        problem = damaged[0] if damaged else f"{run_dir}/checkpoints/last.ckpt is missing"
        warn(f"{problem}; going on from {newest[0].name} of step {newest[1]['step']}")
    return newest


def build_model(payload: dict[str, Any]) -> tuple[GPT, Tokenizer]:
    """The model, of the very weights of a checkpoint, and its tokenizer; `UserError` where its parts do not fit."""
    try:
        tokenizer = Tokenizer.from_dict(payload["tokenizer"])
        config = GPTConfig(vocab_size=tokenizer.vocab_size, **payload["config"]["model"])
        model = GPT.from_state_dict(config, payload["state_dict"])
    except (KeyError, TypeError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"the checkpoint's tokenizer, configuration and weights do not fit ({reason})") from None
    return model.eval(), tokenizer


def find(path: str | Path | None = None, runs: Path = Path("runs")) -> Path:
    """The checkpoint file that a path means: a file itself; of a run directory the best, or else the newest.

    Without a path, the newest run below `runs` that has a checkpoint. `UserError` where there is none.
    """
    if path is None:
        found = [f for name in ("best", "last", "previous") for f in runs.glob(f"*/checkpoints/{name}.ckpt")]
        if not found:
            raise UserError(f"there is no run to sample from below {runs}/: train one first with python train.py")
        path = max(found, key=lambda file: file.stat().st_mtime_ns).parent.parent
    path = Path(path)
    if path.is_dir():
        folder = path if path.name == "checkpoints" else path / "checkpoints"
        candidates = [folder / f"{name}.ckpt" for name in ("best", "last", "previous")]
        existing = [file for file in candidates if file.is_file()]
        if not existing:
            raise UserError(f"{path}: a folder without checkpoints/best.ckpt or last.ckpt; give a run directory")
        return existing[0]
    if not path.is_file():
        raise UserError(f"{path}: there is no such checkpoint or run directory")
    return path


def versions() -> dict[str, str]:
    """What a run depends on for its every bit."""
    names = ("torch", "lightning", "tiktoken")
    return {"python": platform.python_version()} | {name: version(name) for name in names}


def git_commit(folder: Path) -> str | None:
    """The commit of the checkout in `folder`, or None outside one."""
    try:
        answer = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, timeout=5, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()
