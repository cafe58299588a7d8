"""benchmarks/gpu.sh --cpu tries each part of the checks and measurements for GPUs, and prints rows for each."""

import os
import re
import subprocess
import sys

import pytest

from harness import ROOT

SCRIPT = ROOT / "benchmarks/gpu.sh"


@pytest.mark.slow
def test_each_part_prints_rows_on_a_cpu(tmp_path):
    """Rows are printed and stored. No part fails. Only the folder of the results is left."""
    out = tmp_path / "out"
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    variables = {"OUT": str(out), "TMPDIR": str(temporary), "PYTHON": sys.executable}
    command = ["bash", str(SCRIPT), "--cpu"]
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    assert done.stdout == (out / "rows.tsv").read_text(encoding="utf-8")
    rows = [line.split("\t") for line in done.stdout.splitlines()]
    assert [row for row in rows if len(row) != 3 or "failed" in row[2]] == []
    parts = re.findall(r"(\w+):\d+", SCRIPT.read_text(encoding="utf-8"))
    assert len(parts) == 14 and {part for part, _, _ in rows} == {"machine", *parts, "cpu"}
    resumed = [figure for part, _, figure in rows if part == "resume" and "left out" not in figure]
    assert resumed == ["last.ckpt: equal bit for bit"] * 6
    assert list(temporary.iterdir()) == []
    assert {file.name for file in out.iterdir()} == {"rows.tsv", "cpu.log"}
