"""Fixtures for the tests of data: files, servers that answer badly, processes that prepare, and a small disk."""

import logging
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpt.data.data_config import DataConfig
from gpt.data.tokenizer import byte_tokenizer
from harness import import_or_skip
from web_server import WebServer
from workshop import (
    DOCUMENTS,
    SMALL_SHARDS,
    dataset_folder,
    expected_split_ids,
    patched_constants,
    prepare_source,
    read_files,
    read_joined_files,
    split_ids,
    write_documents,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """One for all examples of a property."""
    return tmp_path_factory.mktemp("examples")


@pytest.fixture(scope="session")
def fill() -> Callable[..., Path]:
    """A function that writes files, `__` in a name for a dot and `_in_` for a folder, and returns their folder."""

    def fill(folder: Path, **files: str | bytes) -> Path:
        for name, written in files.items():
            file = folder / name.replace("_in_", "/").replace("__", ".")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(written.encode() if isinstance(written, str) else written)
        return folder

    return fill


@pytest.fixture
def s3(monkeypatch, tmp_path) -> Iterator[Any]:
    """An S3 server on loopback, where programs find it too, as a file system with the empty bucket `texts`."""
    moto_server = import_or_skip("moto.server")
    S3FileSystem = import_or_skip("s3fs").S3FileSystem
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = moto_server.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    for key in ("PROFILE", "SESSION_TOKEN"):
        monkeypatch.delenv(f"AWS_{key}", raising=False)
    for key in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "CONFIG_FILE", "SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(f"AWS_{key}", str(tmp_path / "nothing"))
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://{}:{}".format(*server.get_host_and_port()))
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    S3FileSystem.clear_instance_cache()
    system = S3FileSystem()
    system.mkdir("texts")
    yield system
    system.rm("texts", recursive=True)
    S3FileSystem.clear_instance_cache()
    server.stop()


@pytest.fixture
def server(monkeypatch) -> Iterator[WebServer]:
    """A server, and no proxy before it."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    started = WebServer()
    yield started
    started.stop()


# --- preparing ---


@pytest.fixture
def disk(tmp_path) -> Iterator[Path]:
    """A small disk, to run full or to become read-only."""
    place = tmp_path / "disk"
    place.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", place]).returncode:
        pytest.skip("SKIPPED LOUDLY: only root can mount the small disk that is to run full")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True)


@pytest.fixture(scope="module")
def many_files(tmp_path_factory) -> DataConfig:
    """Documents in five files; one document is long."""
    parts = [DOCUMENTS[:11], ["".join(DOCUMENTS[11:23])], DOCUMENTS[23:29], DOCUMENTS[29:31], DOCUMENTS[31:]]
    folder = tmp_path_factory.mktemp("many")
    for i, part in enumerate(parts):
        write_documents(folder / str(i), part)
    return DataConfig("text", str(folder))


@pytest.fixture(scope="module")
def undisturbed(many_files, tmp_path_factory) -> Path:
    """The folder that an uninterrupted preparation makes of `many_files`."""
    cache = tmp_path_factory.mktemp("undisturbed")
    with patched_constants(SMALL_SHARDS):
        source = prepare_source(many_files, cache)
        assert split_ids(source) == expected_split_ids(many_files, byte_tokenizer())
    return dataset_folder(cache)


@pytest.fixture(scope="module")
def undisturbed_files(undisturbed) -> dict[str, bytes]:
    """Its files."""
    return read_files(undisturbed)


@pytest.fixture(scope="module")
def undisturbed_joined(undisturbed) -> dict[str, bytes]:
    """Its files with the training files joined."""
    return read_joined_files(undisturbed)
