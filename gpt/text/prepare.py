"""From the configured text to token ids on disk: once for a corpus, a tokenizer and a split, and never again.

A corpus is read twice, to decide what validates and then to encode, unless all of it fits into the sample that the
first reading keeps. Encoding uses all cores, and a preparation that was interrupted goes on from where it was.
"""

import contextlib
import errno
import hashlib
import json
import os
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple, TextIO

import numpy as np
from tqdm import tqdm

from gpt.errors import UserError
from gpt.files import explain_cache, sync, try_lock, write_text
from gpt.text import shards
from gpt.text.batches import SHARES
from gpt.text.corpus import ONE_WORD, DataConfig, Piece, open_corpus
from gpt.text.shards import SPLITS, Corpora, Shards, Writer, open_shards, width
from gpt.text.split import SAMPLE_BYTES, Split, Survey, survey
from gpt.text.tokenizer import Tokenizer, TokenizerConfig, byte_tokenizer, gpt2_tokenizer, train_bpe

FORMAT = 3  # of the folder; raise it when what is written for the same text changes
TASK = 1 << 18  # characters, at least, that a thread encodes at once
JOURNAL_BYTES = 1 << 26  # of text, at most, that an interrupted preparation encodes again
ABANDONED = 7 * 24 * 3600  # seconds after which the remains of an interrupted preparation are swept away

Say = Callable[[str], None]


def prepare(
    data: DataConfig,
    tokenizer: TokenizerConfig,
    context_length: int,
    cache: Path,
    given: Tokenizer | None = None,
    say: Say = print,
) -> Corpora:
    """The configured corpus, or the several of a mixture, as token ids; from the cache where they are there already.

    `given` is a tokenizer to use as it is, in place of the configured one: that of a model to fine-tune. The name of a
    folder is a hash of everything that decides its content, so changed text or settings never meet old tokens. A text
    too short for one window of `context_length` tokens raises `UserError`, and nothing is kept of it.
    """
    shares = _shares(data)
    texts = {name: _Text(part, cache, say) for name, part in _parts(data).items()}
    if given is None and tokenizer.name == "bpe" and len(texts) > 1:
        given = _joint_tokenizer(list(texts.values()), shares, tokenizer.vocab_size, cache, say)
    sources = tuple(_prepare(text, tokenizer, given, context_length, cache, say) for text in texts.values())
    return Corpora(sources, tuple(texts), shares)


def _parts(data: DataConfig) -> dict[str, DataConfig]:
    """The corpora of a mixture by what the configuration calls them, or the one corpus."""
    if data.name != "mix":
        return {data.name: data}
    one = replace(data, name="text", path="?", weights=[])
    return {
        path: replace(one, name=path, path=None) if path in ONE_WORD else replace(one, path=path) for path in data.paths
    }


def _shares(data: DataConfig) -> tuple[int, ...]:
    """Weights as whole shares of `SHARES`, by largest remainder."""
    weights = data.weights or [1.0]
    parts = [weight / max(weights) for weight in weights]
    exact = [part / sum(parts) * SHARES for part in parts]
    shares = [int(share) for share in exact]
    for i in sorted(range(len(exact)), key=lambda i: shares[i] - exact[i])[: SHARES - sum(shares)]:
        shares[i] += 1
    if 0 in shares:
        least = data.paths[shares.index(0)]
        raise UserError(f"data.weights: {least!r} has less than a thousandth of all: raise its weight, or leave it out")
    return tuple(shares)


class _Text:
    """A corpus that has been found and hashed, and at most once surveyed."""

    def __init__(self, data: DataConfig, cache: Path, say: Say):
        self.validation_bytes = data.validation_bytes
        self.corpus = open_corpus(data, cache, say)
        self._stamp = self.corpus.stamp()
        self.sha256 = self.corpus.sha256(cache)
        self.surveyed: Survey | None = None

    def survey(self, say: Say) -> Survey:
        """Read all of it once, and say how much there is."""
        if self.surveyed is None:
            count = len(self.corpus.files)
            say(f"reading {self.corpus.name} ({count:,} file{'s' * (count != 1)})")
            with _bar(None) as bar:
                pieces = (piece for _, _, piece in self.corpus.pieces())
                self.surveyed = survey(pieces, self.validation_bytes, bar.update)
            if not self.surveyed.bytes:
                files = ", ".join(map(str, self.corpus.files[:3])) + ", ..." * (count > 3)
                raise UserError(
                    f"{files}: no document has any text in it; give a text, or its key with data.text_field="
                )
            if self.surveyed.replaced:
                say(f"U+FFFD is in it {self.surveyed.replaced:,} times, in place of what is not UTF-8")
            self.require_unchanged()
        return self.surveyed

    def require_unchanged(self, which: slice = slice(None)) -> None:
        """Raise `UserError` where a file, or one of some, is not what it was when it was hashed."""
        if replace(self.corpus, files=self.corpus.files[which]).stamp() != self._stamp[which]:
            raise UserError(f"{self.corpus.name}: its files have changed while they were read: run the command again")


