"""Users' callbacks: when hooks run, what they log, stop and store, and which objects are refused."""

import json
import re
import time

import numpy as np
import pytest
import torch
from lightning import Callback

import gpt
from gpt.api import read_curves
from gpt.checkpoint import load_checkpoint
from gpt.training.callbacks import HOOKS
from harness import (
    StopAt,
    Training,
    begin_again,
    begin_run,
    differences,
    fit,
    read_tensorboard,
    refusal,
    resume_run,
    tiny_arguments,
    tiny_config,
    train_on_ranks,
)

VALIDATIONS = [3, 6, 9, 12, 13]  # of a run of 13 steps


class Recorder:
    """Records each call of a hook, and its arguments."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self.losses: list[float] = []
        self.scores: list[float] = []
        self.gradient_norms: list[float] = []
        self.paused_seconds = 0.0

    def on_train_start(self, step: int) -> None:
        self.calls.append(("on_train_start", step))
        self.start = time.perf_counter()

    def on_train_step_end(self, module, loss, step: int, unknown: str = "its default") -> None:
        assert unknown == "its default"
        self.calls.append(("on_train_step_end", step))
        self.losses.append(float(loss))
        gradients = [p.grad for p in module.model.parameters()]
        assert all(gradient is not None for gradient in gradients)
        self.gradient_norms.append(float(torch.nn.utils.get_total_norm(gradients)))

    def on_validation_end(self, score, step: int) -> None:
        self.calls.append(("on_validation_end", step))
        self.scores.append(score.nats_per_token)
        time.sleep(0.1)

    def on_train_end(self, step: int) -> None:
        self.calls.append(("on_train_end", step))
        self.seconds = time.perf_counter() - self.start


class Logging:
    """Logs a curve in each of its hooks."""

    def on_train_start(self, step: int, log) -> None:
        if step == 0:
            log("mine/start", 1)

    def on_train_step_end(self, step: int, loss, log) -> None:
        log("mine/loss", loss)
        if step % 5 == 0:
            log("mine/fifth", step / 2)

    def on_validation_end(self, score, log) -> None:
        log("mine/double", 2 * score.nats_per_token)

    def on_train_end(self, log) -> None:
        log("mine/end", 7.0)


class Counter:
    """Counts steps and validations, and stores both numbers."""

    def __init__(self) -> None:
        self.counts = {"steps": 0, "validations": 0}

    def on_train_step_end(self) -> None:
        self.counts["steps"] += 1

    def on_validation_end(self) -> None:
        self.counts["validations"] += 1

    def state_dict(self) -> dict:
        return self.counts

    def load_state_dict(self, state: dict) -> None:
        self.counts = state


@pytest.fixture(scope="module")
def recorded(corpus_folder) -> tuple[Training, Recorder]:
    """Return a run of 13 steps of two micro-batches, with dropout, and its recorder."""
    run = ["horizon=13steps", "data.prompts=[]", "trainer.keep_every=5", "optim.clip=0"]
    training = begin_run(tiny_config(corpus_folder, *run, f"run_dir={corpus_folder / 'run'}"))
    recorder = Recorder()
    fit(training, [recorder, Logging(), Counter()])
    return training, recorder


# --- hooks and their arguments ---


def test_hooks_follow_the_steps(recorded):
    """Hooks run once a step, not once a micro-batch. The hook of a step runs before the hook of its validation."""
    training, recorder = recorded
    assert training.config.accumulation_steps == 2
    expected = [("on_train_start", 0)]
    for step in range(1, 14):
        expected.append(("on_train_step_end", step))
        if step in VALIDATIONS:
            expected.append(("on_validation_end", step))
    assert recorder.calls == [*expected, ("on_train_end", 13)]


def test_hooks_receive_the_figures_of_the_curves(recorded):
    """The loss is the mean over the micro-batches, the score is of the validation, and gradients still exist."""
    training, recorder = recorded
    curves = read_tensorboard(training.path)
    means = [sum(recorder.losses[i : i + 3]) / len(recorder.losses[i : i + 3]) for i in range(0, 13, 3)]
    assert [loss for _, loss in curves["train/loss"]] == pytest.approx(means)
    assert curves["val/loss"] == [
        (step, pytest.approx(s)) for step, s in zip(VALIDATIONS, recorder.scores, strict=True)
    ]
    norms = curves["weights/grad_norm"]
    assert norms == [(step, pytest.approx(recorder.gradient_norms[step - 1])) for step, _ in norms]


def test_clock_stands_still_during_validation(recorded):
    """Validations and their hooks do not count as training time."""
    training, recorder = recorded
    seconds = load_checkpoint(training.path / "checkpoints/last.ckpt")["state"]["seconds"]
    assert 0 < seconds < recorder.seconds - len(VALIDATIONS) * 0.1


def test_hooks_choose_their_arguments(recorded, tmp_path):
    """A hook may declare all arguments or none."""
    names: dict[str, set[str]] = {}

    class Every:
        def on_train_start(self, **arguments) -> None:
            names["on_train_start"] = set(arguments)

        def on_train_step_end(self, *positional, **arguments) -> None:
            assert positional == ()
            names["on_train_step_end"] = set(arguments)

        def on_validation_end(self, **arguments) -> None:
            names["on_validation_end"] = set(arguments)

        def on_train_end(self, **arguments) -> None:
            names["on_train_end"] = set(arguments)

    counter = Counter()
    fit(begin_again(recorded[0], tmp_path, horizon="1steps", logger=[]), [Every(), counter])
    assert names == {hook: set(arguments) for hook, arguments in HOOKS.items()}
    assert counter.counts == {"steps": 1, "validations": 1}


# --- curves ---


def test_log_writes_a_curve(recorded):
    """Every call adds a point at its step, to metrics.csv and to TensorBoard."""
    training, recorder = recorded
    table = {tag: points for tag, points in read_curves(training.path).items() if tag.startswith("mine/")}
    assert table == {
        "mine/start": [(0, 1.0)],
        "mine/loss": list(enumerate(recorder.losses, start=1)),
        "mine/fifth": [(5, 2.5), (10, 5.0)],
        "mine/double": [(step, 2 * s) for step, s in zip(VALIDATIONS, recorder.scores, strict=True)],
        "mine/end": [(13, 7.0)],
    }
    shown = {tag: points for tag, points in read_tensorboard(training.path).items() if tag.startswith("mine/")}
    assert shown == {tag: [(step, pytest.approx(value)) for step, value in points] for tag, points in table.items()}


def test_log_writes_at_once(recorded, tmp_path):
    """When `log` returns, the point is in metrics.csv, so that other programs can read it."""
    tables = []

    class Reads:
        def on_train_step_end(self, step: int, log) -> None:
            log("mine/step", step)
            tables.append(read_curves(tmp_path / "run")["mine/step"])

    fit(begin_again(recorded[0], tmp_path, horizon="2steps"), [Reads()])
    assert tables == [[(1, 1.0)], [(1, 1.0), (2, 2.0)]]


def test_resumed_run_has_the_same_points(recorded, tmp_path):
    """A run that was stopped between two log points, and killed later, ends with the same files."""
    training = begin_again(recorded[0], tmp_path)
    fit(training, [Recorder(), Logging(), Counter(), StopAt(5)])
    assert read_curves(training.path)["mine/end"] == [(5, 7.0)]  # logged after the checkpoint
    with (training.path / "metrics.csv").open("a") as table:
        table.write("6,mine/loss,7.0\n")  # as if killed later
    fit(resume_run(training.path), [Recorder(), Logging(), Counter()])
    assert differences(training.path, recorded[0].path) == []


# --- stopping ---


class Stopper:
    """Requests the end of a run in one hook, at a step or later."""

    def __init__(self, hook: str, step: int):
        self.first_step = step
        setattr(self, hook, self.stop_at)

    def stop_at(self, step: int, stop) -> None:
        if step >= self.first_step:
            stop()


@pytest.mark.parametrize(
    ("hook", "step", "expected"),
    [
        ("on_train_start", 0, 1),
        ("on_train_step_end", 5, 5),
        ("on_validation_end", 4, 6),
        ("on_train_step_end", 13, 13),
    ],
)
def test_callbacks_stop_a_run(recorded, tmp_path, capfd, hook, step, expected):
    """The run ends after the step, with a validation and a checkpoint. After the last step, `stop` does nothing."""
    training = begin_again(recorded[0], tmp_path)
    is_early = expected < 13
    fit(training, [Stopper(hook, step)])
    assert training.result.stop_reason == ("callback" if is_early else "horizon")
    assert training.metrics["steps"] == training.result.step == expected
    assert [at for at, _ in read_curves(training.path)["val/loss"]] == sorted(
        {at for at in VALIDATIONS if at <= expected} | {expected}
    )
    printed = capfd.readouterr().out
    hint = f"at step {expected}, as a callback requested; to continue anyway: python train.py resume={training.path}"
    assert (hint in printed) == is_early
    last = load_checkpoint(training.path / "checkpoints/last.ckpt")
    assert last["step"] == expected
    if expected == 5:
        kept = load_checkpoint(recorded[0].path / "checkpoints/step-00000005.ckpt")["state_dict"]
        assert all(torch.equal(weight, kept[name]) for name, weight in last["state_dict"].items())
    assert (resume_run(training.path) is not None) == is_early


@pytest.mark.slow
def test_two_processes_stop_together(corpus_folder, tmp_path, monkeypatch):
    """If a callback of one process requests a stop, all stop at the next validation or log point."""
    (tmp_path / "stopper.py").write_text(
        "import os\n"
        "class Stopper:\n"
        "    def on_train_step_end(self, step, stop):\n"
        "        if step == 7 and os.environ['RANK'] == '1':\n"
        "            stop()\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    run = ["trainer.device=cpu", "horizon=40steps", "trainer.validate_every=4", "callbacks=stopper:Stopper"]
    printed = train_on_ranks(2, *tiny_arguments(corpus_folder, *run, f"run_dir={tmp_path / 'run'}"))
    assert "stopped early at step 8, as a callback requested" in printed
    assert json.loads((tmp_path / "run/metrics.json").read_text())["steps"] == 8


# --- states ---


def test_hooks_run_before_the_checkpoint_of_their_step(recorded):
    """The state in each checkpoint includes the step and the validation of that checkpoint."""
    for file, step in (("step-00000005", 5), ("step-00000010", 10), ("last", 13)):
        counts = load_checkpoint(recorded[0].path / f"checkpoints/{file}.ckpt")["callbacks"]["Counter"]
        assert counts == {"steps": step, "validations": sum(at <= step for at in VALIDATIONS)}


@pytest.mark.parametrize("is_new", [False, True])
def test_states_are_restored(recorded, tmp_path, is_new):
    """A callback continues with its state from the checkpoint. It may also be new to a run."""
    fit(begin_again(recorded[0], tmp_path, logger=[]), [StopAt(5), *([] if is_new else [Counter()])])
    resumed, counter = resume_run(tmp_path / "run"), Counter()
    assert load_checkpoint(resumed.spec.checkpoint)["step"] == 5
    fit(resumed, [counter])
    assert counter.counts == ({"steps": 8, "validations": 4} if is_new else {"steps": 13, "validations": 5})


def test_states_that_cannot_be_stored(recorded, tmp_path):
    """The line has the callback and the type, and nothing is saved, because no such checkpoint could be loaded."""

    class Hoarder(Counter):
        def state_dict(self) -> dict:
            return {"values": [1.0, {"mean": np.float64(2.0)}]}

    training = begin_again(recorded[0], tmp_path, horizon="2steps")
    line = refusal(fit, training, [Hoarder()])
    assert re.search(r"callback Hoarder: .*float64.*: change its state_dict", line)
    assert not list(training.path.glob("checkpoints/*"))


# --- objects that are not callbacks ---


class Nothing:
    """An object without hooks."""


class Unknown:
    """A callback whose hook needs an argument that no hook has."""

    def on_train_end(self, loss) -> None:
        raise AssertionError


class Positional:
    """A callback whose hook does not take its argument by name."""

    def on_train_end(self, step, /) -> None:
        raise AssertionError


@pytest.mark.parametrize(
    ("callbacks", "words"),
    [
        ([Callback()], "Callback is a callback of lightning.Trainer: .*docs/experiments.md.*"),
        ([Counter(), Nothing()], f"Nothing is of type Nothing, with none of {', '.join(HOOKS)}"),
        ([Counter], r"Counter is a class: .* Counter\(\)"),
        ([Unknown()], "Unknown.on_train_end needs 'loss': choose from step, module, log, stop"),
        ([Positional()], "Positional.on_train_end needs 'step': .*"),
        ([Counter(), Recorder(), Counter()], "2 of class Counter have a state_dict: give each a class name"),
    ],
)
def test_objects_that_are_not_callbacks_are_refused(recorded, tmp_path, callbacks, words):
    """One line has the object and the remedy, before a run directory is created."""
    text = recorded[0].config.data.path
    assert re.fullmatch(f"callbacks: ({words})", refusal(gpt.train, text, run_dir=tmp_path / "b", callbacks=callbacks))
    assert not (tmp_path / "b").exists()
