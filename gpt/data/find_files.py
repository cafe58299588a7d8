"""The files that a path or a URL names: one file, those in a folder, or the matches of a glob."""

import functools
import glob
import hashlib
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NoReturn

import fsspec

from gpt.console import say
from gpt.data.dataset_cache import CACHE_WRITE_HINT, make_cache, read_checked_json, write_checked_json
from gpt.data.download import (
    MAX_WAIT_SECONDS,
    QUIET_SECONDS,
    WEB_SCHEMES,
    RemoteFile,
    file_info,
    open_filesystem,
    retry,
    store_errors,
    version_tag,
)
from gpt.data.readers import looks_like_text
from gpt.errors import OutsideError, UserError
from gpt.files import explain, home_path, is_output


def find_text_files(path: str, cache: Path, say: Callable[[str], None] = say) -> tuple[Path, ...]:
    """Return, sorted, the files that `path` names: one file, all text files below a folder, or the matches of a glob.

    Folders and globs leave out hidden files, runs, the cache, and every folder with a CACHEDIR.TAG. Folders
    leave out empty and binary files, too; a file named explicitly must be text. A file with several links is returned
    once.
    """
    root = home_path(path)
    if os.path.isfile(root):
        return drop_duplicate_files([root])
    is_folder = os.path.isdir(root)
    top = root if is_folder else next(folder for folder in root.parents if not glob.has_magic(str(folder)))
    passed: list[Path] = []

    @functools.cache
    def is_open(folder: Path) -> bool:
        """Whether to look into a folder, `top` or one below it."""
        if folder != top and (folder.name.startswith(".") or not is_open(folder.parent)):
            return False
        if is_output(folder) or (cache.is_dir() and folder.samefile(cache)):
            passed.append(folder)
            return False
        return True

    found = drop_duplicate_files(
        _in_folder(top, is_open) if is_folder else _matches(root.relative_to(top), top, is_open)
    )
    if passed:
        count = f"{len(passed)} folder{'s' * (len(passed) > 1)}"
        say(f"skipping {count} below {top}, of runs or the cache: {_first_files(passed, top)}")
    if is_folder:
        is_text = {file: looks_like_text(file) for file in found}
        if others := [file for file in found if not is_text[file]]:
            what = f"{len(others)} of {len(found)} files below {root}, empty or not text"
            say(f"skipping {what}: {_first_files(others, root)}")
            found = tuple(file for file in found if is_text[file])
    if not found:
        raise UserError(f"data.path={path!r} names no text file: give the path of a file, a folder or a quoted glob")
    return found


def find_remote_files(
    url: str, cache: Path, cache_bytes: int, say: Callable[[str], None] = say
) -> tuple[RemoteFile, ...]:
    """Return, sorted, the files that a URL names: one file, all in a folder, or the matches of a glob.

    Hidden and empty ones of several are left out. If the store does not answer, they are those of the last time.
    """
    note = cache / f"downloads/.{hashlib.sha256(url.encode()).hexdigest()[:16]}.json"
    try:
        fs, path = open_filesystem(url)
        with store_errors(url):
            listed = retry(lambda _: _listed(fs, path), url, say, QUIET_SECONDS if note.is_file() else MAX_WAIT_SECONDS)
    except OutsideError as error:
        try:
            listed = read_checked_json(note)["files"]
        except (OSError, ValueError):
            raise error from None
        say(f"{error}; taking its files as they were the last time")
    else:
        if not listed:
            raise UserError(f"data.path={url!r} names no file: give the URL of a file, a folder or a quoted glob")
        with explain(note.parent, *CACHE_WRITE_HINT):
            make_cache(cache)
            note.parent.mkdir(exist_ok=True)
            write_checked_json(note, {"files": listed})
    return tuple(RemoteFile(name, size, tag, cache, cache_bytes, say=say) for name, size, tag in listed)


def drop_duplicate_files(files: Iterable[Path]) -> tuple[Path, ...]:
    """Return files in their order, each once however many links lead to it."""
    first: dict[Path, Path] = {}
    for file in files:
        first.setdefault(file.resolve(), file)
    return tuple(first.values())


def _in_folder(top: Path, is_open: Callable[[Path], bool]) -> list[Path]:
    """Return, sorted, the files below a folder. Links to folders are not followed."""
    found = []
    for folder, inside, names in os.walk(top, onerror=_refuse_folder):
        here = Path(folder)
        inside[:] = [name for name in inside if is_open(here / name)]
        found += [here / name for name in names if is_open(here) and not name.startswith(".")]
    return sorted(filter(Path.is_file, found))


def _refuse_folder(error: OSError) -> NoReturn:
    raise UserError(f"{error.filename}: cannot be read ({error.strerror}); fix that, or move the folder away")


def _matches(pattern: Path, top: Path, is_open: Callable[[Path], bool]) -> list[Path]:
    """Return, sorted, the files below a folder that a glob matches; `**` does not follow links to folders."""
    if "**" in pattern.parts:
        _in_folder(top, is_open)  # which refuses a folder that cannot be read, where a glob finds nothing
        pattern = pattern / "*" if pattern.name == "**" else pattern
    try:
        found = [file for file in top.glob(str(pattern)) if file.is_file() and not file.name.startswith(".")]
    except (OSError, ValueError):  # not a pattern, such as a***b, or too long a name
        return []
    return sorted((file for file in found if is_open(file.parent)), key=str)


def _first_files(files: list[Path], top: Path) -> str:
    names = [str(file.relative_to(top)) for file in files[:3]]
    return ", ".join([*names, "..."] if len(files) > 3 else names)


def _listed(fs: fsspec.AbstractFileSystem, path: str) -> list[tuple[str, int | None, str]]:
    """Return the URL, the size and the tag of each file, in the order that local files have."""
    top, *pattern = re.split(r"[*?\[]", path)
    if not pattern or path.startswith(WEB_SCHEMES):  # a query has a question mark
        info = file_info(fs, path)
        if info["type"] == "file":
            return [(fs.unstrip_protocol(path), info["size"], version_tag(info))]
        found = sorted(fs.find(path, detail=True).items(), key=lambda file: file[0].split("/"))
    else:
        fs.invalidate_cache()
        top, found = top.rpartition("/")[0], sorted(fs.glob(path, detail=True).items())
    return [
        (fs.unstrip_protocol(name), info["size"], version_tag(info))
        for name, info in found
        if info["type"] == "file" and info["size"] != 0 and "/." not in name.removeprefix(top.rstrip("/"))
    ]
