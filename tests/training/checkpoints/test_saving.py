"""Checkpoints that are kept on the way."""

import torch

from gpt.exchange import checkpoint
from gpt.exchange.loading import open_model
from gpt.training import decide
from harness import StopAt, tiny_config


def test_kept_checkpoints(corpus_folder, tmp_path, capfd):
    """Every fifth is kept under its own name, also over an interruption; it opens, and resuming takes the newest."""
    run_dir = tmp_path / "run"
    changes = ["horizon=13steps", "trainer.keep_every=5", "data.prompts=[]", "logger=[]"]
    session = decide.begin(tiny_config(corpus_folder, *changes, f"run_dir={run_dir}"))
    session.fit([StopAt(7)])
    fifth = run_dir / "checkpoints/step-00000005.ckpt"
    before = fifth.read_bytes()
    resumed = decide.resume(str(run_dir))
    assert "continuing" in capfd.readouterr().out
    resumed.fit()
    kept = sorted(run_dir.glob("checkpoints/step-*"))
    assert [file.name for file in kept] == ["step-00000005.ckpt", "step-00000010.ckpt"]
    assert [checkpoint.load(file)["step"] for file in kept] == [5, 10]
    assert fifth.read_bytes() == before
    weights = checkpoint.load(fifth)["state_dict"]
    model = open_model(str(fifth))[0]
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
