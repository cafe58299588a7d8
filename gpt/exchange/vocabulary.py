"""Tokenizers in Hugging Face's terms: tokens as printable strings, and a list of merges in place of ranks."""

import json
import math
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpt.errors import UserError
from gpt.text.tokenizer import BYTE_OF_STAND_IN, END_OF_TEXT, GPT2_PATTERN, Tokenizer, byte_tokenizer, gpt2_tokenizer

if TYPE_CHECKING:
    import tokenizers

SAMPLE = 120_000  # bytes of text, about, on which two tokenizers are compared

_STAND_IN = {byte: character for character, byte in BYTE_OF_STAND_IN.items()}

# Parts of a tokenizer.json that change which ids a text has, and the values with which they are GPT-2's.
_MODEL: dict[str, tuple] = {
    "type": ("BPE", None),
    "dropout": (None,),
    "continuing_subword_prefix": (None, ""),
    "end_of_word_suffix": (None, ""),
    "byte_fallback": (None, False),
}
_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}


def stand_ins(token: bytes) -> str:
    """Spell a token with GPT-2's printable stand-in for each byte."""
    return "".join(_STAND_IN[byte] for byte in token)


def merges(ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """List every split of every token into two known tokens, by the rank of the token and then of the two parts.

    tiktoken joins any two neighbours that spell a token; with one merge per token, other libraries would miss some.
    """
    splits = ((token[:i], token[i:]) for token in ranks for i in range(1, len(token)))
    known = (pair for pair in splits if pair[0] in ranks and pair[1] in ranks)
    return sorted(known, key=lambda pair: (ranks[pair[0] + pair[1]], ranks[pair[0]], ranks[pair[1]]))


def to_huggingface(tokenizer: Tokenizer) -> "tokenizers.Tokenizer":
    """Convert a tokenizer to one of the `tokenizers` library, which gives every text the same ids."""
    from tokenizers import AddedToken

    vocab = {stand_ins(token): rank for token, rank in tokenizer.ranks.items()}
    pairs = [(stand_ins(left), stand_ins(right)) for left, right in merges(tokenizer.ranks)]
    converted = _byte_level(vocab, pairs, whole_words=True)
    converted.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
    return converted


def _byte_level(vocab: dict[str, int], pairs: list[tuple[str, str]], whole_words: bool) -> "tokenizers.Tokenizer":
    """Build a byte-level BPE with GPT-2's pattern; with `whole_words`, a word that is a token needs no merges."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    built = Tokenizer(models.BPE(vocab=vocab, merges=pairs, ignore_merges=whole_words))
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    built.decoder = decoders.ByteLevel()
    return built


def read_object(file: Path) -> dict[str, Any]:
    """Read a JSON object; `OSError`, `ValueError` or `RecursionError` if it cannot be read."""
    stored = json.loads(file.read_bytes())
    if not isinstance(stored, dict):
        raise ValueError(f"{file.name} is not a JSON object")
    return stored


def read(folder: Path) -> tuple[Tokenizer, list[int]] | None:
    """Read a folder's tokenizer.json; None if there is none.

    Returns the tokenizer and, for each of its ids, the id in the folder: ours count in the order of the merges, with
    end-of-text last. Raises `UserError` unless it is a byte-level BPE with GPT-2's pattern and one special token, and a
    table of ranks gives its ids.
    """
    if not (file := folder / "tokenizer.json").is_file():
        if (folder / "vocab.json").is_file():
            remedy = "load it with transformers' AutoTokenizer, and save it as tokenizer.json with save_pretrained"
            raise UserError(f"{folder}: its tokenizer is in the older form, vocab.json: {remedy}")
        return None
    try:
        return _with_ranks(read_object(file))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        why = f"it has no {error}" if isinstance(error, KeyError) else error
        raise UserError(f"{folder}: its tokenizer cannot be used: {why}") from None


def _with_ranks(stored: dict[str, Any]) -> tuple[Tokenizer, list[int]]:
    """Turn ids and merges into a table of ranks, and compare the two on text; `ValueError` if it cannot be done."""
    model, cutter = stored["model"], stored.get("pre_tokenizer") or {}
    if stored.get("normalizer") is not None:
        raise ValueError(f"it has a normalizer, which GPT-2's has not: {stored['normalizer']!r:.100}")
    if any(cutter.get(key) != value for key, value in _BYTE_LEVEL.items()):
        raise ValueError(f"its pre_tokenizer is {cutter!r:.100}, and only GPT-2's is supported: {_BYTE_LEVEL!r:.100}")
    for key, supported in _MODEL.items():
        if model.get(key) not in supported:
            raise ValueError(f"its model's {key} is {model[key]!r:.100}, and only {supported[0]!r} is supported")
    special = {token["content"]: token["id"] for token in stored.get("added_tokens") or []}
    if len(special) != 1:
        raise ValueError(f"it has {len(special)} added tokens ({list(special)!r:.100}), not one, the end of text")
    pairs = [tuple(pair.split(" ") if isinstance(pair, str) else pair) for pair in model["merges"]]
    own = {token: number for token, number in model["vocab"].items() if token not in special}
    ids = [*own.values(), *special.values()]
    if sorted(ids) != list(range(len(ids))):
        raise ValueError(f"its {len(ids)} ids are not 0 to {len(ids) - 1}, each once")
    if foreign := [token for token in own if not BYTE_OF_STAND_IN.keys() >= set(token)]:
        raise ValueError(f"its token {foreign[0]!r:.100} is not spelled in GPT-2's stand-ins for bytes")
    if odd := [pair for pair in pairs if len(pair) != 2 or not own.keys() >= {*pair, "".join(pair)}]:
        raise ValueError(f"its merge {odd[0]!r:.100} is not of two tokens that make a third")
    first: dict[str, int] = {}
    for number, pair in enumerate(pairs):
        first.setdefault("".join(pair), number)
    tokens = sorted(own, key=own.__getitem__)
    if not _ascending(tokens, pairs):
        tokens.sort(key=lambda token: first.get(token, -1 if len(token) == 1 else math.inf))
        if not _ascending(tokens, pairs):
            raise ValueError("its merges make a token in two places, which a table of ranks cannot express")
    order = [*(own[token] for token in tokens), *special.values()]
    ranks = {bytes(BYTE_OF_STAND_IN[c] for c in token): rank for rank, token in enumerate(tokens)}
    for known in (gpt2_tokenizer(), byte_tokenizer()) if len(ranks) in (50256, 256) else ():
        if known.ranks == ranks and len(first) == len(ranks) - 256:
            return known, order
    tokenizer = Tokenizer("bpe", ranks, GPT2_PATTERN)
    theirs = _byte_level(own, pairs, whole_words=bool(model.get("ignore_merges")))
    for text in _samples(list(ranks)):
        if theirs.encode(text).ids != [order[number] for number in tokenizer.encode(text)]:
            raise ValueError("its merges give some texts other tokens than a table of ranks can")
    return tokenizer, order


def _samples(tokens: list[bytes]) -> list[str]:
    """Make two texts to compare tokenizers on: all tokens on lines of their own, and a random sequence of them."""
    count = SAMPLE * len(tokens) // sum(map(len, tokens))  # fewer of long tokens, so that the text has the same length
    mixed = b"".join(random.Random(0).choices(tokens, k=count))
    return [text.decode("utf-8", "ignore") for text in (b"\n".join(tokens), mixed)]


def _ascending(tokens: list[str], pairs: list[tuple[str, str]]) -> bool:
    """Whether a list of merges makes tokens in their order."""
    rank = {token: number for number, token in enumerate(tokens)}
    made = [rank[left + right] for left, right in pairs]
    return made == sorted(made)
