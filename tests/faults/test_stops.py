"""Signals, exceptions and odd environments. A run saves what is complete, and continues bit for bit."""

import os
import re
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest

from gpt.checkpoint import load_checkpoint
from gpt.errors import ExternalError, NonFiniteError, UserError
from gpt.training import batch_loader, loop
from gpt.training.module import GPTModule
from gpt.training.stop_signals import StopSignals
from harness import (
    ROOT,
    StopAt,
    begin_run,
    command,
    differences,
    fit,
    resume_run,
    tiny_config,
    train,
    train_in_subprocess,
)

RUN = ["horizon=23steps"]
STOP = 13


@pytest.mark.promise("runs.md#Ctrl-C")
def test_signal_stops_after_the_step(corpus_folder, reference, tmp_path, capfd):
    """The run saves before it ends."""
    run_dir = tmp_path / "run"
    training = begin_run(tiny_config(corpus_folder, *RUN, f"run_dir={run_dir}"))
    fit(training, [StopAt(STOP, signal.SIGUSR1)])
    assert training.result.stop_signal == signal.SIGUSR1
    assert load_checkpoint(run_dir / "checkpoints/last.ckpt")["step"] == STOP
    assert f"continue with: python train.py resume={run_dir}" in capfd.readouterr().out
    train(f"resume={run_dir}")
    assert differences(run_dir, reference) == []


@pytest.mark.promise("runs.md#Ctrl-C", "runs.md#ignored signal")
@pytest.mark.parametrize(
    ("number", "is_ignored", "stop_signal"),
    [
        *((number, False, number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)),
        *((number, False, number) for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)),
        (signal.SIGHUP, True, 0),
        (signal.SIGINT, True, signal.SIGINT),
    ],
)
def test_signals_of_users_and_queues_stop_a_run(number, is_ignored, stop_signal):
    """After `nohup`, SIGHUP does not stop a run. SIGINT does, even if a script's `&` made the process ignore it."""
    handler = signal.getsignal(number)
    stop = StopSignals()
    try:
        if is_ignored:
            signal.signal(number, signal.SIG_IGN)
        stop.install()
        os.kill(os.getpid(), number)
        assert stop.received_signal == stop_signal
        stop.restore()
        assert signal.getsignal(number) == (signal.SIG_IGN if is_ignored else handler)
    finally:
        stop.restore()
        signal.signal(number, handler)


def test_run_trains_in_a_thread(corpus_folder, reference, tmp_path):
    """A thread, as of a web application, cannot receive signals."""
    training = begin_run(tiny_config(corpus_folder, *RUN, f"run_dir={tmp_path / 'run'}"))
    with ThreadPoolExecutor(1) as pool:
        pool.submit(fit, training).result()
    assert differences(tmp_path / "run", reference) == []


@pytest.mark.promise("runs.md#any other exception", "runs.md#does not answer for two minutes")
@pytest.mark.promise("runs.md#exception within an update", "runs.md#continues from the last checkpoint")
@pytest.mark.parametrize(
    ("place", "error"),
    [
        ("reading", ExternalError("the store does not answer")),
        ("forward", ValueError("a bug")),
        ("update", UserError("a mistake")),
        ("hook", UserError("a mistake")),
    ],
)
def test_exception_saves_the_last_whole_step(corpus_folder, reference, tmp_path, monkeypatch, place, error):
    """On one device, an exception while text is read or before an update loses no step.

    Within an update, and before all that follows it is done, the step is not whole, and earlier checkpoints stay.
    """

    def fail(*arguments, **options):
        raise error

    class Fails:
        def on_train_step_end(self, step) -> None:
            if step == STOP:
                if place == "hook":
                    raise error
                name = {"forward": "training_step", "update": "clip_gradients_to"}.get(place)
                if name:
                    monkeypatch.setattr(GPTModule, name, fail)

    def read_micro_batches(config, dataset, step, *arguments, **options):
        if place == "reading" and step == STOP:
            raise error
        return batch_loader.read_micro_batches(config, dataset, step, *arguments, **options)

    run_dir = tmp_path / "run"
    monkeypatch.setattr(loop, "read_micro_batches", read_micro_batches)
    with pytest.raises(type(error), match=str(error)):
        fit(begin_run(tiny_config(corpus_folder, *RUN, f"run_dir={run_dir}")), [Fails()])
    monkeypatch.undo()
    newest = load_checkpoint(run_dir / "checkpoints/last.ckpt")["step"]
    assert newest == STOP if place in ("reading", "forward") else 0 < newest < STOP
    train(f"resume={run_dir}")
    assert differences(run_dir, reference) == []


class BreakGradient:
    """Makes the gradient of one bias NaN from the step after `step` on. The weights stay finite."""

    def __init__(self, step: int):
        self.step = step

    def on_train_step_end(self, step, module) -> None:
        if step == self.step:
            module.model.final_norm.bias.register_hook(lambda gradient: gradient * float("nan"))


@pytest.mark.promise("runs.md#NaN or infinite gradient")
def test_broken_gradient_ends_the_run_and_saves_nothing(run_copy):
    """The message has the step, the layers and the remedy. No update is made, and no checkpoint changes.

    The step before is complete and not saved yet. After any other exception it would be.
    """
    before = {file.name: file.read_bytes() for file in run_copy.glob("checkpoints/*")}
    step = load_checkpoint(run_copy / "checkpoints/last.ckpt")["step"]
    with pytest.raises(NonFiniteError) as end:
        fit(resume_run(run_copy), [BreakGradient(step + 1)])
    message, norms = str(end.value).splitlines()
    assert re.match(rf"step {step + 2}: the gradient is not finite, so no update was made \(loss \d\.\d+\); ", message)
    assert "init_from=" in message
    assert re.match(r"  gradient norms: token_embedding \d.*, blocks.0 \d.*, final_norm nan", norms)
    assert {file.name: file.read_bytes() for file in run_copy.glob("checkpoints/*")} == before


@pytest.mark.promise("runs.md#continues bit for bit")
@pytest.mark.slow
def test_environment_makes_no_difference(run_copy, reference):
    """A plain terminal, no home and other threads change no bit. A run has stored its number of threads."""
    plain = {"LANG": "C", "LC_ALL": "C", "PYTHONIOENCODING": "ascii", "TERM": "dumb"}
    no_home = {"HOME": "/dev/null/home", "TMPDIR": "/dev/null/home"}
    train_in_subprocess(f"resume={run_copy}", env=os.environ | plain | no_home | {"OMP_NUM_THREADS": "2"})
    assert differences(run_copy, reference) == []


@pytest.mark.slow
@pytest.mark.parametrize("streams", ["2>&-", ">&-", "<&- >&- 2>&-"])
def test_run_survives_closed_streams(settings, reference, tmp_path, streams):
    """Its terminal is gone. A mistake still ends with code 2."""
    run_dir = tmp_path / "run"
    words = " ".join(f"'{word}'" for word in command(*settings, f"run_dir={run_dir}"))
    assert subprocess.run(f"{words} {streams}", shell=True, cwd=ROOT).returncode == 0
    assert differences(run_dir, reference) == []
    if streams == "<&- >&- 2>&-":
        assert subprocess.run(f"{words} {streams}", shell=True, cwd=ROOT).returncode == 2
