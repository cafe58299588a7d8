"""A training called from Python, and on several processes."""

import os
import re
import signal
import time
import weakref
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import yaml
from lightning import Callback

import gpt.training.run.clock
import gpt.training.trainer
from gpt import evaluate
from gpt.exchange import checkpoint
from gpt.model.loss import IGNORE
from gpt.sampling.scoring import score
from gpt.text.batches import validation_batches
from gpt.training import resolve
from gpt.training.begin import load_text
from gpt.training.config.loading import read
from gpt.training.config.schedule import Schedule
from gpt.training.config.schema import Config
from gpt.training.estimate.timing import seconds_per_step
from gpt.training.module import GPTModule
from gpt.training.trainer import make_batch
from harness import (
    StopAt,
    begin_run,
    differences,
    fit,
    read_curves,
    read_table,
    refusal,
    resume_run,
    tiny_arguments,
    tiny_config,
    train,
    train_apart,
)


@pytest.fixture(scope="module")
def folder(corpus_folder) -> Path:
    """A folder with a corpus and a run of six steps from it."""
    fit(begin_run(tiny_config(corpus_folder, "horizon=6steps", f"run_dir={corpus_folder / 'first'}")))
    return corpus_folder


@pytest.fixture
def settings(folder) -> list[str]:
    """The arguments of a short training on two CPU processes, or on as many as a test says."""
    return tiny_arguments(folder, "trainer.device=cpu")


def hardware_decided(config: Config) -> Config:
    """The configuration for this machine."""
    return resolve.for_model(resolve.for_machine(config), config.model)


def test_begin_decides_everything(folder, tmp_path):
    """A session that has begun has a directory, and nothing in its configuration is automatic."""
    session = begin_run(tiny_config(folder, "trainer.micro_batch_size=auto", f"run_dir={tmp_path / 'run'}"))
    trainer = session.config.trainer
    assert "auto" not in (trainer.device, trainer.precision, trainer.compile)
    assert trainer.micro_batch_size == 6
    assert session.config.may_shrink
    assert read(session.directory / "config.yaml") == session.config


@pytest.mark.parametrize(("limit", "horizon"), [(600, "377steps"), (1e-6, "30steps")])
def test_automatic_horizon(folder, tmp_path, monkeypatch, capsys, limit, horizon):
    """Ten epochs of the text, or what fits into the time; and the run is that of a horizon in steps, bit for bit."""
    monkeypatch.setattr(resolve, "AUTO_SECONDS", limit)
    session = begin_run(tiny_config(folder, "horizon=auto", f"run_dir={tmp_path / 'auto'}"))
    assert f"horizon={horizon} suits this text and this machine\n" in capsys.readouterr().out
    assert session.schedule.total_steps == int(horizon.removesuffix("steps"))
    assert read(tmp_path / "auto/config.yaml").horizon == session.config.horizon == horizon
    if horizon == "30steps":
        fit(session)
        fit(begin_run(tiny_config(folder, f"horizon={horizon}", f"run_dir={tmp_path / 'given'}")))
        assert differences(tmp_path / "auto", tmp_path / "given") == []
        line = "horizon=auto is for a new run: to extend one, say until when, such as horizon=8000steps"
        assert refusal(resume_run, str(tmp_path / "auto"), "auto") == line


