"""train.py from end to end: what a run prints and writes, and how mistakes are refused."""

import json
import re
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from gpt.api import read_curves
from gpt.checkpoint import load_checkpoint, restore_model
from gpt.sampling.pictures import CELL_PX, GAP_PX, LINE_PX
from harness import (
    ADVICE_LINES,
    ROOT,
    SAMPLES,
    python_program,
    read_events,
    tiny_arguments,
    train,
    train_refusal,
)

SCALARS = {
    *("train/loss", "train/lr", "train/matrix_lr", "weights/grad_norm"),
    *("val/loss", "val/bits_per_byte", "val_samples/longest_copy"),
    *("work/tokens_per_second", "work/peak_memory_gib", "weights/update_ratio/layer_1", "weights/update_ratio/layer_2"),
}


@pytest.fixture(scope="module")
def settings(corpus_folder) -> list[str]:
    """The arguments of every run here."""
    return tiny_arguments(corpus_folder)


@pytest.fixture(scope="module")
def run(settings, tmp_path_factory) -> tuple[Path, subprocess.CompletedProcess]:
    """A finished run and what it printed."""
    run_dir = tmp_path_factory.mktemp("runs") / "run"
    done = train(
        *settings, SAMPLES, "horizon=40steps", "tokenizer=bpe", "tokenizer.vocab_size=290", f"run_dir={run_dir}"
    )
    return run_dir, done


def test_run_prints_its_figures_and_the_next_commands(run):
    """On stderr there is only the warning about a small validation text."""
    run_dir, done = run
    assert re.fullmatch(r"(train\.py: the validation text .*\n)?", done.stderr)
    assert done.stdout.startswith("settings: model.context_length=16 model.d_model=24 ")
    assert re.search(
        r"^prepared 4,\d{3} bytes as 70\d tokens \(5.72 bytes per token, vocabulary 285\)", done.stdout, re.M
    )
    line = r"^step \d\d/40  train \d\.\d{3} val \d\.\d{3}  \d\.\d{3} bits/byte +\S+ tok/s\n    \[alpha\]"
    assert len(re.findall(line, done.stdout, re.M)) == 4
    assert re.search(r"^trained +40  steps: 3,840 tokens, \d\.\d\d epochs$", done.stdout, re.M)
    metrics = json.loads((run_dir / "metrics.json").read_text())
    bits = metrics["baselines"]["unigram"]  # the text is too short for compressors
    scored = f"validation       {metrics['val_bits_per_byte']:.4f}  bits per byte"
    assert f"\n{scored}\n  unigram        {bits:.4f}  " in done.stdout
    assert f"\nthe run:      {run_dir}\n" in done.stdout
    assert (
        f"its curves:   tensorboard --logdir {run_dir.parent}, and http://localhost:6006/?smoothing=0\n" in done.stdout
    )
    samples = (run_dir / "samples.md").read_text()
    assert re.findall(r"^## Step (\d+)$", samples, re.M) == ["10", "20", "30", "40"]
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", done.stdout)  # a log, in which no terminal acts


def test_metrics_agree_with_each_other(run):
    """docs/runs.md has a line about each (tests/house/)."""
    metrics = json.loads((run[0] / "metrics.json").read_text())
    assert (metrics["steps"], metrics["tokens"]) == (40, 3840)
    assert metrics["val_bits_per_byte"] == pytest.approx(metrics["val_nats_per_byte"] / 0.6931471805599453)
    assert metrics["tokens_per_second"] == pytest.approx(3840 / metrics["train_seconds"])
    curves = read_curves(run[0])
    assert [step for step, _ in curves["val/bits_per_byte"]] == [10, 20, 30, 40]
    assert curves["train/loss"][-1][1] < curves["train/loss"][0][1]


def test_tensorboard_reads_scalars_samples_and_a_picture(run):
    """The picture shows what all heads attend to."""
    events = read_events(run[0])
    tags = events.Tags()
    assert set(tags["scalars"]) >= SCALARS
    assert set(tags["tensors"]) == {"custom_scalars__config__", "samples/text_summary", "_hparams_/session_start_info"}
    assert tags["images"] == ["weights/attention"]
    image = events.Images("weights/attention")[0]  # two layers of three heads of 16 x 16 weights, and words
    words = image.width - 3 * (16 * CELL_PX + GAP_PX)
    assert words > 0 and image.height == 2 * LINE_PX + words + 2 * (16 * CELL_PX + GAP_PX + LINE_PX)


