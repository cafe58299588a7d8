"""Files of token ids, ours and those of other programs, mapped as one sequence.

| files | ids | beside them |
| --- | --- | --- |
| ours | raw, as wide as the vocabulary needs | dataset.json: names, counts and hashes |
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

LLM_C = {(20240520, 1): "<u2", (20240801, 7): "<u4"}  # magic and version: GPT-2's ids, Llama 3's
LLM_C_EVALUATION = 20240522  # the magic of files of questions
LLM_C_HEADER_BYTES = 1024
MEGATRON = {1: "u1", 2: "u1", 3: "<u2", 4: "<u4", 5: "<u8", 8: "<u2"}  # types, as unsigned ones of the same width
TOKEN_SUFFIXES = (".bin", ".ds")
INDEX_SUFFIXES = (".idx", ".index", ".metadata")  # of the files beside them
VALIDATION_WORDS = {"val", "valid", "validation", "dev"}  # in the name of a file or a folder
HASH_BLOCK_BYTES = 1 << 22  # to read at once
OPEN_FILES = 1024  # that a process may need besides the token files


class TokenSequence:
    """Arrays of token ids, one after the other, to be read as one by slices or arrays of positions of any shape."""

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
        which = np.searchsorted(self._ends, positions, side="right")
        ids = np.empty(positions.shape, np.int64)
        for i in np.unique(which):
            is_here = which == i
            begin = self._ends[i] - len(self.arrays[i])
            ids[is_here] = self.arrays[i][positions[is_here].astype(np.int64) - begin]
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
    dtype, size = np.dtype(dtype), file.stat().st_size
    length, rest = divmod(size - start, dtype.itemsize)
    if rest or length < 0 or count not in (None, length):
        wanted = "" if count is None else f", not {start + count * dtype.itemsize:,}"
        raise ValueError(
            f"it has {size:,} bytes{wanted}, for ids of {dtype.itemsize} bytes: it was cut off, or differs"
        )
    return np.asarray(np.memmap(file, dtype, "r", start, (length,))) if length else np.empty(0, dtype)


def open_token_file(file: Path, name: str, indices: Mapping[str, Path], vocab_size: int) -> np.ndarray:
    """Map a token file of another program; `ValueError` says in which way it is not whole, or of no known format.

    Args:
        file: The file on this machine.
        name: Its own name, which a local copy may not have.
        indices: The files beside it that describe it, by their suffixes in `INDEX_SUFFIXES`.
        vocab_size: The entries of the vocabulary. The width of raw ids follows from it.
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
    """Map a file with llm.c's header (dev/data/data_common.py), or without one (nanoGPT, data/openwebtext/prepare.py).

    Read as uint16, llm.c's magic is two ids that GPT-2's vocabulary lacks, so the two cannot be confused.
    """
    with file.open("rb") as stream:
        header = np.frombuffer(stream.read(12).ljust(12, b"\0"), "<i4")
    magic, version, count = (int(field) for field in header)
    if magic == LLM_C_EVALUATION:
        raise ValueError("it holds the questions of an evaluation, not text")
    if magic in [known for known, _ in LLM_C]:
        if (magic, version) not in LLM_C:
            raise ValueError(f"its header has version {version}, and {sorted(LLM_C)} are known")
        return map_tokens(file, LLM_C[magic, version], LLM_C_HEADER_BYTES, count)
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
        raw = np.dtype(f"<u{width}") if width in ("2", "4") else raw  # earlier versions give none
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
    if magic != b"MMIDIDX\0\0" or version != 1 or dtype not in MEGATRON:
        raise ValueError("its .idx is not an index of Megatron-LM of version 1 with whole numbers")
    if 34 + 4 * sequences > index.stat().st_size:
        raise ValueError("its .idx was cut off")
    lengths = np.memmap(index, "<i4", "r", 34, (sequences,)) if sequences else np.empty(0, "<i4")
    return map_tokens(file, MEGATRON[dtype], 0, int(lengths.sum(dtype=np.int64)))


def is_validation_name(name: str) -> bool:
    """Return True if a word of a path, such as fineweb_val_000000.bin or dev/0.bin, says that it is for validation."""
    return bool(VALIDATION_WORDS & set(re.split(r"[^a-z]+", name.lower())))


def hash_tokens(
    file: Path, tokens: np.ndarray, cache: Path | None, on_progress: Callable[[int], object] = lambda size: None
) -> tuple[str, int]:
    """Return the SHA-256 of a file, and the highest of the ids that are mapped from it.

    The cache, if there is one, remembers both; the file is read again if its size or time has changed.
    """
    status = file.stat()
    stamp = str(file.resolve()), status.st_size, status.st_ino, status.st_mtime_ns, tokens.dtype.str
    note = cache / "checked" / hashlib.sha256(repr(stamp).encode()).hexdigest() if cache else None
    if note is not None:
        with contextlib.suppress(OSError, ValueError, IndexError):
            remembered = note.read_text(encoding="utf-8").split()
            return remembered[0], int(remembered[1])
    digest, highest, header = hashlib.sha256(), 0, status.st_size - tokens.nbytes
    with file.open("rb") as stream:
        while block := stream.read(HASH_BLOCK_BYTES):
            digest.update(block)
            ids = np.frombuffer(memoryview(block)[header:], tokens.dtype)
            highest, header = max(highest, int(ids.max(initial=0))), 0
            on_progress(len(block))
    if cache is not None and note is not None:
        with contextlib.suppress(OSError):  # the next process reads it again
            make_cache(cache)
            note.parent.mkdir(exist_ok=True)
            write_text(note, f"{digest.hexdigest()} {highest}\n")
    return digest.hexdigest(), highest


def raise_open_file_limit(count: int) -> None:
    """Let this process keep `count` token files open if the system permits it: macOS begins with 256."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource  # which Windows lacks

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        needed = OPEN_FILES + count if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES + count)
        if soft != resource.RLIM_INFINITY and soft < needed:
            resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
