"""From the configured text to token ids on disk, once for each corpus, tokenizer and split.

A corpus is read twice, to choose the validation text and then to encode, unless it is so small that the first reading
keeps all of it in memory.
"""

import contextlib
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from gpt.console import say
from gpt.errors import UserError
from gpt.files import explain, publish, write_text
from gpt.text.cache import JOURNAL, UNWRITABLE, delete, make_cache, read_json, working_folder, write_json
from gpt.text.corpus.config import DataConfig
from gpt.text.corpus.corpus import Say, open_corpus
from gpt.text.corpus.mixture import configs_of, names_of, shares_of
from gpt.text.prepare.encode import encode
from gpt.text.prepare.source import Source
from gpt.text.prepare.split import SAMPLE_BYTES
from gpt.text.prepared import MIXTURE_WINDOWS, SPLITS, Corpora, PreparedText, open_prepared, read_prepared
from gpt.text.shards import Store
from gpt.text.tokenizer import Tokenizer, TokenizerConfig, byte_tokenizer, gpt2_tokenizer, train_bpe

FORMAT = 3  # raise it when the same text gives other tokens: no run continues on them
LAYOUT = 2  # raise it when a folder holds the same tokens in another way


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
        found = read_prepared(Store(data.paths[0]), cache, data.cache_bytes)
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
    key = key_of(source.sha256, tokenizer, source.validation_bytes)
    folder = cache / f"{source.corpus.name}-{tokenizer.name}-{_digest(key | {'layout': LAYOUT})}"
    if folder.exists():
        source.say(f"{source.corpus.name} is already prepared, in {folder}")
    else:
        with explain(cache, *UNWRITABLE), working_folder(folder, source.say) as working:
            if not folder.exists():  # another process may have made it while we waited
                if not (working / "manifest.json").exists():  # which is written last
                    _fill(working, source, key, tokenizer, context_length)
                (working / JOURNAL).unlink(missing_ok=True)
                publish(working, folder)
    found = open_prepared(folder)
    _require_enough(len(found.train), len(found.validation), context_length)
    return found


def key_of(corpus: str, tokenizer: TokenizerConfig | Tokenizer, validation_bytes: int) -> dict:
    """Return everything that determines the tokens; `corpus` is the hash of all documents."""
    how = {"given": tokenizer.sha256} if isinstance(tokenizer, Tokenizer) else {"name": tokenizer.name}
    if isinstance(tokenizer, TokenizerConfig) and tokenizer.name == "bpe":
        how["vocab_size"] = str(tokenizer.vocab_size)
    return {"format": FORMAT, "corpus": corpus, "tokenizer": how, "validation_bytes": validation_bytes}


def _fill(working: Path, source: Source, key: dict, how: TokenizerConfig | Tokenizer, context_length: int) -> None:
    """Decide on split and tokenizer, encode, and write the manifest; or continue where an earlier process stopped."""
    sample = None
    try:
        journal = read_json(working / JOURNAL)
        tokenizer = Tokenizer.from_dict(json.loads((working / "tokenizer.json").read_text(encoding="utf-8")))
        for unfinished in working.glob(".*.json.*"):  # by a process that was killed in `write_text`
            unfinished.unlink()
    except (FileNotFoundError, ValueError):  # nothing was decided yet, or what was is damaged
        delete(working)
        working.mkdir()
        found = source.survey
        tokenizer = how if isinstance(how, Tokenizer) else make_tokenizer(how, source)
        write_text(working / "tokenizer.json", json.dumps(tokenizer.to_dict()))
        journal = {"split": asdict(found.split), "bytes": found.bytes, "place": (0, 0, 0)}
        write_json(working / JOURNAL, journal)
        if found.stride == 1:
            sample = [piece for piece, _ in found.sample]
        del found, source.survey
    splits, size = encode(working, source, journal, tokenizer, sample), journal["bytes"]
    source.require_unchanged()
    tokens = sum(splits[name]["tokens"] for name in SPLITS)
    _require_enough(splits["train"]["tokens"], splits["validation"]["tokens"], context_length)
    manifest = {"key": key, "corpus": source.corpus.name, "tokenizer": tokenizer.sha256, "splits": splits}
    write_json(working / "manifest.json", manifest)
    source.say(
        f"prepared {size:,} bytes as {tokens:,} tokens ({size / tokens:.2f} bytes per token, vocabulary "
        f"{tokenizer.vocab_size:,}); {splits['validation']['bytes']:,} bytes are for validation"
    )


def make_tokenizer(config: TokenizerConfig, source: Source) -> Tokenizer:
    """Return the tokenizer of a configuration, trained on a corpus if need be."""
    if config.name != "bpe":
        return gpt2_tokenizer() if config.name == "gpt2" else byte_tokenizer()
    found = source.survey
    if found.stride > 1:
        source.say(f"training the byte-pair encoding on an even sample, one in {found.stride} pieces of the text")
    return train_bpe(found.training_sample(), config.vocab_size)


def _require_enough(train_tokens: int, validation_tokens: int, context_length: int) -> None:
    if train_tokens <= context_length:
        raise TooShortError(
            f"the training text has {train_tokens} tokens, fewer than a context of {context_length} and a target: "
            "give more text",
            max(0, train_tokens - 1),
        )
    if validation_tokens < 2:
        raise TooShortError(f"the validation text has {validation_tokens} tokens but needs 2: give more text", 0)
