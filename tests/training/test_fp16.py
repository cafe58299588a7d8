"""Training in fp16: an overflow skips its step and nothing else, and a run resumes after it bit for bit."""

import functools
import json
import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from gpt.api import read_curves
from gpt.checkpoint import load_checkpoint
from gpt.errors import NonFiniteError
from gpt.training.module import GPTModule
from harness import TINY_RUN, StopAt, begin_run, differences, fit, flatten, tiny_config, train, train_on_ranks

FP16 = "trainer.precision=fp16"
FIRST_SCALE = 2.0**22  # every gradient here overflows at this scale
GROWTH = 3  # the scale doubles after this many steps without an overflow


@pytest.fixture(scope="module")
def folder(corpus_folder) -> Path:
    """Return a folder with a corpus and `reference`, an fp16 run of 17 steps with many overflows."""
    with pytest.MonkeyPatch.context() as patch:
        overflow_often(patch)
        fit(begin_run(tiny_config(corpus_folder, FP16, "horizon=17steps", f"run_dir={corpus_folder / 'reference'}")))
    return corpus_folder


@pytest.fixture
def overflowing(monkeypatch) -> None:
    overflow_often(monkeypatch)


def overflow_often(patch: pytest.MonkeyPatch) -> None:
    scaler = functools.partial(torch.amp.GradScaler, init_scale=FIRST_SCALE, growth_interval=GROWTH)
    patch.setattr(torch.amp, "GradScaler", scaler)


def read_steps(run_dir: Path) -> list[dict]:
    """Return the checkpoints of a run that kept all of them."""
    return [load_checkpoint(file) for file in sorted(run_dir.glob("checkpoints/step-*.ckpt"))]


def tensors_of(step: dict) -> list[torch.Tensor]:
    """Return the weights and the state of the optimizer, with its counts of steps."""
    leaves = flatten([step["state_dict"], step["optimizer"]])
    return [torch.as_tensor(leaf) for leaf in leaves.values() if isinstance(leaf, torch.Tensor | int)]


def test_overflow_skips_the_step(folder, tmp_path, overflowing, monkeypatch):
    """Weights and optimizer do not change, and the scale is halved. Sequences and learning rates are as in fp32."""
    sequences: list[torch.Tensor] = []
    loss = GPTModule.loss

    def watched(self, idx, targets):
        sequences.append(idx)
        return loss(self, idx, targets)

    monkeypatch.setattr(GPTModule, "loss", watched)
    for precision in ("fp16", "fp32"):
        settings = ["horizon=13steps", "trainer.log_every=1", "trainer.keep_every=1", f"trainer.precision={precision}"]
        fit(begin_run(tiny_config(folder, *settings, f"run_dir={tmp_path / precision}")))
    assert len(sequences) == 2 * 13 * 2
    assert all(map(torch.equal, sequences[:26], sequences[26:]))

    steps = read_steps(tmp_path / "fp16")
    totals = [step["state"]["skipped_steps"] for step in steps]
    scales = [step["state"]["loss_scale"]["scale"] for step in steps]
    skipped = [total > before for before, total in pairwise([0, *totals])]
    assert {weight.dtype for weight in steps[-1]["state_dict"].values()} == {torch.float32}
    assert len(steps) == 13 and skipped[0] and {True, False} == set(skipped[1:])
    num_clean = 0
    for i in range(1, 13):
        num_clean = 0 if skipped[i] else num_clean + 1
        is_same = all(map(torch.equal, tensors_of(steps[i]), tensors_of(steps[i - 1])))
        assert is_same == skipped[i]
        assert scales[i] == scales[i - 1] * (0.5 if skipped[i] else 2.0 if num_clean % GROWTH == 0 else 1.0)

    curves, in_fp32 = read_curves(tmp_path / "fp16"), read_curves(tmp_path / "fp32")
    for tag in ("train/lr", "train/matrix_lr"):
        assert curves[tag] == in_fp32[tag]
    assert json.loads((tmp_path / "fp16/metrics.json").read_text())["steps"] == 13
    assert curves["train/skipped_steps"] == list(enumerate(totals, 1))
    assert curves["train/loss_scale"] == list(enumerate(scales, 1))
    updates = [step for step, is_skipped in enumerate(skipped, 1) if not is_skipped]
    assert [step for step, _ in curves["weights/update_ratio/layer_1"]] == updates
    assert [step for step, _ in in_fp32["weights/update_ratio/layer_1"]] == list(range(1, 14))
    assert [step for step, _ in curves["train/loss"]] == updates  # no loss of a step that was skipped
    assert "train/loss_scale" not in in_fp32


