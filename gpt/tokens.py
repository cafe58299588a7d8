"""The command `python -m gpt.tokens`: show how a text splits into tokens, or check prepared tokens for damage."""

import argparse
import io
import os
import sys
from collections.abc import Iterable
from typing import BinaryIO

from gpt.console import Parser, command_line, say
from gpt.errors import UserError
from gpt.exchange.loading import open_tokenizer
from gpt.files import explain, home_path
from gpt.text.cache import CACHE
from gpt.text.pieces import cut, decoded, label, visible, well_formed, without_mark
from gpt.text.prepared import token_files, verify
from gpt.text.store import Store
from gpt.text.tokenizer import Tokenizer

EXCERPT = 1000  # tokens to show of a longer text
SHORT = 40  # up to this many tokens are also listed one by one
BORDER = "│"  # between tokens


def main(arguments: list[str] | None = None) -> None:
    """Print how the given text splits, or check prepared corpora."""
    args = parse_arguments(arguments)
    if args.verify is not None:
        verify_corpora(args.verify)
        return
    with open_text(args) as stream:
        tokenizer = open_tokenizer(args.tokenizer)
        text = decoded(iter(lambda: stream.read(1 << 16), b""), str(args.file or "standard input"))
        show(tokenizer, cut(text if args.text is not None else without_mark(text)))


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = Parser("python -m gpt.tokens", "Show how a text splits into tokens.")
    kinds = "gpt2 (the default), byte, or the path of a run, a checkpoint, a Hugging Face GPT-2 or a prepared corpus"
    parser.add_argument("tokenizer", metavar="TOKENIZER", nargs="?", default="gpt2", help=kinds)
    text = parser.add_mutually_exclusive_group()
    text.add_argument("--text", metavar="TEXT", help="the text to split (default: standard input)")
    text.add_argument("--file", metavar="FILE", type=home_path, help="a UTF-8 file to split")
    check = "check the hash of every file of prepared corpora instead, also of stores (default: all in data/cache)"
    text.add_argument("--verify", metavar="FOLDER", nargs="*", type=os.path.expanduser, help=check)
    return parser.parse_args(arguments)


def open_text(args: argparse.Namespace) -> BinaryIO:
    """Open the text as a stream of bytes."""
    if args.text is not None:
        return io.BytesIO(well_formed(args.text).encode("utf-8"))
    if args.file is None:
        if sys.stdin.isatty():
            raise UserError("there is no text: give --text TEXT or --file FILE, or pipe one in")
        return sys.stdin.buffer
    with explain(args.file):
        return args.file.open("rb")


def show(tokenizer: Tokenizer, pieces: Iterable[str]) -> None:
    """Print how a text begins to split, and the counts of all of it."""
    beginning: list[int] = []
    tokens = size = characters = 0
    for piece in pieces:
        ids = tokenizer.encode_piece(piece)
        beginning += ids[: EXCERPT - len(beginning)].tolist()
        tokens, size, characters = tokens + len(ids), size + len(piece.encode("utf-8")), characters + len(piece)
    if tokens:
        shown = (visible(tokenizer.decode_bytes([token])) for token in beginning)
        excerpt = "".join(token.removesuffix("\n") + BORDER + "\n" * token.endswith("\n") for token in shown)
        print(excerpt + "...\n" if tokens > EXCERPT else excerpt.rstrip("\n").removesuffix(BORDER) + "\n")
    if 0 < tokens <= SHORT:
        for token in beginning:
            data = tokenizer.decode_bytes([token])
            print(f"{token:>6}  {data.hex(' '):<23}  {label(data)}")
        print()
    counts = f"{_count(tokens, 'token')}, {_count(size, 'byte')}, {_count(characters, 'character')}"
    ratio = f": {size / tokens:.2f} bytes per token" if tokens else ""
    print(f"{counts}{ratio}; vocabulary {tokenizer.vocab_size:,}, sha256 {tokenizer.sha256[:12]}...")


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"


def verify_corpora(folders: list[str]) -> None:
    """Print a line for each prepared corpus; `UserError` at the first that is damaged."""
    folders = folders or sorted(str(manifest.parent) for manifest in CACHE.glob("[!.]*/manifest.json"))
    if not folders:
        raise UserError(f"{CACHE} holds no prepared corpus: name the folder of one")
    for folder in folders:
        if "://" not in folder and not os.path.isfile(f"{folder}/manifest.json"):  # rather than advise to delete it
            raise UserError(f"{folder}: not a prepared corpus, which has a manifest.json: name a folder of {CACHE}")
        manifest, tokenizer = verify(Store(folder))
        files = f"{len(token_files(manifest)):,} files"
        tokens = sum(split["tokens"] for split in manifest["splits"].values())
        say(f"{folder}: {tokens:,} tokens in {files}, vocabulary {tokenizer.vocab_size:,}, every hash matches")


if __name__ == "__main__":
    with command_line("gpt.tokens"):
        main()
