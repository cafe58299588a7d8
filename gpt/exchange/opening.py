"""The one way to open a model or a tokenizer, wherever it comes from.

Importing this module is quick: torch, which takes seconds, is imported only to read weights.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from gpt.errors import UserError
from gpt.exchange import huggingface
from gpt.text.shards import open_shards
from gpt.text.tokenizer import Tokenizer, byte_tokenizer, gpt2_tokenizer

if TYPE_CHECKING:
    from gpt.model.transformer import GPT

_PREFERRED = ("best", "last", "previous")


def find_checkpoint(path: str | Path | None = None, runs: Path = Path("runs")) -> Path:
    """Find the checkpoint that a path stands for; `UserError` if there is none.

    A run directory stands for its best checkpoint, or else its newest; a checkpoint file and a Hugging Face directory
    for themselves. Without a path, the newest run below `runs` is taken.
    """
    if path is None:
        found = [file for name in _PREFERRED for file in runs.glob(f"*/checkpoints/{name}.ckpt")]
        if not found:
            raise UserError(f"no run below {runs}/ has a checkpoint: train one first with python train.py")
        path = max(found, key=lambda file: file.stat().st_mtime_ns).parent.parent
    path = Path(path)
    if huggingface.is_directory(path) or path.is_file():
        return path
    if not path.is_dir():
        raise UserError(f"{path}: there is no such checkpoint or run directory")
    folder = path if path.name == "checkpoints" else path / "checkpoints"
    for name in _PREFERRED:
        if (file := folder / f"{name}.ckpt").is_file():
            return file
    raise UserError(f"{path}: a folder without checkpoints/best.ckpt or last.ckpt; give a run directory")


def open_model(path: str | Path) -> tuple["GPT", Tokenizer]:
    """Open a run, a checkpoint or a Hugging Face directory: its model, on the CPU and in eval mode, and its tokenizer.

    Raises `UserError` naming the path if it cannot be loaded.
    """
    from gpt.exchange import checkpoint

    path = find_checkpoint(path)
    if huggingface.is_directory(path):
        return huggingface.load_model(path)
    payload = checkpoint.load(path)
    try:
        return checkpoint.to_model(payload)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def open_tokenizer(name_or_path: str | Path) -> Tokenizer:
    """Open `gpt2`, `byte`, or the tokenizer of a run, a checkpoint, a Hugging Face directory or a prepared corpus.

    Raises `UserError` if there is none.
    """
    if name_or_path in ("gpt2", "byte"):
        return gpt2_tokenizer() if name_or_path == "gpt2" else byte_tokenizer()
    if not os.path.exists(name_or_path):  # Path.exists raises an error for a name that is too long
        raise UserError(
            f"{str(name_or_path)!r} is not a tokenizer: choose gpt2, byte, or the path of a run, a checkpoint, "
            "a Hugging Face GPT-2 or a prepared corpus"
        )
    path = Path(name_or_path)
    if huggingface.is_directory(path):
        return huggingface.load_tokenizer(path)
    if (path / "manifest.json").is_file():
        return open_shards(path).tokenizer
    from gpt.exchange import checkpoint

    path = find_checkpoint(path)
    payload = checkpoint.load(path)
    try:
        return Tokenizer.from_dict(payload["tokenizer"])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else error
        raise UserError(f"{path}: the tokenizer in it is invalid ({reason}); use another checkpoint") from None
