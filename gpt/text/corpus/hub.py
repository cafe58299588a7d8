"""Data sets of the Hugging Face hub: a commit, and the parquet files of a split there, as URLs."""

import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from gpt.errors import UserError
from gpt.text.corpus.config import DataConfig
from gpt.text.corpus.formats import read_documents, require
from gpt.text.corpus.remote import PATIENCE, Remote, explain, find


def with_revision(data: DataConfig) -> DataConfig:
    """Return the configuration with the current commit of a hub data set, so that a run resumes on the same text."""
    if data.name != "huggingface" or re.fullmatch("[0-9a-f]{40}", data.revision or ""):
        return data
    [name] = data.paths
    hub = require("huggingface_hub", "data=huggingface", "huggingface")
    with explain(f"data.path={name!r} (or give data.revision=COMMIT)"):
        return replace(data, revision=hub.HfApi().dataset_info(name, revision=data.revision, timeout=PATIENCE).sha)


def find_dataset(data: DataConfig, cache: Path, say: Callable[[str], None]) -> tuple[tuple[Remote, ...], int | None]:
    """Return the parquet files of a data set, and how many bytes of text to take from the last one; None takes all.

    A subset is a folder, a split a folder or the beginning of a name. If no name tells of a split, all are for
    training. Files are fetched until they hold `data.max_bytes`.
    """
    [name] = data.paths
    data = with_revision(data)
    require("huggingface_hub", "data=huggingface", "huggingface")
    top = f"hf://datasets/{name}@{data.revision}"
    found = [file for file in find(top, cache, data.cache_bytes, say) if file.name.endswith(".parquet")]
    files = [(file.url.removeprefix(top), file) for file in found]
    folders = ", ".join(list(dict.fromkeys(os.path.dirname(path)[1:] for path, _ in files))[:8]) or "none"
    if data.subset:
        folder = "[/-]".join(map(re.escape, re.split("[/-]", data.subset)))  # sample-10BT may be sample/10BT
        files = [(path, file) for path, file in files if re.search(f"/{folder}/", path)]
    split = re.compile(f"/(partial-)?{re.escape(data.split)}[-_./]")  # the hub converts only the first 5 GB
    chosen = [(path, file) for path, file in files if split.search(path)]
    if not chosen and data.split == "train" and not any(re.search("test|val|dev", path) for path, _ in files):
        chosen = files
    if not chosen:
        raise UserError(
            f"data.path={name!r}: no parquet files of data.split={data.split!r} and data.subset={data.subset!r}, only "
            f"in {folders}; data.revision=refs/convert/parquet has what the hub makes of other formats"
        )
    if not data.subset and len({split.split(path)[0].rsplit("/", 1)[0] for path, _ in chosen}) > 1:
        raise UserError(f"data.path={name!r} has several subsets: choose one with data.subset= ({folders})")
    return _within([file for _, file in chosen], data)


def _within(files: list[Remote], data: DataConfig) -> tuple[tuple[Remote, ...], int | None]:
    """Return the first files, as many as hold `data.max_bytes` of text, and how many bytes to take from the last."""
    rest = data.max_bytes
    if rest is not None:
        for number, file in enumerate(files):
            size = sum(map(_size, read_documents(file.local(), data.text_field, data.errors)))
            if size >= rest:
                return tuple(files[: number + 1]), rest
            rest -= size
    return tuple(files), rest


def up_to(most: int, documents: Iterable[Iterable[str]]) -> Iterator[Iterable[str]]:
    """Yield documents as long as they have no more than so many bytes together."""
    for blocks in documents:
        document = list(blocks)
        most -= _size(document)
        if most < 0:
            return
        yield document


def _size(blocks: Iterable[str]) -> int:
    return sum(len(block.encode("utf-8")) for block in blocks)
