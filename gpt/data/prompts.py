"""Sample prompts taken from the validation text: the first words of its documents or lines."""

from collections.abc import Iterator
from itertools import islice

import numpy as np

from gpt.data.token_dataset import TokenDataset, TokenSource

TOKENS = 4096  # to look at
WORDS, CHARACTERS = 4, 40  # in a prompt, at most


def extract_prompts(dataset: TokenDataset) -> list[str]:
    """Return the empty prompt, which starts a document, and the words that begin one in each of up to three corpora.

    A single corpus gives two, the better one last, since the closing commands use the last prompt.
    """
    if len(dataset.sources) == 1:
        return ["", *[*islice(_beginnings(dataset.sources[0]), 2)][::-1]]
    return ["", *(words for source in dataset.sources[:3] for words in islice(_beginnings(source), 1))]


def _beginnings(source: TokenSource) -> Iterator[str]:
    """Yield the first words of documents and paragraphs, no two alike; if there are none, those of a line or word.

    The beginning of the first document is the last choice, since it may be the end of one in the training text.
    """
    ids = source.validation[:TOKENS]
    starts = np.flatnonzero(ids == source.tokenizer.end_of_text)
    parts = [part[1:] for part in np.split(ids, starts)[1:]] or [ids]  # token files may have no end-of-text
    texts = [source.tokenizer.decode_bytes(part.tolist()) for part in parts]
    first, *others = (text.decode("utf-8", "ignore") for text in texts)
    found = dict.fromkeys(map(_first_words, [*others, *first.split("\n\n")[1:]]))
    yield from filter(None, found)
    if not any(found):
        rests = (first.partition("\n")[2], first.partition(" ")[2], first)
        yield from islice(filter(None, map(_first_words, rests)), 1)


def _first_words(text: str) -> str:
    """The first words of a line, on one printable line; "" if there are none."""
    for line in text.splitlines():
        words = " ".join(line.split()[:WORDS])[:CHARACTERS].rstrip()
        if words.isprintable() and any(map(str.isalnum, words)) and "'" not in words:  # easy to quote
            return words
    return ""
