"""Files of a stopped run are changed, damaged or missing. The run continues bit for bit, or one line has the reason."""

from pathlib import Path

import pytest

from gpt.checkpoint import load_checkpoint
from harness import contents, differences, flip_a_bit, train, train_refusal

RUN = ["horizon=23steps"]
STOP = 13


def test_harmless_changes_do_not_matter(run_copy, reference):
    """Files of the user, what a kill left half written, and files that a run can do without."""
    users = [run_copy / "events.out.tfevents.backup", run_copy / "notes.txt"]
    for file in users:
        file.write_text("mine")
    (run_copy / "metrics.json").unlink()
    (run_copy / ".lock").unlink()
    (run_copy / "checkpoints/.last.ckpt.77").write_bytes(b"PK")
    (run_copy / "checkpoints/mine").mkdir()
    assert train(f"resume={run_copy}").stderr == ""
    assert differences(run_copy, reference) == []
    assert [file.read_text() for file in users] == ["mine", "mine"]


@pytest.mark.promise("runs.md#*.damaged", "runs.md#the intact checkpoint with the greatest step")
@pytest.mark.parametrize("damage", [Path.unlink, lambda file: file.write_text("")], ids=["deleted", "emptied"])
def test_damaged_checkpoint_and_lost_logs_change_no_weights(run_copy, reference, damage):
    """The run goes back to an older checkpoint, and names the logs. It ends with the weights of the reference."""
    damage(run_copy / "samples.md")
    for file in run_copy.glob("events.*"):
        file.unlink()
    flip_a_bit(run_copy / "checkpoints/last.ckpt")
    damaged, incomplete = train(f"resume={run_copy}").stderr.splitlines()
    assert "last.ckpt: damaged" in damaged and "resuming from" in damaged
    assert "the checkpoint is newer than " in incomplete and "samples.md" in incomplete
    lines = differences(run_copy, reference)
    assert [line for line in lines if not line.startswith(("curve", "samples"))] == []
    assert (run_copy / "checkpoints/last.ckpt.damaged").exists()


@pytest.mark.promise("runs.md#the intact checkpoint with the greatest step")
def test_going_back_is_refused(run_copy):
    """Resuming an older checkpoint of a run would undo the steps after it."""
    newest = load_checkpoint(run_copy / "checkpoints/last.ckpt")["step"]
    before = contents(run_copy)
    line = train_refusal(f"resume={run_copy}/checkpoints/previous.ckpt")
    assert f"and the run has trained until step {newest}: continue it with resume={run_copy}" in line
    assert f"init_from={run_copy}/checkpoints/previous.ckpt" in line
    assert contents(run_copy) == before
