"""From text to token ids and back with tiktoken: GPT-2's encoding, one trained on your text, or plain bytes."""

import base64
import binascii
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files

import numpy as np
import tiktoken

from gpt.data.chunking import replace_surrogates, split_into_chunks
from gpt.errors import UserError, require_choice, require_range

END_OF_TEXT = "<|endoftext|>"

# GPT-2's pattern (Radford et al. 2019) in possessive form, which matches the same chunks in linear time.
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
BYTE_PATTERN = r"(?s:.{1,1000})"
TOKENIZER_NAMES = ("bpe", "gpt2", "byte")
MAX_TOKEN_BYTES = (
    1024  # bytes, of 256 characters, the longest that are learnt; a few doublings make a text of gigabytes
)

# GPT-2's printable stand-ins, which `tokenizers` and files of its kind hold instead of bytes: printable Latin-1
# characters stand for themselves; the other bytes are U+0100 and on, in order.
_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
UNICODE_TO_BYTE = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + i): byte for i, byte in enumerate(_OTHERS)}


@dataclass
class TokenizerConfig:
    """Which tokenizer to use; `vocab_size` is the number of tokens that `bpe` learns, including end-of-text."""

    name: str = "bpe"  # bpe, gpt2 or byte
    vocab_size: int = 1536

    def __post_init__(self) -> None:
        require_choice("tokenizer.name", self.name, TOKENIZER_NAMES)
        if self.name == "bpe":
            note = "(257 are every byte and end-of-text)"
            require_range("tokenizer.vocab_size", self.vocab_size, 257, 1_000_000, note=note)


class Tokenizer:
    """A byte-level byte-pair encoding: any text has ids, and they decode to exactly that text.

    `ranks` maps each token's bytes to its id, which is also the order in which pairs merge. It must include all 256
    single bytes, with ids from 0 without gaps. End-of-text is the next id; no text encodes to it, not even one that
    spells it.
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
        """Encode any text; a lone surrogate, which is not a character, becomes U+FFFD."""
        return [
            token
            for chunk in split_into_chunks([replace_surrogates(text)])
            for token in self.encode_chunk(chunk).tolist()
        ]

    def encode_chunk(self, chunk: str) -> np.ndarray:
        """Encode a chunk of text, as `split_into_chunks` makes them, to uint32, without holding the GIL.

        A million spaces would overflow the matcher's stack; a chunk never has that many.
        """
        return self._encoding.encode_to_numpy(chunk, disallowed_special=())

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """Decode ids to bytes, which may begin or end within a character."""
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

        Only our own patterns are taken: another one could drop text, take for ever, or make tiktoken panic.
        """
        keys = ("name", "pattern", "ranks", "sha256")
        if not isinstance(stored, dict) or not all(isinstance(stored.get(key), str) for key in keys):
            raise UserError(f"the tokenizer is not a dictionary of the strings {', '.join(keys)}: the file is damaged")
        require_choice("the tokenizer's name", stored["name"], TOKENIZER_NAMES)
        require_choice("the tokenizer's pattern", stored["pattern"], (GPT2_PATTERN, BYTE_PATTERN))
        tokenizer = cls(stored["name"], _parse_ranks(stored["ranks"]), stored["pattern"])
        tokenizer._rank_table = stored["ranks"]  # slower to build than to parse
        if tokenizer.sha256 != stored["sha256"]:
            raise UserError(f"tokenizer {stored['name']!r}: its ranks do not match their hash, so the file is damaged")
        return tokenizer


def tokenizer_key(tokenizer: TokenizerConfig | Tokenizer) -> dict[str, str]:
    """Return what determines a tokenizer, for a given text."""
    if isinstance(tokenizer, Tokenizer):
        return {"given": tokenizer.sha256}
    return {"name": tokenizer.name} | ({"vocab_size": str(tokenizer.vocab_size)} if tokenizer.name == "bpe" else {})


def gpt2_tokenizer() -> Tokenizer:
    """Return GPT-2's encoding: 50,257 tokens with end-of-text, from OpenAI's rank table in this package."""
    table = files("gpt").joinpath("assets/r50k_base.tiktoken").read_text(encoding="ascii")
    tokenizer = Tokenizer("gpt2", _parse_ranks(table), GPT2_PATTERN)
    tokenizer._rank_table = table
    return tokenizer


def byte_tokenizer() -> Tokenizer:
    """Return the encoding of one token for each byte: 257 tokens with end-of-text."""
    return Tokenizer("byte", {bytes([byte]): byte for byte in range(256)}, BYTE_PATTERN)


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-pair encoding (Sennrich et al. 2016) of `vocab_size` tokens, including end-of-text.

    Ids are the 256 bytes in order, then the merges in the order they were found. A text too short for that many merges
    gives a smaller vocabulary. The Hugging Face `tokenizers` library does the counting.
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
    learnt = sorted(trainee.get_vocab().items(), key=lambda item: item[1])
    tokens = [bytes(UNICODE_TO_BYTE[character] for character in token) for token, _ in learnt]
    ordered = [bytes([byte]) for byte in range(256)] + [token for token in tokens if len(token) > 1]
    return Tokenizer("bpe", {token: rank for rank, token in enumerate(ordered)}, GPT2_PATTERN)


def _parse_ranks(table: str) -> dict[bytes, int]:
    try:
        pairs = (line.split(" ") for line in table.splitlines())
        return {binascii.a2b_base64(token, strict_mode=True): int(rank) for token, rank in pairs}
    except ValueError:
        raise UserError("the rank table is malformed: each line must be a token in base64 and its rank") from None
