"""Convert tokenizers to and from Hugging Face's form: tokens as printable strings, and a list of merges, not ranks."""

import random
import re
from pathlib import Path
from typing import TYPE_CHECKING

from gpt.data.tokenizer import END_OF_TEXT, GPT2_PATTERN, UNICODE_TO_BYTE, Tokenizer, byte_tokenizer, gpt2_tokenizer
from gpt.errors import UserError

if TYPE_CHECKING:
    import tokenizers

COMPARED_BYTES = 120_000  # approximate: two tokenizers are compared on a text of this size

_BYTE_TO_UNICODE = {byte: character for character, byte in UNICODE_TO_BYTE.items()}


def to_printable(token: bytes) -> str:
    """Spell a token with GPT-2's printable character for each byte."""
    return "".join(_BYTE_TO_UNICODE[byte] for byte in token)


def list_merges(ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """List every split of every token into two known tokens, by the rank of the token and then of the two parts.

    tiktoken joins any two neighbours that spell a token. With one merge per token, other libraries would miss some.
    """
    splits = ((token[:i], token[i:]) for token in ranks for i in range(1, len(token)))
    merges = [(left, right) for left, right in splits if left in ranks and right in ranks]
    return sorted(merges, key=lambda pair: (ranks[pair[0] + pair[1]], ranks[pair[0]], ranks[pair[1]]))


def to_huggingface_tokenizer(tokenizer: Tokenizer) -> "tokenizers.Tokenizer":
    """Convert a tokenizer to a tokenizer of the `tokenizers` library that gives every text the same ids."""
    import tokenizers
    from tokenizers import AddedToken, decoders, models, pre_tokenizers

    vocab = {to_printable(token): rank for token, rank in tokenizer.ranks.items()}
    merges = [(to_printable(left), to_printable(right)) for left, right in list_merges(tokenizer.ranks)]
    # ignore_merges: a word that is itself a token stays whole, as in tiktoken.
    converted = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=True))
    converted.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    converted.decoder = decoders.ByteLevel()
    converted.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
    return converted


def read_huggingface_tokenizer(folder: Path) -> tuple[Tokenizer, list[int]] | None:
    """Read a folder's tokenizer.json; None if there is none.

    Returns the tokenizer and, for each of its ids, the id in the folder. The two differ because end-of-text is the last
    of our ids. Other added tokens, such as a padding token, are left out: text that spells them is text. Raises
    `UserError` unless the tokenizer splits text by GPT-2's pattern, has an end of text, and gives the ids of a table of
    ranks.
    """
    file = folder / "tokenizer.json"
    if not file.is_file():
        if (folder / "vocab.json").is_file():
            hint = "load it with transformers' AutoTokenizer, and save it as tokenizer.json with save_pretrained"
            raise UserError(f"{folder}: its tokenizer is in the older form, vocab.json: {hint}")
        return None
    import tokenizers

    try:
        return _from_huggingface_tokenizer(tokenizers.Tokenizer.from_buffer(file.read_bytes()))
    except Exception as error:  # the library raises plain exceptions
        raise UserError(f"{folder}: its tokenizer cannot be used: {error}") from None


def _from_huggingface_tokenizer(original: "tokenizers.Tokenizer") -> tuple[Tokenizer, list[int]]:
    """Turn a tokenizer's ids into a table of ranks, and compare the two on text; `ValueError` if they differ."""
    from tokenizers.pre_tokenizers import ByteLevel

    splitter = original.pre_tokenizer
    is_gpt2_splitter = isinstance(splitter, ByteLevel) and splitter.use_regex and not splitter.add_prefix_space
    if not is_gpt2_splitter or original.normalizer:
        raise ValueError("GPT-2's has no normalizer, and the pre_tokenizer ByteLevel without a space before the text")
    special_ids = {added.content: token_id for token_id, added in original.get_added_tokens_decoder().items()}
    if END_OF_TEXT not in special_ids and len(special_ids) != 1:
        found = f"{len(special_ids)} added tokens ({list(special_ids)!r:.100})"
        raise ValueError(f"it has {found}, not {END_OF_TEXT} or one")
    ids = {token: token_id for token, token_id in original.get_vocab().items() if token not in special_ids}
    tokens = sorted(ids, key=ids.__getitem__)
    order = [ids[token] for token in tokens]
    all_ids = sorted([*order, *special_ids.values()])
    if all_ids != list(range(len(all_ids))):
        raise ValueError(f"its {len(all_ids)} ids are not 0 to {len(all_ids) - 1}, each once")
    for token in tokens:
        if not UNICODE_TO_BYTE.keys() >= set(token):
            raise ValueError(f"its token {token!r:.100} is not spelled in GPT-2's 256 characters for bytes")
    order.append(special_ids.get(END_OF_TEXT, min(special_ids.values())))
    tokenizer = _make_tokenizer([bytes(UNICODE_TO_BYTE[character] for character in token) for token in tokens])
    original.no_truncation()
    original.no_padding()
    any_special_token = re.compile("|".join(map(re.escape, special_ids)))  # a token there, and text here
    for text in _make_texts(list(tokenizer.ranks)):
        text = any_special_token.sub("", text)
        expected = [order[token] for token in tokenizer.encode(text)]
        if original.encode(text, add_special_tokens=False).ids != expected:
            raise ValueError("its merges give some texts other tokens than a table of ranks can")
    return tokenizer, order


def _make_tokenizer(tokens: list[bytes]) -> Tokenizer:
    """Return the tokenizer with these tokens in the order of their ranks: `gpt2` or `byte` if it is one of them."""
    ranks = {token: rank for rank, token in enumerate(tokens)}
    for tokenizer in (gpt2_tokenizer(), byte_tokenizer()):
        if tokenizer.ranks == ranks:
            return tokenizer
    return Tokenizer("bpe", ranks, GPT2_PATTERN)


def _make_texts(tokens: list[bytes]) -> list[str]:
    """Make two texts to compare tokenizers on: all tokens on lines of their own, and a random sequence of them."""
    count = COMPARED_BYTES * len(tokens) // sum(map(len, tokens))  # fewer tokens if they are longer
    random_tokens = random.Random(0).choices(tokens, k=count)
    return [text.decode("utf-8", "ignore") for text in (b"\n".join(tokens), b"".join(random_tokens))]
