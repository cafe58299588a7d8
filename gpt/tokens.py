"""How a text splits into tokens: the command `python -m gpt.text.tokenizer`."""

import argparse
import functools
import io
import itertools
import json
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, NoReturn

from gpt.errors import UserError
from gpt.text.pieces import NotUTF8Error, cut, decoded, well_formed
from gpt.text.tokenizer import Tokenizer, byte_tokenizer, gpt2_tokenizer

SHORT = 40  # tokens: so many at most are also listed one by one
PASTELS = (189, 194, 223, 217, 159)  # of a terminal's 256 colours, to lie under black letters
BORDER = "│"  # between tokens where there are no colours
SIGNS = {" ": "·", "\t": "→", "\n": "⏎\n"}
RAW = ("utf-8", "surrogateescape")  # keeps bytes that are no character, and gives them back


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see {self.prog} --help")


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = _Parser(
        "python -m gpt.text.tokenizer", description="Show how a text splits into tokens.", allow_abbrev=False
    )
    kinds = "gpt2 (the default), byte, or the path of a run, a checkpoint, a Hugging Face GPT-2 or a prepared corpus"
    parser.add_argument("tokenizer", metavar="TOKENIZER", nargs="?", default="gpt2", help=kinds)
    text = parser.add_mutually_exclusive_group()
    text.add_argument("--text", metavar="TEXT", help="without --text and --file: standard input")
    text.add_argument("--file", metavar="FILE", type=Path, help="a UTF-8 file")
    form = parser.add_mutually_exclusive_group()
    table = f"a line for each token in place of the text; up to {SHORT} tokens are shown both ways"
    form.add_argument("--table", action="store_true", help=table)
    form.add_argument("--json", action="store_true", help="one JSON object; its pieces are bytes in hexadecimal")
    parser.add_argument("--color", choices=["auto", "always", "never"], default="auto", help="auto: on a terminal")
    return parser.parse_args(arguments)


def open_tokenizer(name: str) -> Tokenizer:
    """The tokenizer of this name, or the one that a path leads to; `UserError` where there is none."""
    if name in ("gpt2", "byte"):
        return gpt2_tokenizer() if name == "gpt2" else byte_tokenizer()
    path = Path(name)
    if not os.path.exists(path):
        raise UserError(
            f"{name!r} is no tokenizer: choose gpt2, byte, or the path of a run, a checkpoint, a Hugging Face GPT-2 "
            "or a prepared corpus; a text goes behind --text"
        )
    if (path / "config.json").is_file():
        return _huggingface_tokenizer(path)
    if (path / "manifest.json").is_file():
        from gpt.text.shards import open_shards

        return open_shards(path).tokenizer
    from gpt.exchange import checkpoint  # only now torch, which is slow to import

    file = checkpoint.find(path)
    try:
        return Tokenizer.from_dict(checkpoint.load(file)["tokenizer"])
    except (KeyError, TypeError, AttributeError):
        raise UserError(f"{file}: what it holds as its tokenizer is none; use another checkpoint") from None


def _huggingface_tokenizer(folder: Path) -> Tokenizer:
    """GPT-2's, where the directory is that of a GPT-2; its weights are not read."""
    tokenizer = gpt2_tokenizer()
    try:
        stored = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        kind, vocab_size = stored["model_type"], stored["vocab_size"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder}: cannot be read as a Hugging Face model ({error!r})") from None
    if (kind, vocab_size) != ("gpt2", tokenizer.vocab_size):
        raise UserError(f"{folder}: a {kind} of {vocab_size} tokens; give a gpt2 of {tokenizer.vocab_size}")
    return tokenizer


def open_text(args: argparse.Namespace) -> BinaryIO:
    """The text as a stream of bytes."""
    if args.text is not None:
        return io.BytesIO(well_formed(args.text).encode("utf-8"))
    if args.file is None:
        if sys.stdin is None or sys.stdin.isatty():
            raise UserError("there is no text: give --text TEXT or --file FILE, or pipe one in")
        return sys.stdin.buffer
    try:
        return args.file.open("rb")
    except OSError as error:
        raise UserError(f"{args.file}: cannot be read ({error.strerror})") from None


