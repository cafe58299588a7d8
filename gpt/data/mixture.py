"""The corpora of a configured mixture, their short names, and their weights."""

import os
import re
from dataclasses import replace
from pathlib import Path

from gpt.data.compression import COMPRESSED_SUFFIXES
from gpt.data.data_config import BUILTIN_CORPORA, DataConfig
from gpt.data.token_dataset import MIXTURE_BLOCK
from gpt.errors import UserError


def split_mixture(data: DataConfig) -> list[DataConfig]:
    """Return the configuration of each corpus of a mixture, or the one configuration of a single corpus."""
    if data.name != "mix":
        return [data]
    text = replace(data, name="text", path="?", weights=[])
    return [
        replace(text, name=path, path=None) if path in BUILTIN_CORPORA else replace(text, path=path)
        for path in data.paths
    ]


def source_names(data: DataConfig) -> tuple[str, ...]:
    """Return a short, unique name for each corpus: for a path, the file's stem or the folder's name."""
    if data.name != "mix":
        return (data.name,)
    names: list[str] = []
    for path in data.paths:
        short_name = path if path in BUILTIN_CORPORA else _short_name(path)
        name = short_name
        number = 1
        while name in names:
            number += 1
            name = f"{short_name}-{number}"
        names.append(name)
    return tuple(names)


def _short_name(path: str) -> str:
    absolute = os.path.abspath(os.path.expanduser(path))
    name = next((part for part in reversed(Path(absolute).parts) if not re.search(r"[*?\[]", part)), "")
    if absolute.endswith(name) and not os.path.isdir(absolute):  # a file; a glob has the name of its folder
        while Path(name).suffix.lower() in COMPRESSED_SUFFIXES:
            name = Path(name).stem
        name = Path(name).stem
    return re.sub(r"[^\w.-]+", "_", name).strip("_") or "text"


def integer_weights(data: DataConfig) -> tuple[int, ...]:
    """Return the weights as whole numbers that sum to `MIXTURE_BLOCK`, by largest remainder."""
    weights = data.weights or [1.0]
    fractions = [weight / max(weights) for weight in weights]
    exact = [fraction / sum(fractions) * MIXTURE_BLOCK for fraction in fractions]
    rounded = [int(weight) for weight in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: rounded[i] - exact[i])
    for i in by_remainder[: MIXTURE_BLOCK - sum(rounded)]:
        rounded[i] += 1
    if 0 in rounded:
        path = data.paths[rounded.index(0)]
        raise UserError(f"data.weights: {path!r} has less than a thousandth of all: raise its weight, or leave it out")
    return tuple(rounded)
