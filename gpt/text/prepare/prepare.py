"""From the configured text to token ids on disk, once for each corpus, tokenizer and split.

A corpus is read twice, to choose the validation text and then to encode, unless it is so small that the first reading
keeps all of it in memory.
"""

import contextlib
import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gpt.console import progress_bar, say
from gpt.errors import UserError
from gpt.files import explain, publish, write_text
from gpt.text.cache import UNWRITABLE, delete, make_cache, working_folder
from gpt.text.corpus.config import DataConfig
from gpt.text.corpus.corpus import Say, open_corpus
from gpt.text.prepare.mixture import configs_of, names_of, shares_of
from gpt.text.prepare.plan import FORMAT, Plan, how_of, key_of, plan_here, read_plan
from gpt.text.prepare.shard import encode_here, nothing
from gpt.text.prepare.source import Source
from gpt.text.prepare.split import SAMPLE_BYTES
from gpt.text.prepared import MIXTURE_WINDOWS, SPLITS, Corpora, PreparedText, open_folder, open_prepared, width
from gpt.text.store import Store
from gpt.text.tokenizer import Tokenizer, TokenizerConfig, train_bpe

LAYOUT = 2  # raise it when a folder holds the same tokens in another way
PROGRESS = "progress.json"  # how many shards are safe, and what they come to
FINISHED = ("manifest.json", "tokenizer.json", *(f"{name}.bin" for name in SPLITS))


class TooShortError(UserError):
    """A text does not fill one window; `longest_context` is the longest context that it would fill, or 0."""

    def __init__(self, message: str, longest_context: int):
        super().__init__(message)
        self.longest_context = longest_context


def prepare(
    data: DataConfig, tokenizer: TokenizerConfig | Tokenizer, context_length: int, cache: Path, say: Say = say
) -> Corpora:
    """Return the configured corpus, or the several of a mixture, as token ids; use the cache where possible.

    `tokenizer` says which to use or to train; or it is one already, such as that of a model to fine-tune. A folder's
    name is a hash of everything that determines its content, so changed text or settings never meet old tokens. Raises
    `TooShortError`, and keeps nothing, if a text is too short for one window of `context_length` tokens.
    """
    shares = shares_of(data)
    if data.name == "prepared":
        found = open_prepared(Store(data.paths[0]), cache, data.cache_bytes)
        if isinstance(tokenizer, Tokenizer) and tokenizer.sha256 != found.tokenizer.sha256:
            raise UserError(f"data.path={data.paths[0]!r} was prepared with another tokenizer than the model's")
        _require_enough(len(found.train), len(found.validation), context_length)
        return Corpora((found,), names_of(data), shares)
    sources = [Source(open_corpus(one, cache, say), one.validation_bytes, cache, say) for one in configs_of(data)]
    if len(sources) > 1 and isinstance(tokenizer, TokenizerConfig) and tokenizer.name == "bpe":
        tokenizer = _joint_tokenizer(sources, shares, tokenizer.vocab_size, cache)
    prepared = tuple(_prepare_one(source, tokenizer, context_length, cache) for source in sources)
    return Corpora(prepared, names_of(data), shares)