def _bar(total: int | None, initial: int = 0) -> tqdm:
    """Progress in bytes of text, for who watches, of what takes longer than a second."""
    hidden = not sys.stderr.isatty()
    return tqdm(total=total, initial=initial, unit="B", unit_scale=True, delay=1, leave=False, disable=hidden)


def _joint_tokenizer(texts: list[_Text], shares: tuple[int, ...], vocab_size: int, cache: Path, say: Say) -> Tokenizer:
    """One byte-pair encoding for a mixture, kept in the cache; of large corpora it sees samples by their share."""
    parts = [[text.sha256, text.validation_bytes, share] for text, share in zip(texts, shares, strict=True)]
    file = cache / f"tokenizer-{_digest({'format': FORMAT, 'parts': parts, 'vocab_size': vocab_size})}.json"
    if not file.exists():

        def sample() -> Iterator[str]:
            for text, share in zip(texts, shares, strict=True):
                samples = list(text.survey(say).training_sample())
                size = sum(len(sample.encode("utf-8")) for sample in samples)
                yield from samples[:: max(1, -(-size * SHARES // (SAMPLE_BYTES * share)))]

        tokenizer = train_bpe(sample(), vocab_size)
        with explain_cache(cache):
            cache.mkdir(parents=True, exist_ok=True)
            write_text(file, json.dumps(tokenizer.to_dict()))
    try:
        return Tokenizer.from_dict(json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file}: cannot be read ({error}); delete it and it will be made anew") from None


def _digest(key: dict) -> str:
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]


def _prepare(
    text: _Text, config: TokenizerConfig, given: Tokenizer | None, context_length: int, cache: Path, say: Say
) -> Shards:
    """One corpus as token ids, from the cache or into it."""
    how = {"given": given.sha256} if given else {"name": config.name}
    if not given and config.name == "bpe":
        how["vocab_size"] = str(config.vocab_size)
    key = {"format": FORMAT, "corpus": text.sha256, "tokenizer": how, "validation_bytes": text.validation_bytes}
    name = text.corpus.name
    folder = cache / f"{name}-{given.name if given else config.name}-{_digest(key)}"
    if folder.exists():
        say(f"{name} was prepared before, in {folder}")
    else:
        try:
            with _working_folder(cache / f".preparing-{folder.name}", say) as working:
                if not folder.exists():  # else the process that was waited for has made it
                    if not (working / "manifest.json").exists():  # which is written last
                        _make_folder(
                            working, text, key, lambda: given or _make_tokenizer(config, text, say), context_length, say
                        )
                    for done_with in ("plan.json", "progress.json"):
                        (working / done_with).unlink(missing_ok=True)
                    os.rename(working, folder)
                    sync(cache)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            free = shutil.disk_usage(cache).free
            raise UserError(
                f"{cache}: the disk is full ({free:,} bytes are free): make room and run the command again, "
                "which goes on from there, or name another folder with data.cache="
            ) from None
    found = open_shards(folder)
    if found.manifest.get("key") != key:
        raise UserError(f"{folder}: its manifest is that of another corpus; delete {folder} and it will be made anew")
    _require_enough(len(found.train), len(found.validation), context_length)
    return found


def _make_tokenizer(config: TokenizerConfig, text: _Text, say: Say) -> Tokenizer:
    if config.name != "bpe":
        return gpt2_tokenizer() if config.name == "gpt2" else byte_tokenizer()
    found = text.survey(say)
    if found.stride > 1:
        say(f"training the byte-pair encoding on a sample: one in {found.stride} of its pieces, evenly")
    return train_bpe(found.training_sample(), config.vocab_size)


def _require_enough(train_tokens: int, validation_tokens: int, context_length: int) -> None:
    if train_tokens <= context_length:
        remedy = f", or set model.context_length={train_tokens - 1} or less" if train_tokens > 1 else ""
        raise UserError(
            f"the training text has {train_tokens} tokens, fewer than model.context_length={context_length} and a "
            f"target: give more text{remedy}"
        )
    if validation_tokens < 2:
        raise UserError(f"the validation text has {validation_tokens} tokens, and 2 are the least: give more text")


# --- a folder is written beside its place, by one process at a time, and renamed when it is complete ---


@contextlib.contextmanager
def _working_folder(working: Path, say: Say) -> Iterator[Path]:
    """A folder that this process has to itself; where another has it, that one is waited for.

    What is in it stays for a later process to go on with, but not after a `UserError`.
    """
    cache = working.parent
    with explain_cache(cache):
        cache.mkdir(parents=True, exist_ok=True)
        _sweep(cache)
        lock = _lock(working)
        if isinstance(lock, str):
            say(f"process {lock} is preparing this text: waiting for it")
            while isinstance(lock := _lock(working), str):
                time.sleep(0.2)
    with lock:
        try:
            yield working
        except UserError:
            _remove(working)
            raise
        if working.exists() and not any(file.name != ".lock" for file in working.iterdir()):
            _remove(working)


def _lock(working: Path) -> TextIO | str:
    """Make and hold a folder, or say which process holds it."""
    while True:
        working.mkdir(exist_ok=True)
        with contextlib.suppress(FileNotFoundError), contextlib.ExitStack() as stack:  # it was renamed meanwhile
            lock = try_lock(working / ".lock")
            if isinstance(lock, str):
                return lock
            stack.enter_context(lock)
            if os.fstat(lock.fileno()).st_ino == (working / ".lock").stat().st_ino:
                stack.pop_all()
                return lock


def _remove(working: Path) -> None:
    """Remove a folder that is held, whose name another process may take again at once."""
    aside = working.with_name(f"{working.name}-{os.getpid()}")
    with contextlib.suppress(OSError):
        working.rename(aside)
        shutil.rmtree(aside)


def _sweep(cache: Path) -> None:
    """Remove what was left behind long ago by preparations that nobody has gone on with."""
    for left in cache.glob(".preparing-*"):
        with contextlib.suppress(OSError):
            newest = max(file.stat().st_mtime for file in [left, *left.iterdir()])
            if newest < time.time() - ABANDONED and not isinstance(lock := try_lock(left / ".lock"), str):
                with lock:
                    _remove(left)


def _make_folder(
    working: Path, text: _Text, key: dict, make_tokenizer: Callable[[], Tokenizer], context_length: int, say: Say
) -> None:
    """Decide, encode and describe: a complete folder but for its name."""
    plan_file, sample = working / "plan.json", None
    for unfinished in working.glob(".*.json.*"):  # by `write_text` of a process that was killed
        unfinished.unlink()
    if plan_file.exists():
        tokenizer = Tokenizer.from_dict(json.loads((working / "tokenizer.json").read_text(encoding="utf-8")))
    else:
        found = text.survey(say)
        tokenizer = make_tokenizer()
        write_text(working / "tokenizer.json", json.dumps(tokenizer.to_dict()))
        write_text(plan_file, json.dumps({"split": asdict(found.split), "bytes": found.bytes}))
        if found.stride == 1:
            sample = [piece for piece, _ in found.sample]
        del found
        text.surveyed = None  # a sample of a large corpus has done its work
    plan = json.loads(plan_file.read_text(encoding="utf-8"))
    splits = _encode(working, text, Split(**plan["split"]), plan["bytes"], tokenizer, sample, say)
    text.require_unchanged()
    tokens, size = (sum(splits[split][count] for split in SPLITS) for count in ("tokens", "bytes"))
    _require_enough(splits["train"]["tokens"], splits["validation"]["tokens"], context_length)
    manifest = {
        "key": key,
        "corpus": text.corpus.name,
        "tokenizer": tokenizer.sha256,
        "dtype": width(tokenizer).name,
        "shard_bytes": shards.SHARD_BYTES,
        "splits": splits,
    }
    write_text(working / "manifest.json", json.dumps(manifest, indent=2))
    say(
        f"prepared {size:,} bytes as {tokens:,} tokens of {tokenizer.vocab_size:,} kinds, "
        f"{size / tokens:.2f} bytes each; {splits['validation']['bytes']:,} bytes of it validate"
    )


# --- encoding ---


class _Part(NamedTuple):
    """What the pieces of a task come to in one of the splits."""

    ids: np.ndarray
    bytes: int
    documents: int


def _encode(
    working: Path, text: _Text, split: Split, size: int, tokenizer: Tokenizer, sample: list[Piece] | None, say: Say
) -> dict[str, dict]:
    """Write the token files of both splits, in the order of the text, and return their counts and hashes.

    Every `JOURNAL_BYTES` of text, progress.json says what is safe on disk and which piece comes next.
    """
    journal = working / "progress.json"
    counts: dict[str, dict] = {name: {"tokens": 0, "bytes": 0, "documents": 0, "sha256": []} for name in SPLITS}
    begin = _Place(0, 0, 0)
    if journal.exists():
        stored = json.loads(journal.read_text(encoding="utf-8"))
        counts, begin = stored["splits"], _Place(*stored["place"])
    done = journaled = sum(counts[name]["bytes"] for name in SPLITS)
    if done:
        say(f"going on with the preparation of {text.corpus.name} at {done / size:.0%}")
    dtype = width(tokenizer)
    if sample is None:
        tasks = _tasks(text.corpus.pieces(begin.file), split, begin)
    else:  # it is all there is, and was read already
        tasks = _tasks(((0, number, piece) for number, piece in enumerate(sample)), split, begin)
    with contextlib.ExitStack() as stack:
        writers = {
            name: stack.enter_context(Writer(working, name, dtype, counts[name]["tokens"], counts[name]["sha256"]))
            for name in SPLITS
        }
        bar = stack.enter_context(_bar(size, done))
        for parts, place in _in_order(lambda task: _encode_pieces(tokenizer, dtype, task), tasks):
            for name, part in parts.items():
                writers[name].append(part.ids)
                counts[name]["bytes"] += part.bytes
                counts[name]["documents"] += part.documents
                done += part.bytes
                bar.update(part.bytes)
            if done - journaled >= JOURNAL_BYTES and sample is None:
                for name, writer in writers.items():
                    writer.flush()
                    counts[name] |= {"tokens": writer.length, "sha256": writer.hashes}
                text.require_unchanged(slice(begin.file, place.file + 1))
                write_text(journal, json.dumps({"place": place, "splits": counts}))
                journaled, begin = done, place
        for name, writer in writers.items():
            writer.close()
            counts[name] |= {"tokens": writer.length, "sha256": writer.hashes}
    return counts


class _Place(NamedTuple):
    """Where a task ends: the next piece, by its number in a file, and the characters of the corpus before it."""

    file: int
    piece: int
    characters: int


_Task = list[tuple[Piece, bool]]  # pieces, each with whether it validates


def _tasks(pieces: Iterable[tuple[int, int, Piece]], split: Split, begin: _Place) -> Iterator[tuple[_Task, _Place]]:
    """What is left to encode from a place on, in portions for a thread."""
    task: _Task = []
    size, place = 0, begin
    for file, number, piece in pieces:
        if file == begin.file and number < begin.piece:
            continue
        task += split.sides(piece, place.characters)
        size += len(piece.text)
        place = _Place(file, number + 1, place.characters + len(piece.text))
        if size >= TASK:
            yield task, place
            task, size = [], 0
    if task:
        yield task, place


def _in_order(encode: Callable[[_Task], dict[str, _Part]], tasks: Iterable[tuple[_Task, _Place]]) -> Iterator:
    """What becomes of each task, on all cores but in order, with its place; only a few are held at a time."""
    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    running: deque[tuple[Future, _Place]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        for task, place in tasks:
            running.append((pool.submit(encode, task), place))
            if len(running) > 2 * threads:
                future, reached = running.popleft()
                yield future.result(), reached
        for future, reached in running:
            yield future.result(), reached


def _encode_pieces(tokenizer: Tokenizer, dtype: np.dtype, task: _Task) -> dict[str, _Part]:
    """The ids of a task's pieces for both splits, with end-of-text before each document."""
    begins = np.array([tokenizer.end_of_text], dtype)
    result = {}
    for name in SPLITS:
        pieces = [piece for piece, validates in task if validates == (name == "validation")]
        ids = [begins[:0]]
        for piece in pieces:
            if piece.begins:
                ids.append(begins)
            encoded = tokenizer.encode_piece(piece.text)
            if encoded.size and encoded.max() > np.iinfo(dtype).max:
                raise UserError(
                    f"token {encoded.max()} does not fit into {dtype}: the tokenizer's ids are not its ranks"
                )
            ids.append(encoded.astype(dtype))
        size = sum(len(piece.text.encode("utf-8")) for piece in pieces)
        result[name] = _Part(np.concatenate(ids), size, sum(piece.begins for piece in pieces))
    return result
