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
from gpt.files import explain

REMEMBERED_BYTES = 1 << 20  # files from this size on are remembered


def hash_files(files: Sequence[Path | RemoteFile], cache: Path) -> list[str]:
    """Return the hashes of files, those of large or remote, unchanged ones from the cache, and keep the new ones there.

    A file counts as unchanged if its size, inode and times are. One that changed in the last seconds is not remembered:
    it could change again without a trace.
    """
    store = cache / "hashes.json"
    known: dict[str, list] = {}
    with contextlib.suppress(OSError, ValueError):
        known = read_checked_json(store)
    before = dict(known)

    def sha256(file: Path | RemoteFile) -> str:
        if isinstance(file, RemoteFile):
            fingerprint = [file.size, file.tag]
            if not file.sha256 and known.get(file.url, [None])[0] != fingerprint:
                known[file.url] = [fingerprint, sha256(file.fetch())]
            return file.sha256.lower() or known[file.url][1]
        with explain(file), file.open("rb") as stream:
            status = os.fstat(stream.fileno())
            fingerprint = [status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns]
            settled = max(status.st_mtime, status.st_ctime) < time.time() - 2
            name = str(file.resolve())
            if status.st_size >= REMEMBERED_BYTES and known.get(name, [None])[0] == fingerprint:
                return known[name][1]
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        if status.st_size >= REMEMBERED_BYTES and settled:
            known[name] = [fingerprint, digest]
        return digest

    with ThreadPoolExecutor() as threads:
        each = map if any(isinstance(file, RemoteFile) for file in files) else threads.map  # one download at a time
        digests = list(each(sha256, files))
    if known != before:
        with contextlib.suppress(OSError):  # the next process computes them again
            make_cache(cache)
            write_checked_json(store, known)
    return digests
