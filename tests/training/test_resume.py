"""A run is resumed: to its horizon or a longer one, and only from a checkpoint that fits it."""

import dataclasses
import json
import os
import re
import shutil
import signal
import weakref
from pathlib import Path

import pytest
import tokenizers.trainers
import torch

from gpt import checkpoint
from gpt.training import loop
from gpt.training.config import load_config
from harness import (
    SAMPLES,
    CallAt,
    StopAt,
    begin_run,
    contents,
    differences,
    fit,
    flatten,
    refusal,
    resume_run,
    tiny_config,
    train,
    write_corpus,
)

# --- a longer horizon ---


@pytest.mark.slow
def test_run_extended_before_its_rates_fall_is_a_longer_run(corpus_folder, tmp_path):
    """It is, bit for bit, the run that had the longer horizon from the start."""
    run_dir = tmp_path / "run"
    reference = tmp_path / "whole"
    changes = ["optim.warmup_steps=5", SAMPLES]  # with optim.decay_from=0.3, the rates of 31 steps fall from step 10 on
    fit(begin_run(tiny_config(corpus_folder, *changes, "horizon=31steps", f"run_dir={run_dir}")), [StopAt(6)])
    fit(begin_run(tiny_config(corpus_folder, *changes, "horizon=41steps", f"run_dir={reference}")))
    train(f"resume={run_dir}", "horizon=41steps")
    assert [d for d in differences(run_dir, reference) if "restart_step" not in d] == []


def test_complete_run_is_extended(run_copy):
    """The rates rise again, the loss falls, and configuration and checkpoint have the new horizon."""
    before = json.loads((run_copy / "metrics.json").read_text())
    done = train(f"resume={run_copy}", "horizon=29steps")
    assert "extending the run from horizon=13steps to 29steps, from step 13 on" in done.stdout
    after = json.loads((run_copy / "metrics.json").read_text())
    assert (after["steps"], before["steps"]) == (29, 13)
    assert after["val_loss"] < before["val_loss"]
    assert load_config(run_copy / "config.yaml").horizon == "29steps"
    done = train(f"resume={run_copy}", "horizon=29steps")
    assert "is complete: it has trained all of its 29 steps" in done.stdout


def test_patience_counts_again_in_an_extended_run(corpus_folder, tmp_path):
    """A run that ran out of patience while its rates were at their peak trains to the new horizon's validations."""
    run_dir, high_rates = tmp_path / "run", ["optim.decay_from=1.0", "optim.lr=5.0"]
    config = tiny_config(corpus_folder, "optim.warmup_steps=5", "horizon=61steps", f"run_dir={run_dir}", *high_rates)
    fit(begin_run(dataclasses.replace(config, patience=1)))
    stopped_at = json.loads((run_dir / "metrics.json").read_text())["steps"]
    assert stopped_at < 61
    training = resume_run(run_dir, "83steps")
    assert training.schedule.restart_step == stopped_at
    fit(training)
    assert training.metrics["steps"] > stopped_at + 1
    assert resume_run(run_dir) is None  # it is complete


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_interrupted_extension_continues_bit_for_bit(run_copy, tmp_path, number):
    """A run that is stopped or killed while it is extended needs no second horizon."""
    reference = Path(shutil.copytree(run_copy, tmp_path / "whole"))
    train(f"resume={reference}", "horizon=29steps")
    child = os.fork()
    if child == 0:
        try:
            fit(resume_run(run_copy, "29steps"), [StopAt(19, number)])
        finally:
            os._exit(143)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == (143 if number == signal.SIGTERM else -9)
    train(f"resume={run_copy}")
    assert differences(run_copy, reference) == []


def test_kill_between_checkpoint_and_configuration_is_mended(run_copy):
    """After the extended last.ckpt was written, config.yaml still has the old horizon. Resuming writes the new one."""
    before = (run_copy / "config.yaml").read_bytes()
    fit(resume_run(run_copy, "29steps"), [StopAt(14)])
    extended = (run_copy / "config.yaml").read_bytes()
    (run_copy / "config.yaml").write_bytes(before)
    fit(resume_run(run_copy), [StopAt(15)])
    assert (run_copy / "config.yaml").read_bytes() == extended != before


