"""Decide which text is for training and which for validation, in one reading of a corpus and in bounded memory."""

import hashlib
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from gpt.data.chunking import utf8_size
from gpt.data.corpus import FIRST_SHARD, Chunk, ShardStart

MIN_DOCUMENTS = 20  # with at least this many, validation takes whole documents
SAMPLE_BYTES = 48 << 20  # the largest sample in memory; of a larger corpus it has at least half this size
CHUNK_OVERHEAD_BYTES = 256  # the memory of a chunk besides its text, which matters if chunks are words
MAX_CANDIDATES = 1 << 16  # documents that may become validation text; beyond it, useless candidates are dropped


@dataclass(frozen=True)
class Split:
    """The rule that picks the validation text: short documents by their hash, or else the end of the text.

    A document of one chunk and at most `largest` bytes is for validation if its hash is below `threshold`, so equal
    documents are on the same side. If `threshold` is 0, all text from character `end` on is for validation.
    """

    threshold: int
    largest: int
    end: int

    def assign(self, chunk: Chunk, characters: int) -> list[tuple[Chunk, bool]]:
        """Return a chunk with True if it is for validation. Cut it in two where the training text ends.

        `characters` precede the chunk in the corpus.
        """
        if self.threshold:
            is_short = chunk.starts_document and chunk.ends_document and len(chunk.text) <= self.largest
            encoded = chunk.text.encode("utf-8") if is_short else b""
            return [(chunk, is_short and len(encoded) <= self.largest and _hash(encoded) < self.threshold)]
        cut = self.end - characters  # the characters of the chunk that are for training
        if cut >= len(chunk.text):
            return [(chunk, False)]
        if cut > 0:
            return [
                (Chunk(chunk.text[:cut], chunk.starts_document, False), False),
                (Chunk(chunk.text[cut:], True, chunk.ends_document), True),
            ]
        return [(Chunk(chunk.text, chunk.starts_document or cut == 0, chunk.ends_document), True)]


@dataclass(frozen=True)
class CorpusScan:
    """The findings of one reading of a corpus: its size, its split, an even sample, where shards begin.

    `sample` holds every `stride`-th chunk with the number of characters before it. A stride of 1 means all text.
    """

    bytes: int
    characters: int
    split: Split
    sample: list[tuple[Chunk, int]]
    stride: int
    shard_starts: tuple[ShardStart, ...] = (FIRST_SHARD,)

    def training_sample(self) -> Iterator[str]:
        """Yield the sample's training text."""
        for chunk, characters in self.sample:
            for part, is_validation in self.split.assign(chunk, characters):
                if not is_validation:
                    yield part.text


def scan_chunks(
    chunks: Iterable[Chunk], validation_bytes: int, on_progress: Callable[[int], object] = lambda size: None
) -> CorpusScan:
    """Read a corpus once and choose its validation text: a tenth of it, at most `validation_bytes`.

    It is whole documents, picked by their hash, if there are `MIN_DOCUMENTS` and enough of them are short. Otherwise it
    is the end of the text, to the character.

    Args:
        chunks: The chunks of the corpus.
        validation_bytes: The largest validation text.
        on_progress: Called with the size of each chunk in bytes.
    """
    num_documents = characters = num_bytes = 0
    candidates = _Candidates(validation_bytes)
    tail: deque[bytes] = deque()  # the last chunks
    tail_bytes = 0
    sample: list[tuple[Chunk, int]] = []
    stride = 1
    sampled_bytes = 0
    for number, chunk in enumerate(chunks):
        encoded = chunk.text.encode("utf-8")
        if chunk.starts_document:
            num_documents += 1
            if chunk.ends_document:
                candidates.add(encoded, num_bytes)
        tail.append(encoded)
        tail_bytes += len(encoded)
        while tail_bytes - len(tail[0]) >= validation_bytes:
            tail_bytes -= len(tail.popleft())
        if number % stride == 0:
            sample.append((chunk, characters))
            sampled_bytes += len(encoded) + CHUNK_OVERHEAD_BYTES
            while sampled_bytes > SAMPLE_BYTES and len(sample) > 1:
                sample = sample[::2]
                stride *= 2
                sampled_bytes = sum(utf8_size(part.text) + CHUNK_OVERHEAD_BYTES for part, _ in sample)
        characters += len(chunk.text)
        num_bytes += len(encoded)
        on_progress(len(encoded))

    limit = min(num_bytes // 10, validation_bytes)
    threshold = candidates.threshold(limit) if num_documents >= MIN_DOCUMENTS else 0
    last = b"".join(tail)[-validation_bytes:].decode("utf-8", "ignore")  # without half a character at its start
    end = max(characters * 9 // 10, characters - len(last))
    return CorpusScan(num_bytes, characters, Split(threshold, limit // 2, end), sample, stride)


class _Candidates:
    """The hashes and sizes of documents that may become validation text. Useless ones are dropped to save memory.

    Documents are taken in the order of their hashes until the next one would exceed the limit.
    """

    def __init__(self, validation_bytes: int):
        self._max_bytes = validation_bytes
        self._hashes, self._sizes = array("Q"), array("Q")
        self._hash_limit = 1 << 64  # only documents with a lower hash can still be taken
        self._drop_at = MAX_CANDIDATES

    def add(self, document: bytes, bytes_before: int) -> None:
        """Consider a document; `bytes_before` is the size of the corpus so far."""
        if 2 * len(document) > self._max_bytes:
            return
        document_hash = _hash(document)
        if document_hash >= self._hash_limit:
            return
        self._hashes.append(document_hash)
        self._sizes.append(len(document))
        if len(self._hashes) >= self._drop_at and bytes_before >= 10 * self._max_bytes:  # the final limit is reached
            hashes, sizes, num_taken = self._in_order(self._max_bytes)
            if num_taken < len(hashes):
                self._hash_limit = int(hashes[num_taken])
            self._hashes = array("Q", hashes[:num_taken])
            self._sizes = array("Q", sizes[:num_taken])
            self._drop_at = 2 * num_taken + MAX_CANDIDATES

    def threshold(self, limit: int) -> int:
        """Return the hash below which documents make up at most `limit` bytes, or 0 if not even half of that."""
        hashes, sizes, num_taken = self._in_order(limit)
        threshold = int(hashes[num_taken]) if num_taken < len(hashes) else self._hash_limit
        return threshold if 2 * sizes[hashes < threshold].sum() >= limit else 0

    def _in_order(self, limit: int) -> tuple[np.ndarray, np.ndarray, int]:
        """Return the short documents' hashes and sizes in the order of the hashes, and how many of them fit."""
        hashes = np.array(self._hashes, dtype=np.uint64)
        sizes = np.array(self._sizes, dtype=np.uint64)
        is_short = 2 * sizes <= limit
        hashes, sizes = hashes[is_short], sizes[is_short]
        order = np.argsort(hashes, kind="stable")
        num_taken = int(np.searchsorted(np.cumsum(sizes[order]), limit, side="right"))
        return hashes[order], sizes[order], num_taken


def _hash(document: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(document, digest_size=8).digest(), "little")
