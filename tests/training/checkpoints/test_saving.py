"""Checkpoints that are kept on the way."""

import shutil

import torch

from gpt.exchange import checkpoint
from gpt.exchange.loading import open_model
from harness import StopAt, begin_run, differences, fit, resume_run, tiny_config


def test_kept_checkpoints(corpus_folder, tmp_path, capfd):
    """Every fifth is kept under its own name, also over an interruption; it opens, and resuming takes the newest."""
    run_dir = tmp_path / "run"
    changes = ["horizon=13steps", "trainer.keep_every=5", "data.prompts=[]", "logger=[]"]
    session = begin_run(tiny_config(corpus_folder, *changes, f"run_dir={run_dir}"))
    fit(session, [StopAt(7)])
    fifth = run_dir / "checkpoints/step-00000005.ckpt"
    before = fifth.read_bytes()
    resumed = resume_run(str(run_dir))
    assert "continuing" in capfd.readouterr().out
    fit(resumed)
    kept = sorted(run_dir.glob("checkpoints/step-*"))
    assert [file.name for file in kept] == ["step-00000005.ckpt", "step-00000010.ckpt"]
    assert [checkpoint.load(file)["step"] for file in kept] == [5, 10]
    assert fifth.read_bytes() == before
    weights = checkpoint.load(fifth)["state_dict"]
    model = open_model(str(fifth))[0]
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


def test_newest_is_not_the_last(corpus_folder, tmp_path):
    """As where a kill came between the best of a run and its last, and where only a kept one is there."""
    run_dir, kept = tmp_path / "run", tmp_path / "run/checkpoints/step-00000005.ckpt"
    changes = ["horizon=5steps", "trainer.keep_every=5", "trainer.checkpoint_every=3", "data.prompts=[]"]
    fit(begin_run(tiny_config(corpus_folder, *changes, f"run_dir={run_dir}")))
    last, previous, best = (run_dir / f"checkpoints/{name}.ckpt" for name in ("last", "previous", "best"))
    assert [checkpoint.step_of(file) for file in (previous, best, last)] == [3, 5, 5]
    shutil.copytree(run_dir, copied := tmp_path / "copied")
    previous.replace(last)
    kept.unlink()
    fit(resume_run(run_dir, "7steps"))
    assert [checkpoint.load(file)["step"] for file in (kept, last)] == [5, 7]
    for name in ("last", "previous", "best"):
        (copied / f"checkpoints/{name}.ckpt").unlink()
    fit(resume_run(copied / "checkpoints" / kept.name, "7steps"))
    assert differences(copied, run_dir) == []
