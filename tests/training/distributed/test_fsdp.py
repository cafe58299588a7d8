"""trainer.strategy=fsdp: what it computes is what DDP computes, and what it saves is what everybody else saves."""

import os
import shutil
from pathlib import Path

import pytest
import torch

from gpt import load
from gpt.exchange import checkpoint
from harness import ROOT, differences, flatten, read_table, refusal, tiny_config, train_apart

STEPS = 22
# 13 rows of an embedding, 37 channels and 3 layers do not divide by the number of processes.
SETTINGS = [
    "model.context_length=13",
    "model.d_model=37",
    "model.num_layers=3",
    "model.num_heads=1",
    "trainer.device=cpu",
    "trainer.devices=2",
    "trainer.precision=fp32",
    "trainer.tokens_per_step=78",
    "trainer.micro_batch_size=1",
    "trainer.log_every=1",
    "trainer.validate_every=5",
    "trainer.checkpoint_every=11",
    "tokenizer=byte",
    "data=text",
    "data.validation_bytes=403",
    "optim=adamw",
    "optim.warmup_steps=3",
    f"horizon={STEPS}steps",
    "model.dropout=0.1",
]


def places(folder: Path, name: str) -> list[str]:
    return [f"data.path={folder / 'corpus.txt'}", f"data.cache={folder / 'cache'}", f"run_dir={folder / name}"]


def run(folder: Path, name: str, *changes: str) -> Path:
    """A training of two processes in `folder`, and where it has written."""
    assert train_apart(*SETTINGS, *places(folder, name), *changes).stderr == ""
    return folder / name


@pytest.fixture(scope="module")
def replicated(corpus_folder: Path) -> Path:
    return run(corpus_folder, "ddp")


@pytest.fixture(scope="module")
def sharded(corpus_folder: Path) -> Path:
    return run(corpus_folder, "fsdp", "trainer.strategy=fsdp", "trainer.keep_every=11")


def curve(run_dir: Path, tag: str) -> list[float]:
    return [value for _, value in read_table(run_dir)[tag]]


@pytest.mark.slow
def test_learns_as_without_sharding(replicated, sharded):
    for tag, points in {"train/loss": STEPS, "train/grad_norm": STEPS, "val/loss": 5}.items():
        whole, parts = curve(replicated, tag), curve(sharded, tag)
        assert len(whole) == len(parts) == points
        assert parts == pytest.approx(whole, rel=0, abs=1e-5)
    assert curve(sharded, "val/loss")[-1] < curve(sharded, "val/loss")[0] - 0.1
    assert (sharded / "samples.md").read_bytes() == (replicated / "samples.md").read_bytes()


@pytest.mark.slow
def test_saves_the_same_whole_files(replicated, sharded):
    names = ("best", "last", "previous")
    assert {file.stem for file in (sharded / "checkpoints").iterdir()} == {*names, "step-00000011", "step-00000022"}
    for name in names:
        loaded = [flatten(checkpoint.load(run / f"checkpoints/{name}.ckpt")) for run in (replicated, sharded)]
        whole, parts = ({key: one[key] for key in one if "Journal" not in key} for one in loaded)  # names of files
        assert list(parts) == list(whole)
        assert parts[".step"] == whole[".step"]
        for key in whole:
            assert type(parts[key]) is type(whole[key]), key
            if isinstance(whole[key], torch.Tensor):
                assert parts[key].shape == whole[key].shape
                assert parts[key].dtype == whole[key].dtype
                if ".W_qkv.bias" not in key and ".state_dict" in key:  # keys' biases have no gradient but rounding
                    torch.testing.assert_close(parts[key], whole[key], rtol=0, atol=1e-5)


@pytest.mark.slow
def test_a_checkpoint_is_sampled_without_sharding(replicated, sharded):
    texts = [
        load(str(run_dir)).generate("alpha ", max_new_tokens=29, temperature=0) for run_dir in (replicated, sharded)
    ]
    assert texts[0] == texts[1]
    assert len(texts[0]) > 0


@pytest.mark.slow
def test_a_resumed_run_equals_an_uninterrupted_one(corpus_folder, sharded):
    shutil.copytree(sharded, corpus_folder / "resumed")
    checkpoints = corpus_folder / "resumed/checkpoints"
    (checkpoints / "step-00000011.ckpt").rename(checkpoints / "first")
    for file in checkpoints.glob("*.ckpt"):
        file.unlink()
    (checkpoints / "first").rename(checkpoints / "last.ckpt")
    done = train_apart(f"resume={corpus_folder / 'resumed'}")
    assert "at step 11 of 22" in done.stdout
    assert differences(corpus_folder / "resumed", sharded) == []


@pytest.mark.slow
def test_starts_from_weights_that_only_rank_0_has_read(corpus_folder, replicated):
    settings = ["trainer.strategy=fsdp", "horizon=1steps", "trainer.activation_checkpointing=true"]
    shape = ("model.context_length", "model.d_model", "model.num_layers", "model.num_heads", "tokenizer=")
    left_out = [s for s in SETTINGS if not s.startswith(shape)]
    train_apart(*left_out, *places(corpus_folder, "tuned"), *settings, f"init_from={replicated}", "optim.lr=1e-9")
    assert curve(corpus_folder / "tuned", "val/loss")[-1] == pytest.approx(curve(replicated, "val/loss")[-1], abs=1e-5)


BREAKS_A_WEIGHT = """
import torch
from lightning import Callback

class Broken(Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.global_step == 5 and trainer.global_rank == 1:
            with torch.no_grad():
                module.model.token_embedding.weight.to_local()[0, 0] = torch.nan
"""


@pytest.mark.slow
def test_all_ranks_see_a_weight_that_is_broken_on_one(corpus_folder, monkeypatch):
    (corpus_folder / "breaks_a_weight.py").write_text(BREAKS_A_WEIGHT, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{corpus_folder}")
    changes = [*places(corpus_folder, "broken"), "trainer.strategy=fsdp", 'callbacks=["breaks_a_weight:Broken"]']
    done = train_apart(*SETTINGS, *changes, code=3)
    assert "step 5: the update has left weights that are not finite (token_embedding.weight)" in done.stderr
    assert not list((corpus_folder / "broken").glob("checkpoints/*.ckpt"))


def test_muon_cannot_be_sharded(tmp_path):
    changes = ["trainer.strategy=fsdp", "optim=muon", "trainer.devices=2"]
    assert "muon needs whole ones: add optim=adamw" in refusal(tiny_config, tmp_path, *changes)
