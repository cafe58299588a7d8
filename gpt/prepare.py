"""The command `python -m gpt.prepare`: prepare a text in parts, on many machines, for train.py data=prepared."""

import argparse
import re

from gpt.console import Parser, command_line, say
from gpt.errors import UserError
from gpt.files import home_path
from gpt.text.cache import CACHE
from gpt.text.corpus.config import DataConfig, add_reading, as_options, read_with
from gpt.text.prepare.parts import Planned, plan
from gpt.text.shards import Store
from gpt.text.tokenizer import NAMES, TokenizerConfig


def main(arguments: list[str] | None = None) -> None:
    """Plan, encode some shards, publish them all, or do the three after each other."""
    args = parse_arguments(arguments)
    store, whole = Store(args.to), not (args.plan or args.part or args.join)
    if whole or args.plan:
        if not args.text:
            raise UserError("a plan needs a text: give --text FILE, a folder, a quoted glob or a URL of these")
        how = TokenizerConfig(args.tokenizer, args.vocab_size)
        plan(store, read_with(args), how, args.shard_bytes, args.cache, say)
    elif args.text:
        raise UserError(f"--text={args.text[0]}: the plan says which text: leave this out")
    if whole or args.part:
        Planned(store, args.cache, args.cache_bytes, say).encode(*(args.part or (1, 1)))
    if whole or args.join:
        Planned(store, args.cache, args.cache_bytes, say).join()


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = Parser("python -m gpt.prepare", "Prepare a text in parts, on many machines, for train.py data=prepared.")
    add = parser.add_argument
    add("--to", metavar="URL", required=True, help="where the prepared text goes: a folder, here or in a store")
    step = parser.add_mutually_exclusive_group()
    step.add_argument("--plan", action="store_true", help="first, once: decide the split, the tokenizer, the shards")
    step.add_argument("--part", metavar="I/N", type=_part, help="then, anywhere, in any order: encode a share of them")
    step.add_argument("--join", action="store_true", help="last, once: check that all are there, and publish")
    add("--text", metavar="TEXT", nargs="+", help="what data.path takes: files, folders, quoted globs, URLs of these")
    add_reading(parser)
    add("--tokenizer", choices=NAMES, default="gpt2", help="(default: gpt2)")
    add("--vocab-size", metavar="N", type=int, default=TokenizerConfig.vocab_size, help="of bpe")
    add("--shard-bytes", metavar="N", type=int, default=1 << 28, help="of files in a shard, at least (default: 2^28)")
    add("--cache", metavar="DIR", type=home_path, default=CACHE, help="for work in progress and copies of remote files")
    add("--cache-bytes", metavar="N", type=int, default=DataConfig.cache_bytes, help="that these copies may take")
    return parser.parse_args(arguments)


def _part(text: str) -> tuple[int, int]:
    """Read 3/64."""
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if not found or not 1 <= int(found[1]) <= int(found[2]):
        raise argparse.ArgumentTypeError(f"{text!r} is not such as 3/64")
    return int(found[1]), int(found[2])


if __name__ == "__main__":
    with command_line("gpt.prepare", told=as_options):
        main()
