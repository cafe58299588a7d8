"""GPTModule under a plain lightning.Trainer: the weights of our loop, and Lightning's own callbacks."""

import os
import subprocess
from pathlib import Path

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from gpt.api import read_curves
from gpt.checkpoint import load_checkpoint
from gpt.errors import NonFiniteError
from gpt.training.batch_loader import TrainBatches, ValidationBatches
from gpt.training.module import GPTModule
from gpt.training.request import Request
from gpt.training.start import plan_run
from gpt.training.state import RunSpec
from harness import ROOT, begin_run, fit, python_program, refusal, tiny_arguments, tiny_config, train_on_ranks

pytestmark = [
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec.*"),
]


def make_spec(folder: Path, *changes: str) -> RunSpec:
    return plan_run(Request(tiny_config(folder, "horizon=10steps", *changes)))


def make_trainer(spec: RunSpec, folder: Path, **options) -> lightning.Trainer:
    defaults = {
        "max_steps": spec.schedule.total_steps,
        "accumulate_grad_batches": spec.config.accumulation_steps,
        "accelerator": "cpu",
        "devices": 1,
        "logger": CSVLogger(folder),
        "log_every_n_steps": 1,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    return lightning.Trainer(**defaults | options)


def make_module(spec: RunSpec) -> GPTModule:
    return GPTModule(spec.config, spec.dataset.tokenizer, spec.schedule)


def require_equal_weights(weights: dict, run_dir: Path) -> None:
    expected = load_checkpoint(run_dir / "checkpoints/last.ckpt")["state_dict"]
    assert weights.keys() == expected.keys()
    assert [name for name, value in weights.items() if not torch.equal(value, expected[name])] == []


@pytest.mark.parametrize(
    "changes",
    [
        (),  # dropout, two micro-batches, short sequences
        ("optim=adamw", "optim.clip=0.5", "trainer.micro_batch_size=1", "data.bpe_dropout=0.3", "tokenizer=bpe"),
        ("trainer.precision=bf16", "trainer.micro_batch_size=6", "horizon=700tokens", "trainer.short_sequences=0"),
    ],
)
def test_trainer_gives_the_same_weights(corpus_folder, tmp_path, changes):
    """A Trainer and our loop train the same weights, bit for bit."""
    if "tokenizer=bpe" in changes:
        changes = (*changes, "tokenizer.vocab_size=280")
    training = begin_run(tiny_config(corpus_folder, "horizon=10steps", *changes, f"run_dir={tmp_path / 'run'}"))
    fit(training)
    spec = make_spec(corpus_folder, *changes)
    module = make_module(spec)
    make_trainer(spec, tmp_path).fit(module, TrainBatches(spec))
    require_equal_weights(module.state_dict(), tmp_path / "run")


def test_lightnings_callbacks_work(corpus_folder, tmp_path):
    """LearningRateMonitor logs our schedule, ModelCheckpoint saves, and the validation loss is ours."""
    training = begin_run(
        tiny_config(corpus_folder, "horizon=10steps", f"run_dir={tmp_path / 'run'}", "trainer.log_every=1")
    )
    fit(training)
    spec, folder = make_spec(corpus_folder), tmp_path / "lightning"
    saver = ModelCheckpoint(folder / "checkpoints", monitor="val/loss", save_last=True)
    trainer = make_trainer(
        spec,
        folder,
        enable_checkpointing=True,
        callbacks=[LearningRateMonitor(), saver, EarlyStopping("val/loss", patience=5)],
        val_check_interval=5 * spec.config.accumulation_steps,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
    )
    trainer.fit(make_module(spec), TrainBatches(spec), ValidationBatches(spec))
    assert (folder / "checkpoints/last.ckpt").is_file() and Path(saver.best_model_path).is_file()
    expected = dict(read_curves(tmp_path / "run")["val/loss"])[10]
    assert float(trainer.callback_metrics["val/loss"]) == pytest.approx(expected, rel=1e-5)
    rows = (Path(trainer.logger.log_dir) / "metrics.csv").read_text().splitlines()
    columns = rows[0].split(",")
    lr_columns = [name for name in columns if name.startswith("lr-")]
    assert len(lr_columns) == 3  # matrices, embeddings, vectors
    logged = {float(value) for row in rows[1:] if (value := row.split(",")[columns.index(lr_columns[0])])}
    expected_rates = {value for _, value in read_curves(tmp_path / "run")["train/matrix_lr"]}
    assert sorted(logged) == pytest.approx(sorted(expected_rates), rel=1e-6)


def test_trainer_resumes_exactly(corpus_folder, tmp_path):
    """A run from Lightning's checkpoint of step 5 ends with the same weights."""
    spec = make_spec(corpus_folder, "trainer.short_sequences=0")
    uninterrupted, interrupted, resumed = (make_module(spec) for _ in range(3))
    make_trainer(spec, tmp_path).fit(uninterrupted, TrainBatches(spec))
    trainer = make_trainer(spec, tmp_path, max_steps=5)
    trainer.fit(interrupted, TrainBatches(spec))
    trainer.save_checkpoint(tmp_path / "five.ckpt")
    make_trainer(spec, tmp_path).fit(resumed, TrainBatches(spec), ckpt_path=tmp_path / "five.ckpt", weights_only=True)
    expected = uninterrupted.state_dict()
    assert [name for name, value in resumed.state_dict().items() if not torch.equal(value, expected[name])] == []


@pytest.mark.parametrize("change", ["trainer.precision=fp16", "horizon=3s"])
def test_fp16_and_time_horizons_are_refused(corpus_folder, tmp_path, change):
    """Only our loop trains them. The line has the value and the remedy."""
    spec = make_spec(corpus_folder, "horizon=10steps", change, "data.bpe_dropout=0")
    line = refusal(make_trainer(spec, tmp_path, max_steps=10).fit, make_module(spec), [])
    assert change in line and "fp32 or bf16" in line


def test_a_broken_gradient_ends_a_trainer(corpus_folder, tmp_path):
    """No update is made from a gradient that is not finite."""
    spec = make_spec(corpus_folder)
    module = make_module(spec)
    with torch.no_grad():
        module.model.final_norm.bias[0] = torch.inf
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises(NonFiniteError, match="step 1: the gradient is not finite, so no update was made"):
        make_trainer(spec, tmp_path).fit(module, TrainBatches(spec))
    assert [name for name, value in module.state_dict().items() if not torch.equal(value, weights[name])] == []


TWO_PROCESSES = """
import sys
import lightning
import torch
from gpt.training.batch_loader import TrainBatches
from test_plain_trainer import make_module, make_spec, make_trainer
from pathlib import Path

if __name__ == "__main__":
    folder, corpus = Path(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    spec = make_spec(corpus, "trainer.devices=2", "trainer.device=cpu", "trainer.micro_batch_size=1")
    module = make_module(spec)
    trainer = make_trainer(spec, folder, devices=2, strategy="ddp")
    trainer.fit(module, TrainBatches(spec))
    if trainer.global_rank == 0:
        torch.save(module.state_dict(), folder / "weights.pt")
"""


@pytest.mark.slow
def test_trainer_on_two_processes(corpus_folder, tmp_path):
    """Under DDP, each rank trains on its own micro-batches, and the weights equal those of our loop."""
    two = ("trainer.device=cpu", "trainer.micro_batch_size=1", "horizon=10steps")
    train_on_ranks(2, *tiny_arguments(corpus_folder, *two, f"run_dir={tmp_path / 'run'}"))
    script = tmp_path / "two_processes.py"
    script.write_text(TWO_PROCESSES)
    launcher = [python_program(), "-m", "torch.distributed.run", "--nproc-per-node=2", "--no-python"]
    command = [*launcher, python_program(), str(script), str(tmp_path), str(corpus_folder)]
    paths = f"{ROOT}:{ROOT / 'tests'}:{ROOT / 'tests/training'}"
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=os.environ | {"PYTHONPATH": paths})
    assert done.returncode == 0, done.stderr
    require_equal_weights(torch.load(tmp_path / "weights.pt", weights_only=True), tmp_path / "run")
