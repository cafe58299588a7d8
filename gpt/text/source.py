"""A corpus on its way into tokens: hashed, surveyed at most once, and watched for changes."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from gpt.errors import UserError
from gpt.text.corpus import DataConfig, open_corpus
from gpt.text.progress_bar import progress_bar
from gpt.text.split import Survey, survey

Say = Callable[[str], None]


class Source:
    """A corpus whose files must stay as they were when they were hashed."""

    def __init__(self, data: DataConfig, cache: Path, say: Say):
        self.validation_bytes = data.validation_bytes
        self.corpus = open_corpus(data, cache, say)
        self._stamp = self.corpus.stamp()
        self.sha256 = self.corpus.sha256(cache)
        self._survey: Survey | None = None

    def survey(self, say: Say) -> Survey:
        """Return what one reading finds; the first call reads all of the text and says so."""
        if self._survey is None:
            count = len(self.corpus.files)
            say(f"reading {self.corpus.name} ({count:,} file{'s' * (count != 1)})")
            with progress_bar(delay=1) as bar:
                pieces = (piece for _, _, piece in self.corpus.pieces())
                self._survey = survey(pieces, self.validation_bytes, bar.update)
            if not self._survey.bytes:
                files = ", ".join(map(str, self.corpus.files[:3])) + ", ..." * (count > 3)
                raise UserError(f"{files}: every document is empty; give a text, or its key with data.text_field=")
            if self._survey.replaced:
                say(f"the text contains U+FFFD {self._survey.replaced:,} times, in place of bytes that are not UTF-8")
            self.require_unchanged()
        return self._survey

    def forget_survey(self) -> None:
        """Free the memory that the survey's sample takes."""
        self._survey = None

    def require_unchanged(self, files: slice = slice(None)) -> None:
        """Raise `UserError` if any of some files, by default of all, has changed since it was hashed."""
        if replace(self.corpus, files=self.corpus.files[files]).stamp() != self._stamp[files]:
            raise UserError(f"{self.corpus.name}: its files changed while they were read: run the command again")
