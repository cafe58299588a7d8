"""The code that trains a run: its commit, and the versions on which every bit depends."""

import functools
import json
import platform
import subprocess
from importlib.metadata import distribution, version
from pathlib import Path

from gpt.files import IS_INSTALLED, PACKAGE, code_hash


def git_commit(folder: Path = PACKAGE) -> str | None:
    """The commit of the checkout that holds `folder`, with `-dirty` if its files have changed since; None outside one.

    Files that git does not know make no difference. Of an installed package it is the commit that pip installed, if it
    did so from a repository.
    """
    if IS_INSTALLED and folder == PACKAGE:
        source = json.loads(distribution("mini-gpt").read_text("direct_url.json") or "{}")
        return source.get("vcs_info", {}).get("commit_id")
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        answer = subprocess.run(command, cwd=folder, capture_output=True, encoding="utf-8", timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()


def installed_version() -> str:
    """The version of an installed package and the hash of its code; empty in a checkout, whose commit tells more."""
    return f"{version('mini-gpt')}+{code_hash()}" if IS_INSTALLED else ""


@functools.cache
def code_version() -> str:
    """The commit, or if there is none the installed version or the hash of gpt/."""
    return git_commit() or installed_version() or f"gpt/ of hash {code_hash()}"


def record_code_version(commits: dict[str, str], step: int) -> None:
    """Record in `commits` (step -> code) which code trains the steps after `step`, if that is new."""
    if current_commit(commits) != code_version():
        commits[str(step)] = code_version()


def current_commit(commits: dict[str, str]) -> str:
    """Return the code of the newest steps."""
    return list(commits.values())[-1] if commits else ""


def versions() -> dict[str, str]:
    """The versions on which a run's every bit depends: our own too where we are installed, and no commit tells."""
    own = {"mini-gpt": installed_version()} if IS_INSTALLED else {}
    names = ("torch", "lightning", "tiktoken")
    return {"python": platform.python_version()} | {name: version(name) for name in names} | own
