"""What several tests of the text share."""

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """One for all examples of a property."""
    return tmp_path_factory.mktemp("examples")


@pytest.fixture(scope="session")
def fill() -> Callable[..., Path]:
    """A function that writes files, `__` in a name for a dot and `_in_` for a folder, and returns their folder."""

    def fill(folder: Path, **files: str | bytes) -> Path:
        for name, content in files.items():
            file = folder / name.replace("_in_", "/").replace("__", ".")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content.encode() if isinstance(content, str) else content)
        return folder

    return fill
