"""What plan=true says of a run is what the run then takes."""

import dataclasses
import json
import re

import pytest
import torch

from gpt.model.chunked_loss import chunked_next_token_loss
from gpt.model.transformer import GPT, GPTConfig
from gpt.training.config import Config, TrainerConfig
from gpt.training.forecast import describe, memory, optimizer_bytes, parameters
from gpt.training.optim import OptimConfig, build_optimizer
from harness import TINY, train, train_apart, write_corpus

SHAPE = GPTConfig(context_length=131, d_model=44, num_layers=3, num_heads=4, vocab_size=71)


@pytest.fixture(scope="module")
def arguments(tmp_path_factory):
    """A run on a text that is prepared already."""
    folder = tmp_path_factory.mktemp("forecast")
    given = [
        *TINY,
        f"data.path={write_corpus(folder)}",
        f"data.cache={folder / 'cache'}",
        "horizon=4steps",
        "data.prompts=[]",
    ]
    return folder, given


@pytest.fixture(scope="module")
def figures(arguments):
    """What plan=json prints of that run, before it is trained."""
    folder, given = arguments
    done = train(*given, "plan=json", f"run_dir={folder / 'run'}")
    assert done.returncode == 0, done.stderr
    assert [file.name for file in folder.iterdir() if file.name != "cache"] == ["corpus.txt"]
    return json.loads(done.stdout)


def settings(**of_trainer) -> Config:
    trainer = {"precision": "fp32"} | of_trainer
    return Config(trainer=TrainerConfig(**trainer))


@pytest.mark.parametrize("qkv_bias", [True, False])
@pytest.mark.parametrize("name", ["muon", "adamw"])
def test_counts_are_those_of_the_model(qkv_bias, name):
    """Parameters are counted exactly; the state of the optimizer but for Muon's scales of rows."""
    model = GPT(dataclasses.replace(SHAPE, qkv_bias=qkv_bias))
    assert parameters(model.config) == model.num_parameters()
    config = dataclasses.replace(settings(), optim=OptimConfig(name=name))
    optimizer = build_optimizer(dict(model.named_parameters()), 4, config.optim, torch.float32)
    held = sum(value.nbytes for state in optimizer.state.values() for value in state.values())
    assert optimizer_bytes(model.config, config) == pytest.approx(held, rel=0.05)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize(("precision", "context_length"), [("bf16", 131), ("bf16", 262), ("fp32", 131)])
def test_activations_are_what_autograd_keeps(precision, context_length, dropout):
    """Two more blocks keep as many bytes more as the formula says."""
    counted, computed = [], []
    for num_layers in (2, 4):
        shape = dataclasses.replace(SHAPE, num_layers=num_layers, context_length=context_length, dropout=dropout)
        counted.append(kept_bytes(shape, torch.bfloat16 if precision == "bf16" else torch.float32))
        computed.append(memory(shape, settings(precision=precision), "cpu", B=3)["activations"])
    assert computed[1] - computed[0] == pytest.approx(counted[1] - counted[0], rel=0.06)


def kept_bytes(shape: GPTConfig, dtype: torch.dtype) -> int:
    """The memory of all tensors that the backward pass of three windows needs, but for the weights."""
    model = GPT(shape).compute_in(dtype).train()
    ours = {p.untyped_storage().data_ptr() for p in [*model.parameters(), *model.buffers()]}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in ours:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    idx = torch.zeros(3, shape.context_length, dtype=torch.long)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        chunked_next_token_loss(*model.hidden_and_head(idx), idx)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def test_less_memory_is_foreseen_where_less_is_needed():
    """Checkpointing keeps the inputs of blocks only; sharding divides the state; processes exchange gradients."""
    shape = dataclasses.replace(SHAPE, num_layers=12)
    plain = memory(shape, settings(), "cpu", 5)
    assert memory(shape, settings(activation_checkpointing=True), "cpu", 5)["activations"] < plain["activations"] / 3
    adamw = OptimConfig(name="adamw")
    sharded = Config(optim=adamw, trainer=TrainerConfig(precision="fp32", strategy="fsdp", devices=4))
    whole = memory(shape, dataclasses.replace(settings(), optim=adamw), "cuda", 5)
    assert memory(shape, sharded, "cuda", 5)["optimizer_state"] == whole["optimizer_state"] / 4
    assert memory(shape, settings(devices=4), "cpu", 5)["gradients"] == 2 * plain["gradients"]
    peaks = [memory(shape, settings(), "cuda", 5, accumulates)["peak"] for accumulates in (False, True)]
    assert peaks[0] < peaks[1]


