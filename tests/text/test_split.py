"""The split: by hand, and held to an oracle that has the whole corpus in memory; and the sample of the one reading."""

import hashlib
import tracemalloc
from collections import Counter
from collections.abc import Iterable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gpt.text.split
from gpt.text.corpus import Piece
from gpt.text.pieces import cut
from gpt.text.split import ENOUGH_DOCUMENTS, PIECE_BYTES, Survey, survey

PIECE = 31  # characters, at least, of the pieces of a long document here
EXAMPLES = settings(max_examples=150, deadline=None, derandomize=True, database=None)
DOCUMENTS = [f"document {i:03} " + "é" * (i % 7) for i in range(101)]


def pieces_of(documents: Iterable[str], piece: int = PIECE) -> Iterator[Piece]:
    """The documents as a corpus gives them."""
    for document in documents:
        texts = list(cut([document], piece))
        for i, text in enumerate(texts):
            yield Piece(text, i == 0, i == len(texts) - 1)


def sides(found: Survey, documents: Iterable[str], piece: int = PIECE) -> tuple[list[str], list[str]]:
    """The documents of both parts, after a check that each piece is there once, and its beginning and end too."""
    parts: tuple[list[str], list[str]] = ([], [])
    characters = 0
    for whole in pieces_of(documents, piece):
        halves = found.split.sides(whole, characters)
        assert "".join(part.text for part, _ in halves) == whole.text
        assert [part.ends for part, _ in halves] == [False] * (len(halves) - 1) + [whole.ends]
        assert halves[0][0].begins or not whole.begins
        for part, validates in halves:
            assert part.text
            if part.begins:
                parts[validates].append("")
            parts[validates][-1] += part.text
        characters += len(whole.text)
    return parts


def split(documents: list[str], validation_bytes: int = 1_000_000, piece: int = PIECE) -> tuple[list[str], list[str]]:
    """Training and validation, documents each."""
    return sides(survey(pieces_of(documents, piece), validation_bytes), documents, piece)


def key(document: str) -> int:
    """The number that draws a document: the first eight bytes of its hash."""
    return int.from_bytes(hashlib.blake2b(document.encode(), digest_size=8).digest(), "little")


def size(documents: Iterable[str]) -> int:
    """Their bytes in UTF-8."""
    return sum(len(document.encode()) for document in documents)


