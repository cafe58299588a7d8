"""From text to token ids and back with tiktoken: GPT-2's encoding, an encoding trained on your text, or bytes."""

import base64
import binascii
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.resources import files

import numpy as np
import tiktoken

from gpt.data.chunking import replace_surrogates, split_into_chunks
from gpt.errors import UserError, require_choice, require_range

END_OF_TEXT = "<|endoftext|>"

# GPT-2's pattern (Radford et al. 2019) in possessive form. It matches the same chunks in linear time.
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
BYTE_PATTERN = r"(?s:.{1,1000})"
TOKENIZER_NAMES = ("bpe", "gpt2", "byte")
# The longest tokens that training makes have 256 characters. Without a limit, a few merges could make a token whose
# text takes gigabytes.
MAX_TOKEN_BYTES = 1024

# The `tokenizers` library stores a printable character in place of each byte, as GPT-2 does. A printable Latin-1
# character replaces its own byte. The characters from U+0100 on replace the other bytes, in order.
_PRINTABLE_BYTES = [*range(33, 127), *range(161, 173), *range(174, 256)]
_OTHER_BYTES = [byte for byte in range(256) if byte not in _PRINTABLE_BYTES]
UNICODE_TO_BYTE = {chr(byte): byte for byte in _PRINTABLE_BYTES}
UNICODE_TO_BYTE |= {chr(256 + i): byte for i, byte in enumerate(_OTHER_BYTES)}


@dataclass
class TokenizerConfig:
    """Which tokenizer to use. `vocab_size` is the number of tokens that `bpe` learns, including end-of-text."""

    name: str = "bpe"  # bpe, gpt2 or byte
    vocab_size: int = 1536

    def __post_init__(self) -> None:
        require_choice("tokenizer.name", self.name, TOKENIZER_NAMES)
        if self.name == "bpe":
            note = "(257 are every byte and end-of-text)"
            require_range("tokenizer.vocab_size", self.vocab_size, 257, 1_000_000, note=note)


class Tokenizer:
    """A byte-level byte-pair encoding: any text has ids, and they decode to exactly that text.

    `ranks` maps each token's bytes to its id. Pairs merge in the order of the ids. All 256 single bytes must be tokens,
    and ids must count from 0 without gaps. End-of-text is the next id. No text encodes to it, even if it spells it.
    """

    def __init__(self, name: str, ranks: dict[bytes, int], pattern: str):
        if sorted(ranks.values()) != list(range(len(ranks))):
            raise UserError(f"tokenizer {name!r}: its {len(ranks)} ids must be 0 to {len(ranks) - 1}, each once")
        if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
            raise UserError(
                f"tokenizer {name!r}: it has no token for byte {missing[0]}, so some texts cannot be encoded"
            )
        if (longest := max(map(len, ranks))) > MAX_TOKEN_BYTES:
            raise UserError(
                f"tokenizer {name!r}: it has a token of {longest:,} bytes, and the most are {MAX_TOKEN_BYTES:,}"
            )
        self.name = name
        self.pattern = pattern
        self.end_of_text = len(ranks)
        self.vocab_size = len(ranks) + 1
        self.ranks = ranks
        self._encoding = tiktoken.Encoding(
            name, pat_str=pattern, mergeable_ranks=ranks, special_tokens={END_OF_TEXT: self.end_of_text}
        )

    def encode(self, text: str) -> list[int]:
        """Encode any text. A lone surrogate is not a character, and becomes U+FFFD."""
        ids: list[int] = []
        for chunk in split_into_chunks([replace_surrogates(text)]):
            ids += self.encode_chunk(chunk).tolist()
        return ids

    def encode_chunk(self, chunk: str) -> np.ndarray:
        """Encode a chunk of text to uint32 without holding the GIL.

        The chunk must come from `split_into_chunks`: a million spaces would overflow the matcher's stack.
        """
        return self._encoding.encode_to_numpy(chunk, disallowed_special=())

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """Decode ids to bytes. The bytes may begin or end within a character."""
        return self._encoding.decode_bytes(list(ids))

    def decode(self, ids: Iterable[int]) -> str:
        """Decode ids to text, with U+FFFD for bytes that are not a character."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    @cached_property
    def sha256(self) -> str:
        """The hash of everything that determines which ids a text has."""
        return hashlib.sha256(f"{self.pattern}\n{self._rank_table}".encode()).hexdigest()

    @cached_property
    def _rank_table(self) -> str:
        """The ranks in tiktoken's file format: each line holds a token in base64 and its rank."""
        ordered = sorted(self.ranks.items(), key=lambda item: item[1])
        return "".join(f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ordered)

    def to_dict(self) -> dict[str, str]:
        """Return the whole tokenizer as plain strings, for checkpoints and manifests."""
        return {"name": self.name, "pattern": self.pattern, "ranks": self._rank_table, "sha256": self.sha256}

    @classmethod
    def from_dict(cls, stored: dict[str, str]) -> "Tokenizer":
        """Rebuild the tokenizer that `to_dict` stored; raise `UserError` if it is anything else.

        Only this project's patterns are accepted: another one could drop text, never end, or make tiktoken panic.
        """
        keys = ("name", "pattern", "ranks", "sha256")
        if not isinstance(stored, dict) or not all(isinstance(stored.get(key), str) for key in keys):
            raise UserError(f"the tokenizer is not a dictionary of the strings {', '.join(keys)}: the file is damaged")
        require_choice("the tokenizer's name", stored["name"], TOKENIZER_NAMES)
        require_choice("the tokenizer's pattern", stored["pattern"], (GPT2_PATTERN, BYTE_PATTERN))
        tokenizer = cls(stored["name"], _parse_ranks(stored["ranks"]), stored["pattern"])
        tokenizer._rank_table = stored["ranks"]  # building it takes longer than parsing it
        if tokenizer.sha256 != stored["sha256"]:
            raise UserError(f"tokenizer {stored['name']!r}: its ranks do not match their hash, so the file is damaged")
        return tokenizer