def test_checkpoint_needs_no_other_file(run):
    """It has weights under plain names, and all else that generating and resuming need, as plain types."""
    payload = torch.load(run[0] / "checkpoints/best.ckpt", weights_only=True)
    needed = "format state_dict optimizer callbacks step config schedule state tokenizer corpus"
    assert payload.keys() == {*needed.split(), "git_commit", "versions", "threads"}
    assert "blocks.0.attention.W_qkv.weight" in payload["state_dict"]
    model, tokenizer = restore_model(payload, run[0])
    assert tokenizer.vocab_size == 285
    assert model(torch.tensor([[tokenizer.end_of_text]])).shape == (1, 1, 285)


@pytest.mark.slow
def test_tensorboard_serves_the_run(run):
    """`tensorboard --logdir` shows curves, text, images, the layout of charts and the settings over HTTP."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arguments = ["--logdir", str(run[0].parent), "--port", str(port), "--load_fast", "false"]
    server = subprocess.Popen(
        [sys.executable, "-m", "tensorboard.main", *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )

    def get(path: str):
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/data/plugin/{path}", timeout=10) as answer:
            return json.loads(answer.read())

    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                if set(get("scalars/tags").get("run", {})) >= SCALARS:
                    break
            except OSError:
                pass
            assert time.monotonic() < deadline, "TensorBoard does not show the run's scalars"
            time.sleep(0.3)
        assert len(get("scalars/scalars?run=run&tag=val/loss")) == 4
        assert get("text/tags")["run"] == ["samples/text_summary"]
        assert set(get("images/tags")["run"]) == {"weights/attention"}
        charts = [chart["title"] for chart in get("custom_scalars/layout")["category"][0]["chart"]]
        assert charts[:2] == ["nats per token", "bits per byte"]
        bits = json.loads((run[0] / "metrics.json").read_text())["baselines"]["unigram"]
        points = get("scalars/scalars?run=run&tag=val_baselines/unigram")
        assert [(step, value) for _, step, value in points] == [
            (step, pytest.approx(bits)) for step in (10, 20, 30, 40)
        ]
        settings = {info["name"] for info in get("hparams/experiment?request=%7B%7D")["hparamInfos"]}
        assert settings >= {"model.d_model", "optim.lr", "optim.matrix_lr", "seed"}
    finally:
        server.terminate()
        server.wait(timeout=30)


@pytest.mark.slow
def test_micro_batches_make_no_difference(settings, tmp_path):
    """One sequence at a time or all six at once give the same curve, except for rounding."""
    curves = []
    for size in (1, 6):
        run_dir = tmp_path / str(size)
        exact = ["model.dropout=0", "trainer.precision=fp32", "horizon=9steps", "optim=adamw"]
        train(*settings, *exact, f"trainer.micro_batch_size={size}", f"run_dir={run_dir}")
        curves.append(torch.tensor([value for _, value in read_curves(run_dir)["train/loss"]]))
    assert len(curves[0]) == 3
    torch.testing.assert_close(curves[0], curves[1], atol=1e-4, rtol=0.0)


def test_run_needs_neither_prompts_nor_srun(settings, monkeypatch, tmp_path):
    """Without prompts, it has no samples, and the command to sample it works. In an allocation, it is one process."""
    for name, value in {"SLURM_NTASKS": "4", "SLURM_JOB_ID": "1", "SLURM_JOB_NAME": "bash_1"}.items():
        monkeypatch.setenv(name, value)
    done = train(*settings, "data.prompts=[]", "horizon=1steps", f"run_dir={tmp_path / 'run'}")
    assert done.stderr == ""
    assert f"sample it:    python generate.py --checkpoint {tmp_path / 'run'} --prompt ''" in done.stdout


def test_run_starts_from_another_run(run, settings, tmp_path):
    """It takes the other run's weights, shape and tokenizer, and begins at its loss."""
    run_dir = tmp_path / "tuned"
    tiny_steps = ["optim.lr=1e-9", "optim.matrix_lr=1e-9", "trainer.log_every=1", "horizon=1steps"]
    settings = [argument for argument in settings if not argument.startswith(("model.", "tokenizer"))]
    train(*settings, f"init_from={run[0]}", *tiny_steps, f"run_dir={run_dir}")
    assert load_checkpoint(run_dir / "checkpoints/last.ckpt")["tokenizer"]["name"] == "bpe"
    before = json.loads((run[0] / "metrics.json").read_text())["best_val_loss"]
    assert json.loads((run_dir / "metrics.json").read_text())["val_loss"] == pytest.approx(before, abs=1e-3)