def oracle(documents: list[str], validation_bytes: int, piece: int = PIECE) -> tuple[list[str], list[str]]:
    """Both parts in the obvious way: equal documents are drawn together, by their key, until the next do not fit."""
    limit = min(size(documents) // 10, validation_bytes)
    count = Counter(documents)
    short = [text for text in count if 2 * size([text]) <= limit and len(list(cut([text], piece))) == 1]
    drawn: set[str] = set()
    left = limit
    for document in sorted(short, key=key):
        left -= size([document]) * count[document]
        if left < 0:
            break
        drawn.add(document)
    validation = [document for document in documents if document in drawn]
    if sum(count.values()) - count[""] >= ENOUGH_DOCUMENTS and 2 * size(validation) >= limit:
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


def test_whole_documents():
    """A tenth of many documents, each whole, both parts in the order of the corpus."""
    train, validation = split(DOCUMENTS)
    assert Counter(train) + Counter(validation) == Counter(DOCUMENTS)
    assert train == [document for document in DOCUMENTS if document not in validation]
    assert validation == [document for document in DOCUMENTS if document not in train]
    assert 0.08 * size(DOCUMENTS) < size(validation) <= 0.1 * size(DOCUMENTS)
    assert validation != DOCUMENTS[-len(validation) :]


def test_whole_documents_by_hand():
    """A hundred of equal length give ten, or the three that fit; of these, those with the smallest hashes."""
    documents = [f"{i:07}" for i in range(100)]
    assert [len(part) for part in split(documents)] == [90, 10]
    train, validation = split(documents, 7 * 3 + 6)
    assert len(train) == 97
    assert validation == sorted(sorted(documents, key=key)[:3]) == ["0000010", "0000015", "0000065"]


def test_documents_are_drawn_by_what_they_say():
    """Another order draws the same documents, and of a text that has grown, nearly the same."""
    _, validation = split(DOCUMENTS)
    _, reverse = split(DOCUMENTS[::-1])
    assert reverse == validation[::-1]
    _, grown = split([*DOCUMENTS[:47], "a new one", *DOCUMENTS[47:], "and another"])
    assert len(set(validation) ^ set(grown)) <= 3


@pytest.mark.parametrize("validation_bytes", [31, 101, 150])
def test_whole_documents_within_the_limit(validation_bytes):
    """At most what was asked for, and at least half of it, where that is less than a tenth."""
    train, validation = split(DOCUMENTS, validation_bytes)
    assert Counter(train) + Counter(validation) == Counter(DOCUMENTS)
    assert validation_bytes / 2 <= size(validation) <= validation_bytes < 0.1 * size(DOCUMENTS)


def test_number_of_documents_decides():
    """One document fewer than enough, and the end of the text validates."""
    documents = ["longer", *(f"{i:05}" for i in range(ENOUGH_DOCUMENTS - 1))]  # a tenth begins within a document
    train, validation = split(documents)
    assert sorted(train + validation) == sorted(documents)
    assert 5 <= size(validation) <= 10
    assert split(documents[1:]) == (documents[1:18], documents[18:])
    assert split([*documents[1:], "", ""]) == (documents[1:18], documents[18:])  # an empty document is none


def test_documents_of_very_unequal_length():
    """Where no whole documents make about a tenth, the end of the text does."""
    documents = [*(f"{i:02}" for i in range(23)), "x" * 1000]
    assert split(documents) == ([*documents[:23], "x" * 895], ["x" * 105])


def test_documents_in_pieces_never_validate():
    """They are never held as a whole, so only documents of one piece are drawn, and they do for the others."""
    long = " word" * 20
    assert len(list(cut([long], PIECE))) == 3
    documents = [document for i in range(101) for document in (long, f"{i:03} short and of a single piece")]
    train, validation = split(documents)
    assert train.count(long) == 101
    assert size(validation) <= size(documents) / 10 < size(validation) + size(documents[1:2])


def test_equal_documents_are_on_one_side():
    """Where one validates all of them do: 371 documents of 53 kinds, of which 5 kinds are a tenth."""
    documents = [f"{i % 53:04}" for i in range(53 * 7)]
    train, validation = split(documents)
    assert not set(train) & set(validation)
    assert (len(train), len(validation)) == (48 * 7, 5 * 7)


def test_nothing_but_equal_documents():
    """They cannot all validate, and one of them alone neither: the end of the text does."""
    assert split(["abcdefg"] * 100) == (["abcdefg"] * 90, ["abcdefg"] * 10)


# --- the end of the text ---


@pytest.mark.parametrize(("length", "end"), [(1000, 900), (1009, 908), (11, 9), (10, 9), (7, 6), (2, 1)])
@pytest.mark.parametrize("alphabet", ["ab", "a€"])
def test_single_text_gives_its_last_tenth(length, end, alphabet):
    """To the character, whatever the characters weigh."""
    text = "".join(alphabet[i * i % 7 % 2] for i in range(length))
    assert split([text]) == ([text[:end]], [text[end:]])


def test_training_ends_between_documents():
    """A cut at the end of a document leaves no empty one behind."""
    assert split(["abc", "defghi", "j"]) == (["abc", "defghi"], ["j"])
    assert split(["abcdefgh", "ij"]) == (["abcdefgh", "i"], ["j"])


@pytest.mark.parametrize("piece", [26, 27, 28])
def test_training_ends_between_pieces(piece):
    """Pieces of 104, 108 and 112 characters, before, at and after the place: validation is one document in each."""
    text = "".join(chr(97 + i % 23) for i in range(120))
    assert [len(part) for part in cut([text], piece)] == [4 * piece, 120 - 4 * piece]
    assert split([text], piece=piece) == ([text[:108]], [text[108:]])


def test_least_texts():
    """One character can only validate, and nothing gives nothing."""
    assert split(["a"]) == ([], ["a"])
    assert split([]) == ([], [])


@pytest.mark.parametrize(("length", "validation_bytes"), [(1000, 1), (1000, 7), (1000, 50), (1000, 99)])
def test_single_text_within_the_limit(length, validation_bytes):
    """The end of a plain text, exactly as long as asked for where that is less than a tenth."""
    text = "".join(chr(97 + i % 23) for i in range(length))
    end = length - validation_bytes
    assert split([text], validation_bytes) == ([text[:end]], [text[end:]])


@pytest.mark.parametrize(("length", "validation_bytes"), [(260, 12), (274, 25), (498, 29), (505, 33)])
def test_the_limit_is_exact(length, validation_bytes):
    """Also for lengths whose share floating point cannot hold."""
    train, validation = split(["x" * length], validation_bytes)
    assert (size(train), size(validation)) == (length - validation_bytes, validation_bytes)


@pytest.mark.parametrize("validation_bytes", [100, 1000, 1999, 2000])
def test_limit_is_in_bytes(validation_bytes):
    """Also where the end of the text has wider characters than its beginning, and the other way round."""
    for text, tenth in (("a" * 10_000 + "😀" * 2500, 5000), ("😀" * 2500 + "a" * 10_000, 1250)):
        train, validation = split([text], validation_bytes)
        assert "".join(train + validation) == text
        assert min(tenth, validation_bytes - 3) <= size(validation) <= validation_bytes


@pytest.mark.parametrize(("validation_bytes", "characters"), [(1, 0), (3, 0), (4, 1), (7, 1), (8, 2), (11, 2), (12, 3)])
def test_no_half_characters(validation_bytes, characters):
    """A character of four bytes validates where all of it does, also where the limit falls between two pieces."""
    for piece in (1, 2, PIECE):
        text = "😀" * 101
        train, validation = split([text], validation_bytes, piece)
        assert "".join(validation) == "😀" * characters
        assert "".join(train) == "😀" * (101 - characters)


# --- against the oracle ---

TEXTS = st.one_of(
    st.lists(st.text("aé😀 ", max_size=40), max_size=60),  # about as long as each other
    st.lists(st.text("ab", min_size=1, max_size=3), min_size=20, max_size=100),  # many of them equal
    st.lists(st.text("a€ ", max_size=300), max_size=25),  # in pieces
)


@EXAMPLES
@given(TEXTS, st.integers(1, 300))
def test_the_split_is_the_oracle(documents, validation_bytes):
    """Of any documents, the very same ones, or the very same text; so nothing is lost, doubled or too much."""
    train, validation = split(documents, validation_bytes)
    assert (train, validation) == oracle(documents, validation_bytes)
    assert "".join(sorted("".join(train + validation))) == "".join(sorted("".join(documents)))
    assert size(validation) <= validation_bytes
    assert sum(map(len, validation)) <= -(-sum(map(len, documents)) // 10) or size(validation) <= size(documents) / 10


@EXAMPLES
@given(TEXTS, st.integers(1, 100), st.randoms(use_true_random=False))
def test_the_order_of_documents_does_not_matter(documents, validation_bytes, chance):
    """Which documents validate is the same in any order, unless the end of the text does."""
    found = survey(pieces_of(documents), validation_bytes)
    shuffled = chance.sample(documents, len(documents))
    again = survey(pieces_of(shuffled), validation_bytes)
    assert (found.split.threshold, found.split.largest) == (again.split.threshold, again.split.largest)
    if found.split.threshold:
        assert Counter(sides(found, documents)[1]) == Counter(sides(again, shuffled)[1])


class Eager(gpt.text.split._Candidates):
    """Candidates that are pruned each time, not only where there are many."""

    def add(self, document: bytes, bytes_before: int) -> None:
        """As ever, with no patience."""
        self._drop_at = 0
        super().add(document, bytes_before)


@EXAMPLES
@given(TEXTS, st.integers(1, 30))
def test_pruning_changes_nothing(documents, validation_bytes):
    """The candidates that are dropped are those that can no longer be drawn."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpt.text.split, "_Candidates", Eager)
        found = survey(pieces_of(documents), validation_bytes)
    assert found == survey(pieces_of(documents), validation_bytes)
    assert sides(found, documents) == oracle(documents, validation_bytes)


@pytest.mark.slow
def test_pruning_of_many_documents():
    """More of them than are ever kept, some of them equal, against the oracle."""
    documents = [f"{i * i % 70_001:x}" for i in range(150_000)]
    candidates = gpt.text.split._Candidates(1009)
    before = 0
    for document in documents:
        candidates.add(document.encode(), before)
        before += len(document)
    assert len(candidates._hashes) < 2000 and candidates._below < 1 << 58
    assert split(documents, 1009) == oracle(documents, 1009)


# --- the one reading ---


def test_what_is_counted():
    """Documents, bytes and replaced characters; who waits is told the bytes of each piece."""
    told: list[int] = []
    found = survey(pieces_of(["a\ufffd", "", " word" * 20, "\ufffd\ufffdé"]), 10, told.append)
    assert (found.documents, found.bytes, found.replaced) == (3, 4 + 100 + 8, 3)
    assert told == [4, 35, 35, 30, 8]


def test_sample_of_all(monkeypatch):
    """A corpus of exactly the limit is kept as a whole; of one byte more, every other piece."""
    documents = [f"{i:07}" for i in range(13)]
    pieces = list(pieces_of(documents))
    monkeypatch.setattr(gpt.text.split, "SAMPLE_BYTES", 13 * (7 + PIECE_BYTES))
    found = survey(iter(pieces), 10)
    assert found.stride == 1
    assert found.sample == [(piece, 7 * i) for i, piece in enumerate(pieces)]
    monkeypatch.setattr(gpt.text.split, "SAMPLE_BYTES", 13 * (7 + PIECE_BYTES) - 1)
    found = survey(iter(pieces), 10)
    assert found.stride == 2
    assert found.sample == [(pieces[i], 7 * i) for i in range(0, 13, 2)]


@EXAMPLES
@given(TEXTS, st.integers(1, 20_000))
def test_sample_is_even(documents, limit):
    """Every so many-th piece, with its place, and no more than the limit."""
    pieces = list(pieces_of(documents))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpt.text.split, "SAMPLE_BYTES", limit)
        found = survey(iter(pieces), 50)
    places = [sum(len(before.text) for before in pieces[:i]) for i in range(len(pieces))]
    assert found.sample == list(zip(pieces, places, strict=True))[:: found.stride]
    kept, whole = (size(p.text for p in part) + len(part) * PIECE_BYTES for part in (pieces[:: found.stride], pieces))
    assert kept <= limit or len(found.sample) == 1
    assert found.stride & (found.stride - 1) == 0
    assert (found.stride == 1) == (whole <= limit or len(pieces) == 1)


def test_sample_to_learn_from(monkeypatch):
    """Nothing that validates is in it, to the character."""
    text = " word" * 100
    found = survey(pieces_of([text]), 1_000_000)
    assert found.stride == 1
    assert "".join(found.training_sample()) == text[:450]
    train, validation = split(DOCUMENTS)
    assert list(survey(pieces_of(DOCUMENTS), 1_000_000).training_sample()) == train
    monkeypatch.setattr(gpt.text.split, "SAMPLE_BYTES", 30 * (20 + PIECE_BYTES))
    sample = list(survey(pieces_of(DOCUMENTS), 1_000_000).training_sample())
    assert sample == [document for document in DOCUMENTS[::4] if document not in validation]


@pytest.mark.slow
def test_memory_does_not_grow_with_the_corpus(monkeypatch):
    """Of 300,000 documents, which would take 80 megabytes, a sample is kept that takes no more than it may."""
    monkeypatch.setattr(gpt.text.split, "SAMPLE_BYTES", 1_000_000)
    documents = (Piece(f"document {i}", True, True) for i in range(300_000))
    tracemalloc.start()
    try:
        found = survey(documents, 1009)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found.documents == 300_000
    assert 500_000 < len(found.sample) * 260 < peak < 5_000_000
