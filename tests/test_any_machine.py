"""The first commands of a user on a machine without Linux and CUDA. any_machine.py lists what it lacks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from any_machine import ENDED
from gpt.errors import UserError
from gpt.training.finalize import require_devices
from harness import ROOT, TINY_RUN, tiny_config

TEXT = "naïve “αβγ” → ∀x 中文 "  # a console in western Europe lacks most of it


def run(*commands: list[str]) -> subprocess.CompletedProcess:
    """Run commands on the other machine."""
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONIOENCODING": "cp1252",
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNDEFAULTENCODING": "1",
    }
    return subprocess.run(
        [sys.executable, ROOT / "tests/any_machine.py", json.dumps(commands)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        encoding="cp1252",
        timeout=300,
    )


def training(folder: Path, *changes: str) -> list[str]:
    """Return the command line of a tiny training on a text in many alphabets."""
    (folder / "text.txt").write_text(TEXT * 97, encoding="utf-8")
    where = [f"data.path={folder / 'text.txt'}", f"data.cache={folder / 'cache'}", f"run_dir={folder / 'run'}"]
    return ["train.py", *TINY_RUN, *where, f"data.prompts=['{TEXT}']", "trainer.validate_every=3", *changes]


def test_strategies_of_several_devices(tmp_path, monkeypatch):
    """Apple's GPUs are single, and not every PyTorch was built for several processes."""
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    with pytest.raises(UserError, match=r"trainer\.strategy=ddp is not for mps, a single device: leave it out"):
        require_devices(tiny_config(tmp_path, "trainer.device=mps", "trainer.strategy=ddp"))
    monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
    for change in ("trainer.devices=2", "trainer.strategy=ddp"):
        with pytest.raises(UserError, match=r"built without torch\.distributed: use one device"):
            require_devices(tiny_config(tmp_path, "trainer.device=cpu", change))
    assert require_devices(tiny_config(tmp_path, "trainer.device=mps")).type == "mps"


@pytest.mark.slow
def test_first_hour(tmp_path):
    """Training, resuming, sampling, evaluating and exporting work without Linux, CUDA and float64."""
    folder, checkpoint = tmp_path / "run", str(tmp_path / "run")
    done = run(
        training(tmp_path, "horizon=3steps", "trainer.keep_every=2"),
        ["train.py", f"resume={folder}", "horizon=4steps"],
        ["generate.py", "--checkpoint", checkpoint, "--prompt", TEXT, "--max-new-tokens", "19", "--json"],
        ["gpt.evaluate", "--checkpoint", checkpoint, "--text", str(tmp_path / "text.txt")],
        ["gpt.export", "--checkpoint", checkpoint, "--to", str(tmp_path / "model.gguf")],
        ["gpt.compare", checkpoint],
    )
    ends = [line for line in done.stdout.splitlines() if ENDED in line]
    assert len(ends) == 6 and all(end.endswith(f"{ENDED} 0") for end in ends), done.stdout + done.stderr
    assert "parameters on mps in fp32" in done.stdout
    answer = done.stdout[done.stdout.index("{\n") : done.stdout.index("\n}\n") + 2]
    assert json.loads(answer)["samples"][0]["prompt"] == TEXT
    names = {file.name for file in (folder / "checkpoints").iterdir()}
    assert names == {
        "best.ckpt",
        "last.ckpt",
        "previous.ckpt",
        "step-00000002.ckpt",
        "step-00000004.ckpt",
        "saved.json",
    }
    assert TEXT in (folder / "samples.md").read_text(encoding="utf-8")
    assert any(b"weights/attention" in file.read_bytes() for file in folder.glob("events.*"))