def read_blocks(stream: BinaryIO, source: str) -> Iterator[str]:
    """A stream of UTF-8 as text, block by block; `UserError` names the first byte that is none."""
    try:
        yield from decoded(iter(lambda: stream.read(1 << 16), b""))
    except OSError as error:
        raise UserError(f"{source}: cannot be read ({error.strerror})") from None
    except NotUTF8Error as error:
        raise UserError(f"{source}: not UTF-8 ({error})") from None


def visible(token: bytes) -> str:
    """A token to look at: signs for white space, <e2><82> for bytes that are no character or not a visible one."""
    return "".join(
        SIGNS.get(c) or (c if c.isprintable() else "".join(f"<{byte:02x}>" for byte in c.encode(*RAW)))
        for c in token.decode(*RAW)
    )


def paint(shown: str, color: int | None) -> str:
    """A token on a colour, up to the end of its line, or on none."""
    if color is None:
        return shown
    return "\n".join(f"\x1b[38;5;16;48;5;{color}m{line}\x1b[0m" for line in shown.split("\n"))


def describe(tokenizer: Tokenizer, token: int, color: int | None) -> str:
    """A line about a token: its id, its bytes, itself, and the pair that it was merged from."""
    data, parts = tokenizer.decode_bytes([token]), tokenizer.merged_from(token)
    shown, *merged = (visible(part).replace("\n", "") for part in (data, *parts))
    merge = f" = {' + '.join(merged)}" if len(merged) > 1 else ""
    return f"{token:>6}  {data.hex(' '):<23}  {paint(shown, color)}{merge}\n"


def show(tokenizer: Tokenizer, pieces: Iterable[str], table: bool, colors: tuple[int, ...]) -> None:
    """Print how a text splits, while it is read, and then what it comes to; tokens take the colours in turn, if any."""
    row = functools.cache(lambda token, color: describe(tokenizer, token, color))
    look = functools.cache(lambda token: visible(tokenizer.decode_bytes([token])))
    turns = itertools.cycle(colors or (None,))
    beginning: list[tuple[int, int | None]] = []
    tokens = size = characters = 0
    gap = ""  # between two tokens: their border, then the end of the line if there is one
    for piece in pieces:
        ids = tokenizer.encode_piece(piece).tolist()
        out = []
        for token, color in zip(ids, turns, strict=False):
            if len(beginning) < SHORT:
                beginning.append((token, color))
            if table:
                out.append(row(token, color))
            else:
                shown = look(token)
                body = shown.removesuffix("\n")
                out.append(gap + paint(body, color))
                gap = ("" if colors else BORDER) + shown[len(body) :]
        print("".join(out), end="")
        tokens, size, characters = tokens + len(ids), size + len(piece.encode("utf-8")), characters + len(piece)
    if tokens and not table:
        print("\n")
        if tokens <= SHORT:
            print("".join(row(*one) for one in beginning))
    counts = f"{_count(tokens, 'token')}, {_count(size, 'byte')}, {_count(characters, 'character')}"
    ratio = f": {size / tokens:.2f} bytes per token" if tokens else ""
    print(f"{counts}{ratio}; vocabulary {tokenizer.vocab_size:,}, sha256 {tokenizer.sha256[:12]}...")


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"


def report(tokenizer: Tokenizer, pieces: Iterable[str]) -> dict:
    """The same for scripts, as plain types."""
    ids = [token for piece in pieces for token in tokenizer.encode_piece(piece).tolist()]
    parts = [tokenizer.decode_bytes([token]) for token in ids]
    text = b"".join(parts)
    known = {"tokenizer": tokenizer.name, "vocab_size": tokenizer.vocab_size, "sha256": tokenizer.sha256}
    counts = {"tokens": len(ids), "bytes": len(text), "characters": len(text.decode("utf-8"))}
    return known | counts | {"ids": ids, "pieces": [part.hex() for part in parts]}


def main(arguments: list[str] | None = None) -> None:
    args = parse_arguments(arguments)
    color = args.color == "always"
    if args.color == "auto" and sys.stdout is not None and sys.stdout.isatty():
        color = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    with open_text(args) as stream:
        tokenizer = open_tokenizer(args.tokenizer)
        pieces = cut(read_blocks(stream, str(args.file or "standard input")))
        if args.json:
            print(json.dumps(report(tokenizer, pieces)))
        else:
            show(tokenizer, pieces, args.table, PASTELS if color else ())
