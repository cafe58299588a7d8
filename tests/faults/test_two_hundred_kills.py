"""The long run: pytest -m faults. GPT_KILLS says how many times to kill (200)."""

import os
import random
import signal
import time
from pathlib import Path

import pytest

from harness import TINY, Process, differences, train, write_corpus

KILLS = int(os.environ.get("GPT_KILLS", "200"))
VARIANTS = {
    "Muon, bf16, dropout": [],
    "AdamW, fp32, dropout": ["optim=adamw", "trainer.precision=fp32"],
    "AdamW, bf16, no accumulation": ["optim=adamw", "trainer.precision=bf16", "trainer.micro_batch_size=6"],
    "Muon, fp32, epochs": ["trainer.precision=fp32", "horizon=5epochs", "trainer.micro_batch_size=2"],
}


def kill_at_random(process: Process, run_dir: Path, chance: random.Random) -> bool:
    """SIGKILL at a random moment, one time in three in the middle of a save; False where the run ended first."""
    if process.wait_for("writing to"):
        deadline = time.monotonic() + chance.uniform(0.0, 2.5)
        saving = chance.random() < 1 / 3
        while time.monotonic() < deadline + 5 * saving and process.process.poll() is None:
            if saving and any(run_dir.glob("checkpoints/.*.ckpt.*")):
                break
            time.sleep(0.0005)
    process.send(signal.SIGKILL)
    return process.end() == -signal.SIGKILL


@pytest.mark.faults
def test_killed_at_random(tmp_path, capsys):
    """Whatever the moments, each run ends equal to its reference in every bit, and in its whole loss log."""
    chance = random.Random(2026)
    corpus = [f"data.path={write_corpus(tmp_path)}", f"data.cache={tmp_path / 'cache'}"]
    settings = {name: [*TINY, "horizon=101steps", *corpus, *changes] for name, changes in VARIANTS.items()}
    references = {}
    for i, (name, arguments) in enumerate(settings.items()):
        references[name] = tmp_path / f"reference{i}"
        assert train(*arguments, f"run_dir={references[name]}").returncode == 0
    kills = resumes = runs = in_saves = 0
    while kills < KILLS:
        name = list(VARIANTS)[runs % len(VARIANTS)]
        run_dir = tmp_path / f"run{runs}"
        runs += 1
        elsewhere = {"TMPDIR": "/dev/shm"} if Path("/dev/shm").is_dir() else {}
        process = Process([*settings[name], f"run_dir={run_dir}"], elsewhere)
        while kill_at_random(process, run_dir, chance):
            kills += 1
            in_saves += any(run_dir.glob("checkpoints/.*.ckpt.*"))
            if kills >= KILLS:
                done = train(f"resume={run_dir}")
                assert done.returncode == 0, done.stderr
                resumes += 1
                break
            assert (run_dir / "config.yaml").exists()
            process = Process([f"resume={run_dir}"], elsewhere)
            resumes += 1
        else:
            assert process.process.returncode == 0, process.output
        assert differences(run_dir, references[name]) == []
    with capsys.disabled():
        print(f"\n{kills} kills ({in_saves} in the middle of a save), {resumes} resumes, {runs} runs: 0 bytes lost")