def test_kept_checkpoint_that_a_kill_prevented_is_made(corpus_folder, tmp_path):
    """Resuming at its step makes it."""
    run_dir, keep = tmp_path / "run", ["horizon=9steps", "trainer.keep_every=4", "trainer.checkpoint_every=4"]
    fit(begin_run(tiny_config(corpus_folder, *keep, f"run_dir={run_dir}")), [StopAt(4)])
    kept = run_dir / "checkpoints/step-00000004.ckpt"
    content = kept.read_bytes()
    kept.unlink()
    fit(resume_run(run_dir))
    assert kept.read_bytes() == content


def test_horizon_behind_the_run_is_refused(run_copy):
    """The line has the steps and the time so far, and nothing changes."""
    before = contents(run_copy)
    line = refusal(resume_run, run_copy, "0.1epochs")
    assert re.match(r"horizon=0\.1epochs is behind this run, which has trained 13 steps in \d+s: give a longer", line)
    assert contents(run_copy) == before


# --- a run without a checkpoint ---


@pytest.mark.parametrize("horizon", ["", "7steps"])
def test_run_without_a_checkpoint_starts_at_its_first_step(corpus_folder, tmp_path, capsys, horizon):
    """It trains in its own directory, and config.yaml has the new horizon if there is one."""
    run_dir = tmp_path / "run"
    started = begin_run(tiny_config(corpus_folder, "horizon=3steps", f"run_dir={run_dir}"))
    started.run.close()
    training = resume_run(run_dir, horizon)
    assert "has no checkpoint yet: beginning at its first step" in capsys.readouterr().out
    assert training.config == dataclasses.replace(started.config, horizon=horizon or "3steps")
    fit(training)
    assert training.metrics["steps"] == (7 if horizon else 3)
    assert load_config(run_dir / "config.yaml") == training.config


# --- memory ---


@pytest.mark.promise("runs.md#released before the first step")
def test_loaded_checkpoint_is_released(run_copy, monkeypatch):
    """After it was restored, none of its tensors is left, and its file is not mapped into memory any more."""

    class Average:
        """A callback whose state is as large as weights."""

        def on_train_start(self, module) -> None:
            self.weights = module.model.token_embedding.weight.detach().clone()

        def state_dict(self):
            return {"weights": self.weights}

        def load_state_dict(self, state) -> None:
            self.weights = state["weights"]

    loaded: list[weakref.ref] = []

    def load(*arguments, **options):
        payload = checkpoint.load_checkpoint(*arguments, **options)
        loaded.extend(weakref.ref(leaf) for leaf in flatten(payload).values() if isinstance(leaf, torch.Tensor))
        return payload

    def count() -> None:
        maps = Path("/proc/self/maps")
        mapped = maps.exists() and f"{run_copy}/checkpoints/" in maps.read_text()
        counts.append((sum(reference() is not None for reference in loaded), mapped))

    fit(resume_run(run_copy, "15steps"), [Average()])
    monkeypatch.setattr(loop, "load_checkpoint", load)
    counts: list[tuple[int, bool]] = []
    weights = checkpoint.load_checkpoint(run_copy / "checkpoints/last.ckpt")["state_dict"]
    fit(resume_run(run_copy, "17steps"), [Average(), CallAt(16, count)])
    assert len(loaded) > 3 * len(weights)  # weights, two moments of each, and the callback's
    assert counts == [(0, False)]


# --- a checkpoint that does not fit ---


def rewrite(run_dir: Path, change) -> None:
    """Change what last.ckpt holds, with a matching checksum, and delete the other checkpoints."""
    payload = checkpoint.load_checkpoint(run_dir / "checkpoints/last.ckpt")
    change(payload)
    for name in ("best", "previous"):
        (run_dir / f"checkpoints/{name}.ckpt").unlink()
    checkpoint.save_checkpoint(payload, run_dir / "checkpoints/last.ckpt")


def resume_and_fit(run_dir: Path, horizon: str) -> None:
    fit(resume_run(run_dir, horizon))


NORM = "final_norm.bias"


