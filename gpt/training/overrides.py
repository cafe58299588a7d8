"""Overrides of the command line: quoted for Hydra's grammar, and as words for a shell."""

import os
import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import yaml

from gpt.console import shell_quote

PATHS = re.compile(r"(\+{0,2}(?:run_dir|resume|init_from|data\.(?:path|validation_path|cache|separator)))=(.*)", re.S)
_spellings: dict[str, str] = {}  # an override as Hydra reads it -> as it was typed


def is_sweep() -> bool:
    """Return True if the command line requests a run for each of several settings."""
    return bool({"-m", "--multirun"} & set(sys.argv))


def quote_for_hydra(words: list[str]) -> list[str]:
    """Return a command line as Hydra takes it: options first, then overrides, with paths in quotes.

    Of several overrides of a key the last counts, so that a command can be repeated with changes appended.
    """
    options = [word for word in words if "=" not in word or word.startswith("-")]
    overrides = {word.partition("=")[0]: word for word in words if word not in options}
    quoted = [PATHS.sub(_quote_path, word) for word in overrides.values()]
    _spellings.update(zip(quoted, overrides.values(), strict=True))
    return [*options, *quoted]


def original_spelling(overrides: Iterable[str]) -> str:
    """Return overrides as words for a shell, without the quotes that Hydra's grammar needs."""
    return " ".join(_quote_for_shell(_spellings.get(override, override)) for override in overrides)


def to_shell_words(overrides: Mapping[str, Any]) -> str:
    """Return keys and their values as words for a shell, quoted for Hydra too."""
    return " ".join(_quote_for_shell(f"{key}={_as_hydra_value(value)}") for key, value in overrides.items())


def _quote_for_shell(word: str) -> str:
    """Return a word in the quotes of a shell, always on one line."""
    if "\n" not in word:
        return shell_quote(word)
    escaped = word.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n")
    return f"$'{escaped}'"


def _as_hydra_value(value: Any) -> str:
    if isinstance(value, list):
        return f"[{','.join(map(_as_hydra_value, value))}]"
    if not isinstance(value, str):
        return yaml.safe_dump(value).split("\n")[0]  # null, true, 0.001
    is_plain = re.fullmatch(r"[a-z_/.][\w/.-]*|\d+[a-z]+", value, re.ASCII | re.IGNORECASE)
    is_word_of_hydra = value.lower() in ("null", "true", "false", "nan", "inf")
    return value if is_plain and not is_word_of_hydra else _quoted(value)


def _quoted(text: str) -> str:
    """Return text in the quotes of Hydra's grammar. Backslashes before a quote, or at the end, are doubled."""
    escaped = re.sub(r"(\\*)('|$)", lambda match: match[1] * 2 + "\\" * len(match[2]) + match[2], text)
    return f"'{escaped}'"


def _quote_path(override: re.Match) -> str:
    """Return a key with its path in quotes: one path, a list, or in a sweep several."""

    def quote_all(paths: str) -> str:
        return ",".join(_quoted(os.path.expanduser(path.strip())) for path in paths.split(","))

    key, value = override.groups()
    if re.fullmatch(r"(['\"].*|\w+\(.*\)|null|)", value, re.S) and not os.path.exists(value):
        return override[0]  # in quotes already, or one of Hydra's functions
    if key.endswith("separator") or os.path.exists(value):
        return f"{key}={_quoted(value)}"
    if items := re.fullmatch(r"\[(.*)\]", value, re.S):
        return override[0] if re.search("['\"]", value) else f"{key}=[{quote_all(items[1])}]"
    if is_sweep():
        return f"{key}={quote_all(value)}"
    is_several = "," in value and key.endswith("data.path")  # Hydra's error explains it
    return override[0] if is_several else f"{key}={_quoted(os.path.expanduser(value))}"
