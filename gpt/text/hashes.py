"""SHA-256 of files, remembered for large ones so that each is read only once."""

import contextlib
import hashlib
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from gpt.files import explain
from gpt.text.cache import make_cache, read_json, write_json
from gpt.text.corpus.remote import Remote

REMEMBERED = 1 << 20  # bytes: files from this size on are remembered


def hash_files(files: Sequence[Path | Remote], cache: Path) -> list[str]:
    """Return the hashes of files, those of large or remote, unchanged ones from the cache, and keep the new ones there.

    A file counts as unchanged if its size, inode and times are. One that changed in the last seconds is not remembered:
    it could change again without a trace.
    """
    store = cache / "hashes.json"
    known: dict[str, list] = {}
    with contextlib.suppress(OSError, ValueError):
        known = read_json(store)
    before = dict(known)

    def sha256(file: Path | Remote) -> str:
        if isinstance(file, Remote):
            stamp = [file.size, file.tag]
            if not file.sha256 and known.get(file.url, [None])[0] != stamp:
                known[file.url] = [stamp, sha256(file.local())]
            return file.sha256.lower() or known[file.url][1]
        with explain(file), file.open("rb") as stream:
            status = os.fstat(stream.fileno())
            stamp = [status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns]
            settled = max(status.st_mtime, status.st_ctime) < time.time() - 2
            name = str(file.resolve())
            if status.st_size >= REMEMBERED and known.get(name, [None])[0] == stamp:
                return known[name][1]
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        if status.st_size >= REMEMBERED and settled:
            known[name] = [stamp, digest]
        return digest

    with ThreadPoolExecutor() as threads:
        each = map if any(isinstance(file, Remote) for file in files) else threads.map  # one download at a time
        digests = list(each(sha256, files))
    if known != before:
        with contextlib.suppress(OSError):  # the next process computes them again
            make_cache(cache)
            write_json(store, known)
    return digests
