"""SHA-256 of files, remembered for large ones so that each is read only once."""

import contextlib
import hashlib
import os
import re
import time
from pathlib import Path

from gpt.text.cache import read_json, write_json
from gpt.text.formats import explain_unreadable

REMEMBERED = 1 << 20  # bytes: files from this size on are remembered


class HashMemory:
    """Hashes files, and keeps the hashes of large ones from one process to the next.

    A file counts as unchanged if its size, inode and times are. One that changed in the last seconds is not remembered:
    it could change again without a trace.
    """

    def __init__(self, store: Path):
        self._store = store
        self._changed = False
        try:
            stored = read_json(store)
        except (OSError, ValueError):
            stored = {}
        self._known = {name: entry for name, entry in stored.items() if _is_valid(entry)}

    def sha256(self, file: Path) -> str:
        """Return a file's hash, from memory where it is large and unchanged."""
        with explain_unreadable(file), file.open("rb") as stream:
            status = os.fstat(stream.fileno())
            stamp = [status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns]
            settled = max(status.st_mtime, status.st_ctime) < time.time() - 2
            name = str(file.resolve())
            if status.st_size >= REMEMBERED and self._known.get(name, [None])[0] == stamp:
                return self._known[name][1]
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        if status.st_size >= REMEMBERED and settled:
            self._known[name] = [stamp, digest]
            self._changed = True
        return digest

    def save(self) -> None:
        """Store new hashes; if the folder cannot be written, the next process computes them again."""
        if self._changed:
            with contextlib.suppress(OSError):
                self._store.parent.mkdir(parents=True, exist_ok=True)
                write_json(self._store, self._known)


def _is_valid(entry: object) -> bool:
    """Whether an entry of the store is a stamp and a hash."""
    return isinstance(entry, list) and len(entry) == 2 and bool(re.fullmatch("[0-9a-f]{64}", str(entry[1])))
