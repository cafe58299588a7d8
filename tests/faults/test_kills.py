"""Real processes are killed, stopped or suspended. Their runs end like an undisturbed run."""

import json
import signal
import time
from pathlib import Path

import psutil
import pytest

from harness import (
    SAMPLES,
    Process,
    differences,
    train,
    train_refusal,
    wait_for_file,
)

RUN = ["horizon=101steps", SAMPLES]
STOP = 29


def start(arguments: list[str], file: Path, env: dict[str, str] | None = None) -> Process:
    """Start a training, and wait until it has written a file."""
    process = Process(arguments, env)
    wait_for_file(file)
    return process


@pytest.mark.promise("runs.md#continues bit for bit", "runs.md#Weights, optimizer, curves, samples")
@pytest.mark.promise("runs.md#a horizon in steps, tokens or epochs", "runs.md#exit code is 128")
@pytest.mark.slow
def test_run_that_is_stopped_and_killed_again_and_again_ends_as_the_reference(settings, reference, tmp_path):
    """It gets SIGTERM, SIGINT once and twice, and SIGKILL during a save."""
    run_dir, folder = tmp_path / "run", tmp_path / "run" / "checkpoints"
    process = start([*settings, f"run_dir={run_dir}"], folder / "last.ckpt", {"TMPDIR": "/dev/shm"})
    process.send(signal.SIGTERM)
    assert process.end() == 143
    assert f"continue with: python train.py resume={run_dir}" in process.output

    resume = [f"resume={run_dir}"]
    for times in (1, 2):
        process = Process(resume)
        assert process.wait_for("/101  train")  # the line of a validation
        for _ in range(times):
            process.send(signal.SIGINT)
            assert process.wait_for("stopping after this step") or times == 2
        assert process.end() == 130
        assert "Traceback" not in process.output

    process = Process(resume)
    assert process.wait_for("writing to")
    deadline = time.monotonic() + 30
    while not list(folder.glob(".*.ckpt.*")) and time.monotonic() < deadline:
        pass
    process.send(signal.SIGKILL)
    assert process.end() == -signal.SIGKILL

    done = train(*resume)
    assert not list(folder.glob(".*.ckpt.*"))
    assert differences(run_dir, reference) == []
    done = train(*resume)
    assert done.stderr == ""
    assert "is complete" in done.stdout


@pytest.mark.promise("runs.md#on CPUs")
@pytest.mark.slow
def test_run_killed_before_its_first_checkpoint_starts_again(settings, reference, tmp_path):
    """It needs only its configuration."""
    run_dir = tmp_path / "run"
    process = start([*settings, f"run_dir={run_dir}"], run_dir / "config.yaml")
    process.send(signal.SIGKILL)
    process.end()
    assert not list(run_dir.glob("checkpoints/*"))
    done = train(f"resume={run_dir}")
    assert "has no checkpoint yet: beginning at its first step" in done.stdout
    assert differences(run_dir, reference) == []


@pytest.mark.promise("runs.md#Weights, optimizer, curves, samples")
@pytest.mark.slow
def test_run_on_a_mixture_continues_bit_for_bit(settings, tmp_path):
    """After a kill, it has the sequences, the BPE-dropout, the validation and the epochs of each corpus."""
    (tmp_path / "more.txt").write_text("".join(f"{i} times {i} is {i * i}. " for i in range(307)))
    path = next(a for a in settings if a.startswith("data.path=")).removeprefix("data.path=")
    mix = [f"data.path=[{path},{tmp_path / 'more.txt'}]", "data.weights=[2,1]", "data=mix", "tokenizer=bpe"]
    arguments = [a for a in settings if not a.startswith(("data.path=", "data=", "tokenizer="))] + mix
    arguments += ["tokenizer.vocab_size=300", "data.bpe_dropout=0.3"]
    train(*arguments, f"run_dir={tmp_path / 'whole'}")
    run_copy = tmp_path / "hurt"
    process = Process([*arguments, f"run_dir={run_copy}"])
    assert process.wait_for("step 17/")
    process.send(signal.SIGKILL)
    assert process.end() == -signal.SIGKILL
    done = train(f"resume={run_copy}")
    assert "continuing" in done.stdout
    assert differences(run_copy, tmp_path / "whole") == []
    assert list(json.loads((run_copy / "metrics.json").read_text())["corpus_epochs"]) == ["corpus", "more"]


@pytest.mark.slow
def test_suspending_changes_only_the_time(settings, reference, tmp_path):
    """Ctrl-Z and fg send these signals."""
    run_dir = tmp_path / "run"
    process = start([*settings, f"run_dir={run_dir}"], run_dir / "checkpoints/last.ckpt")
    process.send(signal.SIGTSTP)
    time.sleep(0.5)
    assert psutil.Process(process.pid).status() == psutil.STATUS_STOPPED
    process.send(signal.SIGCONT)
    assert process.end() == 0, process.output
    assert differences(run_dir, reference) == []


@pytest.mark.promise("runs.md#second process in the same directory")
@pytest.mark.slow
def test_second_process_in_a_directory_is_refused(run_copy):
    """The line has the process id of the first."""
    first = Process([f"resume={run_copy}"])
    assert first.wait_for("continuing")
    assert f"process {first.pid} is training in it" in train_refusal(f"resume={run_copy}")
    first.send(signal.SIGKILL)
    first.end()