def test_counts_are_those_of_the_run(arguments, figures):
    """Steps, tokens, epochs, parameters and the size of a checkpoint; the plan itself has left no trace."""
    folder, given = arguments
    run = folder / "run"
    assert train(*given, f"run_dir={run}").returncode == 0
    metrics = json.loads((run / "metrics.json").read_text(encoding="utf-8"))
    assert figures["epochs"] == {"text": pytest.approx(metrics["epochs"])}
    assert {key: figures[key] for key in ("steps", "tokens", "parameters")} == {
        key: metrics[key] for key in ("steps", "tokens", "parameters")
    }
    assert figures["validations"] == (run / "samples.md").read_text(encoding="utf-8").count("## Step") == 4
    tensors = 4 * figures["parameters"]
    assert tensors < figures["checkpoint_bytes"] < (run / "checkpoints/last.ckpt").stat().st_size
    assert min(figures["memory"]["peak"], figures["memory"]["process"]) > 2**27


def test_text(figures):
    """A person reads the figures, what fits of other models, and every concern."""
    figures = figures | {"epochs": {"prose": 3.0, "verse": 5000.0}, "train_seconds": 7300.0, "concerns": ["too long"]}
    text = describe(figures)
    assert "4 steps of 96 tokens see each byte 3 times in prose, 5e+03 times in verse" in text
    assert "2.03 h at" in text
    assert re.search(r"^ +\d+ MiB  activations$", text, re.M)
    assert re.search(r"^gpt2_small +\d\d,\d{3},\d{3} +(\d+|-) +\d+ +\d+ +\d+$", text, re.M)
    assert text.endswith("\n\ntoo long")
    assert list(figures["models"]) == ["mini", "gpt2_small", "gpt2_medium", "gpt2_large", "gpt2_xl"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["plan=maybe"], "plan=maybe is not known: choose from true, json, false"),
        (["plan=true", "resume=runs/x"], "plan=true describes a new run, and resume continues one: leave one of the"),
        (
            ["plan=json", "-m", "seed=1,2"],
            "plan=json describes one run, and -m is for several: leave one of the two out",
        ),
        (["plan=true", "model.num_heads=7"], "model.d_model=128 is not divisible by model.num_heads=7"),
        (["plan=true", "optim=adamw", "optim.matrix_lr=0.1"], "optim.matrix_lr=0.1 has no effect with optim=adamw"),
    ],
)
def test_refusals(given, message):
    """One line, before anything slow."""
    done = train(*given)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_plan_is_asked_for_on_the_command_line(arguments, tmp_path):
    """A configuration file cannot keep every run from training."""
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment/p.yaml").write_text("# @package _global_\nplan: true\n", encoding="utf-8")
    done = train("--config-dir", tmp_path, *arguments[1], "experiment=p")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "plan=true in a configuration file: ask for a plan on the command line" in done.stderr


@pytest.mark.slow
def test_other_ways_to_train(arguments, tmp_path):
    """Several devices, a time as horizon, and the weights of another run; each leaves nothing behind."""
    folder, given = arguments
    run = folder / "earlier"
    assert train(*given, f"run_dir={run}").returncode == 0
    without_model = [one for one in given if not one.startswith(("model", "tokenizer"))]
    for changes, key, value in (
        ([*given, "trainer.devices=2", "trainer.micro_batch_size=auto", "horizon=2epochs"], "epochs", 2),
        ([*given, "horizon=9s", "trainer.precision=fp32"], "train_seconds", 9),
        ([*without_model, f"init_from={run}"], "steps", 4),
    ):
        done = train(*changes, "plan=json", f"run_dir={tmp_path / 'run'}")
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)[key]
        assert (found["text"] if key == "epochs" else found) == pytest.approx(value, rel=0.02)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("changes", [[], ["trainer.precision=fp32", "optim=adamw", "trainer.micro_batch_size=8"]])
def test_memory(arguments, tmp_path, changes):
    """The peak of a real run is within a fifth of the plan, for a model that takes more memory than the process."""
    given = [*arguments[1], "model.context_length=131", "model.d_model=384", "model.num_layers=5", "model.num_heads=6"]
    given += ["model.dropout=0", "trainer.tokens_per_step=4192", "trainer.micro_batch_size=auto", "horizon=2steps"]
    given += changes
    planned = train_apart(*given, "plan=json")
    assert planned.returncode == 0, planned.stderr
    done = train_apart(*given, f"run_dir={tmp_path / 'run'}")
    assert done.returncode == 0, done.stderr
    peak = json.loads((tmp_path / "run/metrics.json").read_text(encoding="utf-8"))["peak_memory_bytes"]
    found = json.loads(planned.stdout)["memory"]
    assert found["peak"] == pytest.approx(peak, rel=0.2)
    parts = sum(size for name, size in found.items() if name != "peak")
    assert parts == pytest.approx(peak, rel=0.3)
