"""Text to token ids and back, by tiktoken: GPT-2's own byte-pair encoding, one trained on your text, or plain bytes.

`python -m gpt.text.tokenizer --text "Hello, world"` shows how a text splits, and which merges its tokens come from.
"""

import base64
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from itertools import pairwise

import numpy as np
import tiktoken

from gpt.errors import UserError, command_line, require_choice
from gpt.text.pieces import cut, well_formed

END_OF_TEXT = "<|endoftext|>"

# GPT-2's pattern (Radford et al. 2019) in its possessive form, which matches the same pieces in linear time.
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
BYTE_PATTERN = r"(?s:.{1,1000})"


@dataclass
class TokenizerConfig:
    """Which tokenizer; `vocab_size` is how many tokens `bpe` is trained to, end-of-text among them."""

    name: str = "bpe"  # bpe, gpt2 or byte
    vocab_size: int = 1536

    def __post_init__(self) -> None:
        require_choice("tokenizer.name", self.name, ("bpe", "gpt2", "byte"))
        if self.name == "bpe" and not 257 <= self.vocab_size <= 1_000_000:
            raise ValueError(
                f"tokenizer.vocab_size={self.vocab_size} is out of range: it must be at least 257 (every byte and "
                "end-of-text) and at most 1000000"
            )


class Tokenizer:
    """A byte-level byte-pair encoding: any text has ids, and they decode to the very same text.

    `ranks` maps each token's bytes to its id, the order in which pairs merge; all 256 single bytes are among them, and
    ids run from 0 without gaps. End-of-text is the id after the last and never arises from text, whatever it spells.
    """

    def __init__(self, name: str, ranks: dict[bytes, int], pattern: str):
        if sorted(ranks.values()) != list(range(len(ranks))):
            raise UserError(f"tokenizer {name!r}: its {len(ranks)} ids are not 0 to {len(ranks) - 1}, each once")
        if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
            raise UserError(f"tokenizer {name!r}: it has no token for the byte {missing[0]}, so some text has no ids")
        self.name = name
        self.pattern = pattern
        self.end_of_text = len(ranks)
        self.vocab_size = len(ranks) + 1
        self._ranks = ranks
        self._encoding = tiktoken.Encoding(
            name, pat_str=pattern, mergeable_ranks=ranks, special_tokens={END_OF_TEXT: self.end_of_text}
        )

    def encode(self, text: str) -> list[int]:
        """The ids of a text. A lone surrogate, which is no character, becomes U+FFFD."""
        return [token for piece in cut([well_formed(text)]) for token in self.encode_piece(piece).tolist()]

    def encode_piece(self, piece: str) -> np.ndarray:
        """The ids, as uint32, of a well-formed piece of text as `gpt.text.pieces.cut` makes them; other threads go on.

        The matcher's stack overflows on a million spaces inside a text; a piece never has as many.
        """
        return self._encoding.encode_to_numpy(piece, disallowed_special=())

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The bytes that ids stand for; they may end, or begin, within a character."""
        return self._encoding.decode_bytes(list(ids))

    def decode(self, ids: Iterable[int]) -> str:
        """The text that ids stand for, with U+FFFD for bytes that make no character."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def merged_from(self, token: int) -> list[bytes]:
        """The two tokens whose merge a token is, as bytes; a byte alone has none and is returned as it is."""
        parts = [bytes([byte]) for byte in self.decode_bytes([token])]
        while len(parts) > 2:
            ranks = [self._ranks.get(left + right, token) for left, right in pairwise(parts)]
            if (first := min(ranks)) >= token:
                break  # the table is no training's: no merge leads to this token
            i = ranks.index(first)
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        return parts

    @cached_property
    def sha256(self) -> str:
        """The hash of all that decides which ids a text has."""
        return hashlib.sha256(f"{self.pattern}\n{self._rank_table}".encode()).hexdigest()

    @cached_property
    def _rank_table(self) -> str:
        """The ranks in tiktoken's file format: a line each, the token in base64 and its rank."""
        ordered = sorted(self._ranks.items(), key=lambda item: item[1])
        return "".join(f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ordered)

    def to_dict(self) -> dict[str, str]:
        """The whole tokenizer as plain strings, for checkpoints and manifests."""
        return {"name": self.name, "pattern": self.pattern, "ranks": self._rank_table, "sha256": self.sha256}

    @classmethod
    def from_dict(cls, stored: dict[str, str]) -> "Tokenizer":
        """The tokenizer that `to_dict` stored; a hash that does not fit is refused."""
        tokenizer = cls(stored["name"], _parse_ranks(stored["ranks"]), stored["pattern"])
        tokenizer._rank_table = stored["ranks"]  # which takes longer to write than to read
        if tokenizer.sha256 != stored["sha256"]:
            raise UserError(f"tokenizer {stored['name']!r}: its ranks do not match their hash, so the file is damaged")
        return tokenizer


def gpt2_tokenizer() -> Tokenizer:
    """GPT-2's encoding: 50,257 tokens with end-of-text, from OpenAI's rank table, which lies in this package."""
    table = files("gpt").joinpath("assets/r50k_base.tiktoken").read_text(encoding="ascii")
    tokenizer = Tokenizer("gpt2", _parse_ranks(table), GPT2_PATTERN)
    tokenizer._rank_table = table
    return tokenizer


def byte_tokenizer() -> Tokenizer:
    """One token a byte: 257 tokens with end-of-text."""
    return Tokenizer("byte", {bytes([byte]): byte for byte in range(256)}, BYTE_PATTERN)


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-pair encoding (Sennrich et al. 2016) of `vocab_size` tokens, end-of-text among them.

    Ids are the 256 bytes in order, then the merges as they were found. A short text has fewer merges to offer, and then
    the vocabulary is smaller. The Hugging Face `tokenizers` library does the counting.
    """
    from tokenizers import Regex, models, pre_tokenizers, trainers
    from tokenizers import Tokenizer as Trainee

    trainee = Trainee(models.BPE())
    trainee.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(GPT2_PATTERN), behavior="isolated"),
            pre_tokenizers.Split(Regex(r"(?m:.{1,256})"), behavior="isolated"),  # longer ones take quadratic time
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,
        min_frequency=2,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    trainee.train_from_iterator((piece for text in texts for piece in cut([well_formed(text)])), trainer)
    byte_of = _bytes_by_stand_in()
    learnt = sorted(trainee.get_vocab().items(), key=lambda item: item[1])
    tokens = [bytes(byte_of[character] for character in token) for token, _ in learnt]
    ordered = [bytes([byte]) for byte in range(256)] + [token for token in tokens if len(token) > 1]
    return Tokenizer("bpe", {token: rank for rank, token in enumerate(ordered)}, GPT2_PATTERN)


def _parse_ranks(table: str) -> dict[bytes, int]:
    try:
        pairs = [line.split() for line in table.splitlines()]
        ranks = {base64.b64decode(token): int(rank) for token, rank in pairs}
    except (ValueError, AttributeError):
        raise UserError("the rank table is not one: a line each of a token in base64 and its rank") from None
    if len(ranks) != len(pairs):
        raise UserError(f"the rank table has {len(pairs) - len(ranks)} tokens twice, so the file is damaged")
    return ranks


def _bytes_by_stand_in() -> dict[str, int]:
    """The printable character that stands for each byte inside `tokenizers`: GPT-2's own convention.

    Printable Latin-1 stands for itself; the other bytes take the characters from U+0100 on, in order.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


if __name__ == "__main__":
    from gpt.tokens import main

    with command_line("gpt.text.tokenizer"):
        main()
