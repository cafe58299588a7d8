"""A corpus while it is prepared: surveyed at most once, and watched for changes."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from gpt.console import progress_bar
from gpt.errors import UserError
from gpt.text.corpus.corpus import Corpus, Piece, Say
from gpt.text.prepare.split import Survey, survey
from gpt.text.tokenizer import END_OF_TEXT

MARKS = (END_OF_TEXT, "<|end_of_text|>", "<|eot_id|>", "<|im_end|>", "</s>", "<eos>")  # which may part documents


class Source:
    """A corpus whose files must stay as they are now."""

    def __init__(self, corpus: Corpus, validation_bytes: int, cache: Path, say: Say):
        self.corpus = corpus
        self.validation_bytes = validation_bytes
        self.cache = cache
        self.say = say
        self._stamp = corpus.stamp()

    @cached_property
    def sha256(self) -> str:
        """The hash of everything that determines the documents."""
        return self.corpus.sha256(self.cache)

    @cached_property
    def survey(self) -> Survey:
        """The findings of one reading, which is said; `del` frees the memory that the sample takes."""
        count = len(self.corpus.files)
        self.say(f"reading {self.corpus.name} ({count:,} file{'s' * (count != 1)})")
        with progress_bar(f"reading {self.corpus.name}", delay=1) as bar:
            found = survey(self._counted(), self.validation_bytes, bar.update)
        self.corpus.require_text(found.bytes)
        for mark, times in self.marks.most_common(1):
            learnt = f"{mark} stands {times:,} time{'s' * (times > 1)} in the text, and is learnt as these letters"
            self.say(f"{learnt}: data.separator='{mark}' parts the documents of plain text there")
        self.require_unchanged()
        return found

    def _counted(self) -> Iterator[Piece]:
        """Yield the pieces, and count the characters of each file, and the marks."""
        self.characters, self.marks = [0] * len(self.corpus.files), Counter[str]()
        for file, _, piece in self.corpus.pieces():
            self.characters[file] += len(piece.text)
            self.marks.update({mark: times for mark in MARKS if (times := piece.text.count(mark))})
            yield piece

    def require_unchanged(self, files: slice = slice(None)) -> None:
        """Raise `UserError` if any of some files, by default of all, has changed since then."""
        if replace(self.corpus, files=self.corpus.files[files]).stamp() != self._stamp[files]:
            raise UserError(f"{self.corpus.name}: its files changed while they were read: run the command again")
