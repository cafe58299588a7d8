"""Data sets of the Hugging Face hub, streamed once into parquet files and read from there ever after."""

import errno
import hashlib
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from tqdm import tqdm

from gpt.errors import UserError
from gpt.files import explain_cache, sync, try_lock, write_text
from gpt.text.formats import require
from gpt.text.pieces import well_formed
from gpt.text.url import OFFLINE

if TYPE_CHECKING:
    from gpt.text.corpus import DataConfig

PART_BYTES = 1 << 26  # of text in a file; an interrupted download repeats at most this much


def find_revision(config: "DataConfig", folder: Path) -> str:
    """The commit of the data set that `data.revision` names, by default the newest; it takes the network.

    A folder of this machine has the hash of its files for a commit.
    """
    (name,) = config.paths
    if os.path.isdir(name):
        digest = hashlib.sha256()
        for file in sorted(file for file in Path(name).rglob("*") if file.is_file()):
            with file.open("rb") as stream:
                digest.update(f"{file.relative_to(name)}\n".encode() + hashlib.file_digest(stream, "sha256").digest())
        return digest.hexdigest()[:40]
    if config.revision and re.fullmatch(r"[0-9a-f]{40}", config.revision):
        return config.revision
    hub = require("huggingface_hub", f"data.path={name!r}", "huggingface")
    try:
        return str(hub.HfApi().dataset_info(name, revision=config.revision, timeout=20).sha)
    except Exception as error:  # of several libraries below
        before = sorted(state.read_text(encoding="utf-8") for state in folder.glob(f"{_safe(name)}-*/revision"))
        have = f"; fetched before: data.revision={before[-1]}" if before else ""
        raise UserError(f"data.path={name!r}: the hub does not give it ({_line(error)}){have}; {OFFLINE}") from None


def fetch_dataset(config: "DataConfig", folder: Path, say: Callable[[str], None] = print) -> tuple[Path, ...]:
    """The files with the data set's text, under `text`; those that are not there yet are streamed from the hub.

    What was fetched before an interruption is kept.
    """
    (name,) = config.paths
    revision = find_revision(config, folder)
    key = [name, config.subset, config.split, revision, config.text_field, config.max_bytes]
    place = folder / f"{_safe(name)}-{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]}"
    if not (place / "complete").exists():
        with explain_cache(folder):
            place.mkdir(parents=True, exist_ok=True)
            lock = try_lock(place / ".lock")
        if isinstance(lock, str):
            raise UserError(f"data.path={name!r}: process {lock} is fetching it: wait for that one")
        with lock:
            _stream(config, revision, place, say)
    return tuple(sorted(place.glob("part-*.parquet")))


def _stream(config: "DataConfig", revision: str, place: Path, say: Callable[[str], None]) -> None:
    """Fetch what is missing, part by part; after each, state.json says where the stream goes on."""
    (name,) = config.paths
    datasets = require("datasets", f"data.path={name!r}", "huggingface")
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity_error()
    state_file = place / "state.json"
    state = json.loads(state_file.read_text(encoding="utf-8")) if state_file.exists() else {"parts": 0, "bytes": 0}
    say(
        f"fetching {name} at {revision[:10]} from the hub" + f", from byte {state['bytes']:,} on" * bool(state["bytes"])
    )
    write_text(place / "revision", revision)
    try:
        stream = datasets.load_dataset(
            name, config.subset, split=config.split, revision=None if os.path.isdir(name) else revision, streaming=True
        )
        if "stream" in state:
            stream.load_state_dict(state["stream"])
        hidden = not sys.stderr.isatty()
        with tqdm(initial=state["bytes"], unit="B", unit_scale=True, leave=False, disable=hidden) as bar:
            texts: list[str] = []
            size = 0
            for row in stream:
                text = _text_of(row, config)
                added = len(text.encode("utf-8"))
                if config.max_bytes and state["bytes"] + size + added > config.max_bytes:
                    break
                texts.append(text)
                size += added
                bar.update(added)
                if size >= PART_BYTES:
                    _write_part(place, state["parts"], texts)
                    state = {"parts": state["parts"] + 1, "bytes": state["bytes"] + size, "stream": stream.state_dict()}
                    write_text(state_file, json.dumps(state))
                    texts, size = [], 0
            if texts:
                _write_part(place, state["parts"], texts)
            elif not state["parts"]:
                more = "; raise data.max_bytes" if config.max_bytes else ""
                raise UserError(f"data.path={name!r}: not one document was taken from it{more}")
    except (UserError, MemoryError):
        raise
    except Exception as error:  # of several libraries below
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        kept = (
            f"; {state['bytes']:,} bytes are kept, and the same command goes on" if state["bytes"] else f"; {OFFLINE}"
        )
        raise UserError(f"data.path={name!r}: cannot be fetched ({_line(error)}){kept}") from None
    write_text(place / "complete", "")


def _text_of(row: dict, config: "DataConfig") -> str:
    text = row.get(config.text_field, 0)
    if not isinstance(text, str | None):
        columns = ", ".join(list(row)[:8])
        raise UserError(
            f"data.path={config.path!r} has no text under {config.text_field!r}; "
            f"name another column with data.text_field= ({columns})"
        )
    return well_formed(text or "")


def _write_part(place: Path, number: int, texts: list[str]) -> None:
    pyarrow = require("pyarrow", place, "huggingface")
    parquet = require("pyarrow.parquet", place, "huggingface")
    temporary = place / "part.unfinished"
    parquet.write_table(pyarrow.table({"text": texts}), temporary, row_group_size=1 << 14, compression="zstd")
    sync(temporary)
    os.replace(temporary, place / f"part-{number:05d}.parquet")
    sync(place)


def _safe(name: str) -> str:
    return re.sub(r"[^\w.-]+", "_", name).strip("_")[-60:]


def _line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
