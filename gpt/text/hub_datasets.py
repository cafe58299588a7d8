"""Data sets of the Hugging Face hub, streamed once into parquet files and read from there."""

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Callable
from dataclasses import astuple, dataclass, replace
from pathlib import Path

from gpt.errors import UserError, is_disk_full
from gpt.files import replacing, write_text
from gpt.text.cache import one_at_a_time, read_json, write_json
from gpt.text.formats import require
from gpt.text.pieces import well_formed
from gpt.text.progress_bar import progress_bar
from gpt.text.url import OFFLINE

PART_BYTES = 1 << 26  # of text in a file; an interrupted download repeats at most this much


@dataclass(frozen=True)
class Dataset:
    """A data set, and what to take of it."""

    name: str  # on the hub, or a folder of this machine
    subset: str | None = None
    split: str = "train"
    revision: str | None = None  # a commit, branch or tag; by default the newest commit
    text_field: str = "text"
    max_bytes: int | None = None


def find_revision(dataset: Dataset, folder: Path) -> str:
    """Return the commit that the revision stands for, by asking the hub unless it is a commit already.

    A folder of this machine has no commits: the hash of its files takes their place.
    """
    name, revision = dataset.name, dataset.revision
    if os.path.isdir(name):
        digest = hashlib.sha256()
        for file in sorted(file for file in Path(name).rglob("*") if file.is_file()):
            with file.open("rb") as stream:
                digest.update(f"{file.relative_to(name)}\n".encode() + hashlib.file_digest(stream, "sha256").digest())
        return digest.hexdigest()[:40]
    if revision and re.fullmatch(r"[0-9a-f]{40}", revision):
        return revision
    hub = require("huggingface_hub", f"data.path={name!r}", "huggingface")
    try:
        return str(hub.HfApi().dataset_info(name, revision=revision, timeout=20).sha)
    except Exception as error:  # of several libraries below
        before = sorted(
            state.read_text(encoding="utf-8", errors="replace") for state in folder.glob(f"{_safe(name)}-*/revision")
        )
        have = f"; already fetched: data.revision={before[-1]}" if before else ""
        raise UserError(f"data.path={name!r}: the hub does not provide it ({_line(error)}){have}; {OFFLINE}") from None


def fetch_dataset(dataset: Dataset, folder: Path, say: Callable[[str], None] = print) -> tuple[Path, ...]:
    """Return parquet files that hold the data set's text in the column `text`, after streaming what is missing.

    An interrupted download keeps its parts and resumes.
    """
    dataset = replace(dataset, revision=find_revision(dataset, folder))
    key = hashlib.sha256(json.dumps(astuple(dataset)).encode()).hexdigest()[:16]
    place = folder / f"{_safe(dataset.name)}-{key}"
    if not (place / "complete").exists():
        with one_at_a_time(place / ".lock", f"fetching {dataset.name}", say):
            if not (place / "complete").exists():  # another process may have finished it while we waited
                _stream(dataset, place, say)
    return tuple(sorted(place.glob("part-*.parquet")))


def _stream(dataset: Dataset, place: Path, say: Callable[[str], None]) -> None:
    """Fetch the missing parts; after each, state.json says where the stream continues."""
    name, revision = dataset.name, str(dataset.revision)
    datasets = require("datasets", f"data.path={name!r}", "huggingface")
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity_error()
    for unfinished in place.glob(".part-*"):  # by a process that was killed
        unfinished.unlink()
    state_file = place / "state.json"
    state: dict = {"parts": 0, "bytes": 0}
    if state_file.exists():
        with contextlib.suppress(ValueError):  # damaged: fetch everything again
            state |= read_json(state_file)
    say(f"fetching {name} at {revision[:10]} from the hub" + f", from byte {state['bytes']:,}" * bool(state["bytes"]))
    write_text(place / "revision", revision)
    try:
        commit = None if os.path.isdir(name) else revision
        stream = datasets.load_dataset(name, dataset.subset, split=dataset.split, revision=commit, streaming=True)
        if "stream" in state:
            stream.load_state_dict(state["stream"])
        with progress_bar(initial=state["bytes"]) as bar:
            texts: list[str] = []
            size = 0
            for row in stream:
                text = _text_of(row, dataset)
                added = len(text.encode("utf-8"))
                if dataset.max_bytes and state["bytes"] + size + added > dataset.max_bytes:
                    break
                texts.append(text)
                size += added
                bar.update(added)
                if size >= PART_BYTES:
                    _write_part(place, state["parts"], texts)
                    state = {"parts": state["parts"] + 1, "bytes": state["bytes"] + size, "stream": stream.state_dict()}
                    write_json(state_file, state)
                    texts, size = [], 0
            if texts:
                _write_part(place, state["parts"], texts)
            elif not state["parts"]:
                more = "; raise data.max_bytes" if dataset.max_bytes else ""
                raise UserError(f"data.path={name!r}: not a single document was taken{more}")
    except (UserError, MemoryError):
        raise
    except Exception as error:  # of several libraries below
        if is_disk_full(error):
            raise
        kept = (
            f"; {state['bytes']:,} bytes are kept, and the same command resumes" if state["bytes"] else f"; {OFFLINE}"
        )
        raise UserError(f"data.path={name!r}: cannot be fetched ({_line(error)}){kept}") from None
    write_text(place / "complete", "")


def _text_of(row: dict, dataset: Dataset) -> str:
    text = row.get(dataset.text_field, 0)
    if not isinstance(text, str | None):
        columns = ", ".join(list(row)[:8])
        raise UserError(
            f"data.path={dataset.name!r} has no text under {dataset.text_field!r}; "
            f"name another column with data.text_field= ({columns})"
        )
    return well_formed(text or "")


def _write_part(place: Path, number: int, texts: list[str]) -> None:
    pyarrow = require("pyarrow", place, "huggingface")
    parquet = require("pyarrow.parquet", place, "huggingface")
    with replacing(place / f"part-{number:05d}.parquet") as unfinished:
        parquet.write_table(pyarrow.table({"text": texts}), unfinished, row_group_size=1 << 14, compression="zstd")


def _safe(name: str) -> str:
    return re.sub(r"[^\w.-]+", "_", name).strip("_")[-60:]


def _line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
