"""The files that a path or a URL names: one file, the files in a folder, or the matches of a glob."""

import contextlib
import functools
import glob
import hashlib
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn

import fsspec

from gpt.console import print_line, shell_quote
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
from gpt.data.readers import detect_skipped, looks_like_text
from gpt.errors import ExternalError, UserError
from gpt.files import expand_path, is_program_output, user_errors


def find_text_files(path: str, cache: Path, print_line: Callable[[str], None] = print_line) -> tuple[Path, ...]:
    """Return, sorted, the files that `path` names: one file, all text files below a folder, or the matches of a glob.

    Folders and globs skip hidden files, runs, the cache, and every folder below that has a CACHEDIR.TAG or holds
    installed packages. Folders also skip empty and binary files, and what Hugging Face's datasets writes beside a text.
    They also skip the log of this process. A file that is named explicitly must be text. A file with several links is
    returned once.
    """
    root = expand_path(path)
    if os.path.isfile(root):
        return drop_duplicate_files([root])
    is_folder = os.path.isdir(root)
    top = root if is_folder else next(folder for folder in root.parents if not glob.has_magic(str(folder)))
    skipped_folders: list[Path] = []

    @functools.cache
    def is_searched(folder: Path) -> bool:
        """Return True if files may come from a folder, which is `top` or below it."""
        if folder != top and (folder.name.startswith(".") or not is_searched(folder.parent)):
            return False
        is_cache = cache.is_dir() and folder.samefile(cache)
        if is_program_output(folder) or is_cache or (folder != top and _holds_packages(folder)):
            skipped_folders.append(folder)
            return False
        return True

    if is_folder:
        files = drop_duplicate_files(_walk_folder(top, is_searched))
    else:
        files = drop_duplicate_files(_match_glob(root.relative_to(top), top, is_searched))
    if skipped_folders:
        count = f"{len(skipped_folders)} folder{'s' * (len(skipped_folders) > 1)}"
        print_line(f"skipping {count} below {top}, of runs, packages or the cache: {_list_files(skipped_folders, top)}")
    if logs := [file for file in files if _is_own_output(file)]:
        files = tuple(file for file in files if file not in logs)
        remedy = "write it elsewhere, because a resumed run would read it as text"
        print_line(f"skipping {_list_files(logs, top)} below {top}, the output of this program: {remedy}")
    if is_folder:
        text_files = tuple(file for file in files if looks_like_text(file) and not _describes_dataset(file))
        if skipped := sorted(set(files) - set(text_files)):
            count = f"{len(skipped)} of {len(files)} files"
            print_line(f"skipping {count} below {root}, empty or not text: {_list_files(skipped, root)}")
            print_formats(skipped, detect_skipped, "skipped;", print_line)
        files = text_files
    if not files:
        hint = "give the path of a file, a folder or a quoted glob"
        if len(path) > 1000 or "\n" in path:
            raise UserError(f"data.path={path!r:.60}... names no text file: {hint}, not the text itself")
        raise UserError(f"data.path={path!r} names no text file: {hint}")
    return files


def print_formats(
    files: Iterable[Path | RemoteFile],
    detect: Callable[[Any], tuple[str, str] | None],
    treatment: str,
    print_line: Callable[[str], None],
    text_field: str = "",
) -> None:
    """Print which files are of other formats than plain text, and how to make text of them.

    Args:
        files: The files.
        detect: Returns the name of a file's format, and how to make text of it, or None. In the latter, {0} stands for
            the file and {1} for `text_field`.
        treatment: What is done with such files, and the words before the command.
        print_line: Prints a line.
        text_field: The key of the text.
    """
    files_by_format: dict[tuple[str, str], list[Path | RemoteFile]] = {}
    for file in files:
        with contextlib.suppress(UserError):  # the file cannot be read: its reader raises this again
            if detected := detect(file):
                files_by_format.setdefault(detected, []).append(file)
    for (format_name, hint), (first, *more) in files_by_format.items():
        names = first.name + (f" and {len(more):,} more" if more else "")
        print_line(f"{names}: {format_name}, {treatment} {hint.format(shell_quote(str(first)), text_field)}")


def _is_own_output(file: Path) -> bool:
    """Return True if the standard output or error of this process goes to the file, which then grows."""
    for descriptor in (1, 2):
        with contextlib.suppress(OSError):  # closed, or the file has just been deleted
            if os.path.samestat(os.fstat(descriptor), file.stat()):
                return True
    return False


def _holds_packages(folder: Path) -> bool:
    """Return True for a virtual environment, a conda environment, or the packages of Node.js."""
    return folder.name == "node_modules" or any((folder / name).exists() for name in ("pyvenv.cfg", "conda-meta"))


