"""benchmarks/check_machine.py trains, resumes and samples, and prints a row for each."""

import subprocess
import sys

import pytest

from harness import ROOT

SMALL = (
    "model.d_model=32",
    "model.num_heads=2",
    "model.num_layers=1",
    "model.context_length=64",
    "trainer.tokens_per_step=128",
    "trainer.device=cpu",
    "data=text",
    "data.path=README.md",
    "data.validation_bytes=2000",
)


@pytest.mark.slow
def test_the_report_has_a_row_for_each_check():
    command = [sys.executable, str(ROOT / "benchmarks/check_machine.py"), *SMALL]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    assert set(rows) - {"GPU"} == {"system", "processor", "versions", "training", "speed", "loss", "resume", "sampling"}
    assert rows["training"].startswith("cpu in ")
    assert rows["resume"] == "the same weights bit for bit"
    assert rows["sampling"].startswith("the same text twice")


@pytest.mark.slow
def test_a_training_that_fails_is_reported():
    command = [sys.executable, str(ROOT / "benchmarks/check_machine.py"), "model.num_heads=3"]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", timeout=300)
    assert done.returncode == 1
    assert "exit code 2" in done.stdout
    assert "num_heads" in done.stderr
