"""`trainer.compile=true` on a CPU: a run stops and resumes bit for bit, and learns as without it."""

import shutil

import pytest
import torch

from gpt.exchange import checkpoint
from gpt.training import decide
from gpt.training.session import Session
from harness import StopAt, differences, tiny_config, train, write_corpus

COMPILER = any(map(shutil.which, ("c++", "g++", "clang++")))


@pytest.mark.slow
@pytest.mark.skipif(not COMPILER, reason="SKIPPED LOUDLY: there is no C++ compiler to compile a training with")
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # PyTorch's own, within its compiler
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.filterwarnings("ignore:.*autograd.function.Function.*should not be instantiated:DeprecationWarning")
def test_resumes_exactly(tmp_path):
    """With dropout, two micro-batches a step and checkpointed activations; the state dict has the plain names."""
    write_corpus(tmp_path)

    def begin(name: str, compile: str, *changes: str) -> Session:
        changes += ("trainer.activation_checkpointing=true", f"trainer.compile={compile}", "horizon=9steps")
        torch.compiler.reset()  # as if in a process of its own
        return decide.begin(tiny_config(tmp_path, *changes, f"run_dir={tmp_path / name}"))

    begin("plain", "false").fit()
    begin("reference", "true").fit()
    begin("stopped", "true").fit([StopAt(4)])
    assert checkpoint.load(tmp_path / "stopped/checkpoints/last.ckpt")["step"] == 4
    torch.compiler.reset()
    assert train(f"resume={tmp_path / 'stopped'}").returncode == 0
    assert differences(tmp_path / "stopped", tmp_path / "reference") == []
    plain, compiled = (checkpoint.load(tmp_path / name / "checkpoints/last.ckpt") for name in ("plain", "reference"))
    assert list(plain["state_dict"]) == list(compiled["state_dict"])
    losses = [payload["callbacks"]["Validation"]["best_loss"] for payload in (plain, compiled)]
    assert losses[1] == pytest.approx(losses[0], rel=0.01)  # the masks of dropout are others
    assert losses[1] != losses[0]
