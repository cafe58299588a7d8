"""Find and open models and tokenizers of every kind.

Importing this module is quick: torch takes seconds, so it is imported only to read weights.
"""

import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpt.data.token_dataset import is_prepared, read_metadata
from gpt.data.tokenizer import Tokenizer, byte_tokenizer, gpt2_tokenizer
from gpt.errors import UserError
from gpt.files import TRAIN_COMMAND
from gpt.interop import huggingface

if TYPE_CHECKING:
    from gpt.model.transformer import GPT

# The files of a run directory.
BEST_CHECKPOINT = "checkpoints/best.ckpt"
LAST_CHECKPOINT = "checkpoints/last.ckpt"
PREVIOUS_CHECKPOINT = "checkpoints/previous.ckpt"
SAVE_TIME_FILE = "checkpoints/saved.json"  # when the newest checkpoint was saved
_CHECKPOINTS = (BEST_CHECKPOINT, LAST_CHECKPOINT, PREVIOUS_CHECKPOINT)  # in order of preference
_HUB_NAME = re.compile(r"(distil)?gpt2|gpt2-(medium|large|xl)|[A-Za-z0-9][\w.-]*/[\w.-]+", re.ASCII)


def find_checkpoint(path: str | Path | None = None, runs: Path = Path("runs")) -> Path:
    """Return the checkpoint file or Hugging Face folder that a path or a name means.

    The checkpoint of a run directory is its best, or else its newest. Without a path, the run is the newest below
    `runs`. A path that does not exist is the name of a run below `runs`, or else of a model on the Hugging Face hub:
    OWNER/NAME, or gpt2 and its other sizes. That model is downloaded. Raises `UserError` if nothing is found.
    """
    if path is None:
        path = _find_newest_run(runs)
    if path is None:
        raise UserError(f"no run below {runs}/ has a checkpoint: train one first with {TRAIN_COMMAND}")
    local_path = find_path(path, runs)
    path = local_path if os.path.exists(local_path) else _download(str(path), runs)
    if huggingface.is_huggingface_folder(path) or path.is_file():
        return path
    run = path.parent if path.name == "checkpoints" else path
    for name in _CHECKPOINTS:
        if (run / name).is_file():
            return run / name
    raise UserError(f"{path}: a folder without {BEST_CHECKPOINT} or {LAST_CHECKPOINT}; give a run directory")


def find_run(path: str | Path) -> Path:
    """Return the run directory of a path: the directory, its name in runs/, its checkpoints folder, or a file there.

    Raises `UserError` if there is none.
    """
    path = find_path(path)
    if path.is_file():
        path = path.resolve().parent
    if path.name == "checkpoints":
        path = path.resolve().parent
    if not (path / "config.yaml").is_file():
        problem = "it has no config.yaml" if path.exists() else "it does not exist"
        newest = _find_newest_run(Path("runs"))
        hint = f"; the newest, {newest}, is also called last" if newest else ""
        raise UserError(f"{path}: not a run directory ({problem}); give one of those below runs/{hint}")
    return path


def find_path(name: str | Path, runs: Path = Path("runs")) -> Path:
    """Return an existing path of this name, or else the run of this name below `runs`.

    `last` is the newest run, unless a path or a run has that name. A name that nothing has is returned as a path.
    """
    name = os.path.expanduser(name)
    for path in (name, runs / name):
        if os.path.exists(path):  # Path.exists raises an error if the name is too long
            return Path(path)
    newest = _find_newest_run(runs) if str(name) == "last" else None
    return newest or Path(name)


def _find_newest_run(runs: Path) -> Path | None:
    """Return the run below `runs` that was saved last; None if no run has a checkpoint."""
    directories = {file.parent.parent for name in _CHECKPOINTS for file in runs.glob(f"*/{name}")}
    return max(directories, key=_read_save_time, default=None)


def _read_save_time(run: Path) -> float:
    """Return the recorded time of a run's last save, or else the time of its newest file."""
    try:
        return float(json.loads((run / SAVE_TIME_FILE).read_text(encoding="utf-8"))["saved"])
    except (OSError, ValueError, KeyError, TypeError):
        return max(file.stat().st_mtime for name in _CHECKPOINTS if (file := run / name).exists())


def _download(name: str, runs: Path) -> Path:
    """Download a model from the Hugging Face hub; `UserError` if it is not there, or the name cannot be a model's."""
    folder = name.split("/")[0]
    is_local = folder == runs.name or os.path.exists(folder)  # a mistake in "runs/typo" is not looked up on the hub
    if _HUB_NAME.fullmatch(name) and len(name) <= 96 and not is_local and not name.endswith(".ckpt"):
        return huggingface.download_from_hub(name)
    hint = f"give a path, a name below {runs}/, or OWNER/NAME on the Hugging Face hub"
    raise UserError(f"{name}: there is no such checkpoint or run directory: {hint}")


def open_model(path: str | Path) -> tuple["GPT", Tokenizer]:
    """Open a model, on the CPU in eval mode, and its tokenizer; `UserError` if there is none at the path."""
    return open_checkpoint(path)[:2]


def open_checkpoint(path: str | Path) -> tuple["GPT", Tokenizer, dict[str, Any]]:
    """Open a model as `open_model` does, with its whole checkpoint. It is empty for a Hugging Face folder."""
    from gpt.checkpoint import load_checkpoint, restore_model

    path = find_checkpoint(path)
    if huggingface.is_huggingface_folder(path):
        return *huggingface.load_huggingface(path), {}
    checkpoint = load_checkpoint(path)
    return *restore_model(checkpoint, path), checkpoint


def open_tokenizer(name_or_path: str | Path) -> Tokenizer:
    """Open `gpt2`, `byte`, or the tokenizer of a run, checkpoint, Hugging Face folder or corpus, or `UserError`."""
    if name_or_path == "gpt2":
        return gpt2_tokenizer()
    if name_or_path == "byte":
        return byte_tokenizer()
    name_or_path = os.path.expanduser(name_or_path)
    if not os.path.exists(name_or_path):  # Path.exists raises an error if the name is too long
        choices = "gpt2, byte, or the path of a run, a checkpoint, a Hugging Face GPT-2 or a prepared corpus"
        raise UserError(f"{str(name_or_path)!r} is not a tokenizer: choose {choices}")
    path = Path(name_or_path)
    if huggingface.is_huggingface_folder(path):
        return huggingface.load_tokenizer(path)[0]
    if is_prepared(path):
        return read_metadata(path)[1]
    return open_model(path)[1]
