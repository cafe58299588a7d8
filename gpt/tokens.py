"""The command `python -m gpt.tokens`: show how a text splits into tokens."""

import argparse
import io
import sys
from collections.abc import Iterable
from typing import BinaryIO

from gpt.console import Parser, clean_exit
from gpt.data.chunking import (
    decode_argument,
    decode_stream,
    show_token,
    split_into_chunks,
    strip_byte_order_mark,
    token_label,
    utf8_size,
)
from gpt.data.tokenizer import Tokenizer
from gpt.errors import UserError
from gpt.files import expand_path, user_errors
from gpt.loading import open_tokenizer

MAX_SHOWN_TOKENS = 1000  # of a longer text, only the beginning is shown
MAX_LISTED_TOKENS = 40  # up to this number, tokens are also listed one by one
TOKEN_BORDER = "│"


def main(arguments: list[str] | None = None) -> None:
    """Print how the given text splits."""
    args = parse_arguments(arguments)
    with open_text(args) as stream:
        tokenizer = open_tokenizer(args.tokenizer)
        text = decode_stream(iter(lambda: stream.read(1 << 16), b""), str(args.file or "standard input"))
        print_tokens(tokenizer, split_into_chunks(text if args.text is not None else strip_byte_order_mark(text)))


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = Parser("python -m gpt.tokens", "Show how a text splits into tokens.")
    choices = "gpt2 (the default), byte, or the path of a run, a checkpoint, a Hugging Face GPT-2 or a prepared corpus"
    parser.add_argument("tokenizer", metavar="TOKENIZER", nargs="?", default="gpt2", help=choices)
    text = parser.add_mutually_exclusive_group()
    text.add_argument("--text", metavar="TEXT", help="the text to split (default: standard input)")
    text.add_argument("--file", metavar="FILE", type=expand_path, help="a UTF-8 file to split")
    return parser.parse_args(arguments)


def open_text(args: argparse.Namespace) -> BinaryIO:
    """Open the text as a stream of bytes."""
    if args.text is not None:
        return io.BytesIO(decode_argument(args.text).encode("utf-8"))
    if args.file is None:
        if sys.stdin.isatty():
            raise UserError("there is no text: give --text TEXT or --file FILE, or pipe one in")
        return sys.stdin.buffer
    with user_errors(args.file):
        return args.file.open("rb")


def print_tokens(tokenizer: Tokenizer, chunks: Iterable[str]) -> None:
    """Print the first tokens of a text, and the counts of all of it."""
    first_ids: list[int] = []
    num_tokens = num_bytes = num_characters = 0
    for chunk in chunks:
        ids = tokenizer.encode_chunk(chunk)
        first_ids += ids[: MAX_SHOWN_TOKENS - len(first_ids)].tolist()
        num_tokens += len(ids)
        num_bytes += utf8_size(chunk)
        num_characters += len(chunk)
    if num_tokens:
        shown = (show_token(tokenizer.decode_bytes([token])) for token in first_ids)
        excerpt = "".join(token.removesuffix("\n") + TOKEN_BORDER + "\n" * token.endswith("\n") for token in shown)
        is_complete = num_tokens <= MAX_SHOWN_TOKENS
        print(excerpt.rstrip("\n").removesuffix(TOKEN_BORDER) + "\n" if is_complete else excerpt + "...\n")
    if 0 < num_tokens <= MAX_LISTED_TOKENS:
        for token in first_ids:
            data = tokenizer.decode_bytes([token])
            print(f"{token:>6}  {data.hex(' '):<23}  {token_label(data)}")
        print()
    counts = f"{_count(num_tokens, 'token')}, {_count(num_bytes, 'byte')}, {_count(num_characters, 'character')}"
    ratio = f": {num_bytes / num_tokens:.2f} bytes per token" if num_tokens else ""
    print(f"{counts}{ratio}; vocabulary {tokenizer.vocab_size:,}, sha256 {tokenizer.sha256[:12]}...")


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"


if __name__ == "__main__":
    with clean_exit("gpt.tokens"):
        main()
