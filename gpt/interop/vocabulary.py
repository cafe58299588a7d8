"""Tokenizers in Hugging Face's terms: tokens as printable strings, and a list of merges in place of ranks."""

import random
import re
from pathlib import Path
from typing import TYPE_CHECKING

from gpt.data.tokenizer import END_OF_TEXT, GPT2_PATTERN, UNICODE_TO_BYTE, Tokenizer, byte_tokenizer, gpt2_tokenizer
from gpt.errors import UserError

if TYPE_CHECKING:
    import tokenizers

SAMPLE = 120_000  # bytes of text, about, on which two tokenizers are compared

_STAND_IN = {byte: character for character, byte in UNICODE_TO_BYTE.items()}


def to_printable(token: bytes) -> str:
    """Spell a token with GPT-2's printable stand-in for each byte."""
    return "".join(_STAND_IN[byte] for byte in token)


def list_merges(ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """List every split of every token into two known tokens, by the rank of the token and then of the two parts.

    tiktoken joins any two neighbours that spell a token; with one merge per token, other libraries would miss some.
    """
    splits = ((token[:i], token[i:]) for token in ranks for i in range(1, len(token)))
    known = (pair for pair in splits if pair[0] in ranks and pair[1] in ranks)
    return sorted(known, key=lambda pair: (ranks[pair[0] + pair[1]], ranks[pair[0]], ranks[pair[1]]))


def to_huggingface_tokenizer(tokenizer: Tokenizer) -> "tokenizers.Tokenizer":
    """Convert a tokenizer to one of the `tokenizers` library, which gives every text the same ids."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Theirs

    vocab = {to_printable(token): rank for token, rank in tokenizer.ranks.items()}
    pairs = [(to_printable(left), to_printable(right)) for left, right in list_merges(tokenizer.ranks)]
    converted = Theirs(models.BPE(vocab=vocab, merges=pairs, ignore_merges=True))  # a word that is a token needs none
    converted.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    converted.decoder = decoders.ByteLevel()
    converted.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
    return converted


def read(folder: Path) -> tuple[Tokenizer, list[int]] | None:
    """Read a folder's tokenizer.json; None if there is none.

    Returns the tokenizer and, for each of its ids, the id in the folder: ours have end-of-text last. Raises `UserError`
    unless it cuts text with GPT-2's pattern, has an end of text, and gives the ids of a table of ranks. Other added
    tokens, such as one for padding, are left out: text that spells them is text.
    """
    if not (file := folder / "tokenizer.json").is_file():
        if (folder / "vocab.json").is_file():
            hint = "load it with transformers' AutoTokenizer, and save it as tokenizer.json with save_pretrained"
            raise UserError(f"{folder}: its tokenizer is in the older form, vocab.json: {hint}")
        return None
    from tokenizers import Tokenizer as Theirs

    try:
        return _with_ranks(Theirs.from_buffer(file.read_bytes()))
    except Exception as error:  # the library's own are plain exceptions
        raise UserError(f"{folder}: its tokenizer cannot be used: {error}") from None


def _with_ranks(theirs: "tokenizers.Tokenizer") -> tuple[Tokenizer, list[int]]:
    """Turn their ids into a table of ranks, and compare the two on text; `ValueError` if they differ."""
    from tokenizers.pre_tokenizers import ByteLevel

    cutter = theirs.pre_tokenizer
    if not isinstance(cutter, ByteLevel) or cutter.add_prefix_space or not cutter.use_regex or theirs.normalizer:
        raise ValueError("GPT-2's has no normalizer, and the pre_tokenizer ByteLevel without a space before the text")
    special = {added.content: number for number, added in theirs.get_added_tokens_decoder().items()}
    if END_OF_TEXT not in special and len(special) != 1:
        raise ValueError(f"it has {len(special)} added tokens ({list(special)!r:.100}), not {END_OF_TEXT} or one")
    own = {token: number for token, number in theirs.get_vocab().items() if token not in special}
    tokens = sorted(own, key=own.__getitem__)
    order = [*map(own.__getitem__, tokens), special.get(END_OF_TEXT, min(special.values()))]
    every = sorted([*own.values(), *special.values()])
    if every != list(range(len(every))):
        raise ValueError(f"its {len(every)} ids are not 0 to {len(every) - 1}, each once")
    if foreign := [token for token in tokens if not UNICODE_TO_BYTE.keys() >= set(token)]:
        raise ValueError(f"its token {foreign[0]!r:.100} is not spelled in GPT-2's stand-ins for bytes")
    ranks = {bytes(UNICODE_TO_BYTE[character] for character in token): rank for rank, token in enumerate(tokens)}
    known = [one for one in (gpt2_tokenizer(), byte_tokenizer()) if one.ranks == ranks]
    tokenizer = known[0] if known else Tokenizer("bpe", ranks, GPT2_PATTERN)
    theirs.no_truncation()
    theirs.no_padding()
    spelled = re.compile("|".join(map(re.escape, special)))  # which is a token to them, and text to us
    for text in (spelled.sub("", text) for text in _samples(list(ranks))):
        if theirs.encode(text, add_special_tokens=False).ids != [order[number] for number in tokenizer.encode(text)]:
            raise ValueError("its merges give some texts other tokens than a table of ranks can")
    return tokenizer, order


def _samples(tokens: list[bytes]) -> list[str]:
    """Make two texts to compare tokenizers on: all tokens on lines of their own, and a random sequence of them."""
    count = SAMPLE * len(tokens) // sum(map(len, tokens))  # fewer of long tokens, so that the text has the same length
    mixed = b"".join(random.Random(0).choices(tokens, k=count))
    return [text.decode("utf-8", "ignore") for text in (b"\n".join(tokens), mixed)]
