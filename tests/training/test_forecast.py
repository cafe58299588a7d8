"""A dry run: plan=true predicts what the run then takes."""

import json
import re

import pytest
import torch

from gpt.hardware.device import DTYPES
from gpt.model.memory_estimate import activation_bytes
from gpt.model.transformer import GPTConfig
from gpt.training.config import Config, TrainerConfig
from gpt.training.forecast import LOG_BYTES, describe_plan, peak_memory
from gpt.training.optim import OptimConfig
from harness import tiny_arguments, train, train_in_subprocess


@pytest.fixture(scope="module")
def arguments(corpus_folder) -> list[str]:
    """The arguments of a run of four steps."""
    return tiny_arguments(corpus_folder, "data.prompts=[]", "horizon=4steps")


@pytest.fixture(scope="module")
def figures(corpus_folder, arguments):
    """The output of plan=json for that run, before it is trained."""
    done = train(*arguments, "plan=json", f"run_dir={corpus_folder / 'run'}")
    assert [file.name for file in corpus_folder.iterdir() if file.name != "cache"] == ["corpus.txt"]
    return json.loads(done.stdout)


@pytest.mark.slow
def test_planned_counts_equal_those_of_the_run(corpus_folder, arguments, figures):
    run = corpus_folder / "run"
    train(*arguments, f"run_dir={run}")
    metrics = json.loads((run / "metrics.json").read_text(encoding="utf-8"))
    assert figures["epochs"] == {"text": pytest.approx(metrics["epochs"])}
    assert all(figures[key] == metrics[key] for key in ("steps", "tokens", "parameters"))
    assert figures["validations"] == (run / "samples.md").read_text(encoding="utf-8").count("## Step") == 4
    tensors = 4 * figures["parameters"]
    assert tensors < figures["checkpoint_bytes"] < (run / "checkpoints/last.ckpt").stat().st_size
    assert figures["peak_memory"] > 2**27


@pytest.mark.slow
def test_plan_as_text_has_figures_and_warnings(figures):
    figures = figures | {"epochs": {"prose": 3.0, "verse": 4541.2}, "train_seconds": 7300.0, "warnings": ["too long"]}
    text = describe_plan(figures)
    assert "4 steps of 96 tokens see each byte 3.00 times in prose, 4,541.20 times in verse" in text
    assert "384 tokens, 12,345.60 per parameter (compute-optimal: 20)" in describe_plan(
        figures | {"tokens_per_parameter": 12345.6}
    )
    assert "384 tokens, 0.01 per parameter" in describe_plan(figures | {"tokens_per_parameter": 0.012345})
    assert "2h01m at" in text
    assert re.search(r"^memory +[\d.,]+ [GM]iB at peak on each device, of [\d.,]+ [GM]iB free$", text, re.M)
    assert text.endswith("\n\ntoo long")


def test_memory_is_estimated_if_it_cannot_be_measured(monkeypatch):
    """It has four bytes each for weights, gradients and AdamW's two averages, and the activations."""
    monkeypatch.setattr("gpt.training.forecast.peak_memory_bytes", lambda device: 0)
    trainer = TrainerConfig(precision="fp32", tokens_per_step=1536, micro_batch_size=3)
    config, shape = Config(optim=OptimConfig("adamw"), trainer=trainer), GPTConfig(vocab_size=71)
    micro_batch_bytes = activation_bytes(shape, 3, DTYPES["fp32"], "cpu")
    peak = peak_memory(torch.device("cpu"), shape, config)
    assert peak == 16 * shape.num_parameters + micro_batch_bytes + LOG_BYTES


@pytest.mark.slow
def test_plan_of_devices_a_time_horizon_and_init_from(corpus_folder, arguments, tmp_path):
    """None of them writes a file."""
    run = corpus_folder / "earlier"
    train(*arguments, f"run_dir={run}")
    without_model = [word for word in arguments if not word.startswith(("model", "tokenizer"))]
    for changes, key, value in (
        ([*arguments, "trainer.devices=2", "trainer.micro_batch_size=auto", "horizon=2epochs"], "epochs", 2),
        ([*arguments, "horizon=9s", "trainer.precision=fp32"], "train_seconds", 9),
        ([*without_model, f"init_from={run}"], "steps", 4),
    ):
        done = train(*changes, "plan=json", f"run_dir={tmp_path / 'run'}")
        figure = json.loads(done.stdout)[key]
        assert (figure["text"] if key == "epochs" else figure) == pytest.approx(value, rel=0.02)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("changes", [[], ["trainer.precision=fp32", "optim=adamw", "trainer.micro_batch_size=8"]])
def test_planned_memory_is_within_a_fifth_of_the_run(arguments, tmp_path, changes):
    """The model takes more memory than the process itself."""
    arguments = [*arguments, "model.context_length=131", "model.d_model=384", "model.num_layers=5", "model.num_heads=6"]
    arguments += ["model.dropout=0", "trainer.tokens_per_step=2096", "trainer.micro_batch_size=auto", "horizon=2steps"]
    arguments += ["trainer.short_sequences=0", *changes]
    planned = train_in_subprocess(*arguments, "plan=json")
    train_in_subprocess(*arguments, f"run_dir={tmp_path / 'run'}")
    peak = json.loads((tmp_path / "run/metrics.json").read_text(encoding="utf-8"))["peak_memory_bytes"]
    assert json.loads(planned.stdout)["peak_memory"] == pytest.approx(peak, rel=0.2)
