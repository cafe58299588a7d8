"""The scan: one reading of a corpus decides the split, the tokenizer and where shards begin. A plan stores that."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path

from gpt.console import progress_bar
from gpt.data.corpus import FIRST_SHARD, Chunk, Corpus, Say, ShardStart, make_corpus, open_corpus
from gpt.data.data_config import BUILTIN_CORPORA, DataConfig
from gpt.data.dataset_cache import PLAN_FILE, dump_checked_json
from gpt.data.download import RemoteFile
from gpt.data.file_hashes import hash_files
from gpt.data.split import CorpusScan, Split, scan_chunks
from gpt.data.storage import Directory, read_bytes, read_sealed, write_bytes, write_sealed
from gpt.data.token_dataset import DAMAGE_HINT, TOKENIZER_FILE
from gpt.data.tokenizer import (
    END_OF_TEXT,
    Tokenizer,
    TokenizerConfig,
    byte_tokenizer,
    gpt2_tokenizer,
    tokenizer_key,
    train_bpe,
)
from gpt.errors import UserError

TOKENS_FORMAT = 3  # raise it when the same text gives other tokens: no run continues on them
PLAN_FORMAT = 2  # raise it when a plan is to be read in another way
SHARD_BYTES = 1 << 28  # of files in a shard, about
MAX_SCAN_BYTES = 100 << 30  # of a larger text, the scan reads files at even distances
# What may separate documents in plain text.
SEPARATORS = (END_OF_TEXT, "<|end_of_text|>", "<|eot_id|>", "<|im_end|>", "</s>", "<eos>")


class CorpusScanner:
    """A corpus whose files must stay as they are. It is hashed and scanned at most once."""

    def __init__(self, data: DataConfig, cache: Path, say: Say):
        self.data = data
        self.cache = cache
        self.say = say
        self.corpus = open_corpus(data, cache, say)
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
        """The findings of one reading, which is printed. `del` frees the memory that the sample takes."""
        sizes = [size or 0 for size, _ in self.fingerprints]
        stride = -(-sum(sizes) // MAX_SCAN_BYTES) or 1
        if stride > 1 and not self.corpus.validation_files:
            sampled = self._read(replace(self.corpus, files=self.corpus.files[::stride]), self.fingerprints[::stride])
            if sampled.split.threshold:  # else the validation text is the end of the text, which only a reading finds
                split = replace(sampled.split, threshold=sampled.split.threshold // stride)
                return replace(sampled, bytes=0, split=split, shard_starts=_starts_at_files(sizes))
        return self._read(self.corpus, self.fingerprints)

    def _read(self, corpus: Corpus, fingerprints: list[tuple]) -> CorpusScan:
        self.say(f"reading {corpus.name} ({len(corpus.files):,} file{'s' * (len(corpus.files) != 1)})")
        marks, shard_starts = Counter[str](), [FIRST_SHARD]
        validation_start: list[int] = []
        with progress_bar(f"reading {corpus.name}", delay=1) as bar:
            chunks = _noted(corpus, fingerprints, marks, shard_starts, validation_start)
            scan = scan_chunks(chunks, self.data.validation_bytes, bar.update)
        corpus.require_text(scan.bytes)
        for mark, count in marks.most_common(1):
            learned = f"{mark} stands {count:,} time{'s' * (count > 1)} in the text, and is learnt as these letters"
            self.say(f"{learned}: data.separator='{mark}' parts the documents of plain text there")
        corpus.require_unchanged(fingerprints, range(len(corpus.files)))
        if corpus.validation_files:
            scan = replace(scan, split=Split(0, 0, validation_start[0] if validation_start else scan.characters))
        return replace(scan, shard_starts=tuple(shard_starts))


def _noted(
    corpus: Corpus,
    fingerprints: list[tuple],
    marks: Counter[str],
    shard_starts: list[ShardStart],
    validation_start: list[int],
) -> Iterator[Chunk]:
    """Yield the chunks of a corpus, and note where shards begin, and where the validation files do."""
    characters = bytes_before = shard_begin = previous = 0  # `bytes_before` counts those of whole files
    first_validation_file = len(corpus.files) - corpus.validation_files
    for file, byte, chunk in corpus.chunks():
        if file != previous:
            bytes_before += sum(size or 0 for size, _ in fingerprints[previous:file])
            previous, byte = file, 0
        if file >= first_validation_file and not validation_start:
            validation_start.append(characters)
        if byte is not None and bytes_before + byte - shard_begin >= SHARD_BYTES:
            shard_starts.append(ShardStart(file, byte, chunk.starts_document, characters))
            shard_begin = bytes_before + byte
        characters += len(chunk.text)
        marks.update({mark: count for mark in SEPARATORS if (count := chunk.text.count(mark))})
        yield chunk


def _starts_at_files(sizes: list[int]) -> tuple[ShardStart, ...]:
    """Return where shards begin if they hold whole files."""
    shard_starts, before = [FIRST_SHARD], [0, *accumulate(sizes)]
    for file in range(len(sizes)):
        if before[file] - before[shard_starts[-1].file] >= SHARD_BYTES:
            shard_starts.append(ShardStart(file, 0, True, 0))
    return tuple(shard_starts)


@dataclass(frozen=True)
class ShardPlan:
    """What a scan has decided, as plan.json and tokenizer.json: all that `encode_shard` needs besides the text.

    Attributes:
        data: How to read the files.
        files: The path or URL of each file, and its fingerprint.
        validation_files: How many of these, the last ones, are the validation text.
        hashes: The SHA-256 of files by their numbers, at least of those that two shards share.
        split: Which text is for validation.
        starts: Where each shard begins.
        bytes: Of all documents, or 0 where not all were read.
        tokenizer: The tokenizer.
        tokenizer_key: What determines it, for this text.
    """

    data: dict
    files: list[list]
    validation_files: int
    hashes: dict[str, str]
    split: Split
    shard_starts: tuple[ShardStart, ...]
    bytes: int
    tokenizer: Tokenizer
    tokenizer_key: dict

    @cached_property
    def content(self) -> dict:
        """What plan.json holds."""
        fields = {"data": self.data, "files": self.files, "validation_files": self.validation_files}
        fields |= {
            "hashes": self.hashes,
            "split": asdict(self.split),
            "starts": [list(start) for start in self.shard_starts],
        }
        fields |= {"bytes": self.bytes, "tokenizer": self.tokenizer.sha256, "tokenizer_key": self.tokenizer_key}
        return {"plan": PLAN_FORMAT, "format": TOKENS_FORMAT, **fields}

    @cached_property
    def digest(self) -> str:
        """The hash of the plan, by which the records of its shards name it."""
        return hashlib.sha256(dump_checked_json(self.content).encode()).hexdigest()

    @property
    def fingerprints(self) -> list[tuple]:
        return [tuple(fingerprint) for _, *fingerprint in self.files]

    def write(self, directory: Directory) -> None:
        write_bytes(directory, TOKENIZER_FILE, json.dumps(self.tokenizer.to_dict()).encode())
        write_sealed(directory, PLAN_FILE, self.content)

    def matches(self, scanner: CorpusScanner, tokenizer: TokenizerConfig | Tokenizer) -> bool:
        """Return True if this is the plan of a corpus as it is now."""
        corpus = scanner.corpus
        now = _data_record(scanner.data), _file_records(scanner), corpus.validation_files, tokenizer_key(tokenizer)
        return now == (self.data, self.files, self.validation_files, self.tokenizer_key)

    def open_corpus(self, cache: Path, cache_bytes: int, say: Say) -> Corpus:
        """Return the corpus. Remote files come into the cache, which may take `cache_bytes` bytes."""
        data = DataConfig(**self.data | ({} if self.data["name"] in BUILTIN_CORPORA else {"path": "."}))
        files = tuple(
            RemoteFile(file, size, tag, cache, cache_bytes, say=say) if isinstance(tag, str) else Path(file)
            for file, size, tag in self.files
        )
        if data.name not in ("python_docs", "python_stdlib"):
            return make_corpus(data, files, self.validation_files)
        corpus = open_corpus(data, cache, say)
        if corpus.files != files:
            raise UserError(f"data={data.name} is of another Python here: use the same on all machines")
        return corpus

    def files_of_shard(self, number: int) -> range:
        """Return the numbers of the files that a shard has text of."""
        first, *following = self.shard_starts[number : number + 2]
        return range(first.file, following[0].file + (following[0].byte > 0) if following else len(self.files))

    def chunks_of_shard(self, number: int, corpus: Corpus) -> Iterator[Chunk]:
        """Yield the chunks of a shard."""
        first, *following = self.shard_starts[number : number + 2]
        if following:
            corpus = corpus.up_to(following[0])
        for file, byte, chunk in corpus.chunks(first):
            if following and (file, byte) == following[0][:2]:
                return
            yield chunk


def make_shard_plan(
    scanner: CorpusScanner, tokenizer: TokenizerConfig | Tokenizer, hash_all: bool
) -> tuple[ShardPlan, list[Chunk] | None]:
    """Scan a corpus; return the plan, and all chunks of the text if memory holds them.

    Args:
        scanner: The corpus.
        tokenizer: A tokenizer, or which one to train or take.
        hash_all: Put the hash of every file into the plan, and not only of those that two shards share.
    """
    scan = scanner.scan
    made = tokenizer if isinstance(tokenizer, Tokenizer) else _make_tokenizer(tokenizer, scan, scanner.say)
    numbers = (
        range(len(scanner.corpus.files))
        if hash_all
        else sorted({start.file for start in scan.shard_starts if start.byte})
    )
    known = scanner.hashes if hash_all else hash_files([scanner.corpus.files[i] for i in numbers], scanner.cache)
    hashes = {str(number): sha256 for number, sha256 in zip(numbers, known, strict=True)}
    chunks = [chunk for chunk, _ in scan.sample] if scan.stride == 1 and len(scan.shard_starts) == 1 else None
    files, key = _file_records(scanner), tokenizer_key(tokenizer)
    validation_files = scanner.corpus.validation_files
    data = _data_record(scanner.data)
    return ShardPlan(
        data, files, validation_files, hashes, scan.split, scan.shard_starts, scan.bytes, made, key
    ), chunks


def _data_record(data: DataConfig) -> dict:
    return {
        key: getattr(data, key) for key in ("name", "text_field", "errors", "validation_bytes")
    } | data.reader_settings


def _file_records(scanner: CorpusScanner) -> list[list]:
    files = scanner.corpus.files
    names = [file.url if isinstance(file, RemoteFile) else str(file.absolute()) for file in files]
    return [[name, *fingerprint] for name, fingerprint in zip(names, scanner.fingerprints, strict=True)]


def _make_tokenizer(config: TokenizerConfig, scan: CorpusScan, say: Say) -> Tokenizer:
    """Return the tokenizer of a configuration, trained on a sample of the training text if it is to be trained."""
    if config.name != "bpe":
        return gpt2_tokenizer() if config.name == "gpt2" else byte_tokenizer()
    if scan.stride > 1:
        say(f"training the byte-pair encoding on an even sample, one in {scan.stride} chunks of the text")
    return train_bpe(scan.training_sample(), config.vocab_size)


def read_shard_plan(directory: Directory) -> ShardPlan | None:
    """Return the plan in a directory, None if there is none; `UserError` if it is damaged or of another version."""
    content, stored = read_sealed(directory, PLAN_FILE, DAMAGE_HINT), read_bytes(directory, TOKENIZER_FILE)
    if content is None or stored is None:
        return None
    if (content.get("plan"), content["format"]) != (PLAN_FORMAT, TOKENS_FORMAT):
        raise UserError(f"{directory}: its preparation was begun by another version: begin again, in an empty folder")
    try:
        tokenizer = Tokenizer.from_dict(json.loads(stored))
    except (ValueError, KeyError, TypeError):
        tokenizer = None
    if tokenizer is None or tokenizer.sha256 != content["tokenizer"]:
        raise UserError(f"{directory}: its tokenizer is not the one in its plan: begin again, in an empty folder")
    return ShardPlan(
        **{key: content[key] for key in ("data", "files", "validation_files", "hashes", "bytes", "tokenizer_key")},
        split=Split(**content["split"]),
        shard_starts=tuple(ShardStart(*start) for start in content["starts"]),
        tokenizer=tokenizer,
    )
