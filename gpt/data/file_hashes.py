"""SHA-256 of files, remembered for large ones so that each is read only once."""

import contextlib
import hashlib
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from gpt.data.dataset_cache import make_cache, read_checked_json, write_checked_json
from gpt.data.download import RemoteFile
from gpt.files import user_errors

REMEMBERED_BYTES = 1 << 20  # files of this size or more are remembered
SETTLED_SECONDS = 2  # a file that changed more recently could change again without another time stamp


def hash_files(files: Sequence[Path | RemoteFile], cache: Path) -> list[str]:
    """Return the hash of each file. The cache remembers the hashes of large and of remote files.

    A file counts as unchanged if its size, inode and times are. A file that changed in the last seconds is not
    remembered.
    """
    memory = cache / "hashes.json"
    known: dict[str, list] = {}  # path or URL -> fingerprint and hash
    with contextlib.suppress(OSError, ValueError):
        known = read_checked_json(memory)
    known_before = dict(known)

    def sha256(file: Path | RemoteFile) -> str:
        if isinstance(file, RemoteFile):
            return file.sha256.lower() or remote_sha256(file)
        with user_errors(file), file.open("rb") as stream:
            status = os.fstat(stream.fileno())
            fingerprint = [status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns]
            name = str(file.resolve())
            if status.st_size >= REMEMBERED_BYTES and known.get(name, [None])[0] == fingerprint:
                return known[name][1]
            is_settled = max(status.st_mtime, status.st_ctime) < time.time() - SETTLED_SECONDS
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        if status.st_size >= REMEMBERED_BYTES and is_settled:
            known[name] = [fingerprint, digest]
        return digest

    def remote_sha256(file: RemoteFile) -> str:
        fingerprint = [file.size, file.tag]
        if known.get(file.url, [None])[0] != fingerprint:
            known[file.url] = [fingerprint, sha256(file.fetch())]
        return known[file.url][1]

    with ThreadPoolExecutor() as threads:
        has_remote = any(isinstance(file, RemoteFile) for file in files)
        mapped = map(sha256, files) if has_remote else threads.map(sha256, files)  # one download at a time
        digests = list(mapped)
    if known != known_before:
        with contextlib.suppress(OSError):  # the next process computes them again
            make_cache(cache)
            write_checked_json(memory, known)
    return digests
