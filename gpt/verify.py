"""The command `python -m gpt.verify`: check the hash of every file of prepared corpora."""

import os
from pathlib import Path

from gpt.console import Parser, command_line, progress_bar, say
from gpt.errors import UserError
from gpt.text.shards import open_shards, verify, width


def main(arguments: list[str] | None = None) -> None:
    """Print a line for each corpus; raise `UserError` at the first that is damaged."""
    parser = Parser("python -m gpt.verify", "Check the hash of every file of prepared corpora.")
    parser.add_argument("folders", nargs="*", type=Path, help="prepared corpora (default: all in data/cache)")
    folders = parser.parse_args(arguments).folders or sorted(
        manifest.parent for manifest in Path("data/cache").glob("[!.]*/manifest.json")
    )
    if not folders:
        raise UserError("data/cache holds no prepared corpus: name the folder of one")
    for folder in folders:
        if not os.path.isfile(folder / "manifest.json"):  # rather than advise to delete what is something else
            raise UserError(f"{folder}: not a prepared corpus, which has a manifest.json: name a folder of data/cache")
        shards = open_shards(folder)
        tokens = len(shards.train) + len(shards.validation)
        total = tokens * width(shards.tokenizer).itemsize
        with progress_bar(total) as bar:
            verify(folder, shards.manifest, bar.update)
        vocabulary = f"vocabulary {shards.tokenizer.vocab_size:,}"
        say(f"{folder}: {tokens:,} tokens, {vocabulary}, every hash matches")


if __name__ == "__main__":
    with command_line("gpt.verify"):
        main()