@pytest.mark.promise("runs.md#does not fit the run")
@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda p: p.pop("schedule"), "it has no 'schedule'"),
        (lambda p: p["schedule"].update(more=1), "unexpected keyword argument 'more'"),
        (lambda p: p["state"].pop("loss_sums"), "it has no 'loss_sums'"),
        (lambda p: p["state"].update(overfit_count="2"), "its overfit_count is '2'"),
        (lambda p: p.pop("threads"), "it has no 'threads'"),
        (lambda p: p.pop("callbacks"), "it has no 'callbacks'"),
        (lambda p: p["state_dict"].pop(NORM), "Missing key"),
        (lambda p: p["optimizer"]["state"].pop(0), "it has no 0"),
        (
            lambda p: p["optimizer"]["state"][0].update(exp_avg=p["state_dict"][NORM]),
            "does not fit the model's weights",
        ),
        (lambda p: p["optimizer"]["param_groups"].pop(), "is shorter than"),
    ],
)
def test_checkpoint_that_does_not_fit_is_refused_before_anything_changes(run_copy, change, problem):
    """One line has the file, the problem and the remedy, and every file stays as it is."""
    rewrite(run_copy, change)
    before = contents(run_copy)
    line = refusal(resume_and_fit, run_copy, "29steps")
    file = f"{run_copy}/checkpoints/last.ckpt"
    assert line.startswith(f"{file}: cannot be resumed: ") and line.endswith(f"init_from={file}")
    assert problem in line
    assert contents(run_copy) == before


@pytest.mark.promise("runs.md#disagrees with `config.yaml`", "security.md#checkpoint that disagrees")
def test_checkpoint_that_disagrees_with_the_configuration_is_refused(run_copy):
    """The line has the key, both values and both files, and nothing changes."""
    rewrite(run_copy, lambda p: p["config"]["data"].update(path="/etc/passwd", cache=str(run_copy / "elsewhere")))
    before = contents(run_copy)
    line = refusal(resume_run, run_copy, "29steps")
    assert line.startswith(f"{run_copy}/config.yaml has data.path='") and "last.ckpt '/etc/passwd'" in line
    assert contents(run_copy) == before


def test_run_continues_only_on_its_own_text(run_copy):
    """The line has the hash that differs, and the remedy."""
    rewrite(run_copy, lambda p: p["corpus"].update(corpus="0" * 64))
    line = refusal(resume_run, run_copy, "29steps")
    assert "the corpus was 000000" in line
    assert f"start a new run with init_from={run_copy}/checkpoints/last.ckpt" in line


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["gone", "of a new run"])
def test_a_run_keeps_its_tokenizer_if_the_library_trains_another(tmp_path, monkeypatch, capsys, cache):
    """It trains on, and can be resumed again. The cache may hold the text with the other tokenizer."""
    corpus = write_corpus(tmp_path)
    bpe = ("tokenizer=bpe", "tokenizer.vocab_size=300")
    paths = (f"data.path={corpus}", f"data.cache={tmp_path / 'cache'}")
    fit(begin_run(tiny_config(tmp_path, *bpe, *paths, "horizon=9steps", f"run_dir={tmp_path / 'run'}")))
    tokenizer = checkpoint.load_checkpoint(tmp_path / "run/checkpoints/last.ckpt")["tokenizer"]
    shutil.rmtree(tmp_path / "cache")
    trainer = tokenizers.trainers.BpeTrainer

    def train_otherwise(**options):
        return trainer(**options | {"min_frequency": 150})

    monkeypatch.setattr(tokenizers.trainers, "BpeTrainer", train_otherwise)
    if cache == "of a new run":
        fit(begin_run(tiny_config(tmp_path, *bpe, *paths, "horizon=2steps", f"run_dir={tmp_path / 'new'}")))
    fit(resume_run(tmp_path / "run", "13steps"))
    assert "another tokenizer on this text: the run keeps its own" in capsys.readouterr().out
    resumed = checkpoint.load_checkpoint(tmp_path / "run/checkpoints/last.ckpt")
    assert (resumed["step"], resumed["tokenizer"]) == (13, tokenizer)
    shutil.rmtree(tmp_path / "cache")
    fit(resume_run(tmp_path / "run", "15steps"))
    assert "another tokenizer" not in capsys.readouterr().out
