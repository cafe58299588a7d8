"""The version of the code that trains a run, and of the libraries that its results depend on bit for bit."""

import functools
import json
import platform
import subprocess
from importlib.metadata import distribution, version
from pathlib import Path

from gpt.files import IS_INSTALLED, PACKAGE, code_hash


def git_commit(folder: Path = PACKAGE) -> str | None:
    """Return the commit of the checkout that contains `folder`, with `-dirty` if tracked files were changed.

    For an installed package, return the commit that pip installed from a repository. Return None if there is no commit.
    """
    if IS_INSTALLED and folder == PACKAGE:
        source = json.loads(distribution("mini-gpt").read_text("direct_url.json") or "{}")
        return source.get("vcs_info", {}).get("commit_id")
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, encoding="utf-8", timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def installed_version() -> str:
    """Return the version and code hash of an installed package; empty in a checkout, because it has a commit."""
    return f"{version('mini-gpt')}+{code_hash()}" if IS_INSTALLED else ""


@functools.cache
def code_version() -> str:
    """Return the commit, or else the installed version, or else the hash of gpt/."""
    return git_commit() or installed_version() or f"gpt/ of hash {code_hash()}"


def record_code_version(commits: dict[str, str], step: int) -> None:
    """Add the code version of the steps after `step` to `commits` (step -> code version), if it has changed."""
    if current_code_version(commits) != code_version():
        commits[str(step)] = code_version()


def current_code_version(commits: dict[str, str]) -> str:
    """Return the code version of the newest steps."""
    return list(commits.values())[-1] if commits else ""


@functools.cache
def versions() -> dict[str, str]:
    """Return the versions that a run depends on bit for bit. An installed package has no commit, so it is included."""
    versions = {"python": platform.python_version()}
    versions |= {name: version(name) for name in ("torch", "lightning", "tiktoken")}
    if IS_INSTALLED:
        versions["mini-gpt"] = installed_version()
    return versions
