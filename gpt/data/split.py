"""Which text is for training and which for validation, decided in one reading of a corpus and in bounded memory."""

import hashlib
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from gpt.data.corpus import FIRST_SHARD, Chunk, ShardStart

MIN_DOCUMENTS = 20  # with at least this many, validation takes whole documents
SAMPLE_BYTES = 48 << 20  # of a larger corpus, memory holds an even sample of half this size to all of it
CHUNK_OVERHEAD_BYTES = 256  # that a chunk takes in memory besides its text, which matters if chunks are words
MAX_CANDIDATES = 1 << 16  # documents that may become validation text, beyond which those that cannot are dropped


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
        """Return a chunk with whether it is for validation, in two where training ends; `characters` come before it."""
        if self.threshold:
            short = chunk.starts_document and chunk.ends_document and len(chunk.text) <= self.largest
            encoded = chunk.text.encode("utf-8") if short else b""
            return [(chunk, short and len(encoded) <= self.largest and _hash(encoded) < self.threshold)]
        left = self.end - characters  # for training
        if left >= len(chunk.text):
            return [(chunk, False)]
        if left > 0:
            return [
                (Chunk(chunk.text[:left], chunk.starts_document, False), False),
                (Chunk(chunk.text[left:], True, chunk.ends_document), True),
            ]
        return [(Chunk(chunk.text, chunk.starts_document or left == 0, chunk.ends_document), True)]


@dataclass(frozen=True)
class CorpusScan:
    """The findings of one reading of a corpus: its size, its split, an even sample, where shards begin.

    `sample` holds every `stride`-th chunk, with the number of characters before it; a stride of 1 means all text.
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
            for part, validates in self.split.assign(chunk, characters):
                if not validates:
                    yield part.text


def scan_chunks(
    chunks: Iterable[Chunk], validation_bytes: int, read: Callable[[int], object] = lambda size: None
) -> CorpusScan:
    """Read a corpus once and choose its validation text: a tenth of it, at most `validation_bytes`.

    With `MIN_DOCUMENTS`, enough of them short, that is whole documents drawn by their hash; otherwise it is the end
    of the text, to the character. Each chunk is reported to `read` by its size in bytes.
    """
    documents = characters = num_bytes = 0
    candidates = _Candidates(validation_bytes)
    tail: deque[bytes] = deque()  # the last chunks
    tail_bytes = 0
    sample: list[tuple[Chunk, int]] = []
    stride, sampled = 1, 0
    for number, chunk in enumerate(chunks):
        encoded = chunk.text.encode("utf-8")
        if chunk.starts_document:
            documents += 1
            if chunk.ends_document:
                candidates.add(encoded, num_bytes)
        tail.append(encoded)
        tail_bytes += len(encoded)
        while tail_bytes - len(tail[0]) >= validation_bytes:
            tail_bytes -= len(tail.popleft())
        if number % stride == 0:
            sample.append((chunk, characters))
            sampled += len(encoded) + CHUNK_OVERHEAD_BYTES
            while sampled > SAMPLE_BYTES and len(sample) > 1:
                sample, stride = sample[::2], stride * 2
                sampled = sum(len(kept.text.encode("utf-8")) + CHUNK_OVERHEAD_BYTES for kept, _ in sample)
        characters += len(chunk.text)
        num_bytes += len(encoded)
        read(len(encoded))

    limit = min(num_bytes // 10, validation_bytes)
    threshold = candidates.threshold(limit) if documents >= MIN_DOCUMENTS else 0
    last = b"".join(tail)[-validation_bytes:].decode("utf-8", "ignore")  # without half a character at its start
    end = max(characters * 9 // 10, characters - len(last))
    return CorpusScan(num_bytes, characters, Split(threshold, limit // 2, end), sample, stride)


class _Candidates:
    """Hashes and sizes of the documents that may become validation text; useless ones are dropped to save memory.

    Documents are taken in the order of their hashes until the next one would exceed the limit.
    """

    def __init__(self, validation_bytes: int):
        self._most = validation_bytes
        self._hashes, self._sizes = array("Q"), array("Q")
        self._below = 1 << 64  # only documents with a hash below can still be taken
        self._drop_at = MAX_CANDIDATES

    def add(self, document: bytes, bytes_before: int) -> None:
        """Consider a document; `bytes_before` is the size of the corpus so far."""
        if 2 * len(document) <= self._most and (key := _hash(document)) < self._below:
            self._hashes.append(key)
            self._sizes.append(len(document))
            if len(self._hashes) >= self._drop_at and bytes_before >= 10 * self._most:  # the limit is known
                hashes, sizes, taken = self._in_order(self._most)
                if taken < len(hashes):
                    self._below = int(hashes[taken])
                self._hashes, self._sizes = (array("Q", hashes[:taken]), array("Q", sizes[:taken]))
                self._drop_at = 2 * taken + MAX_CANDIDATES

    def threshold(self, limit: int) -> int:
        """Return the hash below which documents make up at most `limit` bytes, or 0 if not even half of that."""
        hashes, sizes, taken = self._in_order(limit)
        threshold = int(hashes[taken]) if taken < len(hashes) else self._below
        return threshold if 2 * sizes[hashes < threshold].sum() >= limit else 0

    def _in_order(self, limit: int) -> tuple[np.ndarray, np.ndarray, int]:
        """Return the short documents' hashes and sizes in the order of the hashes, and how many of them fit."""
        hashes, sizes = (np.array(self._hashes, dtype=np.uint64), np.array(self._sizes, dtype=np.uint64))
        short = 2 * sizes <= limit
        order = np.argsort(hashes[short], kind="stable")
        hashes, sizes = hashes[short][order], sizes[short][order]
        return (hashes, sizes, int(np.searchsorted(np.cumsum(sizes), limit, side="right")))


def _hash(document: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(document, digest_size=8).digest(), "little")
