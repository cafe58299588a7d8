"""Preparing a text in parts, on any machines and in any order, into a store that all of them reach.

A plan decides what is for validation, the tokenizer, and which files make which shard; a part encodes its share of the
shards, each of which the store has whole or not at all. However many parts there are, the shards are the same. Up to
ten of them hold, one after the other, what train.py makes of the text; more hold it in blocks that are dealt to files.
"""

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from itertools import accumulate
from pathlib import Path

import numpy as np

from gpt.errors import OutsideError, UserError
from gpt.text.cache import delete, sealed, working_folder
from gpt.text.corpus.config import DataConfig
from gpt.text.corpus.corpus import Say, corpus_of, open_corpus
from gpt.text.corpus.hashes import hash_files
from gpt.text.corpus.remote import Remote
from gpt.text.prepare.encode import Place, encode
from gpt.text.prepare.prepare import FORMAT, key_of, make_tokenizer
from gpt.text.prepare.source import Source
from gpt.text.prepared import SPLITS, width
from gpt.text.shards import GROUP, Store
from gpt.text.tokenizer import Tokenizer, TokenizerConfig

READ = 100 << 30  # bytes of files that a plan reads, at most: of a larger text, files at even distances
PIECES = 16  # files of a shard, at most
BLOCKS = 16  # in such a file, every sixteenth of the shard, so that groups of files are alike; 1 if there is one group
LEAST = 1 << 10  # tokens in a block: a small shard has fewer blocks


