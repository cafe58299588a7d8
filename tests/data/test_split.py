"""The split: by hand, and held to an oracle that has the whole corpus in memory; and the sample of the one reading."""

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import gpt.data.split
from gpt.data.chunking import split_into_chunks
from gpt.data.corpus import Chunk
from gpt.data.split import CHUNK_OVERHEAD_BYTES, MIN_DOCUMENTS, CorpusScan, scan_chunks

PIECE = 31  # characters, at least, of the pieces of a long document here
EXAMPLES = settings(max_examples=150, deadline=None, derandomize=True, database=None)
DOCUMENTS = [f"document {i:03} " + "é" * (i % 7) for i in range(101)]


def pieces_of(documents: Iterable[str]) -> Iterator[Chunk]:
    """The documents as a corpus gives them."""
    for document in documents:
        texts = list(split_into_chunks([document], PIECE))
        for i, text in enumerate(texts):
            yield Chunk(text, i == 0, i == len(texts) - 1)


def sides(found: CorpusScan, documents: Iterable[str]) -> tuple[list[str], list[str]]:
    """The documents of both parts, after a check that each piece is there once, and its beginning and end too."""
    parts: tuple[list[str], list[str]] = ([], [])
    characters = 0
    for whole in pieces_of(documents):
        halves = found.split.assign(whole, characters)
        assert "".join(part.text for part, _ in halves) == whole.text
        assert [part.ends_document for part, _ in halves] == [False] * (len(halves) - 1) + [whole.ends_document]
        assert halves[0][0].starts_document or not whole.starts_document
        for part, validates in halves:
            assert part.text
            if part.starts_document:
                parts[validates].append("")
            parts[validates][-1] += part.text
        characters += len(whole.text)
    return parts


def split(documents: list[str], validation_bytes: int = 1_000_000) -> tuple[list[str], list[str]]:
    """Training and validation, documents each."""
    return sides(scan_chunks(pieces_of(documents), validation_bytes), documents)


def key(document: str) -> int:
    """The number that draws a document: the first eight bytes of its hash."""
    return int.from_bytes(hashlib.blake2b(document.encode(), digest_size=8).digest(), "little")


def size(documents: Iterable[str]) -> int:
    """Their bytes in UTF-8."""
    return sum(len(document.encode()) for document in documents)


