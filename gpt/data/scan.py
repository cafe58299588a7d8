"""The scan: one reading of a corpus decides the validation text, the tokenizer, and where shards begin."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from gpt.console import progress_bar
from gpt.data.corpus import FIRST_SHARD, Chunk, Corpus, Say, ShardStart, open_corpus
from gpt.data.data_config import DataConfig
from gpt.data.encodings import display_name
from gpt.data.file_hashes import hash_files
from gpt.data.split import CorpusScan, Split, scan_chunks
from gpt.data.tokenizer import END_OF_TEXT, Tokenizer, TokenizerConfig, builtin_tokenizer, train_bpe
from gpt.errors import UserError

MAX_UNREADABLE_FRACTION = 0.01  # of the characters of a file
# The sign of a byte that could not be decoded, and control characters that only a wrong encoding gives.
_UNREADABLE = re.compile("[\ufffd\x80-\x9f]")
SHARD_BYTES = 1 << 28  # the approximate size of the files of a shard
# What may separate documents in plain text.
SEPARATORS = (END_OF_TEXT, "<|end_of_text|>", "<|eot_id|>", "<|im_end|>", "</s>", "<eos>")


class CorpusScanner:
    """A corpus whose files must stay as they are. It is hashed and scanned at most once."""

    def __init__(self, data: DataConfig, cache: Path, print_line: Say):
        self.data = data
        self.cache = cache
        self.print_line = print_line
        self.corpus = open_corpus(data, cache, print_line)
        self.fingerprints = self.corpus.fingerprints()

    @cached_property
    def hashes(self) -> list[str]:
        """The SHA-256 of each file."""
        return hash_files(self.corpus.files, self.cache)

    @cached_property
    def sha256(self) -> str:
        """The hash of everything that determines the documents."""
        return self.corpus.identity(self.hashes)

    @cached_property
    def scan(self) -> CorpusScan:
        """The findings of the scan. `del scanner.scan` frees the memory of its sample."""
        corpus = self.corpus
        files = f"{len(corpus.files):,} file{'s' * (len(corpus.files) != 1)}"
        encodings = " or ".join(map(display_name, self.data.encodings))
        self.print_line(f"reading {corpus.name} ({files}{f', in {encodings}' * (encodings != 'utf-8')})")
        notes = _Reading(corpus, [size or 0 for size, _ in self.fingerprints])
        with progress_bar(f"reading {corpus.name}", delay=1) as bar:
            scan = scan_chunks(notes.chunks(), self.data.validation_bytes, bar.update)
        corpus.require_text(scan.bytes)
        for separator, count in notes.separators.most_common(1):
            finding = f"the text contains {separator} {count:,} time{'s' * (count > 1)} as ordinary characters"
            self.print_line(f"{finding}: data.separator='{separator}' makes it separate the documents of plain text")
        corpus.require_unchanged(self.fingerprints, range(len(corpus.files)))
        if corpus.validation_files:
            start = scan.characters if notes.validation_start is None else notes.validation_start
            scan = replace(scan, split=Split(0, 0, start))
        return replace(scan, shard_starts=tuple(notes.shard_starts))


class _Reading:
    """One reading of a corpus, and what it finds on the way.

    Attributes:
        shard_starts: Where shards begin.
        separators: How often the text contains each of `SEPARATORS`.
        validation_start: The number of characters before the validation files, if there are any.
    """

    def __init__(self, corpus: Corpus, sizes: Sequence[int]):
        self.corpus = corpus
        self.sizes = sizes
        self.shard_starts = [FIRST_SHARD]
        self.separators = Counter[str]()
        self.validation_start: int | None = None

    def chunks(self) -> Iterator[Chunk]:
        """Yield the chunks of the corpus."""
        first_validation_file = len(self.corpus.files) - self.corpus.validation_files
        characters = 0
        bytes_before = 0  # in the files before the current one
        shard_begin = 0  # in bytes of all files
        current = 0
        file_characters = 0
        unreadable = 0  # characters of the current file
        for file, byte, chunk in self.corpus.chunks():
            if file != current:
                self._require_readable(current, file_characters, unreadable)
                file_characters = unreadable = 0
                bytes_before += sum(self.sizes[current:file])
                current, byte = file, 0
            if file >= first_validation_file and self.validation_start is None:
                self.validation_start = characters
            if byte is not None and bytes_before + byte - shard_begin >= SHARD_BYTES:
                self.shard_starts.append(ShardStart(file, byte, chunk.starts_document, characters))
                shard_begin = bytes_before + byte
            characters += len(chunk.text)
            file_characters += len(chunk.text)
            if not chunk.text.isascii():
                unreadable += len(_UNREADABLE.findall(chunk.text))
            for separator in SEPARATORS:
                if count := chunk.text.count(separator):
                    self.separators[separator] += count
            yield chunk
        self._require_readable(current, file_characters, unreadable)

    def _require_readable(self, file: int, characters: int, unreadable: int) -> None:
        """Raise `UserError` if too many characters of a file show that it was decoded wrongly."""
        if unreadable > MAX_UNREADABLE_FRACTION * characters:
            finding = f"{unreadable / characters:.0%} of its characters are U+FFFD or control characters above 0x7f"
            raise UserError(
                f"{self.corpus.files[file]}: {finding}, more than {MAX_UNREADABLE_FRACTION:.0%}: it is in another "
                "encoding: name it with data.encoding="
            )


def make_tokenizer(tokenizer: TokenizerConfig | Tokenizer, scan: CorpusScan, print_line: Say) -> Tokenizer:
    """Return the given or configured tokenizer. `bpe` is trained on a sample of the training text."""
    if isinstance(tokenizer, Tokenizer):
        return tokenizer
    if tokenizer.name != "bpe":
        return builtin_tokenizer(tokenizer.name)
    if scan.stride > 1:
        print_line(f"training the byte-pair encoding on an even sample, one in {scan.stride} chunks of the text")
    return train_bpe(scan.training_sample(), tokenizer.vocab_size)
