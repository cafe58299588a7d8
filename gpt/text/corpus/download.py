"""Text from the network: a file behind a URL, or a data set of the Hugging Face hub; downloaded once and kept."""

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from http.client import HTTPException
from io import BufferedRandom
from pathlib import Path
from urllib.error import HTTPError
from urllib.parse import unquote
from urllib.request import Request, urlopen

from gpt.console import progress_bar
from gpt.errors import UserError, is_disk_full, reason
from gpt.files import publish
from gpt.text.cache import explain_unwritable, make_cache, one_at_a_time, read_json, write_json
from gpt.text.corpus.config import DataConfig
from gpt.text.corpus.formats import read_documents, require

BLOCK = 1 << 18  # bytes to receive at once
TIMEOUT = 30  # seconds without a byte
OFFLINE = "without a network, use data=python_docs, data=python_stdlib or data.path=FILE"


def fetch_file(url: str, sha256: str, cache: Path, say: Callable[[str], None]) -> Path:
    """Return the local copy of a file behind an http(s) URL; no network is needed if the cache has it already.

    The file gets its name only once its hash is known to be `sha256` (64 hex digits). An interrupted download resumes.
    Raises `UserError` naming the URL or the folder, the reason and the remedy.
    """
    if not re.fullmatch("[0-9a-fA-F]{64}", sha256):
        raise UserError(f"data.sha256={sha256!r} is not 64 hex digits: give what sha256sum FILE prints for {url}")
    folder = cache / "downloads"
    name = re.sub("[^A-Za-z0-9._-]+", "_", unquote(re.split("[?#]", url)[0].rsplit("/", 1)[-1]))[-100:]
    target = folder / f"{sha256[:16].lower()}-{name}"
    if target.is_file():
        return target
    with explain_unwritable(folder):
        make_cache(cache)
        with one_at_a_time(folder / f".{target.name}.lock", f"downloading {url}", say):
            if not target.is_file():  # another process may have finished it while we waited
                part = folder / f"{target.name}.part"
                with part.open("a+b") as stream:
                    say(f"downloading {url}")
                    _download(url, sha256.lower(), stream)
                publish(part, target)
    return target


def _download(url: str, sha256: str, stream: BufferedRandom) -> None:
    """Append the rest of a file, trying again while that brings more of it, and check its hash."""
    while True:
        before = stream.seek(0, os.SEEK_END)
        try:
            _receive(url, stream)
            break
        except (HTTPException, OSError, ValueError) as error:
            here = stream.seek(0, os.SEEK_END)
            if is_disk_full(error):
                raise
            if here <= before:
                kept = f"{here:,} bytes are kept for the next attempt; " if here else ""
                raise UserError(f"{url}: cannot be downloaded ({reason(error)}); {kept}{OFFLINE}") from None
    stream.seek(0)
    if (found := hashlib.file_digest(stream, "sha256").hexdigest()) != sha256:
        stream.truncate(0)
        raise UserError(
            f"{url}: the SHA-256 is {found[:16]}..., not {sha256[:16]}...: the file has changed, or another server "
            "answered; check the URL and data.sha256=, and run the command again"
        )


def _receive(url: str, stream: BufferedRandom) -> None:
    """Append the rest of a file, or write it anew if the server sends all of it."""
    here = stream.tell()
    try:
        answer = urlopen(Request(url, headers={"Range": f"bytes={here}-"} if here else {}), timeout=TIMEOUT)
    except HTTPError as error:
        with error:
            if here and error.code == 416:
                return  # nothing is left to send: the hash tells whether the file is complete
            raise
    with answer:
        if here and answer.status != 206:
            stream.truncate(0)
            here = stream.seek(0)
        with progress_bar(f"downloading {url.rpartition('/')[2]}", answer.length and here + answer.length, here) as bar:
            while block := answer.read(BLOCK):
                stream.write(block)
                bar.update(len(block))
        if answer.length:
            raise ConnectionError(f"{answer.length:,} bytes are missing")


# --- the Hugging Face hub ---


def with_revision(data: DataConfig, cache: Path) -> DataConfig:
    """Return the configuration with the current commit of a hub data set, so that a run resumes on the same text."""
    if data.name != "huggingface" or re.fullmatch("[0-9a-f]{40}", data.revision or ""):
        return data
    with _explain_hub(data, cache):
        return replace(data, revision=_find_files(data)[0])


