"""A thousand kills: pytest -m faults. The environment variable GPT_KILLS is their number."""

import os
import random
import signal
import time
from pathlib import Path

import psutil
import pytest

from harness import SAMPLES, Process, differences, tiny_arguments, train

KILLS = int(os.environ.get("GPT_KILLS", "1000"))
TWO = ["trainer.devices=2", "trainer.device=cpu", "trainer.micro_batch_size=3"]
VARIANTS = {  # one in four runs on two processes
    "Muon, bf16, dropout": [],
    "AdamW, fp32, dropout": ["optim=adamw", "trainer.precision=fp32"],
    "Muon, fp32, epochs": ["trainer.precision=fp32", "horizon=5epochs", "trainer.micro_batch_size=2"],
    "Muon, bf16, two processes": TWO,
}


def all_processes(training: Process) -> list[psutil.Process]:
    """Return the process that was started, and the ranks if it has started any."""
    try:
        starter = psutil.Process(training.pid)
        return [
            starter,
            *(child for child in starter.children() if "resource_tracker" not in " ".join(child.cmdline())),
        ]
    except psutil.NoSuchProcess:
        return []


def kill_at_random(training: Process, run_dir: Path, chance: random.Random, seconds: float) -> str:
    """Kill one process or all of them, one time in three during a save.

    Args:
        training: the process that was started.
        run_dir: its run directory.
        chance: the source of randomness.
        seconds: how long to wait at most before the kill.

    Returns:
        What was killed, or nothing if the training had ended.
    """
    training.wait_for("writing to")
    deadline = time.monotonic() + chance.uniform(0.0, seconds)
    saving = chance.random() < 1 / 3
    while time.monotonic() < deadline + 5 * saving and training.poll() is None:
        if saving and any(run_dir.glob("checkpoints/.*.ckpt.*")):
            break
        time.sleep(0.0005)
    processes = all_processes(training)
    for victim in chance.choice([processes, *([one] for one in processes)]):
        victim.kill()
    _, orphans = psutil.wait_procs(processes, timeout=30)
    assert not orphans, f"still running 30 s after a kill: {orphans}"
    code = training.end()
    if code == 0:
        return ""
    assert code in (-signal.SIGKILL, 1), training.output
    assert code < 0 or "died; all others were ended" in training.output
    return "the starter" if code < 0 else "a rank"


@pytest.mark.promise("runs.md#continues bit for bit")
@pytest.mark.faults
def test_run_killed_at_random_ends_as_its_reference(corpus_folder, tmp_path, capsys):
    """Each run is equal to its reference in every bit and in every point of its curves."""
    chance = random.Random(2026)
    settings = {
        name: tiny_arguments(corpus_folder, "horizon=101steps", SAMPLES, *more) for name, more in VARIANTS.items()
    }
    references = {}
    for i, (name, arguments) in enumerate(settings.items()):
        references[name] = tmp_path / f"reference{i}"
        train(*arguments, f"run_dir={references[name]}")
    counts = dict.fromkeys(("the starter", "a rank"), 0)
    killed = dict.fromkeys(VARIANTS, 0)
    runs = in_saves = 0
    while sum(killed.values()) < KILLS:
        name = min(killed, key=lambda variant: killed[variant])
        run_dir = tmp_path / f"run{runs}"
        runs += 1
        training = Process([*settings[name], f"run_dir={run_dir}"])
        seconds = 3.0 if name.endswith("processes") else 0.8
        while what := kill_at_random(training, run_dir, chance, seconds):
            seconds *= 1.05  # so that a run ends, however slow the machine is
            counts[what] += 1
            killed[name] += 1
            in_saves += any(run_dir.glob("checkpoints/.*.ckpt.*"))
            training = Process([f"resume={run_dir}"])
        assert training.end() == 0, training.output
        assert differences(run_dir, references[name]) == []
        with capsys.disabled():
            total = sum(killed.values())
            print(f"\n{total} kills {counts}, {in_saves} in a save, {runs} runs: 0 bytes lost", end="")
