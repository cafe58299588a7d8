"""The configuration of the text: the keys of `data`."""

import argparse
import codecs
import os
import re
from dataclasses import dataclass, field, replace
from typing import Any

from gpt.errors import UserError, require_choice, require_range

BUILTIN_CORPORA = {  # corpora without a path, and their sample prompts
    "python_docs": ["", "Raise ValueError if", "Return a list of"],
    "python_stdlib": ["", "class Error(", "def __init__(self"],
    "tinyshakespeare": ["", "JULIET:", "ROMEO:"],
}
DATA_NAMES = (*BUILTIN_CORPORA, "text", "mix", "tokens")
READER_OPTIONS = {  # how to read files: keys of `data`, which are also options of commands
    "text_field": "the key or column that holds the text in .jsonl and .parquet (default: text)",
    "errors": "strict, or replace: U+FFFD for bytes that are not of the encoding (default: strict)",
    "separator": "the text between documents of plain text (default: a file is one document)",
    "encoding": "the encoding of plain text and JSON lines, or several to try in order: utf-8,gb18030 (default: utf-8)",
}


def is_url(path: str) -> bool:
    """Return True if a path is a URL."""
    return re.match(r"\w[\w+.-]+://", path) is not None


@dataclass
class DataConfig:
    """The text to train on, and the part of it that is for validation."""

    name: str = "python_docs"  # one of DATA_NAMES
    path: Any = None  # text and tokens: a file, folder, glob or URL, or a list of these; mix: a list of texts
    weights: list[float] = field(default_factory=list)  # mix: a weight for each path
    text_field: str = "text"  # the key or column that holds the text in .jsonl and .parquet
    errors: str = "strict"  # or replace: U+FFFD for bytes that are not of the encoding
    separator: str | None = None  # the text between documents of plain text, such as <|endoftext|>
    encoding: Any = "utf-8"  # of plain text and JSON lines: an encoding of Python, or a list to try file by file
    sha256: str | None = None  # the required hash of the file behind a URL
    cache: str | None = None  # the folder for prepared text; by default data/cache
    cache_bytes: int = 100_000_000_000  # the space there for copies of remote files
    validation_path: Any = None  # text and tokens: like `path`, for validation; by default a part of `path`
    validation_bytes: int = 1_000_000  # at most this much, and at most a tenth, is for validation (tokens: tokens)
    seed: int | None = None  # of the order of sequences; by default the run's seed
    bpe_dropout: float | None = None  # the probability that a token is split; by default it suits the epochs
    prompts: list[str] | None = None  # sampled during training; "" starts a document; by default taken from the text

    def __post_init__(self) -> None:
        require_choice("data.name", self.name, DATA_NAMES)
        require_choice("data.errors", self.errors, ("strict", "replace"))
        names = [_canonical_encoding(name) for name in self.encodings]
        self.encoding = names[0] if len(names) == 1 else names
        if self.separator == "":
            raise UserError("data.separator= is empty: give the text between two documents, or leave it out")
        if self.name == "text" and not self.paths:
            raise UserError("data=text needs data.path=FILE: a file, a folder or a quoted glob such as 'books/*.txt'")
        if self.name == "tokens" and not self.paths:
            raise UserError("data=tokens needs data.path=DIR: a prepared text, or token files such as 'DIR/*.bin'")
        if self.validation_paths and self.name not in ("text", "tokens"):
            problem = f"data.validation_path={self.validation_path!r} works only with data=text and data=tokens"
            raise UserError(f"{problem}: leave it out, or add one of these")
        if self.name in BUILTIN_CORPORA and self.paths:
            problem = f"data.path={self.path!r} works only with data=text and data=tokens"
            raise UserError(f"{problem}: add one of these, or leave the path out")
        if self.name == "mix" and (len(self.paths) < 2 or len(set(self.paths)) < len(self.paths)):
            raise UserError("data=mix needs at least two different corpora, such as data.path='[python_docs, FILE]'")
        if len(self.weights) != (len(self.paths) if self.name == "mix" else 0):
            raise UserError(
                f"data.weights={self.weights} does not fit: only data=mix takes weights, one for each data.path"
            )
        if not all(0 < weight < float("inf") for weight in self.weights):
            raise UserError(f"data.weights={self.weights} is out of range: each must be above 0")
        require_range("data.validation_bytes", self.validation_bytes, 1, 10**9)
        require_range("data.cache_bytes", self.cache_bytes, 1)
        require_range("data.bpe_dropout", self.bpe_dropout or 0, 0, 1)
        if self.sha256 is not None and not re.fullmatch("[0-9a-fA-F]{64}", self.sha256):
            raise UserError(f"data.sha256={self.sha256!r} is not 64 hex digits: give what sha256sum FILE prints")
        is_one_url = (
            self.name == "text" and len(self.paths) == 1 and is_url(self.paths[0]) and not self.validation_paths
        )
        if self.sha256 is not None and not is_one_url:
            raise UserError(
                "data.sha256 is the hash of one file behind a URL: leave it out, or give only data.path=URL"
            )
        if self.cache:
            self.cache = os.path.expanduser(self.cache)

    def with_absolute_paths(self) -> "DataConfig":
        """Return the configuration with paths that do not depend on the working directory."""

        def absolute(path: Any) -> Any:
            if isinstance(path, list):
                return [absolute(entry) for entry in path]
            if not isinstance(path, str) or not path or is_url(path) or path in BUILTIN_CORPORA:
                return path
            return os.path.abspath(os.path.expanduser(path))

        paths = {key: absolute(getattr(self, key)) for key in ("path", "validation_path", "cache")}
        return replace(self, **paths)

    @property
    def reader_settings(self) -> dict[str, Any]:
        """The separator and the encoding if they are set. Without them, older prepared text keeps its hash."""
        keys = ("separator", "encoding")
        return {key: getattr(self, key) for key in keys if getattr(self, key) != getattr(DataConfig, key)}

    @property
    def encodings(self) -> list[str]:
        """`encoding` as a list."""
        return self.encoding if isinstance(self.encoding, list) else str(self.encoding).split(",")

    @property
    def paths(self) -> list[str]:
        """`path` as a list."""
        return _as_list(self.path)

    @property
    def validation_paths(self) -> list[str]:
        """`validation_path` as a list."""
        return _as_list(self.validation_path)


def _canonical_encoding(name: Any) -> str:
    """Return Python's name of an encoding: an encoding has several."""
    try:
        "".encode(name)
        return codecs.lookup(name).name
    except (LookupError, ValueError, TypeError):
        problem = f"data.encoding={name!r} is not a text encoding of Python"
        raise UserError(f"{problem}: give one such as utf-8, windows-1252, utf-16, gb18030 or shift_jis") from None


def _as_list(path: Any) -> list[str]:
    paths = path if isinstance(path, list) else [path]
    return [str(path) for path in paths if path not in (None, "")]


def add_reader_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that determine how files are read."""
    for key, meaning in READER_OPTIONS.items():
        parser.add_argument(f"--{key.replace('_', '-')}", metavar="X", default=getattr(DataConfig, key), help=meaning)


def data_config_from_args(args: argparse.Namespace) -> DataConfig:
    """Return the configuration of the text that a command line names."""
    return DataConfig("text", args.text, **{key: getattr(args, key) for key in READER_OPTIONS})


def as_cli_options(message: str) -> str:
    """Replace the keys in a message by the options of commands, as in --text-field= for data.text_field=."""
    message = message.replace("data.path=", "--text=")
    return re.sub(r"data\.(\w+)=", lambda key: f"--{key[1].replace('_', '-')}=", message)
