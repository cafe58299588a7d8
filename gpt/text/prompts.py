"""Sample prompts taken from the validation text: the first words of its documents or lines."""

import numpy as np

from gpt.text.shards import Corpora, Shards

TOKENS = 4096  # to look at
WORDS, CHARACTERS = 4, 40  # in a prompt, at most


def prompts_from(corpora: Corpora) -> list[str]:
    """Return the empty prompt, which starts a document, and one from each corpus with words to begin with."""
    return ["", *filter(None, map(_first_words, corpora.sources[:3]))]  # as each takes time to continue


def _first_words(source: Shards) -> str:
    """The first words of a line, on one printable line; "" if there are none.

    The first document is the last choice, since it may be the end of one that begins in the training text.
    """
    ids = source.validation[:TOKENS]
    starts = np.flatnonzero(ids == source.tokenizer.end_of_text)
    texts = [source.tokenizer.decode_bytes(part[1:].tolist()) for part in np.split(ids, starts)[1:]]
    first, *others = (text.decode("utf-8", "ignore") for text in texts)
    for text in [*others, *(first.partition(gap)[2] for gap in ("\n\n", "\n", " ")), first]:
        for line in text.splitlines():
            words = " ".join(line.split()[:WORDS])[:CHARACTERS].rstrip()
            if words.isprintable() and any(map(str.isalnum, words)) and "'" not in words:  # easy to quote
                return words
    return ""
