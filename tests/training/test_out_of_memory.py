"""If memory runs out, a run continues with smaller micro-batches, unless the user chose their size."""

import os
import signal
from types import SimpleNamespace

import pytest
import torch

from gpt.api import read_curves
from gpt.checkpoint import load_checkpoint
from gpt.training import training_clock
from gpt.training.config import load_config
from gpt.training.module import GPTModule
from harness import begin_run, fit, refusal, tiny_config


def imitate_small_device(monkeypatch, max_sequences: int, number: int = 0) -> list[int]:
    """Raise an out-of-memory error for micro-batches of more than `max_sequences` sequences.

    Return a list that collects the sizes. If `number` is a signal, send it to this process before the error.
    """
    sizes: list[int] = []
    loss = GPTModule.loss

    def limited(self, idx, targets):
        size = idx.numel() // self.config.model.context_length
        if not sizes or sizes[-1] != size:
            sizes.append(size)
        if size > max_sequences:
            if number:
                os.kill(os.getpid(), number)
            raise torch.OutOfMemoryError("imitated")
        return loss(self, idx, targets)

    monkeypatch.setattr(GPTModule, "loss", limited)
    return sizes


@pytest.mark.promise("runs.md#micro_batch_size=auto")
def test_micro_batch_shrinks_until_it_fits(corpus_folder, trained, tmp_path, monkeypatch, capsys):
    """A warning has both sizes, and the run still starts from the weights of `init_from`."""
    sizes = imitate_small_device(monkeypatch, max_sequences=2)
    changes = ["trainer.micro_batch_size=auto", "horizon=1steps", f"init_from={trained.path}", "optim.lr=1e-9"]
    training = begin_run(tiny_config(corpus_folder, *changes, "optim.matrix_lr=1e-9", f"run_dir={tmp_path / 'run'}"))
    fit(training)
    assert sizes == [6, 3, 1]
    warnings = capsys.readouterr().err
    for before, after in ((6, 3), (3, 1)):
        assert f"out of memory at trainer.micro_batch_size={before}: continuing with {after} and as many" in warnings
    assert load_config(training.path / "config.yaml").trainer.micro_batch_size == 1
    changes = [f"# after step 0: trainer.micro_batch_size={size}" for size in ("3, was 6", "1, was 3")]
    assert (training.path / "command.txt").read_text().splitlines()[1:] == changes
    assert [step for step, _ in read_curves(training.path)["val/loss"]] == [0, 1]  # each is written once
    start, end = (load_checkpoint(run / "checkpoints/last.ckpt")["state_dict"] for run in (trained.path, training.path))
    for name in start:
        torch.testing.assert_close(end[name], start[name], atol=1e-6, rtol=0.0)


@pytest.mark.parametrize("when", ["before the update", "within the update"])
def test_run_continues_from_its_last_whole_step(corpus_folder, tmp_path, monkeypatch, when):
    """Within an update, the weights may have changed, so the run continues from a checkpoint."""
    name = "training_step" if when == "before the update" else "clip_gradients_to"
    original, calls = getattr(GPTModule, name), []

    def fail_once(self, *arguments):
        calls.append(name)
        if len(calls) == 5:
            raise torch.OutOfMemoryError("imitated")
        return original(self, *arguments)

    monkeypatch.setattr(GPTModule, name, fail_once)
    changes = ["trainer.micro_batch_size=auto", "horizon=13steps", "trainer.checkpoint_every=3"]
    training = begin_run(tiny_config(corpus_folder, *changes, f"run_dir={tmp_path / 'run'}"))
    fit(training)
    step = 4 if when == "before the update" else 3
    change = f"# after step {step}: trainer.micro_batch_size=3, was 6"
    assert (training.path / "command.txt").read_text().splitlines()[1:] == [change]
    assert training.metrics["steps"] == 13
    if when == "within the update":
        assert len(calls) == 5 + 10  # steps 4 and 5 are made again


@pytest.mark.promise("runs.md#second process in the same directory")
@pytest.mark.parametrize(
    ("size", "max_sequences", "words"),
    [(6, 3, "=6: try trainer.micro_batch_size=3"), (1, 0, "=1, the smallest: choose a smaller model")],
)
def test_size_that_was_given_does_not_shrink(corpus_folder, tmp_path, monkeypatch, size, max_sequences, words):
    """The line has the next size to try."""
    imitate_small_device(monkeypatch, max_sequences)
    changes = [f"trainer.micro_batch_size={size}", "horizon=1steps", f"run_dir={tmp_path / 'run'}"]
    training = begin_run(tiny_config(corpus_folder, *changes))
    assert f"out of memory at trainer.micro_batch_size{words}" in refusal(fit, training)


def test_stop_signal_is_not_lost_when_memory_runs_out(corpus_folder, tmp_path, monkeypatch):
    """The signal arrives in the step that fails, and the run stops after the step that succeeds."""
    imitate_small_device(monkeypatch, 3, signal.SIGTERM)
    changes = ["trainer.micro_batch_size=auto", "horizon=5steps", f"run_dir={tmp_path / 'run'}"]
    training = begin_run(tiny_config(corpus_folder, *changes))
    fit(training)
    assert training.result.stop_signal == signal.SIGTERM
    assert load_checkpoint(training.path / "checkpoints/last.ckpt")["step"] == 1


def test_memory_runs_out_as_time_is_up(corpus_folder, tmp_path, monkeypatch):
    """The last steps are trained again, as many as the clock allows."""
    now = 0.0
    tick = 1.0

    def read_time() -> float:
        nonlocal now
        now += tick
        return now

    class FailsOnce:
        failed_at = 0

        def on_validation_end(self, step, module) -> None:
            nonlocal tick
            if module.clock.progress == 1.0 and not self.failed_at:
                self.failed_at, tick = step, 0.5
                raise torch.OutOfMemoryError("imitated")

    monkeypatch.setattr(training_clock, "time", SimpleNamespace(perf_counter=read_time, process_time=read_time))
    changes = ["trainer.micro_batch_size=auto", "horizon=30s", f"run_dir={tmp_path / 'run'}"]
    training, fails_once = begin_run(tiny_config(corpus_folder, *changes)), FailsOnce()
    fit(training, [fails_once])
    assert training.metrics["steps"] > fails_once.failed_at > 0
