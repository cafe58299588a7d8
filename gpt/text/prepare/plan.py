"""The plan of a text, made before it is encoded: the split, the tokenizer, and where its shards begin."""

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path

from gpt.errors import UserError
from gpt.files import mark_as_cache
from gpt.text.cache import sealed
from gpt.text.corpus.config import DataConfig
from gpt.text.corpus.corpus import START, Corpus, Piece, Place, Say, corpus_of, open_corpus
from gpt.text.corpus.remote import Remote
from gpt.text.hashes import hash_files
from gpt.text.prepare.source import Source
from gpt.text.prepare.split import Split
from gpt.text.store import Store
from gpt.text.tokenizer import Tokenizer, TokenizerConfig, byte_tokenizer, gpt2_tokenizer, train_bpe

FORMAT = 3  # raise it when the same text gives other tokens: no run continues on them
PLAN = 1  # raise it when a plan is to be read in another way
READ = 100 << 30  # bytes of files that gpt.prepare reads for a plan, at most: of a larger text, files at even distances


@dataclass(frozen=True)
class Plan:
    """How a text is prepared, in a store as plan.json and tokenizer.json.

    `places` say where each shard begins; `bytes` are those of all documents, or 0 where not all were read. `text` says
    which files they are and how to read them, for whoever encodes them elsewhere; else it is empty.
    """

    split: Split
    places: tuple[Place, ...]
    bytes: int
    tokenizer: Tokenizer
    text: dict

    @cached_property
    def content(self) -> dict:
        """What is written to plan.json."""
        decided = {"split": asdict(self.split), "places": [list(place) for place in self.places], "bytes": self.bytes}
        return {"plan": PLAN, "format": FORMAT, **decided, "tokenizer": self.tokenizer.sha256, "text": self.text}

    @cached_property
    def digest(self) -> str:
        """The hash of the plan, by which the records of its shards name it."""
        return hashlib.sha256(sealed(self.content).encode()).hexdigest()

    def write(self, store: Store) -> None:
        store.write("tokenizer.json", json.dumps(self.tokenizer.to_dict()).encode())
        store.write_json("plan.json", self.content)

    def files_of(self, number: int, corpus: Corpus) -> range:
        """Return the numbers of the files that a shard has text of."""
        first, *following = self.places[number : number + 2]
        return range(first.file, following[0].file + (following[0].byte > 0) if following else len(corpus.files))

    def corpus_at(self, cache: Path, room: int, say: Say) -> Corpus:
        """Return the text that the plan names; remote files come into the cache, which may take `room` bytes."""
        files = tuple(
            Remote(file, size, tag, cache, room, say=say) if isinstance(tag, str) else Path(file)
            for file, size, tag in self.text["files"]
        )
        return corpus_of(DataConfig("text", ".", **self.text["data"]), files)

    @property
    def stamps(self) -> list[tuple]:
        """The size and time, or tag, of each file when the plan was made."""
        return [tuple(stamp) for _, *stamp in self.text["files"]]


def read_plan(store: Store) -> Plan | None:
    """Return the plan in a store, None if there is none; `UserError` if it is damaged or of another version."""
    found, tokens = store.read_json("plan.json"), store.read("tokenizer.json")
    if found is None or tokens is None:
        return None
    if (found.get("plan"), found["format"]) != (PLAN, FORMAT):
        raise UserError(f"{store.url}: was planned by another version of this program: plan it again, elsewhere")
    try:
        tokenizer = Tokenizer.from_dict(json.loads(tokens))
    except (ValueError, KeyError, TypeError):
        tokenizer = None
    if tokenizer is None or tokenizer.sha256 != found["tokenizer"]:
        raise UserError(f"{store.url}: its tokenizer is not the one in its plan: plan it again, elsewhere")
    places = tuple(Place(*place) for place in found["places"])
    return Plan(Split(**found["split"]), places, found["bytes"], tokenizer, found["text"])


def plan_here(source: Source, how: TokenizerConfig | Tokenizer) -> tuple[Plan, list[Piece] | None]:
    """Plan a text of this machine; return the plan, and all pieces of the text if memory holds them."""
    found = source.survey
    tokenizer = how if isinstance(how, Tokenizer) else make_tokenizer(how, source)
    pieces = [piece for piece, _ in found.sample] if found.stride == 1 and len(source.places) == 1 else None
    return Plan(found.split, tuple(source.places), found.bytes, tokenizer, {}), pieces


def plan_apart(store: Store, data: DataConfig, how: TokenizerConfig, shard_bytes: int, cache: Path, say: Say) -> Plan:
    """Plan a text that many will encode, put the plan into the store, and say what it comes to.

    Raises `UserError` if the store holds another plan.
    """
    corpus = open_corpus(data, cache, say)
    stamps = corpus.stamp()
    before = [0, *accumulate(size or 0 for size, _ in stamps)]
    every = -(-before[-1] // READ) or 1
    some = replace(corpus, files=corpus.files[::every])
    source = Source(some, data.validation_bytes, cache, say, shard_bytes)
    split, places = source.survey.split, source.places
    if every > 1:
        if not split.threshold:
            raise UserError(f"{data.path}: has too few short documents to choose validation text from {READ:,} bytes")
        split, places = replace(split, threshold=split.threshold // every), [START]
        for file, size in enumerate(before[:-1]):
            if size - before[places[-1].file] >= shard_bytes:
                places.append(Place(file, 0, True, 0))
    halved = sorted({place.file for place in places if place.byte})
    names = [file.url if isinstance(file, Remote) else str(file.resolve()) for file in corpus.files]
    text = {
        "data": {key: getattr(data, key) for key in ("text_field", "errors", "validation_bytes")} | data.reading,
        "tokenizer": how_of(how),
        "files": [[name, *stamp] for name, stamp in zip(names, stamps, strict=True)],
        "hashes": dict(zip(map(str, halved), hash_files([corpus.files[file] for file in halved], cache), strict=True)),
    }
    size = source.survey.bytes if every == 1 else 0
    plan = Plan(split, tuple(places), size, make_tokenizer(how, source), text)
    if store.read_json("plan.json") not in (None, plan.content):
        raise UserError(f"{store.url}: holds another plan: name an empty folder")
    plan.write(store)
    if store.folder:
        mark_as_cache(store.folder)
    say(f"planned {len(places):,} shards of {len(names):,} files, {before[-1]:,} bytes, in {store.url}")
    return plan


def make_tokenizer(config: TokenizerConfig, source: Source) -> Tokenizer:
    """Return the tokenizer of a configuration, trained on a corpus if need be."""
    if config.name != "bpe":
        return gpt2_tokenizer() if config.name == "gpt2" else byte_tokenizer()
    found = source.survey
    if found.stride > 1:
        source.say(f"training the byte-pair encoding on an even sample, one in {found.stride} pieces of the text")
    return train_bpe(found.training_sample(), config.vocab_size)


def how_of(tokenizer: TokenizerConfig | Tokenizer) -> dict:
    """Return what determines a tokenizer, for a text."""
    if isinstance(tokenizer, Tokenizer):
        return {"given": tokenizer.sha256}
    return {"name": tokenizer.name} | ({"vocab_size": str(tokenizer.vocab_size)} if tokenizer.name == "bpe" else {})


def key_of(corpus: str, how: dict, validation_bytes: int) -> dict:
    """Return everything that determines the tokens: the hash of all documents, and how they are encoded and split."""
    return {"format": FORMAT, "corpus": corpus, "tokenizer": how, "validation_bytes": validation_bytes}