def plan(store: Store, data: DataConfig, how: TokenizerConfig, shard_bytes: int, cache: Path, say: Say) -> None:
    """Decide everything about a text before it is encoded; a shard begins once one has `shard_bytes` of files.

    Raises `UserError` if the store holds another plan.
    """
    corpus = open_corpus(data, cache, say)
    stamps = corpus.stamp()
    sizes = [size or 0 for size, _ in stamps]
    every = -(-sum(sizes) // READ) or 1
    source = Source(replace(corpus, files=corpus.files[::every]), data.validation_bytes, cache, say)
    split = source.survey.split
    if every > 1:
        if not split.threshold:
            raise UserError(f"{data.path}: has too few short documents to choose validation text from {READ:,} bytes")
        split = replace(split, threshold=split.threshold // every)
    tokenizer = make_tokenizer(how, source)
    firsts, size = [0], 0
    for number, of_file in enumerate(sizes):
        if size >= shard_bytes:
            firsts, size = [*firsts, number], 0
        size += of_file
    before = [0, *accumulate(source.characters)] if every == 1 else [0] * len(sizes)
    files = [file.url if isinstance(file, Remote) else str(file.resolve()) for file in corpus.files]
    decided = {
        "format": FORMAT,
        "data": {key: getattr(data, key) for key in ("text_field", "errors", "validation_bytes")} | data.reading,
        "tokenizer": {"how": asdict(how), "sha256": tokenizer.sha256},
        "split": asdict(split),
        "files": [[file, *stamp] for file, stamp in zip(files, stamps, strict=True)],
        "shards": [{"first": first, "characters": before[first]} for first in firsts],
    }
    if store.read_json("plan.json") not in (None, decided):
        raise UserError(f"{store.url}: holds another plan: name an empty folder")
    store.write("tokenizer.json", json.dumps(tokenizer.to_dict()).encode())
    store.write_json("plan.json", decided)
    say(f"planned {len(firsts):,} shards of {len(files):,} files, {sum(sizes):,} bytes, in {store.url}")


class Planned:
    """What a store's plan says, for those who carry it out."""

    def __init__(self, store: Store, cache: Path, room: int, say: Say):
        plan, tokenizer = store.read_json("plan.json"), store.read("tokenizer.json")
        if plan is None or tokenizer is None:
            raise UserError(f"{store.url}: holds no plan: begin with python -m gpt.prepare --plan --text TEXT")
        if plan["format"] != FORMAT:
            raise UserError(f"{store.url}: was planned by another version of this program: plan it again, elsewhere")
        self.store, self.cache, self.say = store, cache, say
        self.split = plan["split"]
        self.how = TokenizerConfig(**plan["tokenizer"]["how"])
        self.tokenizer = Tokenizer.from_dict(json.loads(tokenizer))
        if self.tokenizer.sha256 != plan["tokenizer"]["sha256"]:
            raise UserError(f"{store.url}: its tokenizer is not the one in its plan: plan it again, elsewhere")
        self.digest = hashlib.sha256(sealed(plan).encode()).hexdigest()
        self.shards = plan["shards"]
        self.blocks = BLOCKS if len(self.shards) * PIECES > GROUP else 1
        self.data = DataConfig("text", ".", **plan["data"])
        self.stamps = [tuple(stamp) for _, *stamp in plan["files"]]
        files = tuple(
            Remote(file, size, tag, cache, room, say=say) if isinstance(tag, str) else Path(file)
            for file, size, tag in plan["files"]
        )
        self.corpus = corpus_of(self.data, files)

    def encode(self, part: int, parts: int) -> None:
        """Make every shard of a part that the store does not have yet."""
        for number in range(part - 1, len(self.shards), parts):
            with working_folder(self.cache / f"shard-{self.digest[:16]}-{number:06}", self.say) as working:
                if self._record(number) is None:  # nobody else has made it, also while this one waited
                    self._make(number, working)

    def _make(self, number: int, working: Path) -> None:
        """Encode the files of a shard here, and put the result into the store, its record last."""
        ends = [*(shard["first"] for shard in self.shards[1:]), len(self.corpus.files)]
        first, characters = self.shards[number]["first"], self.shards[number]["characters"]
        source = Source(replace(self.corpus, files=self.corpus.files[first : ends[number]]), 0, self.cache, self.say)
        if source.corpus.stamp() != self.stamps[first : ends[number]]:
            raise UserError(f"{source.corpus.files[0]}: this file or one of the next is not as it was planned")
        delete(working)
        working.mkdir(parents=True)
        journal = {"split": self.split, "bytes": None, "place": Place(0, 0, characters)}
        splits = encode(working, source, journal, self.tokenizer, None)
        digests = hash_files(source.corpus.files, self.cache)
        source.require_unchanged()
        files: dict[str, list] = {name: [] for name in SPLITS}
        for name, most in (("train", PIECES), ("validation", 1)):
            tokens = np.fromfile(working / f"{name}.bin", width(self.tokenizer))
            count = min(most * self.blocks, -(-len(tokens) // LEAST))
            blocks = np.array_split(tokens, count) if count else []
            for i in range(min(most, len(blocks))):
                file, piece = f"{name}-{number:06}-{i:02}.bin", np.concatenate(blocks[i::most])
                self.store.write(file, piece.tobytes())
                files[name].append([file, len(piece), hashlib.sha256(piece.data).hexdigest()])
        record = {"plan": self.digest, "sources": digests, "splits": splits, "files": files}
        self.store.write_json(f"part-{number:06}.json", record)
        delete(working)

    def _record(self, number: int) -> dict | None:
        """Return what the store says of a shard; None if it is not there."""
        record = self.store.read_json(f"part-{number:06}.json")
        if record is not None and record["plan"] != self.digest:
            raise UserError(f"{self.store.url}: shard {number} is of another plan: name an empty folder")
        return record

    def _content(self, name: str, sha256: str) -> bytes:
        """Return the tokens of a file in the store; `UserError` if they are not what its record says."""
        content = self.store.read(name) or b""
        if hashlib.sha256(content).hexdigest() != sha256:
            remedy = f"delete part-{name.split('-')[1]}.json, and run --part 1/1 again"
            raise OutsideError(f"{self.store.url}/{name}: is damaged (its SHA-256 is not that of its record); {remedy}")
        return content

    def join(self) -> None:
        """Publish the manifest, after checking that the store has every shard; `UserError` names those it lacks."""
        each, sizes = width(self.tokenizer).itemsize, self.store.sizes()

        def record_of(number: int) -> dict | None:
            record = self._record(number)
            files = [file for name in SPLITS for file in record["files"][name]] if record else []
            return record if all(sizes.get(name) == tokens * each for name, tokens, _ in files) else None

        with ThreadPoolExecutor(16) as threads:
            found = list(threads.map(record_of, range(len(self.shards))))
        if missing := [number for number, record in enumerate(found) if record is None]:
            some = ", ".join(map(str, missing[:5])) + ", ..." * (len(missing) > 5)
            raise UserError(
                f"{self.store.url}: lacks {len(missing):,} of {len(found):,} shards ({some}): run the missing "
                "parts again, or --part 1/1 for all that is missing"
            )
        records = [record for record in found if record]
        counts = {name: [record["splits"][name] for record in records] for name in SPLITS}
        files = {name: [file for record in records for file in record["files"][name]] for name in SPLITS}
        validation = b"".join(self._content(name, sha256) for name, _, sha256 in files["validation"])
        hashes = {"train": json.dumps(files["train"]).encode(), "validation": validation}
        splits = {
            name: {count: sum(one[count] for one in counts[name]) for count in ("tokens", "bytes", "documents")}
            | {"sha256": hashlib.sha256(hashes[name]).hexdigest()}
            for name in SPLITS
        }
        corpus = self.corpus.identity(digest for record in records for digest in record["sources"])
        key = key_of(corpus, self.how, self.data.validation_bytes)
        if self.blocks > 1:  # then the order of windows follows from the shards
            key["shards"] = splits["train"]["sha256"]
        self.store.write("validation.bin", validation)
        manifest = {"key": key, "corpus": self.corpus.name, "tokenizer": self.tokenizer.sha256, "splits": splits}
        self.store.write_json("manifest.json", manifest | {"shards": files["train"]})
        tokens = splits["train"]["tokens"]
        self.say(f"published {tokens:,} tokens in {len(records):,} shards: data=prepared data.path={self.store.url}")
