"""Find and open models and tokenizers of every kind.

Importing this module is quick: torch takes seconds, so it is imported only to read weights.
"""

import json
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpt.console import print_line
from gpt.data.token_dataset import is_prepared, read_metadata
from gpt.data.tokenizer import Tokenizer, byte_tokenizer, gpt2_tokenizer
from gpt.errors import UserError
from gpt.files import TRAIN_COMMAND
from gpt.interop import huggingface, nanogpt

if TYPE_CHECKING:
    from gpt.model.transformer import GPT

# The files of a run directory.
BEST_CHECKPOINT = "checkpoints/best.ckpt"
LAST_CHECKPOINT = "checkpoints/last.ckpt"
PREVIOUS_CHECKPOINT = "checkpoints/previous.ckpt"
SAVE_TIME_FILE = "checkpoints/saved.json"  # when the newest checkpoint was saved
_CHECKPOINTS = (BEST_CHECKPOINT, LAST_CHECKPOINT, PREVIOUS_CHECKPOINT)  # in order of preference
_FILE_SUFFIXES = (".ckpt", ".pt", ".safetensors", ".gguf")  # of files, so not of models on the hub
_HUB_NAME = re.compile(r"(distil)?gpt2|gpt2-(medium|large|xl)|[A-Za-z0-9][\w.-]*/[\w.-]+", re.ASCII)


def find_checkpoint(path: str | Path | None = None, runs: Path = Path("runs")) -> Path:
    """Return the checkpoint file or Hugging Face folder that a path or a name means.

    The checkpoint of a run directory is its best, or else its newest. Without a path, the run is the newest below
    `runs`. A file of a Hugging Face folder means the folder, and nanoGPT's out_dir means its ckpt.pt. A path that does
    not exist is the name of a run below `runs`, or else of a model on the Hugging Face hub: OWNER/NAME, or gpt2 and its
    other sizes. That model is downloaded. Raises `UserError` if nothing is found.
    """
    if path is None:
        path = _find_newest_run(runs)
    if path is None:
        raise UserError(f"no run below {runs}/ has a checkpoint: train one first with {TRAIN_COMMAND}")
    local_path = find_path(path, runs)
    path = local_path if os.path.exists(local_path) else _download(str(path), runs)
    if path.suffix in (".json", ".safetensors") and huggingface.is_huggingface_folder(path.parent):
        path = path.parent
    if huggingface.is_huggingface_folder(path):
        return path
    if problem := _describe_unsupported(path):
        raise UserError(f"{path}: {problem}")
    if path.is_file():
        return path
    run = path.parent if path.name == "checkpoints" else path
    for name in _CHECKPOINTS:
        if (run / name).is_file():
            return run / name
    if (path / nanogpt.NANOGPT_CHECKPOINT).is_file():
        return path / nanogpt.NANOGPT_CHECKPOINT
    raise UserError(f"{path}: a folder without {BEST_CHECKPOINT} or {LAST_CHECKPOINT}; give a run directory")


def _describe_unsupported(path: Path) -> str:
    """Return what a file or a folder of another program is, and what to give instead; empty for anything else."""
    if path.suffix == ".gguf":
        return "a GGUF file, for llama.cpp; give the run or the Hugging Face folder that it was made from"
    folder = path if path.is_dir() else path.parent
    is_weights = path.suffix in (".safetensors", ".bin")
    if (path.is_dir() or is_weights) and (folder / "adapter_config.json").is_file():
        hint = (
            "merge it into its GPT-2 with merge_and_unload() of peft, and give the folder that save_pretrained writes"
        )
        return f"an adapter such as LoRA, without the weights of its model; {hint}"
    if is_weights:
        return f"weights without a model's config.json; put them into a folder with it, and give {folder}"
    files = [*path.glob("checkpoint-*/config.json"), *path.glob("checkpoint-*/adapter_config.json")]
    newest = max((file.parent for file in files), key=_read_trainer_step, default=None)
    return f"the output folder of transformers' Trainer; give a checkpoint in it, such as {newest}" if newest else ""


def _read_trainer_step(checkpoint: Path) -> int:
    """Return the step in the name of a Trainer's checkpoint, such as checkpoint-500."""
    step = checkpoint.name.removeprefix("checkpoint-")
    return int(step) if step.isdecimal() else -1


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
    if _HUB_NAME.fullmatch(name) and len(name) <= 96 and not is_local and not name.endswith(_FILE_SUFFIXES):
        return huggingface.download_from_hub(name)
    hint = f"give a path, a name below {runs}/, or OWNER/NAME on the Hugging Face hub"
    raise UserError(f"{name}: there is no such checkpoint or run directory: {hint}")


def open_model(path: str | Path, quiet: bool = False) -> tuple["GPT", Tokenizer]:
    """Open a model, on the CPU in eval mode, and its tokenizer; `UserError` if there is none at the path."""
    return open_checkpoint(path, quiet)[:2]


def open_checkpoint(path: str | Path, quiet: bool = False) -> tuple["GPT", Tokenizer, dict[str, Any]]:
    """Open a model as `open_model` does, with its whole checkpoint. It is empty for a Hugging Face folder.

    A checkpoint of nanoGPT gives nanoGPT's keys, and a line on stderr unless `quiet`.
    """
    from gpt.checkpoint import check_checkpoint, read_archive, restore_model

    path = find_checkpoint(path)
    if huggingface.is_huggingface_folder(path):
        return *huggingface.load_huggingface(path), {}
    checkpoint = read_archive(path)
    if nanogpt.is_nanogpt(checkpoint):
        model, tokenizer = nanogpt.restore_nanogpt(checkpoint, path)
        if not quiet:
            print_line(nanogpt.describe_gelu(path), sys.stderr)
        return model, tokenizer, checkpoint
    checkpoint = check_checkpoint(checkpoint, path)
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
