"""Text in a real S3 server: read, prepared and trained from there, with the same bits as here."""

import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest
import s3fs
from moto.server import ThreadedMotoServer

from gpt.prepare import main
from gpt.text.corpus.config import DataConfig
from gpt.text.corpus.corpus import open_corpus
from harness import TINY, refusal, train
from workshop import DOCUMENTS, make, write_files


@pytest.fixture
def s3(monkeypatch) -> Iterator:
    """A client of the server; the bucket `texts` is there."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer("127.0.0.1", 0)
    server.start()
    host, port = server.get_host_and_port()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    s3fs.S3FileSystem.clear_instance_cache()
    client = boto3.client("s3")
    client.create_bucket(Bucket="texts")
    yield client
    s3fs.S3FileSystem.clear_instance_cache()
    server.stop()


def put(s3, folder: Path) -> None:
    for file in folder.iterdir():
        s3.upload_file(str(file), "texts", f"{folder.name}/{file.name}")


def test_the_same_corpus(s3, tmp_path):
    """A file, a folder and a glob in a store are what they are here, also with room for only some of the copies."""
    here = tmp_path / "text"
    write_files(here)
    put(s3, here)
    for name in ("", "/*.txt", "/007.txt", "/0[12]*.txt"):
        there = DataConfig("text", f"s3://texts/text{name}", cache_bytes=2000)
        local = DataConfig("text", f"{here}{name}")
        cache = tmp_path / "cache"
        assert open_corpus(there, cache).sha256(cache) == open_corpus(local, cache).sha256(cache)
        copies = [file for file in (cache / "downloads").iterdir() if not file.name.startswith(".")]
        assert sum(file.stat().st_size for file in copies) <= 2000
    one, other = make(there, tmp_path / "1"), make(local, tmp_path / "2")
    assert (one.manifest, one.train.tolist()) == (other.manifest, other.train.tolist())


def test_mistakes(s3, tmp_path, monkeypatch):
    """One line names the URL and the remedy."""
    for url, said in [
        ("s3://texts/none", "there is no such file: check the spelling"),
        ("s3://no-bucket/a", "there is no such file: check the spelling"),
        ("s3://texts/*.txt", "names no file: give the URL of a file, a folder or a quoted glob"),
        ("nowhere://a", "check the spelling"),
    ]:
        line = refusal(open_corpus, DataConfig("text", url), tmp_path)
        assert url in line and said in line


def test_training_from_a_store(s3, tmp_path, monkeypatch):
    """Prepared into the store and trained from it, in little room: the very losses of the same files on a disk."""
    monkeypatch.setattr("gpt.text.prepare.parts.LEAST", 64)
    write_files(tmp_path / "text", [document * 20 for document in DOCUMENTS])
    how = ["--tokenizer", "byte", "--shard-bytes", "300", "--text", str(tmp_path / "text")]
    for to in ("s3://texts/made", str(tmp_path / "made")):
        main(["--to", to, "--cache", str(tmp_path / "cache"), *how])
    losses, cache = [], tmp_path / "small"
    settings = ["data=prepared", f"data.cache={cache}", "data.cache_bytes=250000", "horizon=700steps"]
    for name, path in (("there", "s3://texts/made"), ("here", str(tmp_path / "made"))):
        done = train(*TINY, *settings, f"data.path={path}", f"run_dir={tmp_path / name}")
        assert done.returncode == 0, done.stderr
        losses.append(json.loads((tmp_path / name / "metrics.json").read_text())["val_loss"])
    assert losses[0] == losses[1]
    files = [file for file in (cache / "downloads").iterdir() if file.name.endswith(".bin") and file.name[0] != "."]
    assert len(files) > 160 and sum(file.stat().st_size for file in files) <= 250_000
    done = train(*TINY, *settings, "data.path=s3://texts/made", "data.cache_bytes=1000", f"run_dir={tmp_path / 'a'}")
    assert done.returncode == 2 and "data.cache_bytes=1,000 does not hold 320 files" in done.stderr
    shutil.rmtree(cache)
    for found in s3.list_objects_v2(Bucket="texts", Prefix="made/train-00004")["Contents"]:
        s3.delete_object(Bucket="texts", Key=found["Key"])
    done = train(*TINY, *settings, "data.path=s3://texts/made", f"run_dir={tmp_path / 'lost'}")
    assert done.returncode == 2 and "there is no such file" in done.stderr and "Traceback" not in done.stderr
