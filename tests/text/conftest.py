"""What several tests of the text share."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from harness import needs


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


@pytest.fixture
def s3(monkeypatch, tmp_path) -> Iterator[Any]:
    """An S3 server on loopback, where programs find it too, as a file system with the empty bucket `texts`."""
    ThreadedMotoServer, S3FileSystem = needs("moto.server").ThreadedMotoServer, needs("s3fs").S3FileSystem
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
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
