"""A text in several files and what it comes to, processes that prepare, and a disk of their own."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpt.text.corpus.config import DataConfig
from gpt.text.tokenizer import byte_tokenizer
from workshop import (
    DOCUMENTS,
    SMALL,
    Workshop,
    constants,
    content,
    folder_of,
    halves,
    lists,
    make,
    obvious,
    write_documents,
)


@pytest.fixture(scope="module")
def workshop(tmp_path_factory) -> Iterator[Workshop]:
    """One for all tests, as it takes a second or two to begin."""
    found = Workshop(tmp_path_factory.mktemp("outputs"))
    yield found
    found.close()


@pytest.fixture
def disk(tmp_path) -> Iterator[Path]:
    """A disk of its own, which is to run full or to be made read-only."""
    place = tmp_path / "disk"
    place.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", place]).returncode:
        pytest.skip("SKIPPED LOUDLY: only root can mount the small disk that is to run full")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True)


@pytest.fixture(scope="module")
def many(tmp_path_factory) -> DataConfig:
    """Documents in five files, one of which is long."""
    parts = [DOCUMENTS[:11], ["".join(DOCUMENTS[11:23])], DOCUMENTS[23:29], DOCUMENTS[29:31], DOCUMENTS[31:]]
    folder = tmp_path_factory.mktemp("many")
    for i, part in enumerate(parts):
        write_documents(folder / str(i), part)
    return DataConfig("text", str(folder))


@pytest.fixture(scope="module")
def undisturbed(many, tmp_path_factory) -> dict[str, bytes]:
    """What it comes to."""
    cache = tmp_path_factory.mktemp("undisturbed")
    with constants(SMALL):
        prepared = make(many, cache)
        expected = tuple(obvious(documents, byte_tokenizer()) for documents in halves(many))
    assert lists(prepared) == expected
    return content(folder_of(cache))
