"""A corpus while it is prepared: surveyed at most once, and watched for changes."""

from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

from gpt.console import progress_bar
from gpt.text.corpus.corpus import START, Corpus, Piece, Place, Say
from gpt.text.prepare.split import Survey, survey
from gpt.text.tokenizer import END_OF_TEXT

SHARD_BYTES = 1 << 28  # of files in a shard, about
MARKS = (END_OF_TEXT, "<|end_of_text|>", "<|eot_id|>", "<|im_end|>", "</s>", "<eos>")  # which may part documents


class Source:
    """A corpus whose files must stay as they are now."""

    def __init__(self, corpus: Corpus, validation_bytes: int, cache: Path, say: Say, shard_bytes: int | None = None):
        self.corpus = corpus
        self.validation_bytes = validation_bytes
        self.cache = cache
        self.say = say
        self.shard_bytes = shard_bytes or SHARD_BYTES
        self.stamps = corpus.stamp()

    @cached_property
    def sha256(self) -> str:
        """The hash of everything that determines the documents."""
        return self.corpus.sha256(self.cache)

    @cached_property
    def survey(self) -> Survey:
        """The findings of one reading, which is said; `del` frees the memory that the sample takes.

        It leaves in `places` where shards begin.
        """
        count = len(self.corpus.files)
        self.say(f"reading {self.corpus.name} ({count:,} file{'s' * (count != 1)})")
        with progress_bar(f"reading {self.corpus.name}", delay=1) as bar:
            found = survey(self._noted(), self.validation_bytes, bar.update)
        self.corpus.require_text(found.bytes)
        for mark, times in self.marks.most_common(1):
            learnt = f"{mark} stands {times:,} time{'s' * (times > 1)} in the text, and is learnt as these letters"
            self.say(f"{learnt}: data.separator='{mark}' parts the documents of plain text there")
        self.corpus.require_unchanged(self.stamps, range(count))
        return found

    def _noted(self) -> Iterator[Piece]:
        """Yield the pieces, and note the places at which shards begin, and the marks."""
        self.places, self.marks = [START], Counter[str]()
        characters = before = begun = 0  # `before` counts bytes of files
        previous = 0
        for file, byte, piece in self.corpus.pieces():
            if file != previous:
                before += sum(size or 0 for size, _ in self.stamps[previous:file])
                previous, byte = file, 0
            if byte is not None and before + byte - begun >= self.shard_bytes:
                self.places.append(Place(file, byte, piece.begins, characters))
                begun = before + byte
            characters += len(piece.text)
            self.marks.update({mark: times for mark in MARKS if (times := piece.text.count(mark))})
            yield piece
