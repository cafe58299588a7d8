"""What a configured mixture consists of: its corpora, their short names, and their shares of the windows."""

import os
import re
from dataclasses import replace
from pathlib import Path

from gpt.errors import UserError
from gpt.text.corpus.config import ONE_WORD, DataConfig
from gpt.text.corpus.unpack import PACKED
from gpt.text.prepared import MIXTURE_WINDOWS


def configs_of(data: DataConfig) -> list[DataConfig]:
    """Return the configuration of each corpus of a mixture, or the one of a single corpus."""
    if data.name != "mix":
        return [data]
    one = replace(data, name="text", path="?", weights=[])
    return [replace(one, name=path, path=None) if path in ONE_WORD else replace(one, path=path) for path in data.paths]


def names_of(data: DataConfig) -> tuple[str, ...]:
    """Return a short, unique name for each corpus: for a path, the file's stem or the folder's name."""
    if data.name != "mix":
        return (data.name,)
    names: list[str] = []
    for path in data.paths:
        name = short = path if path in ONE_WORD else _short_name(path)
        number = 1
        while name in names:
            number += 1
            name = f"{short}-{number}"
        names.append(name)
    return tuple(names)


def _short_name(path: str) -> str:
    whole = os.path.abspath(os.path.expanduser(path))
    name = next((part for part in reversed(Path(whole).parts) if not re.search(r"[*?\[]", part)), "")
    if whole.endswith(name) and not os.path.isdir(whole):  # a file; the name of a glob is that of its folder
        while Path(name).suffix.lower() in PACKED:
            name = Path(name).stem
        name = Path(name).stem
    return re.sub(r"[^\w.-]+", "_", name).strip("_") or "text"


def shares_of(data: DataConfig) -> tuple[int, ...]:
    """Return the weights as whole shares that sum to `MIXTURE_WINDOWS`, by largest remainder."""
    weights = data.weights or [1.0]
    parts = [weight / max(weights) for weight in weights]
    exact = [part / sum(parts) * MIXTURE_WINDOWS for part in parts]
    shares = [int(share) for share in exact]
    for i in sorted(range(len(exact)), key=lambda i: shares[i] - exact[i])[: MIXTURE_WINDOWS - sum(shares)]:
        shares[i] += 1
    if 0 in shares:
        least = data.paths[shares.index(0)]
        raise UserError(f"data.weights: {least!r} has less than a thousandth of all: raise its weight, or leave it out")
    return tuple(shares)