@pytest.mark.slow
def test_run_starts_from_hugging_face(settings, tmp_path):
    """A GPT-2 directory gives its weights and shape. The tokenizer is GPT-2's."""
    torch.manual_seed(29)
    pretrained = GPT2LMHeadModel(GPT2Config(n_embd=6, n_layer=1, n_head=2, n_positions=16))
    pretrained.save_pretrained(tmp_path / "pretrained")
    settings = [argument for argument in settings if not argument.startswith(("model.", "tokenizer"))]
    arguments = [*settings, f"init_from={tmp_path / 'pretrained'}", "horizon=1steps", f"run_dir={tmp_path / 'run'}"]
    train(*arguments, "optim.lr=0.006")
    payload = load_checkpoint(tmp_path / "run/checkpoints/last.ckpt")
    assert payload["tokenizer"]["name"] == "gpt2"
    assert payload["config"]["model"]["d_model"] == 6
    moved = (payload["state_dict"]["position_embedding.weight"] - pretrained.transformer.wpe.weight).abs().max()
    assert 0 < moved < 0.01


# --- mistakes ---


def test_mistake_is_refused_before_anything_is_written(tmp_path):
    places = [f"data.cache={tmp_path / 'cache'}", f"run_dir={tmp_path / 'run'}"]
    assert "data.path='a b.txt' names no text file" in train_refusal("data.path=a b.txt", *places)
    assert [file for file in tmp_path.rglob("*") if not file.name.endswith((".lock", ".TAG", "cache"))] == []


def test_model_keys_do_not_go_with_init_from(run):
    """Keys that would change the shapes of the weights are refused in one line."""
    assert "model.num_layers=5: the weights of init_from=" in train_refusal(f"init_from={run[0]}", "model.num_layers=5")
    assert "model.num_heads=5" in train_refusal(f"init_from={run[0]}", "model.num_heads=5")


@pytest.mark.promise("runs.md#NaN or infinite gradient")
def test_weights_that_an_update_broke_are_not_saved(settings, tmp_path):
    """The run ends with code 3 before they are validated, sampled or saved."""
    broken = ["optim.matrix_weight_decay=1e41", "trainer.validate_every=1", f"run_dir={tmp_path / 'run'}"]
    done = train(*settings, "horizon=9steps", *broken, code=3)
    assert re.match(r"train.py: step \d: the (update|gradient)", done.stderr) and "init_from=" in done.stderr
    for file in tmp_path.glob("run/checkpoints/*.ckpt"):
        assert all(p.isfinite().all() for p in load_checkpoint(file)["state_dict"].values())


@pytest.mark.slow
def test_run_survives_the_reader_of_its_output(settings, tmp_path):
    """Its output is piped to a program that ends early, and the run trains to its horizon."""
    words = " ".join(f"'{argument}'" for argument in [*settings, "horizon=9steps", f"run_dir={tmp_path / 'run'}"])
    done = subprocess.run(
        f"{python_program()} train.py {words} | head -c 3; echo ${{PIPESTATUS[0]}}",
        shell=True, cwd=ROOT, capture_output=True, text=True, timeout=120, executable="/bin/bash",
    )  # fmt: skip
    assert done.stdout.endswith("0\n")
    assert ADVICE_LINES.sub("", done.stderr) == ""
    assert json.loads((tmp_path / "run/metrics.json").read_text())["steps"] == 9


@pytest.mark.slow
def test_run_saves_every_few_minutes(settings, tmp_path):
    """It does so even if its checkpoints are many steps apart. Here the minutes are 60 ms."""
    rare = ["trainer.checkpoint_every=1000", "trainer.validate_every=1000", "trainer.checkpoint_minutes=0.001"]
    train(*settings, *rare, "horizon=60steps", f"run_dir={tmp_path / 'run'}")
    assert 0 < load_checkpoint(tmp_path / "run/checkpoints/previous.ckpt")["step"] < 60