@pytest.mark.slow
def test_learns_as_well(folder, tmp_path):
    """Without overflows, the losses are within 0.1% of fp32, closer than bf16."""
    losses = {}
    for precision in ("fp32", "bf16", "fp16"):
        run_dir = tmp_path / precision
        settings = (
            "horizon=41steps",
            "optim=adamw",
            "optim.lr=0.006",
            f"trainer.precision={precision}",
            f"run_dir={run_dir}",
        )
        fit(begin_run(tiny_config(folder, *settings)))
        losses[precision] = torch.tensor([value for _, value in read_curves(run_dir)["train/loss"]])
    assert dict(read_curves(tmp_path / "fp16")["train/skipped_steps"])[41] == 0
    worst = {name: (loss / losses["fp32"] - 1).abs().max() for name, loss in losses.items()}
    assert 0 < worst["fp16"] < 1e-3
    assert worst["fp16"] < worst["bf16"]


@pytest.mark.parametrize("step", [3, pytest.param(16, marks=pytest.mark.slow)])
def test_a_run_that_stopped_among_skipped_steps_resumes_bit_for_bit(folder, tmp_path, overflowing, step):
    """Weights, scale, curves and samples equal those of an uninterrupted run."""
    config = tiny_config(folder, FP16, "horizon=17steps", f"run_dir={tmp_path / 'run'}")
    fit(begin_run(config), [StopAt(step)])
    train(f"resume={tmp_path / 'run'}")
    assert differences(tmp_path / "run", folder / "reference") == []
    state = load_checkpoint(folder / "reference/checkpoints/last.ckpt")["state"]
    assert 1 < state["loss_scale"]["scale"] < FIRST_SCALE
    assert state["skipped_steps"] > 5


@pytest.mark.promise("runs.md#fp16")
def test_gradient_that_stays_broken(folder, tmp_path, monkeypatch):
    """When the scale has fallen to 1, the run ends. The last good checkpoint does not change."""
    training_step = GPTModule.training_step

    def broken(self, batch, batch_idx):
        is_broken = batch_idx >= 12 * self.config.accumulation_steps
        return training_step(self, batch, batch_idx) * (math.nan if is_broken else 1.0)

    monkeypatch.setattr(GPTModule, "training_step", broken)
    config = tiny_config(folder, FP16, "horizon=61steps", f"run_dir={tmp_path / 'run'}")
    last_words = r"step 29: the gradient is not finite.*\n.*\n  at a loss scale of 1, with 16 steps skipped so far"
    with pytest.raises(NonFiniteError, match=last_words):
        fit(begin_run(config))
    last = load_checkpoint(tmp_path / "run/checkpoints/last.ckpt")
    assert (last["step"], last["state"]["loss_scale"]["scale"]) == (22, 2.0**6)


@pytest.mark.slow
def test_several_processes(folder, tmp_path):
    """All ranks skip the same steps: two processes train as one does."""
    settings = [FP16, "horizon=17steps", "model.context_length=3", "trainer.tokens_per_step=6"]
    settings += ["trainer.micro_batch_size=1", "model.dropout=0", "optim=adamw", "trainer.log_every=1"]
    settings += ["trainer.short_sequences=0", f"data.path={folder / 'corpus.txt'}", f"data.cache={folder / 'cache'}"]
    train(*TINY_RUN, *settings, f"run_dir={tmp_path / '1'}")
    train_on_ranks(2, *TINY_RUN, *settings, f"run_dir={tmp_path / '2'}")
    alone, shared = (read_curves(tmp_path / name) for name in "12")
    assert alone["train/skipped_steps"] == shared["train/skipped_steps"]
    assert 0 < dict(alone["train/skipped_steps"])[17] < 15
    assert dict(shared["train/loss"]) == pytest.approx(dict(alone["train/loss"]), rel=1e-3)
