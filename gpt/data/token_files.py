"""Files of token ids, from this and other programs, mapped as one sequence.

| files | ids | files beside them |
| --- | --- | --- |
| this project | raw, as wide as the vocabulary needs | dataset.json: names, counts and hashes |
| nanoGPT: train.bin, val.bin | raw | |
| llm.c, modded-nanogpt: NAME_train_*.bin, NAME_val_*.bin | after a header of 256 int32: magic, version, count | |
| datatrove: *.ds | raw | *.ds.index: the end of each document; *.ds.metadata: width, count |
| Megatron-LM, datatrove: *.bin | raw | *.idx: type, lengths |
"""

import contextlib
import hashlib
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from gpt.data.dataset_cache import make_cache
from gpt.files import write_text

LLM_C_DTYPES = {(20240520, 1): "<u2", (20240801, 7): "<u4"}  # by magic and version: ids of GPT-2, of Llama 3
LLM_C_EVALUATION_MAGIC = 20240522  # of files with the questions of an evaluation
LLM_C_HEADER_BYTES = 1024
MEGATRON_DTYPES = {1: "u1", 2: "u1", 3: "<u2", 4: "<u4", 5: "<u8", 8: "<u2"}  # by code; signed types become unsigned
TOKEN_SUFFIXES = (".bin", ".ds")
INDEX_SUFFIXES = (".idx", ".index", ".metadata")  # of files that describe a token file
VALIDATION_WORDS = {"val", "valid", "validation", "dev"}  # in the name of a file or folder that is for validation
HASH_BLOCK_BYTES = 1 << 22  # bytes to read at once
OTHER_OPEN_FILES = 1024  # that a process may need besides the token files


class TokenSequence:
    """Arrays of token ids, read as one sequence by slices, or by arrays of positions of any shape."""

    def __init__(self, arrays: Sequence[np.ndarray]):
        self.arrays = [array for array in arrays if len(array)]
        self._ends = np.cumsum([len(array) for array in self.arrays])

    def __len__(self) -> int:
        return int(self._ends[-1]) if self.arrays else 0

    def __getitem__(self, positions: slice | np.ndarray) -> np.ndarray:
        if isinstance(positions, slice):
            assert positions.step in (None, 1)
            start, stop, _ = positions.indices(len(self))
            parts = self.part(start, stop).arrays
            return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, np.uint16), *parts])
        if len(self.arrays) == 1:
            return self.arrays[0][positions]
        array_index = np.searchsorted(self._ends, positions, side="right")
        ids = np.empty(positions.shape, np.int64)
        for i in np.unique(array_index):
            mask = array_index == i
            begin = self._ends[i] - len(self.arrays[i])
            ids[mask] = self.arrays[i][positions[mask].astype(np.int64) - begin]
        return ids

    def part(self, start: int, stop: int) -> "TokenSequence":
        """Return the tokens from one position to another, without a copy."""
        begins = self._ends - [len(array) for array in self.arrays]
        spans = zip(self.arrays, begins.tolist(), strict=True)
        return TokenSequence([array[max(0, start - begin) : max(0, stop - begin)] for array, begin in spans])


def token_dtype(vocab_size: int) -> np.dtype:
    """Return the type of raw ids on disk: uint16 if the vocabulary fits, else uint32."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def map_tokens(file: Path, dtype: np.dtype | str, start: int = 0, count: int | None = None) -> np.ndarray:
    """Map the ids of a file from byte `start` on; `ValueError` unless it has whole ids, and `count` of them."""
    dtype = np.dtype(dtype)
    size = file.stat().st_size
    length, rest = divmod(size - start, dtype.itemsize)
    if rest or length < 0 or count not in (None, length):
        expected = "" if count is None else f", not {start + count * dtype.itemsize:,}"
        raise ValueError(
            f"it has {size:,} bytes{expected}, for ids of {dtype.itemsize} bytes: it was cut off, or differs"
        )
    return np.asarray(np.memmap(file, dtype, "r", start, (length,))) if length else np.empty(0, dtype)


def open_token_file(file: Path, name: str, indices: Mapping[str, Path], vocab_size: int) -> np.ndarray:
    """Map a token file of another program. Raise `ValueError` if it is incomplete or of an unknown format.

    Args:
        file: The file on this machine.
        name: The original name. A local copy may have another one.
        indices: The files that describe it, by their suffixes in `INDEX_SUFFIXES`.
        vocab_size: The entries of the vocabulary. They determine the width of raw ids.
    """
    raw = token_dtype(vocab_size)
    if name.endswith(".ds"):
        return _open_datatrove(file, indices, raw)
    if not name.endswith(".bin"):
        raise ValueError(f"the name ends in none of {', '.join(TOKEN_SUFFIXES)}")
    if ".idx" in indices:
        return _open_megatron(file, indices[".idx"])
    return _open_llm_c(file, raw)


def _open_llm_c(file: Path, raw: np.dtype) -> np.ndarray:
    """Map a file with llm.c's header (dev/data/data_common.py) or without one (nanoGPT, data/openwebtext/prepare.py).

    Read as uint16, llm.c's magic is two ids outside of GPT-2's vocabulary. So the two formats cannot be confused.
    """
    with file.open("rb") as stream:
        header = np.frombuffer(stream.read(12).ljust(12, b"\0"), "<i4")
    magic, version, count = (int(field) for field in header)
    if magic == LLM_C_EVALUATION_MAGIC:
        raise ValueError("it holds the questions of an evaluation, not text")
    if magic in [known_magic for known_magic, _ in LLM_C_DTYPES]:
        if (magic, version) not in LLM_C_DTYPES:
            raise ValueError(f"its header has version {version}, and {sorted(LLM_C_DTYPES)} are known")
        return map_tokens(file, LLM_C_DTYPES[magic, version], LLM_C_HEADER_BYTES, count)
    ids = map_tokens(file, raw)
    if len(ids) > 1 and not ids[1:1000:2].any():
        width = raw.itemsize
        raise ValueError(f"every second id is 0, so its ids probably have {2 * width} bytes, not {width}: convert them")
    return ids


def _open_datatrove(file: Path, indices: Mapping[str, Path], raw: np.dtype) -> np.ndarray:
    """Map a file of datatrove's DocumentTokenizer (src/datatrove/pipeline/tokens/tokenizer.py)."""
    if not indices:
        raise ValueError("it has neither .index nor .metadata beside it: it is unfinished, or they were not copied")
    count = None
    if ".metadata" in indices:
        tokenizer, tokens, *_ = indices[".metadata"].read_text(encoding="utf-8").splitlines()
        count, width = int(tokens), tokenizer.rpartition("|")[2]
        raw = np.dtype(f"<u{width}") if width in ("2", "4") else raw  # earlier versions do not give the width
    ids = map_tokens(file, raw, 0, count)
    if ".index" in indices:
        ends = map_tokens(indices[".index"], "<u8")
        if len(ends) and ends[-1] != len(ids):
            raise ValueError(f"it has {len(ids):,} ids, and {ends[-1]:,} by its .index")
    return ids


