"""The one way to open a model or a tokenizer, wherever it comes from.

Importing this module is quick: torch, which takes seconds, is imported only to read weights.
"""

import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpt.data.token_dataset import DATASET_FILE, MANIFEST_FILE, read_metadata
from gpt.data.tokenizer import Tokenizer, byte_tokenizer, gpt2_tokenizer
from gpt.errors import UserError
from gpt.files import TRAIN_COMMAND
from gpt.interop import huggingface

if TYPE_CHECKING:
    from gpt.model.transformer import GPT

BEST_CHECKPOINT, LAST_CHECKPOINT, PREVIOUS_CHECKPOINT = (
    "checkpoints/best.ckpt",
    "checkpoints/last.ckpt",
    "checkpoints/previous.ckpt",
)  # of a run
SAVE_TIME_FILE = "checkpoints/saved.json"  # when the newest of them was saved
_PREFERRED = (BEST_CHECKPOINT, LAST_CHECKPOINT, PREVIOUS_CHECKPOINT)
_HUB_NAME = re.compile(r"(distil)?gpt2|gpt2-(medium|large|xl)|[A-Za-z0-9][\w.-]*/[\w.-]+", re.ASCII)


def find_checkpoint(path: str | Path | None = None, runs: Path = Path("runs")) -> Path:
    """Find the checkpoint that a path stands for, without a path the newest run below `runs`; `UserError` if none.

    A run directory stands for its best checkpoint, or else its newest; a checkpoint file and a Hugging Face directory
    for themselves. What does not exist is taken as the name of a run below `runs`, or else as OWNER/NAME, or gpt2 and
    its larger sizes, on the Hugging Face hub, from which the model is downloaded.
    """
    if path is None and (path := _newest(runs)) is None:
        raise UserError(f"no run below {runs}/ has a checkpoint: train one first with {TRAIN_COMMAND}")
    named = find_path(path, runs)
    path = named if os.path.exists(named) else _from_hub(str(path), runs)
    if huggingface.is_huggingface_folder(path) or path.is_file():
        return path
    run = path.parent if path.name == "checkpoints" else path
    for name in _PREFERRED:
        if (file := run / name).is_file():
            return file
    raise UserError(f"{path}: a folder without {BEST_CHECKPOINT} or {LAST_CHECKPOINT}; give a run directory")


def _newest(runs: Path) -> Path | None:
    """Return the run below `runs` that was saved last; None if none has a checkpoint."""
    found = {file.parent.parent for name in _PREFERRED for file in runs.glob(f"*/{name}")}
    return max(found, key=_saved, default=None)


def _saved(run: Path) -> float:
    """The time at which a run was saved last: as recorded, or else that of its files, which copying changes."""
    try:
        return float(json.loads((run / SAVE_TIME_FILE).read_text(encoding="utf-8"))["saved"])
    except (OSError, ValueError, KeyError, TypeError):
        return max(file.stat().st_mtime for name in _PREFERRED if (file := run / name).exists())


def find_run(path: str | Path) -> Path:
    """The run directory that a path or a run's name stands for, or its checkpoints, or a file in them; `UserError`."""
    path = find_path(path)
    if path.is_file():
        path = path.resolve().parent
    if path.name == "checkpoints":
        path = path.resolve().parent
    if not (path / "config.yaml").is_file():
        why = "it has no config.yaml" if path.exists() else "it does not exist"
        newest = _newest(Path("runs"))
        which = f"; the newest, {newest}, is also called last" if newest else ""
        raise UserError(f"{path}: not a run directory ({why}); give one of those below runs/{which}")
    return path


def find_path(name: str | Path, runs: Path = Path("runs")) -> Path:
    """Return the path of this name, or else that of the run of this name below `runs`, if either exists.

    If neither does, `last` is the run that was saved last.
    """
    name = os.path.expanduser(name)
    found = [path for path in (name, runs / name) if os.path.exists(path)]  # Path.exists fails for a name too long
    if not found and str(name) == "last":
        found = [newest] if (newest := _newest(runs)) else []
    return Path(found[0] if found else name)


def _from_hub(name: str, runs: Path) -> Path:
    """Download the model that the Hugging Face hub has under a name; `UserError` if none can have it."""
    first = name.split("/")[0]
    below_here = first == runs.name or os.path.exists(first)  # a mistake in "runs/typo" is not looked up elsewhere
    if _HUB_NAME.fullmatch(name) and len(name) <= 96 and not below_here and not name.endswith(".ckpt"):
        return huggingface.download_from_hub(name)
    hint = f"give a path, a name below {runs}/, or OWNER/NAME on the Hugging Face hub"
    raise UserError(f"{name}: there is no such checkpoint or run directory: {hint}")


def open_model(path: str | Path) -> tuple["GPT", Tokenizer]:
    """Open what `find_checkpoint` finds: a model, on the CPU and in eval mode, and its tokenizer, or `UserError`."""
    return open_checkpoint(path)[:2]


def open_checkpoint(path: str | Path) -> tuple["GPT", Tokenizer, dict[str, Any]]:
    """Open a model as `open_model` does, with its whole checkpoint (empty for a Hugging Face directory)."""
    from gpt import checkpoint

    path = find_checkpoint(path)
    if huggingface.is_huggingface_folder(path):
        return *huggingface.load_huggingface(path), {}
    payload = checkpoint.load_checkpoint(path)
    return *checkpoint.restore_model(payload, path), payload


def open_tokenizer(name_or_path: str | Path) -> Tokenizer:
    """Open `gpt2`, `byte`, or the tokenizer of a run, checkpoint, Hugging Face directory or corpus, or `UserError`."""
    if name_or_path in ("gpt2", "byte"):
        return gpt2_tokenizer() if name_or_path == "gpt2" else byte_tokenizer()
    name_or_path = os.path.expanduser(name_or_path)
    if not os.path.exists(name_or_path):  # Path.exists raises an error for a name that is too long
        kinds = "gpt2, byte, or the path of a run, a checkpoint, a Hugging Face GPT-2 or a prepared corpus"
        raise UserError(f"{str(name_or_path)!r} is not a tokenizer: choose {kinds}")
    path = Path(name_or_path)
    if huggingface.is_huggingface_folder(path):
        return huggingface.load_tokenizer(path)[0]
    if any((path / name).is_file() for name in (DATASET_FILE, MANIFEST_FILE)):
        return read_metadata(path)[1]
    return open_model(path)[1]