def _joint_tokenizer(sources: list[Source], shares: Sequence[int], vocab_size: int, cache: Path) -> Tokenizer:
    """Return one byte-pair encoding for a mixture, kept in the cache; it samples large corpora by their share."""
    parts = [[source.sha256, source.validation_bytes, share] for source, share in zip(sources, shares, strict=True)]
    file = cache / f"tokenizer-{_digest({'format': FORMAT, 'parts': parts, 'vocab_size': vocab_size})}.json"
    with contextlib.suppress(FileNotFoundError, ValueError):  # damaged: train it again
        return Tokenizer.from_dict(json.loads(file.read_text(encoding="utf-8")))

    def sample() -> Iterator[str]:
        for source, share in zip(sources, shares, strict=True):
            samples = list(source.survey.training_sample())
            size = sum(len(sample.encode("utf-8")) for sample in samples)
            yield from samples[:: max(1, -(-size * MIXTURE_WINDOWS // (SAMPLE_BYTES * share)))]

    tokenizer = train_bpe(sample(), vocab_size)
    with explain(cache, *UNWRITABLE):
        make_cache(cache)
        write_text(file, json.dumps(tokenizer.to_dict()))
    return tokenizer


def _digest(key: dict) -> str:
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]


def _prepare_one(
    source: Source, tokenizer: TokenizerConfig | Tokenizer, context_length: int, cache: Path
) -> PreparedText:
    """Return one corpus as token ids, from the cache or after adding it there."""
    key = key_of(source.sha256, how_of(tokenizer), source.validation_bytes)
    folder = cache / f"{source.corpus.name}-{tokenizer.name}-{_digest(key | {'layout': LAYOUT})}"
    if folder.exists():
        source.say(f"{source.corpus.name} is already prepared, in {folder}")
    else:
        with explain(cache, *UNWRITABLE), working_folder(folder, source.say) as working:
            if not folder.exists():  # another process may have made it while we waited
                if not (working / "manifest.json").exists():  # which is written last
                    _make(working, source, key, tokenizer, context_length)
                for file in working.iterdir():
                    if file.name not in FINISHED:
                        file.unlink()
                publish(working, folder)
    found = open_folder(folder)
    _require_enough(len(found.train), len(found.validation), context_length)
    return found


def _make(working: Path, source: Source, key: dict, how: TokenizerConfig | Tokenizer, context_length: int) -> None:
    """Make a prepared text in a folder, or go on with what an earlier process left there."""
    store, name, pieces = Store(working), source.corpus.name, None
    plan = left = None
    with contextlib.suppress(UserError):  # damaged, or of another version
        plan, left = read_plan(store), store.read_json(PROGRESS)
    if plan is None:
        delete(working)
        left = None
        plan, pieces = plan_here(source, how)
        del source.survey
        plan.write(store)
    shards, splits, digests = _left(working, left, plan)
    done = sum(splits[split]["bytes"] for split in SPLITS)
    if done:
        source.say(f"resuming the preparation of {name} at {done / plan.bytes:.0%}")
    with progress_bar(f"tokenizing {name}", plan.bytes, done, delay=1) as bar:
        for number in range(shards, len(plan.places)):
            how_far = (splits, digests, pieces)
            splits = encode_here(plan, number, source.corpus, source.stamps, working, *how_far, read=bar.update)
            store.write_json(PROGRESS, {"plan": plan.digest, "shards": number + 1, "splits": splits})
    _require_enough(splits["train"]["tokens"], splits["validation"]["tokens"], context_length)
    manifest = {"key": key, "corpus": name, "tokenizer": plan.tokenizer.sha256, "splits": splits}
    store.write_json("manifest.json", manifest)
    tokens = sum(splits[split]["tokens"] for split in SPLITS)
    source.say(
        f"prepared {plan.bytes:,} bytes as {tokens:,} tokens ({plan.bytes / tokens:.2f} bytes per token, vocabulary "
        f"{plan.tokenizer.vocab_size:,}), of which {splits['validation']['bytes']:,} bytes are for validation"
    )


def _left(working: Path, left: dict | None, plan: Plan) -> tuple[int, dict[str, dict], dict[str, Any]]:
    """Return how many shards an earlier process has encoded, and their counts and digests; `UserError` if damaged."""
    splits, digests = nothing()
    if left is None or left["plan"] != plan.digest:
        return 0, splits, digests
    for name in SPLITS:
        file, size = working / f"{name}.bin", left["splits"][name]["tokens"] * width(plan.tokenizer).itemsize
        with explain(file), file.open("rb") as stream:
            while block := stream.read(min(size, 1 << 22)):
                digests[name].update(block)
                size -= len(block)
        if digests[name].hexdigest() != left["splits"][name]["sha256"]:
            raise UserError(f"{file}: was damaged while the preparation was interrupted: run the command again")
    return left["shards"], left["splits"], digests


def _require_enough(train_tokens: int, validation_tokens: int, context_length: int) -> None:
    if train_tokens <= context_length:
        raise TooShortError(
            f"the training text has {train_tokens} tokens, fewer than a context of {context_length} and a target: "
            "give more text",
            max(0, train_tokens - 1),
        )
    if validation_tokens < 2:
        raise TooShortError(f"the validation text has {validation_tokens} tokens but needs 2: give more text", 0)
