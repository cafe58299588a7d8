"""The content of a run's checkpoints."""

import subprocess
from dataclasses import asdict

import torch

from gpt.checkpoint import load_checkpoint
from gpt.training.versions import code_version, git_commit, versions


def test_best_and_last_checkpoints(trained):
    """best.ckpt has the best step and last.ckpt the last. If these are equal, both are one file."""
    folder, metrics = trained.path / "checkpoints", trained.metrics
    assert load_checkpoint(folder / "best.ckpt")["step"] == metrics["best_step"]
    assert load_checkpoint(folder / "last.ckpt")["step"] == 13
    assert load_checkpoint(folder / "previous.ckpt")["step"] == 11
    assert (folder / "best.ckpt").samefile(folder / "last.ckpt") == (metrics["best_step"] == 13)


def test_checkpoints_record_their_origin(trained):
    """Each checkpoint has versions, commit, threads, schedule and configuration as plain types."""
    stored = load_checkpoint(trained.path / "checkpoints/best.ckpt")
    assert stored["versions"] == versions()
    assert stored["git_commit"] == code_version()
    assert stored["state"]["commits"] == {"0": code_version()}
    assert stored["threads"] == torch.get_num_threads()
    assert stored["schedule"] == asdict(trained.spec.schedule)
    assert stored["config"] == asdict(trained.config)


def test_git_commit(tmp_path):
    """The commit of a checkout is found; outside one there is none."""
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    outside.mkdir()
    assert git_commit(outside) is None
    assert git_commit(tmp_path / "nowhere") is None
    identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", "init", "-q", inside], check=True)
    subprocess.run(["git", *identity, "-C", inside, "commit", "-q", "--allow-empty", "-m", "a"], check=True)
    head = (inside / ".git" / (inside / ".git/HEAD").read_text().split()[1]).read_text().strip()
    assert git_commit(inside) == head
    (inside / "code.py").touch()
    assert git_commit(inside) == head
    subprocess.run(["git", "-C", inside, "add", "code.py"], check=True)
    assert git_commit(inside) == f"{head}-dirty"