def oracle(documents: list[str], validation_bytes: int) -> tuple[list[str], list[str]]:
    """Both parts in the obvious way: equal documents are drawn together, by their key, until the next do not fit."""
    limit = min(size(documents) // 10, validation_bytes)
    count = Counter(documents)
    short = [text for text in count if 2 * size([text]) <= limit and len(list(split_into_chunks([text], PIECE))) == 1]
    drawn: set[str] = set()
    left = limit
    for document in sorted(short, key=key):
        left -= size([document]) * count[document]
        if left < 0:
            break
        drawn.add(document)
    validation = [document for document in documents if document in drawn]
    if sum(count.values()) - count[""] >= MIN_DOCUMENTS and 2 * size(validation) >= limit:
        return [document for document in documents if document and document not in drawn], validation
    end = sum(map(len, documents)) * 9 // 10
    while size(["".join(documents)[end:]]) > validation_bytes:
        end += 1
    parts: tuple[list[str], list[str]] = ([], [])
    for document in documents:
        for part, text in zip(parts, (document[:end], document[end:]), strict=True):
            part.extend([text] if text else [])
        end = max(0, end - len(document))
    return parts


# --- whole documents ---


def test_whole_documents_by_hand():
    """A hundred of equal length give ten, or the three that fit; of these, those with the smallest hashes."""
    documents = [f"{i:07}" for i in range(100)]
    assert [len(part) for part in split(documents)] == [90, 10]
    train, validation = split(documents, 7 * 3 + 6)
    assert len(train) == 97
    assert validation == sorted(sorted(documents, key=key)[:3]) == ["0000010", "0000015", "0000065"]


def test_number_of_documents_decides():
    """One document fewer than enough, and the end of the text validates."""
    documents = ["longer", *(f"{i:05}" for i in range(MIN_DOCUMENTS - 1))]  # a tenth begins within a document
    train, validation = split(documents)
    assert sorted(train + validation) == sorted(documents)
    assert 5 <= size(validation) <= 10
    assert split(documents[1:]) == (documents[1:18], documents[18:])
    assert split([*documents[1:], "", ""]) == (documents[1:18], documents[18:])  # an empty document is none


# --- against the oracle ---

TEXTS = st.one_of(
    st.lists(st.text("aé😀 ", max_size=40), max_size=60),  # about as long as each other
    st.lists(st.text("ab", min_size=1, max_size=3), min_size=20, max_size=100),  # many of them equal
    st.lists(st.text("a€ ", max_size=300), max_size=25),  # in pieces
)


@EXAMPLES
@given(TEXTS, st.integers(1, 300))
def test_the_split_is_the_oracle(documents, validation_bytes):
    """Of any documents, in any order, the very same ones or text; so nothing is lost, doubled or too much."""
    train, validation = split(documents, validation_bytes)
    assert (train, validation) == oracle(documents, validation_bytes)
    assert "".join(sorted("".join(train + validation))) == "".join(sorted("".join(documents)))
    assert size(validation) <= validation_bytes
    assert sum(map(len, validation)) <= -(-sum(map(len, documents)) // 10) or size(validation) <= size(documents) / 10


@EXAMPLES
@given(TEXTS, st.integers(1, 30))
def test_pruning_changes_nothing(documents, validation_bytes):
    """The candidates that are dropped are those that can no longer be drawn."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpt.data.split, "MAX_CANDIDATES", 0)
        found = scan_chunks(pieces_of(documents), validation_bytes)
    assert found == scan_chunks(pieces_of(documents), validation_bytes)
    assert sides(found, documents) == oracle(documents, validation_bytes)


# --- the one reading ---


def test_what_is_counted():
    """The size is in bytes, and the progress callback gets the bytes of each chunk."""
    sizes: list[int] = []
    found = scan_chunks(pieces_of(["a\ufffd", "", " word" * 20, "\ufffd\ufffdé"]), 10, sizes.append)
    assert found.bytes == 4 + 100 + 8
    assert sizes == [4, 35, 35, 30, 8]


@EXAMPLES
@given(TEXTS, st.integers(1, 20_000))
@example([f"{i:07}" for i in range(13)], 13 * (7 + CHUNK_OVERHEAD_BYTES))  # all of it, to the byte
@example([f"{i:07}" for i in range(13)], 13 * (7 + CHUNK_OVERHEAD_BYTES) - 1)
def test_sample_is_even(documents, limit):
    """Every so many-th piece, with its place, and no more than the limit."""
    pieces = list(pieces_of(documents))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpt.data.split, "SAMPLE_BYTES", limit)
        found = scan_chunks(iter(pieces), 50)
    places = [sum(len(before.text) for before in pieces[:i]) for i in range(len(pieces))]
    assert found.sample == list(zip(pieces, places, strict=True))[:: found.stride]
    kept, whole = (
        size(p.text for p in part) + len(part) * CHUNK_OVERHEAD_BYTES for part in (pieces[:: found.stride], pieces)
    )
    assert kept <= limit or len(found.sample) == 1
    assert found.stride & (found.stride - 1) == 0
    assert (found.stride == 1) == (whole <= limit or len(pieces) == 1)


def test_sample_to_learn_from(monkeypatch):
    """Nothing that validates is in it, to the character."""
    text = " word" * 100
    found = scan_chunks(pieces_of([text]), 1_000_000)
    assert found.stride == 1
    assert "".join(found.training_sample()) == text[:450]
    train, validation = split(DOCUMENTS)
    assert list(scan_chunks(pieces_of(DOCUMENTS), 1_000_000).training_sample()) == train
    monkeypatch.setattr(gpt.data.split, "SAMPLE_BYTES", 30 * (20 + CHUNK_OVERHEAD_BYTES))
    sample = list(scan_chunks(pieces_of(DOCUMENTS), 1_000_000).training_sample())
    assert sample == [document for document in DOCUMENTS[::4] if document not in validation]
