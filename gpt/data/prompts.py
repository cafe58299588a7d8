"""Sample prompts taken from the validation text: the first words of its documents or lines."""

from collections.abc import Iterator
from itertools import islice

import numpy as np

from gpt.data.token_dataset import TokenDataset, TokenSource

PROMPT_SEARCH_TOKENS = 4096  # tokens of the validation text in which prompts are searched
MAX_PROMPT_WORDS = 4
MAX_PROMPT_CHARS = 40


def extract_prompts(dataset: TokenDataset) -> list[str]:
    """Return the empty prompt, which starts a document, and a beginning of text from each of up to three corpora.

    A single corpus gives two beginnings. The better one is last, since the closing commands use the last prompt.
    """
    if len(dataset.sources) == 1:
        first_two = list(islice(_beginnings(dataset.sources[0]), 2))
        return ["", *reversed(first_two)]
    return ["", *(words for source in dataset.sources[:3] for words in islice(_beginnings(source), 1))]


def _beginnings(source: TokenSource) -> Iterator[str]:
    """Yield the different first words of documents and paragraphs, or else the first words of a line or word.

    The beginning of the first document is the last choice, since it may be the end of one in the training text.
    """
    ids = source.validation[:PROMPT_SEARCH_TOKENS]
    starts = np.flatnonzero(ids == source.tokenizer.end_of_text)
    parts = [part[1:] for part in np.split(ids, starts)[1:]] or [ids]  # token files may have no end-of-text
    texts = [source.tokenizer.decode_bytes(part.tolist()).decode("utf-8", "ignore") for part in parts]
    first, *rest = texts
    beginnings = dict.fromkeys(map(_first_words, [*rest, *first.split("\n\n")[1:]]))
    yield from filter(None, beginnings)
    if not any(beginnings):
        fallbacks = (first.partition("\n")[2], first.partition(" ")[2], first)
        yield from islice(filter(None, map(_first_words, fallbacks)), 1)


def _first_words(text: str) -> str:
    """Return the first words of a line, printable and easy to quote, or "" if there are none."""
    for line in text.splitlines():
        words = " ".join(line.split()[:MAX_PROMPT_WORDS])[:MAX_PROMPT_CHARS].rstrip()
        if words.isprintable() and any(map(str.isalnum, words)) and "'" not in words:
            return words
    return ""