def tokenizer_key(tokenizer: TokenizerConfig | Tokenizer) -> dict[str, str]:
    """Return everything that determines a tokenizer, given the text that it is trained on."""
    if isinstance(tokenizer, Tokenizer):
        return {"given": tokenizer.sha256}
    if tokenizer.name == "bpe":
        return {"name": tokenizer.name, "vocab_size": str(tokenizer.vocab_size)}
    return {"name": tokenizer.name}


@cache
def gpt2_tokenizer() -> Tokenizer:
    """Return GPT-2's encoding: 50,257 tokens with end-of-text, from OpenAI's rank table in this package."""
    table = files("gpt").joinpath("assets/r50k_base.tiktoken").read_text(encoding="ascii")
    tokenizer = Tokenizer("gpt2", _parse_ranks(table), GPT2_PATTERN)
    tokenizer._rank_table = table
    return tokenizer


@cache
def byte_tokenizer() -> Tokenizer:
    """Return an encoding with one token for each byte: 257 tokens with end-of-text."""
    return Tokenizer("byte", {bytes([byte]): byte for byte in range(256)}, BYTE_PATTERN)


def builtin_tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer `gpt2` or `byte`, which need no training."""
    return gpt2_tokenizer() if name == "gpt2" else byte_tokenizer()


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-pair encoding (Sennrich et al. 2016) of `vocab_size` tokens, including end-of-text.

    The first ids are the 256 bytes, and then the merges in their order. A short text gives a smaller vocabulary. The
    Hugging Face `tokenizers` library counts the pairs.
    """
    from tokenizers import Regex, models, pre_tokenizers, trainers
    from tokenizers import Tokenizer as Trainee

    trainee = Trainee(models.BPE())
    trainee.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(GPT2_PATTERN), behavior="isolated"),
            pre_tokenizers.Split(Regex(r"(?m:.{1,256})"), behavior="isolated"),  # longer words take quadratic time
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,
        min_frequency=2,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    trainee.train_from_iterator(
        (chunk for text in texts for chunk in split_into_chunks([replace_surrogates(text)])), trainer
    )
    vocabulary = trainee.get_vocab()
    tokens = [bytes(UNICODE_TO_BYTE[c] for c in token) for token in sorted(vocabulary, key=vocabulary.__getitem__)]
    ordered = [bytes([byte]) for byte in range(256)] + [token for token in tokens if len(token) > 1]
    return Tokenizer("bpe", {token: rank for rank, token in enumerate(ordered)}, GPT2_PATTERN)


def _parse_ranks(table: str) -> dict[bytes, int]:
    try:
        pairs = (line.split(" ") for line in table.splitlines())
        return {binascii.a2b_base64(token, strict_mode=True): int(rank) for token, rank in pairs}
    except ValueError:
        raise UserError("the rank table is malformed: each line must be a token in base64 and its rank") from None
