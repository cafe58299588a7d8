"""The words of a command line: how Hydra is to read them, and what it says of those that it cannot read."""

import os
import re
import sys
from collections.abc import Iterable

from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import MissingConfigException, OverrideParseException

from gpt.console import quote
from gpt.errors import UserError
from gpt.training.config.loading import unknown_key

PATHS = re.compile(r"(\+{0,2}(?:run_dir|resume|rerun|init_from|data\.(?:path|cache|separator)))=(.*)", re.S)
_typed: dict[str, str] = {}  # words as they were typed, by what Hydra reads


def is_sweep() -> bool:
    """Whether the command line asks for a run with each of several settings."""
    return bool({"-m", "--multirun"} & set(sys.argv))


def for_hydra(words: list[str]) -> list[str]:
    """The command line as Hydra reads it: options first, then overrides, with names of files as they stand."""
    for word in get_args_parser().parse_known_args(words)[1]:
        if word.startswith("--"):
            raise UserError(f"{word}: keys are written key=value, such as seed=3; see --help for the options there are")
    typed, words = words, [PATHS.sub(_quoted, word) for word in words]
    _typed.update(zip(words, typed, strict=True))
    return sorted(words, key=lambda word: "=" in word and not word.startswith("-"))


def _quoted(override: re.Match) -> str:
    """A key and its path in the quotes that Hydra's grammar asks for, alone, in a list, or in a sweep over several."""

    def quoted(text: str) -> str:
        return "'" + re.sub(r"(\\*)('|$)", lambda found: found[1] * 2 + "\\" * len(found[2]) + found[2], text) + "'"

    def all_quoted(paths: str) -> str:
        return ",".join(quoted(os.path.expanduser(path.strip())) for path in paths.split(","))

    key, value = override.groups()
    if re.fullmatch(r"(['\"].*|\w+\(.*\)|null|)", value, re.S) and not os.path.exists(value):
        return override[0]  # in quotes already, or one of Hydra's functions
    if key.endswith("separator") or os.path.exists(value):
        return f"{key}={quoted(value)}"
    if listed := re.fullmatch(r"\[(.*)\]", value, re.S):
        return override[0] if re.search("['\"]", value) else f"{key}=[{all_quoted(listed[1])}]"
    if is_sweep():
        return f"{key}={all_quoted(value)}"
    several = "," in value and key.endswith("data.path")  # which Hydra explains
    return override[0] if several else f"{key}={quoted(os.path.expanduser(value))}"


def given_by(overrides: list[str]) -> dict[str, str]:
    """The keys and groups that overrides give, each with its words as they were typed."""
    parsed = OverridesParser.create().parse_overrides(overrides)
    return {str(one.key_or_group): as_typed([str(one.input_line)]) for one in parsed}


def as_typed(overrides: Iterable[str]) -> str:
    """Overrides as words for a shell, without the quotes that Hydra's grammar asks for."""
    return " ".join(quote(_typed.get(override, override)) for override in overrides)


def describe(error: Exception) -> str:
    """Condense an error of Hydra's to one line."""
    several = re.match(r"Ambiguous value for argument '(.*)'", str(error))
    if isinstance(error, OverrideParseException) or several:
        override = several[1] if several else str(getattr(error, "override", ""))
        what = "is not key=value as Hydra reads it"
        if several:
            what = "has several values: add -m to train with each, or brackets for a list"
        remedy = "; to give the value as it stands, use quotes inside quotes, as in 'data.path=\"a,b.txt\"'"
        if "=" not in override:
            remedy = f": to train on it, write data.path={override}" if os.path.exists(override) else ""
        return f"{override!r} {what}{remedy}"
    if isinstance(error, MissingConfigException) and error.options:
        group, _, name = str(error.missing_cfg_file).rpartition("/")
        if group.startswith("data/"):  # a path
            group, _, name = str(error.missing_cfg_file).partition("/")
        file = quote(name) if os.path.exists(name) else "FILE"
        own = {
            "data": f"; for a text of your own say data.path={file}",
            "tokenizer": "; byte comes closest to characters",
        }
        return f"{group}={name} is not known: choose from {', '.join(error.options)}{own.get(group, '')}"
    if str(error).startswith("Config group override must be"):
        return "a group takes the name of one of its files, such as model=mini"
    if "@experiment." in str(error):
        return "an experiment file must begin with the line: # @package _global_"
    if unknown := re.match(r"Could not override '([^']+)'", str(error)):
        return unknown_key(unknown[1])
    return " ".join(line.strip() for line in str(error).splitlines() if line.strip())