def _describes_dataset(file: Path) -> bool:
    """Return True for the files that Hugging Face's datasets writes beside the Arrow files of a text."""
    if file.name == "dataset_dict.json":
        return any(file.parent.glob("*/state.json"))
    is_beside_text = (file.parent / "state.json").exists() and any(file.parent.glob("data-*.arrow"))
    is_cache = file.name.startswith("cache-") and file.suffix == ".arrow"
    return is_beside_text and (is_cache or file.name in ("dataset_info.json", "state.json"))


def find_remote_files(
    url: str, cache: Path, cache_bytes: int, print_line: Callable[[str], None] = print_line
) -> tuple[RemoteFile, ...]:
    """Return, sorted, the files that a URL names: one file, all files in a folder, or the matches of a glob.

    Folders and globs skip hidden and empty files. If the store does not answer, the listing of the last time is used.

    Args:
        url: The URL.
        cache: The folder for copies and listings.
        cache_bytes: The space that copies may take there.
        print_line: Prints a line.
    """
    remembered = cache / f"downloads/.{hashlib.sha256(url.encode()).hexdigest()[:16]}.json"
    wait = QUIET_SECONDS if remembered.is_file() else MAX_WAIT_SECONDS
    try:
        fs, path = open_filesystem(url)
        with store_errors(url):
            listing = retry(lambda _: _list_remote(fs, path), url, print_line, wait)
    except ExternalError as error:
        try:
            listing = read_checked_json(remembered)["files"]
        except (OSError, ValueError):
            raise error from None
        print_line(f"{error}; using the list of files of the last time")
    else:
        if not listing:
            raise UserError(f"data.path={url!r} names no file: give the URL of a file, a folder or a quoted glob")
        with user_errors(remembered.parent, *CACHE_WRITE_HINT):
            make_cache(cache)
            remembered.parent.mkdir(exist_ok=True)
            write_checked_json(remembered, {"files": listing})
    return tuple(RemoteFile(name, size, tag, cache, cache_bytes, print_line=print_line) for name, size, tag in listing)


def drop_duplicate_files(files: Iterable[Path]) -> tuple[Path, ...]:
    """Return files in their order, each once, even if several links lead to it."""
    first_links: dict[Path, Path] = {}
    for file in files:
        first_links.setdefault(file.resolve(), file)
    return tuple(first_links.values())


def _walk_folder(top: Path, is_searched: Callable[[Path], bool]) -> list[Path]:
    """Return, sorted, the files below a folder. Links to folders are not followed."""
    files = []
    for name, subfolders, file_names in os.walk(top, onerror=_refuse_folder):
        folder = Path(name)
        subfolders[:] = [subfolder for subfolder in subfolders if is_searched(folder / subfolder)]
        if is_searched(folder):
            files += [folder / file for file in file_names if not file.startswith(".")]
    return sorted(filter(Path.is_file, files))


def _refuse_folder(error: OSError) -> NoReturn:
    raise UserError(f"{error.filename}: cannot be read ({error.strerror}); fix that, or move the folder away")


def _match_glob(pattern: Path, top: Path, is_searched: Callable[[Path], bool]) -> list[Path]:
    """Return, sorted, the files below a folder that a glob matches. `**` does not follow links to folders."""
    if "**" in pattern.parts:
        _walk_folder(top, is_searched)  # refuses a folder that cannot be read; a glob would silently find nothing
        pattern = pattern / "*" if pattern.name == "**" else pattern
    try:
        files = [file for file in top.glob(str(pattern)) if file.is_file() and not file.name.startswith(".")]
    except (OSError, ValueError):  # not a pattern, such as a***b, or too long a name
        return []
    return sorted((file for file in files if is_searched(file.parent)), key=str)


def _list_files(files: list[Path], top: Path) -> str:
    names = [str(file.relative_to(top)) for file in files[:3]]
    return ", ".join([*names, "..."] if len(files) > 3 else names)


def _list_remote(fs: fsspec.AbstractFileSystem, path: str) -> list[tuple[str, int | None, str]]:
    """Return the URL, the size and the version tag of each file, in the order of local files."""
    top, *pattern = re.split(r"[*?\[]", path)
    if not pattern or path.startswith(WEB_SCHEMES):  # a URL's query has a question mark
        info = file_info(fs, path)
        if info["type"] == "file":
            return [(fs.unstrip_protocol(path), info["size"], version_tag(info))]
        entries = sorted(fs.find(path, detail=True).items(), key=lambda entry: entry[0].split("/"))
    else:
        fs.invalidate_cache()
        top = top.rpartition("/")[0]
        entries = sorted(fs.glob(path, detail=True).items())
    return [
        (fs.unstrip_protocol(name), info["size"], version_tag(info))
        for name, info in entries
        if info["type"] == "file" and info["size"] != 0 and "/." not in name.removeprefix(top.rstrip("/"))
    ]
