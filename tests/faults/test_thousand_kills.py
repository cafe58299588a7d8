"""A thousand kills: pytest -m faults. The environment variable GPT_KILLS is their number."""

import multiprocessing
import os
import random
import runpy
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from harness import ROOT, differences, tiny_arguments, train

KILLS = int(os.environ.get("GPT_KILLS", "1000"))
TWO = ["trainer.devices=2", "trainer.device=cpu", "trainer.micro_batch_size=3"]
VARIANTS = {  # one in four runs on two processes
    "Muon, bf16, dropout": [],
    "AdamW, fp32, dropout": ["optim=adamw", "trainer.precision=fp32"],
    "Muon, fp32, epochs": ["trainer.precision=fp32", "horizon=5epochs", "trainer.micro_batch_size=2"],
    "Muon, bf16, two processes": TWO,
}
# Processes that have imported everything already, so that a kill does not cost the seconds that imports take.
START = multiprocessing.get_context("forkserver")
START.set_forkserver_preload(["gpt.training.loop", "train"])


def run_train(arguments: list[str], log: Path) -> None:
    """Run train.py in this process, with its output in a file."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.argv = ["train.py", *arguments]
    os.chdir(ROOT)
    runpy.run_path("train.py", run_name="__main__")


class Training:
    """A training in a process of its own, which a test kills."""

    def __init__(self, arguments: list[str], log: Path):
        self.log, self.begin = log, log.stat().st_size if log.exists() else 0
        self.process = START.Process(target=run_train, args=(arguments, log))
        self.process.start()

    def output(self) -> str:
        return self.log.read_text()[self.begin :] if self.log.exists() else ""

    def wait_for(self, text: str) -> None:
        """Wait until the output has `text`, or the process has ended."""
        while text not in self.output() and self.process.is_alive():
            time.sleep(0.005)

    def all_processes(self) -> list[psutil.Process]:
        """Return the process that was started, and the ranks if it has started any."""
        try:
            starter = psutil.Process(self.process.pid)
            return [starter, *(p for p in starter.children() if "resource_tracker" not in " ".join(p.cmdline()))]
        except psutil.NoSuchProcess:
            return []


def kill_at_random(training: Training, run_dir: Path, chance: random.Random, seconds: float) -> str:
    """Kill one process or all within some seconds, one time in three in a save. Return what was killed, if anything."""
    training.wait_for("writing to")
    deadline = time.monotonic() + chance.uniform(0.0, seconds)
    saving = chance.random() < 1 / 3
    while time.monotonic() < deadline + 5 * saving and training.process.is_alive():
        if saving and any(run_dir.glob("checkpoints/.*.ckpt.*")):
            break
        time.sleep(0.0005)
    processes = training.all_processes()
    for victim in chance.choice([processes, *([one] for one in processes)]):
        victim.kill()
    _, orphans = psutil.wait_procs(processes, timeout=30)
    assert not orphans, f"still running 30 s after a kill: {orphans}"
    training.process.join()
    code = training.process.exitcode
    if code == 0:
        return ""
    assert code in (-signal.SIGKILL, 1), training.output()
    assert code < 0 or "died; all others were ended" in training.output()
    return "the starter" if code < 0 else "a rank"


@pytest.mark.promise("runs.md#continues bit for bit")
@pytest.mark.faults
def test_run_killed_at_random_ends_as_its_reference(corpus_folder, tmp_path, capsys):
    """Each run is equal to its reference in every bit and in every point of its curves."""
    chance = random.Random(2026)
    settings = {name: tiny_arguments(corpus_folder, "horizon=101steps", *more) for name, more in VARIANTS.items()}
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
        training = Training([*settings[name], f"run_dir={run_dir}"], tmp_path / f"log{runs}")
        seconds = 3.0 if name.endswith("processes") else 0.8
        while what := kill_at_random(training, run_dir, chance, seconds):
            seconds *= 1.05  # so that a run ends, however slow the machine is
            counts[what] += 1
            killed[name] += 1
            in_saves += any(run_dir.glob("checkpoints/.*.ckpt.*"))
            training = Training([f"resume={run_dir}"], tmp_path / f"log{runs}")
        assert training.process.exitcode == 0, training.output()
        assert differences(run_dir, references[name]) == []
        with capsys.disabled():
            total = sum(killed.values())
            print(f"\n{total} kills {counts}, {in_saves} in a save, {runs} runs: 0 bytes lost", end="")