def _open_megatron(file: Path, index: Path) -> np.ndarray:
    """Map a file of Megatron-LM's IndexedDataset (megatron/core/datasets/indexed_dataset.py)."""
    with index.open("rb") as stream:
        magic, version, dtype, sequences, _ = struct.unpack("<9sQBQQ", stream.read(34).ljust(34, b"\0"))
    if magic != b"MMIDIDX\0\0" or version != 1 or dtype not in MEGATRON_DTYPES:
        raise ValueError("its .idx is not an index of Megatron-LM of version 1 with whole numbers")
    if 34 + 4 * sequences > index.stat().st_size:
        raise ValueError("its .idx was cut off")
    lengths = np.memmap(index, "<i4", "r", 34, (sequences,)) if sequences else np.empty(0, "<i4")
    return map_tokens(file, MEGATRON_DTYPES[dtype], 0, int(lengths.sum(dtype=np.int64)))


def is_validation_name(name: str) -> bool:
    """Return True if a word of a path means validation, as in fineweb_val_000000.bin or dev/0.bin."""
    return bool(VALIDATION_WORDS & set(re.split(r"[^a-z]+", name.lower())))


def hash_tokens(
    file: Path, tokens: np.ndarray, cache: Path | None, on_progress: Callable[[int], object] = lambda size: None
) -> tuple[str, int]:
    """Return the SHA-256 of a file, and the highest of the ids that are mapped from it.

    Args:
        file: The file.
        tokens: The ids that are mapped from it.
        cache: Remembers the result, until the size or time of the file changes. None reads the file.
        on_progress: Called with numbers of bytes.
    """
    status = file.stat()
    fingerprint = str(file.resolve()), status.st_size, status.st_ino, status.st_mtime_ns, tokens.dtype.str
    remembered = cache / "checked" / hashlib.sha256(repr(fingerprint).encode()).hexdigest() if cache else None
    if remembered is not None:
        with contextlib.suppress(OSError, ValueError, IndexError):
            words = remembered.read_text(encoding="utf-8").split()
            return words[0], int(words[1])
    digest = hashlib.sha256()
    highest = 0
    header = status.st_size - tokens.nbytes  # bytes of the first block that are no ids
    with file.open("rb") as stream:
        while block := stream.read(HASH_BLOCK_BYTES):
            digest.update(block)
            ids = np.frombuffer(memoryview(block)[header:], tokens.dtype)
            highest = max(highest, int(ids.max(initial=0)))
            header = 0
            on_progress(len(block))
    if cache is not None and remembered is not None:
        with contextlib.suppress(OSError):  # the next process reads the file again
            make_cache(cache)
            remembered.parent.mkdir(exist_ok=True)
            write_text(remembered, f"{digest.hexdigest()} {highest}\n")
    return digest.hexdigest(), highest


def raise_open_file_limit(count: int) -> None:
    """Let this process keep `count` token files open if the system permits it. The limit of macOS is 256 at first."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource  # Windows has no such module

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        needed = OTHER_OPEN_FILES + count
        if hard != resource.RLIM_INFINITY:
            needed = min(hard, needed)
        if soft != resource.RLIM_INFINITY and soft < needed:
            resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
