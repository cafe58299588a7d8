"""A corpus while it is prepared: hashed, surveyed at most once, and watched for changes."""

from dataclasses import replace
from functools import cached_property
from pathlib import Path

from gpt.console import progress_bar
from gpt.errors import UserError
from gpt.text.corpus.config import DataConfig
from gpt.text.corpus.corpus import Say, open_corpus
from gpt.text.prepare.split import Survey, survey


class Source:
    """A corpus whose files must stay as they were when they were hashed."""

    def __init__(self, data: DataConfig, cache: Path, say: Say):
        self.validation_bytes = data.validation_bytes
        self.say = say
        self.corpus = open_corpus(data, cache, say)
        self._stamp = self.corpus.stamp()
        self.sha256 = self.corpus.sha256(cache)

    @cached_property
    def survey(self) -> Survey:
        """The findings of one reading, which is said; `del` frees the memory that the sample takes."""
        count = len(self.corpus.files)
        self.say(f"reading {self.corpus.name} ({count:,} file{'s' * (count != 1)})")
        with progress_bar(f"reading {self.corpus.name}", delay=1) as bar:
            pieces = (piece for _, _, piece in self.corpus.pieces())
            found = survey(pieces, self.validation_bytes, bar.update)
        self.corpus.require_text(found.bytes)
        self.require_unchanged()
        return found

    def require_unchanged(self, files: slice = slice(None)) -> None:
        """Raise `UserError` if any of some files, by default of all, has changed since it was hashed."""
        if replace(self.corpus, files=self.corpus.files[files]).stamp() != self._stamp[files]:
            raise UserError(f"{self.corpus.name}: its files changed while they were read: run the command again")
