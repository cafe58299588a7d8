"""Text prepared into a real S3 server and trained from there, with the same bits as here."""

import json
import os
import random
import shutil
import signal
import time

import pytest

from gpt.prepare import main
from harness import TINY, Process, differences, refused, train
from workshop import DOCUMENTS, write_files

KILLS = int(os.environ.get("GPT_KILLS", "2"))


@pytest.mark.slow
def test_training_from_a_store(s3, tmp_path, monkeypatch):
    """Prepared into the store and trained from it, in little room: the very losses of the same files on a disk."""
    monkeypatch.setattr("gpt.text.prepare.shard.LEAST", 64)
    write_files(tmp_path / "text", [document * 20 for document in DOCUMENTS])
    how = ["--tokenizer", "byte", "--shard-bytes", "300", "--text", str(tmp_path / "text")]
    for to in ("s3://texts/made", str(tmp_path / "made")):
        main(["--to", to, "--cache", str(tmp_path / "cache"), *how])
    losses, cache = [], tmp_path / "small"
    settings = ["data=prepared", f"data.cache={cache}", "data.cache_bytes=250000", "horizon=700steps"]
    for name, path in (("there", "s3://texts/made"), ("here", str(tmp_path / "made"))):
        done = train(*TINY, *settings, f"data.path={path}", f"run_dir={tmp_path / name}")
        losses.append(json.loads((tmp_path / name / "metrics.json").read_text())["val_loss"])
    assert losses[0] == losses[1]
    files = [file for file in (cache / "downloads").iterdir() if file.name.endswith(".bin") and file.name[0] != "."]
    assert len(files) > 160 and sum(file.stat().st_size for file in files) <= 250_000
    line = refused(*TINY, *settings, "data.path=s3://texts/made", "data.cache_bytes=1000", f"run_dir={tmp_path / 'a'}")
    assert "data.cache_bytes=1,000 does not hold 480 files" in line
    shutil.rmtree(cache)
    s3.rm("texts/made/train-00004*")
    done = train(*TINY, *settings, "data.path=s3://texts/made", f"run_dir={tmp_path / 'lost'}", code=2)
    assert "there is no such file" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.slow
def test_kills_while_training_from_a_store(s3, tmp_path, monkeypatch):
    """Killed at any moment and resumed, also while shards are fetched: the bits of a run that was not."""
    monkeypatch.setattr("gpt.text.prepare.shard.LEAST", 64)
    text = write_files(tmp_path / "text", [document * 20 for document in DOCUMENTS])
    how = ["--tokenizer", "byte", "--shard-bytes", "300", "--text", str(text.path)]
    main(["--to", "s3://texts/made", "--cache", str(tmp_path / "cache"), *how])
    settings = [*TINY, "data=prepared", "data.path=s3://texts/made", f"data.cache={tmp_path / 'small'}"]
    settings += ["data.cache_bytes=250000", "horizon=151steps", "resume=auto"]
    begin = time.monotonic()
    assert Process([*settings, f"run_dir={tmp_path / 'whole'}"]).end() == 0
    seconds, run_dir = time.monotonic() - begin, tmp_path / "run"
    chance, kills = random.Random(5), 0
    while True:
        process = Process([*settings, f"run_dir={run_dir}"])
        if kills < KILLS:
            time.sleep(chance.uniform(0.2, 1) * seconds)
            process.send(signal.SIGKILL)
        if process.end() == -signal.SIGKILL:
            kills += 1
            continue
        assert process.process.returncode == 0, process.output
        assert differences(run_dir, tmp_path / "whole") == []
        if kills >= KILLS:
            break
        shutil.rmtree(run_dir)
    print(f"{kills} kills")