class Shapes(Callback):
    """Notes the shape of the inputs of each step."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, ...]] = []

    def on_train_batch_start(self, trainer, module, batch, batch_idx) -> None:
        self.seen.append(tuple(batch[0][0].shape))


@pytest.mark.parametrize(("window", "short"), [(8, (6, 8)), (4, (12, 4)), (0, (3, 16))])
def test_short_windows_at_first(folder, tmp_path, window, short):
    """From the second step to 0.6 of a run, as many tokens come in shorter windows, from more places; then in whole."""
    shapes, asked = Shapes(), [f"trainer.short_window={window}", f"run_dir={tmp_path / 'run'}"]
    fit(begin_run(tiny_config(folder, "horizon=10steps", *asked)), [shapes])
    assert shapes.seen == [(3, 16), *[short] * 5, *[(3, 16)] * 4]


def test_short_windows_by_default(folder, tmp_path):
    """They are for a context of 256 and random weights alone; a longer context is trained in whole windows."""
    long = ["horizon=1steps", "trainer.tokens_per_step=512", "trainer.micro_batch_size=1", "trainer.short_window=null"]
    for context, expected in (("256", 128), ("128", 0), ("512", 0)):
        asked = [*long, f"model.context_length={context}", f"run_dir={tmp_path / context}"]
        run = begin_run(tiny_config(folder, *asked))
        assert (run.config.trainer.short_window, run.config.decided["trainer.short_window"]) == (expected, None)
        fit(run)
    trained = begin_run(tiny_config(folder, *long, f"init_from={tmp_path / '256'}", f"run_dir={tmp_path / 'tuned'}"))
    assert (trained.config.model.context_length, trained.config.trainer.short_window) == (256, 0)
    line = refusal(tiny_config, folder, "trainer.short_window=5")
    assert line.startswith("trainer.short_window=5 does not divide model.context_length=16: ")


def test_short_windows_of_a_time(folder, tmp_path):
    """They end when 0.6 of the time is up."""
    shapes = Shapes()
    run = begin_run(tiny_config(folder, "horizon=2s", f"run_dir={tmp_path / 'run'}"))
    fit(run, [shapes])
    short, steps = run.schedule.whole_from, run.schedule.total_steps
    assert shapes.seen == [(3, 16), *[(6, 8)] * (short - 1), *[(3, 16)] * (steps - short)][:steps]
    assert short <= steps + 1


def test_validation_in_short_windows(folder, tmp_path, capsys):
    """A validation has windows as long as those of the step before it; of a checkpoint from then, evaluate says so."""
    often = ["horizon=10steps", "trainer.validate_every=6", f"run_dir={tmp_path / 'run'}"]
    run = begin_run(tiny_config(folder, *often))
    fit(run, [StopAt(6)])
    for trained, said in ((run.directory, True), (folder / "first", False)):
        evaluate.main(["--checkpoint", str(trained), "--text", str(folder / "corpus.txt"), "--json"])
        printed = capsys.readouterr()
        assert ("knows contexts of 8 tokens: its run learns those of 16 from 0.6 of" in printed.err) == said
    module = GPTModule(run.config, run.text.tokenizer, lambda step: 1.0)
    module.load_state_dict(checkpoint.load(run.directory / "checkpoints/last.ckpt")["state_dict"])
    (loss,) = (value for step, value in read_table(run.directory)["val/loss"] if step == 6)
    source = run.text.sources[0]
    for window, is_equal in ((8, True), (16, False)):
        expected = score(module.model, validation_batches(source.validation, 1, window, IGNORE), 1).nats_per_token
        assert (loss == pytest.approx(expected, rel=1e-5)) == is_equal


@pytest.mark.parametrize(("horizon", "end", "whole_from"), [(20, 5, 12), (20, 6, 6), (20, 10, 6), (7, 5, 5), (8, 7, 6)])
def test_short_windows_do_not_come_back(folder, tmp_path, horizon, end, whole_from):
    """A run of another horizon goes on with whole windows if it has come to them, and else until 0.6 of the new one."""
    fit(begin_run(tiny_config(folder, "horizon=10steps", f"run_dir={tmp_path / 'run'}")), [StopAt(end)])
    run, shapes = resume_run(str(tmp_path / "run"), f"{horizon}steps"), Shapes()
    assert run.schedule.whole_from == whole_from
    fit(run, [shapes])
    assert shapes.seen == [(6, 8)] * (whole_from - end) + [(3, 16)] * (horizon - max(end, whole_from))


def test_the_best_of_whole_windows(folder, tmp_path):
    """The first validation in whole windows counts as the best so far, whatever short ones came to."""

    class Spoil(Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx) -> None:
            if batch_idx == 7:
                with torch.no_grad():
                    module.model.token_embedding.weight.normal_()

    asked = ["horizon=10steps", "trainer.validate_every=2", f"run_dir={tmp_path / 'run'}"]
    run = begin_run(tiny_config(folder, *asked))
    fit(run, [Spoil()])
    losses = dict(read_table(run.directory)["val/loss"])
    assert losses.keys() == {2, 4, 6, 8, 10}
    assert max(losses[2], losses[4], losses[6]) < min(losses[8], losses[10])
    assert run.state.best_loss == pytest.approx(min(losses[8], losses[10]))
    assert run.state.best_step == checkpoint.load(run.directory / "checkpoints/best.ckpt")["step"] > 6


def test_short_windows_are_of_the_same_text(folder):
    """An epoch of short windows shows the text once, as one of whole windows does, but for what fills no step."""
    config = hardware_decided(tiny_config(folder))
    text = load_text(config, quiet=True)
    train, T = text.sources[0].train, config.model.context_length
    expected = np.bincount(train[0], minlength=257)
    count = len(train) // T // 3  # of micro-batches in an epoch
    for window in (T, T // 2):
        batches = [make_batch(config, text, 3 * i, window) for i in range(count)]
        assert {tuple(idx.shape) for idx, _ in batches} == {(3 * T // window, window)}
        shown = np.bincount(torch.cat([idx for idx, _ in batches]).flatten(), minlength=257)
        assert np.abs(expected - shown).sum() < 4 * T
        assert all(torch.equal(idx[:, 1:], targets[:, :-1]) for idx, targets in batches)


def test_a_seed_for_the_order_of_windows(folder):
    """`seed` draws the initial weights and, unless `data.seed` is given, the order of windows."""

    def drawn(*changes: str) -> tuple[bytes, bytes]:
        config = hardware_decided(tiny_config(folder, "horizon=6steps", *changes))
        corpora = load_text(config, quiet=True)
        module = GPTModule(config, corpora.tokenizer, lambda step: 1.0)
        weights = module.model.position_embedding.weight.detach().numpy().tobytes()
        return weights, make_batch(config, corpora, 0)[0].numpy().tobytes()

    usual, both, order = drawn("seed=1"), drawn("seed=1", "data.seed=1"), drawn("seed=1", "data.seed=2")
    assert usual == both
    assert order[0] == usual[0] and order[1] != usual[1]
    other = drawn("seed=2")
    assert other[0] != usual[0] and other[1] == order[1]
    assert drawn("seed=2", "data.seed=1") == (other[0], usual[1])
    assert "data.seed=-1 is out of range" in refusal(tiny_config, folder, "data.seed=-1")


def test_automatic_horizon_of_a_short_text(folder, tmp_path, monkeypatch):
    """The least number of steps is not timed, however long it takes."""
    monkeypatch.setattr("gpt.training.estimate.timing.measure", lambda *_: pytest.fail("timed"))
    changes = ("horizon=auto", "trainer.tokens_per_step=4800", f"run_dir={tmp_path / 'run'}")
    assert begin_run(tiny_config(folder, *changes)).config.horizon == "30steps"


def test_probe_takes_a_few_steps(folder):
    """The probe times steps of a throwaway model, within its limit."""
    config = hardware_decided(tiny_config(folder))
    corpora = load_text(config)
    begin = time.monotonic()
    seconds = seconds_per_step(config, Schedule.of(config, corpora.train_tokens), corpora, at_most=0.2)
    assert 0.0 < seconds < time.monotonic() - begin


def test_resume_of_a_run_without_checkpoints(folder, tmp_path, capsys):
    """A run that was stopped before its first checkpoint begins at its first step, in its own directory."""
    begun = begin_run(tiny_config(folder, "horizon=2steps", f"run_dir={tmp_path / 'run'}"))
    begun.close()
    again = resume_run(str(begun.directory))
    assert "has no checkpoint yet: beginning at its first step" in capsys.readouterr().out
    again.close()
    assert (again.directory, again.config, again.schedule) == (begun.directory, begun.config, begun.schedule)


def test_what_was_decided_is_recorded(folder, tmp_path):
    """config.yaml says what the program chose, and what stood there; a run that is begun again knows it, too."""
    config = tiny_config(folder, "trainer.micro_batch_size=auto", "data.prompts=null", f"run_dir={tmp_path / 'run'}")
    begun = begin_run(config)
    begun.close()
    stored = read(tmp_path / "run/config.yaml")
    assert stored == begun.config and begun.config.may_shrink
    assert stored.decided["trainer.micro_batch_size"] == "auto" != stored.trainer.micro_batch_size
    assert stored.decided["data.prompts"] is None and "seed" not in stored.decided
    assert stored.decided["data.bpe_dropout"] is None and stored.data.bpe_dropout is not None
    again = resume_run(str(tmp_path / "run"))
    again.close()
    assert again.config.may_shrink


class Weights(Callback):
    """Whether a tensor is still referenced once training has started."""

    def __init__(self, tensor: torch.Tensor):
        self.reference = weakref.ref(tensor)
        self.gone = False

    def on_train_batch_start(self, trainer, module, batch, batch_idx: int) -> None:
        self.gone = self.reference() is None


def test_initial_weights_are_let_go(folder, tmp_path):
    """The weights that a run starts from take no memory while it trains."""
    changes = [f"init_from={folder / 'first'}", "horizon=1steps", f"run_dir={tmp_path / 'run'}"]
    session = begin_run(tiny_config(folder, *changes))
    probe = Weights(session.weights["token_embedding.weight"])
    fit(session, [probe])
    assert probe.gone


@pytest.mark.parametrize(
    ("changes", "chance"),
    [
        ([], 0.5),
        (["horizon=9min"], 0.5),
        (["init_from=first"], 0.0),
        (["init_from=first", "data.bpe_dropout=0.3"], 0.3),
    ],
)
def test_the_chance_to_split_tokens(folder, tmp_path, monkeypatch, changes, chance):
    """A text that is seen often is split, and not by a model that is trained already, unless it is asked for."""
    monkeypatch.chdir(folder)
    session = begin_run(tiny_config(folder, "horizon=900steps", f"run_dir={tmp_path / 'run'}", *changes))
    session.close()
    assert session.config.data.bpe_dropout == chance


def test_a_checkpoint_is_read_once(folder, tmp_path, monkeypatch):
    """Resuming reads the file once, although Lightning asks for it again, and lets go of what was read."""
    run_dir = tmp_path / "run"
    config = tiny_config(folder, "horizon=8steps", "trainer.checkpoint_every=3", f"run_dir={run_dir}")
    fit(begin_run(config))
    (run_dir / "checkpoints/last.ckpt").unlink()
    (run_dir / "checkpoints/best.ckpt").unlink()
    reads: list[Path] = []

    def load(path: Path, mmap: bool = False) -> dict:
        reads.append(path)
        return original(path, mmap)

    original = checkpoint.load
    for module in (gpt.training.trainer, gpt.training.fit, gpt.training.run.run):
        monkeypatch.setattr(module, "load", load)
    session = resume_run(str(run_dir))
    fit(session)
    assert [path.name for path in reads] == ["previous.ckpt"]
    assert session.metrics["steps"] == 8


def test_too_many_devices(corpus_folder, monkeypatch):
    """Devices are counted, and no more are taken than this machine has."""
    config = tiny_config(corpus_folder, "trainer.devices=2", "trainer.micro_batch_size=auto")
    monkeypatch.setattr("gpt.training.resolve.device_count", lambda device: 1)
    assert refusal(resolve.for_machine, config) == "trainer.devices=2 is more than this machine has: at most 1 of cpu"


def test_too_short_a_text_names_the_key(folder, tmp_path):
    """The text says which context would do, and training which key sets it."""
    (tmp_path / "short.txt").write_text("To be, or not")
    config = tiny_config(folder, f"data.path={tmp_path / 'short.txt'}", f"data.cache={tmp_path / 'cache'}")
    line = refusal(load_text, config)
    assert re.search(r"or set model\.context_length=\d+ trainer\.tokens_per_step=\d+ or less", line)


# --- memory ---


def run_out_of_memory(monkeypatch, above: int) -> list[int]:
    """Imitate a device on which micro-batches of more than `above` windows do not fit; returns the sizes tried."""
    tried: list[int] = []
    loss = gpt.training.trainer.GPTModule.loss

    def limited(self, idx, targets):
        windows = idx.numel() // self.config.model.context_length
        if not tried or tried[-1] != windows:
            tried.append(windows)
        if windows > above:
            raise torch.OutOfMemoryError("imitated")
        return loss(self, idx, targets)

    monkeypatch.setattr(gpt.training.trainer.GPTModule, "loss", limited)
    return tried


@pytest.mark.slow
def test_micro_batch_shrinks(folder, tmp_path, monkeypatch, capsys):
    """An automatic micro-batch is halved until it fits; the weights that the run started from are not lost."""
    tried = run_out_of_memory(monkeypatch, above=2)
    changes = ["trainer.micro_batch_size=auto", "horizon=1steps", f"init_from={folder / 'first'}", "optim.lr=1e-9"]
    session = begin_run(tiny_config(folder, *changes, "optim.matrix_lr=1e-9", f"run_dir={tmp_path / 'run'}"))
    fit(session)
    assert tried == [6, 3, 1]
    assert "out of memory at trainer.micro_batch_size=6: going on with 3 and as many tokens" in capsys.readouterr().err
    stored = read(tmp_path / "run/config.yaml")
    assert (stored.trainer.micro_batch_size, stored.decided["trainer.micro_batch_size"]) == (1, "auto")
    assert stored.amended == []  # not on its way, so it can be repeated
    started, ended = (
        checkpoint.load(run / "checkpoints/last.ckpt")["state_dict"] for run in (folder / "first", session.directory)
    )
    for name in started:
        torch.testing.assert_close(ended[name], started[name], atol=1e-6, rtol=0.0)


@pytest.mark.parametrize(
    ("size", "above", "words"),
    [(6, 3, "=6: try trainer.micro_batch_size=3"), (1, 0, "=1, the least: choose a smaller model")],
)
def test_micro_batch_that_was_set(folder, tmp_path, monkeypatch, size, above, words):
    """A micro-batch that the user has set is named, with the next one to try."""
    run_out_of_memory(monkeypatch, above)
    changes = [f"trainer.micro_batch_size={size}", "horizon=1steps", f"run_dir={tmp_path / 'run'}"]
    session = begin_run(tiny_config(folder, *changes))
    assert f"out of memory at trainer.micro_batch_size{words}" in refusal(fit, session)


def test_stop_as_memory_runs_out(folder, tmp_path, monkeypatch):
    """A signal to stop that comes within the step in which memory runs out counts."""
    loss = gpt.training.trainer.GPTModule.loss

    def limited(self, idx, targets):
        if idx.numel() > 3 * self.config.model.context_length:
            os.kill(os.getpid(), signal.SIGTERM)
            raise torch.OutOfMemoryError("imitated")
        return loss(self, idx, targets)

    monkeypatch.setattr(gpt.training.trainer.GPTModule, "loss", limited)
    changes = ["trainer.micro_batch_size=auto", "horizon=5steps", f"run_dir={tmp_path / 'run'}"]
    session = begin_run(tiny_config(folder, *changes))
    fit(session)
    assert session.stopped_by == signal.SIGTERM
    assert checkpoint.load(tmp_path / "run/checkpoints/last.ckpt")["step"] == 1


def test_memory_runs_out_as_time_is_up(folder, tmp_path, monkeypatch):
    """The steps that are trained once more take as many as the clock then says."""
    now, tick = 0.0, 1.0

    def look() -> float:
        nonlocal now
        now += tick
        return now

    class FailsOnce(Callback):
        failed_at = 0

        def on_validation_end(self, trainer, module):
            nonlocal tick
            if trainer.global_step > 10 and not self.failed_at:
                self.failed_at, tick = trainer.global_step, 0.5
                raise torch.OutOfMemoryError("imitated")

    monkeypatch.setattr(gpt.training.run.clock, "time", mock.Mock(perf_counter=look, process_time=look))
    session = begin_run(
        tiny_config(folder, "trainer.micro_batch_size=auto", "horizon=16s", f"run_dir={tmp_path / 'run'}")
    )
    fit(session, [fails := FailsOnce()])
    assert session.metrics["steps"] > fails.failed_at


# --- several processes ---


@pytest.mark.slow
def test_sweep_goes_on_after_processes_that_fail(settings, tmp_path):
    """A job whose processes fail is named, and does not keep the next from training."""
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken/file").touch()
    dirs = f"run_dir={tmp_path / 'taken'},{tmp_path / 'free'}"
    done = train_apart("-m", *settings, "trainer.devices=2", "horizon=1steps", dirs, code=2)
    assert done.stderr.startswith(f"train.py: run_dir={tmp_path / 'taken'} is not empty")
    assert "train.py: job 0 (" in done.stderr and ": its processes have failed" in done.stderr
    assert (tmp_path / "free/checkpoints/last.ckpt").exists()


@pytest.mark.slow
def test_sweep_on_two_processes(settings, tmp_path, monkeypatch):
    """Both ranks of each job train the configuration of that job, and nothing is left behind of the first."""
    monkeypatch.chdir(tmp_path)
    environment, exact = dict(os.environ), ["model.dropout=0", "trainer.precision=fp32"]
    two = ["trainer.devices=2", "trainer.micro_batch_size=3", "horizon=4steps"]
    done = train("-m", *settings, *exact, *two, "optim.lr=0.003,0.02", "trainer.log_every=1")
    assert done.stderr == ""
    assert dict(os.environ) == environment | {"HYDRA_FULL_ERROR": "1"}
    assert not torch.distributed.is_initialized()
    for run, lr in zip(sorted((tmp_path / "runs").glob("2*")), (0.003, 0.02), strict=True):
        assert yaml.safe_load((run / "config.yaml").read_text())["optim"]["lr"] == lr
        alone = tmp_path / f"alone-{lr}"
        one = [*settings, *exact, "horizon=4steps", f"optim.lr={lr}", "trainer.log_every=1"]
        train(*one, f"run_dir={alone}")
        a, b = (torch.tensor([loss for _, loss in read_curves(folder)["train/loss"]]) for folder in (run, alone))
        torch.testing.assert_close(a, b, atol=1e-4, rtol=0.0)