def fetch_dataset(data: DataConfig, cache: Path, say: Callable[[str], None]) -> tuple[tuple[Path, ...], int | None]:
    """Return the parquet files of a data set, and how many bytes of text to take from the last one; None takes all.

    Files are fetched until they hold `data.max_bytes`. A note in the cache says which, so that the next time needs no
    network.
    """
    data = with_revision(data, cache)
    which = [data.paths, data.subset, data.split, data.revision, data.text_field, data.errors, data.max_bytes]
    note = cache / f"downloads/{hashlib.sha256(json.dumps(which).encode()).hexdigest()[:16]}.json"
    with _explain_hub(data, cache):
        try:
            stored = read_json(note)
        except (OSError, ValueError):
            say(f"fetching {data.path} at {str(data.revision)[:10]} from the hub")
            make_cache(cache)
            names, rest = [], data.max_bytes
            for name in _find_files(data)[1]:
                names.append(name)
                file = _fetch(data, name, cache)
                if rest is not None:
                    size = sum(map(_size, read_documents(file, data.text_field, data.errors)))
                    if size >= rest:
                        break
                    rest -= size
            stored = {"files": names, "rest": rest}
            write_json(note, stored)
        return tuple(_fetch(data, name, cache) for name in stored["files"]), stored["rest"]


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


def _fetch(data: DataConfig, name: str, cache: Path) -> Path:
    """Return the local copy of a file of a data set; the library keeps it, and resumes and checks a download."""
    hub = require("huggingface_hub", "data=huggingface", "huggingface")
    folder = cache / "downloads"
    return Path(hub.hf_hub_download(data.paths[0], name, repo_type="dataset", revision=data.revision, cache_dir=folder))


def _find_files(data: DataConfig) -> tuple[str, list[str]]:
    """Return the commit of a data set, and its parquet files of the subset and the split.

    A subset is a folder, a split a folder or the beginning of a name. If no name tells of a split, all are for
    training.
    """
    [name] = data.paths
    hub = require("huggingface_hub", "data=huggingface", "huggingface")
    info = hub.HfApi().dataset_info(name, revision=data.revision, timeout=TIMEOUT)
    files = sorted(file.rfilename for file in info.siblings if file.rfilename.endswith(".parquet"))
    folders = ", ".join(list(dict.fromkeys(map(os.path.dirname, files)))[:8]) or "none"
    if data.subset:
        folder = "[/-]".join(map(re.escape, re.split("[/-]", data.subset)))  # sample-10BT may be sample/10BT
        files = [file for file in files if re.search(f"(^|/){folder}/", file)]
    split = re.compile(f"(^|/)(partial-)?{re.escape(data.split)}[-_./]")  # the hub converts only the first 5 GB
    chosen = [file for file in files if split.search(file)]
    if not chosen and data.split == "train" and not re.search("test|val|dev", " ".join(files)):
        chosen = files
    if not chosen:
        raise UserError(
            f"data.path={name!r}: no parquet files of data.split={data.split!r} and data.subset={data.subset!r}, only "
            f"in {folders}; data.revision=refs/convert/parquet has what the hub makes of other formats"
        )
    if not data.subset and len({split.split(file)[0].rsplit("/", 1)[0] for file in chosen}) > 1:
        raise UserError(f"data.path={name!r} has several subsets: choose one with data.subset= ({folders})")
    return info.sha, chosen


@contextlib.contextmanager
def _explain_hub(data: DataConfig, cache: Path) -> Iterator[None]:
    """Turn whatever the hub's library raises into one line."""
    try:
        with explain_unwritable(cache / "downloads"):
            yield
    except (UserError, MemoryError):
        raise
    except Exception as error:  # of several libraries below
        before = cache.glob(f"downloads/datasets--{data.paths[0].replace('/', '--')}/snapshots/*")
        have = "".join(f"; already fetched: data.revision={folder.name}" for folder in sorted(before)[-1:])
        raise UserError(
            f"data.path={data.path!r}: the hub does not provide it ({type(error).__name__}: {reason(error)}){have}; "
            f"{OFFLINE}"
        ) from None
