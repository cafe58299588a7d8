"""Runs that continue: with a longer horizon, by the same command, and only from a checkpoint that fits them."""

import dataclasses
import json
import os
import re
import shutil
import signal
from pathlib import Path

import pytest
import yaml

from gpt.exchange import checkpoint
from gpt.training.config.asked import Asked
from gpt.training.config.loading import read
from gpt.training.config.schema import Config
from gpt.training.optim import OptimConfig, lr_factor
from gpt.training.resume import settle_auto
from gpt.training.run.run import Run
from harness import (
    StopAt,
    begin_run,
    differences,
    fit,
    refusal,
    refused,
    resume_run,
    tiny_arguments,
    tiny_config,
    train,
)

STEADY = "optim.warmup_steps=5"  # with optim.decay_from=0.3, the rates of 61 steps fall from step 19 on


@pytest.fixture(scope="module")
def trained(corpus_folder) -> Path:
    """A run of 61 steps."""
    run_dir = corpus_folder / "trained"
    fit(begin_run(tiny_config(corpus_folder, STEADY, "horizon=61steps", f"run_dir={run_dir}")))
    return run_dir


@pytest.fixture
def short(trained, tmp_path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


# --- a longer horizon ---


def test_rates_by_hand():
    """From a tenth of the peak at step 20 they rise by a quarter a step, and meet the schedule of 40 steps."""
    config = OptimConfig(warmup_steps=4, schedule="linear", decay_from=0.5, final_lr=0.0)
    factors = [lr_factor(step, 40, config, 20, 0.1) for step in (20, 21, 22, 23, 24, 30, 39, 40)]
    assert factors == pytest.approx([0.35, 0.6, 0.85, 17 / 20, 16 / 20, 0.5, 0.05, 0.0], abs=1e-12)


def test_before_the_rates_fall(corpus_folder, tmp_path):
    """A run that is extended before its rates fall is, bit for bit, the run of that horizon from the start."""
    run_dir, whole = tmp_path / "run", tmp_path / "whole"
    config = tiny_config(corpus_folder, STEADY, "horizon=61steps", f"run_dir={run_dir}")
    fit(begin_run(config), [StopAt(13)])
    fit(begin_run(tiny_config(corpus_folder, STEADY, "horizon=83steps", f"run_dir={whole}")))
    train(f"resume={run_dir}", "horizon=83steps")
    assert [d for d in differences(run_dir, whole) if "extended_at" not in d] == []


def test_after_the_end(short):
    """The rates rise again, more is learnt, and configuration and checkpoint name the new horizon."""
    before = json.loads((short / "metrics.json").read_text())
    done = train(f"resume={short}", "horizon=97steps")
    assert "extending the run from horizon=61steps to 97steps, from step 61 on" in done.stdout
    after = json.loads((short / "metrics.json").read_text())
    assert (after["steps"], before["steps"]) == (97, 61)
    assert after["val_loss"] < before["val_loss"]
    assert read(short / "config.yaml").horizon == "97steps"
    done = train(f"resume={short}", "horizon=97steps")
    assert "is complete: it has trained all of its 97 steps" in done.stdout


def test_patience_begins_anew(corpus_folder, tmp_path):
    """A run that ran out of patience while its rates were at their peak trains to the new horizon's validations."""
    run_dir, wild = tmp_path / "run", ["optim.decay_from=1.0", "optim.lr=5.0"]
    config = tiny_config(corpus_folder, STEADY, "horizon=61steps", f"run_dir={run_dir}", *wild)
    fit(begin_run(dataclasses.replace(config, patience=1)))
    stopped = json.loads((run_dir / "metrics.json").read_text())["steps"]
    assert stopped < 61
    session = resume_run(str(run_dir), "83steps")
    assert session.schedule.extended_at == stopped
    fit(session)
    assert session.metrics["steps"] > stopped + 1
    assert resume_run(str(run_dir)).complete


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_interrupted_extension(short, tmp_path, number):
    """A run that is stopped or killed while it is extended ends with the same bits, and needs no second horizon."""
    whole = Path(shutil.copytree(short, tmp_path / "whole"))
    train(f"resume={whole}", "horizon=97steps")
    child = os.fork()
    if child == 0:
        session = resume_run(str(short), "97steps")
        assert session is not None
        try:
            fit(session, [StopAt(79, number)])
        finally:
            os._exit(143)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == (143 if number == signal.SIGTERM else -9)
    train(f"resume={short}")
    assert differences(short, whole) == []


def test_killed_between_two_files(short):
    """A kill between the extended last.ckpt and config.yaml leaves the old horizon there; resuming mends it."""
    before = (short / "config.yaml").read_bytes()
    fit(resume_run(str(short), "97steps"), [StopAt(62)])
    extended = (short / "config.yaml").read_bytes()
    (short / "config.yaml").write_bytes(before)
    fit(resume_run(str(short)), [StopAt(63)])
    assert (short / "config.yaml").read_bytes() == extended != before


def test_a_kept_checkpoint_that_a_kill_prevented(corpus_folder, tmp_path):
    """It is made when the run is resumed at its step."""
    run_dir, keep = tmp_path / "run", ["horizon=9steps", "trainer.keep_every=4", "trainer.checkpoint_every=4"]
    fit(begin_run(tiny_config(corpus_folder, *keep, f"run_dir={run_dir}")), [StopAt(4)])
    kept = run_dir / "checkpoints/step-00000004.ckpt"
    content = kept.read_bytes()
    kept.unlink()
    fit(resume_run(str(run_dir)))
    assert kept.read_bytes() == content


def test_reached_already(short):
    """A horizon that has been reached is one line, and changes nothing."""
    files = {file: file.read_bytes() for file in short.rglob("*") if file.is_file()}
    line = refusal(resume_run, str(short), "1epochs")
    assert re.match(r"horizon=1epochs is behind this run, which has trained 61 steps in \d+s: give a longer", line)
    assert {file: file.read_bytes() for file in short.rglob("*") if file.is_file()} == files


def test_without_a_checkpoint(corpus_folder, tmp_path):
    """A run that never saved begins with the new horizon, and its config.yaml says so once it trains."""
    run_dir = tmp_path / "run"
    begin_run(tiny_config(corpus_folder, STEADY, "horizon=61steps", f"run_dir={run_dir}"))
    session = resume_run(str(run_dir), "7steps")
    fit(session)
    assert (session.metrics["steps"], read(run_dir / "config.yaml").horizon) == (7, "7steps")


# --- a checkpoint that does not fit ---


def damage(change):
    """Change a checkpoint, with a matching checksum."""

    def apply(run_dir: Path) -> None:
        payload = checkpoint.load(run_dir / "checkpoints/last.ckpt")
        change(payload)
        for name in ("best", "previous"):
            (run_dir / f"checkpoints/{name}.ckpt").unlink()
        checkpoint.save(payload, run_dir / "checkpoints/last.ckpt")

    return apply


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda p: p.pop("schedule"), "it has no 'schedule'"),
        (lambda p: p["schedule"].update(more=1), "unexpected keyword argument 'more'"),
        (lambda p: p["state"].pop("seconds"), "it has no 'seconds'"),
        (lambda p: p["state"].pop("losses"), "it has no 'losses'"),
        (lambda p: p["state"].update(worse="2"), "its worse is '2'"),
        (lambda p: p["state_dict"].pop("final_norm.bias"), "Missing key"),
        (
            lambda p: p["state_dict"].update({"final_norm.bias": p["state_dict"]["final_norm.bias"][:5]}),
            "size mismatch",
        ),
        (lambda p: p["optimizer_states"].pop(), "not enough values to unpack"),
        (lambda p: p["optimizer_states"][0]["state"].pop(0), "it has no 0"),
        (
            lambda p: p["optimizer_states"][0]["state"][0].update(exp_avg=p["state_dict"]["final_norm.bias"]),
            "does not fit the model's weights",
        ),
        (lambda p: p["optimizer_states"][0]["param_groups"].pop(), "is shorter than"),
    ],
)
def test_is_refused_before_anything_changes(short, change, problem):
    """One line, exit code 2, and every file stays as it is."""
    damage(change)(short)
    before = {file: file.read_bytes() for file in short.rglob("*") if file.is_file()}
    line = refused(f"resume={short}", "horizon=97steps")
    assert line.startswith(f"train.py: {short}/checkpoints/last.ckpt: cannot be continued: ")
    assert problem in line
    assert {file: file.read_bytes() for file in short.rglob("*") if file.is_file()} == before


def test_another_configuration(short):
    """What config.yaml says is what is used: a checkpoint that says otherwise is refused before anything is touched."""
    damage(lambda p: p["config"]["data"].update(path="/etc/passwd", cache=str(short / "elsewhere")))(short)
    before = {file: file.read_bytes() for file in short.rglob("*") if file.is_file()}
    line = refused(f"resume={short}", "horizon=97steps")
    assert line.startswith(f"train.py: {short}/config.yaml has data.path='") and "last.ckpt '/etc/passwd'" in line
    assert {file: file.read_bytes() for file in short.rglob("*") if file.is_file()} == before


def test_another_text(short):
    """A run continues only on the text and the tokens that it has learnt."""
    damage(lambda p: p["corpus"].update(corpus="0" * 64))(short)
    assert "the corpus was 000000" in (line := refusal(resume_run, str(short), "97steps"))
    assert f"start a new run with init_from={short}/checkpoints/last.ckpt" in line


# --- resume=auto ---


@pytest.fixture
def arguments(corpus_folder, tmp_path):
    """A command for a job queue."""
    changes = ["data.prompts=null", "resume=auto", "horizon=5steps", "trainer.checkpoint_every=2"]
    return tiny_arguments(corpus_folder, *changes, f"run_dir={tmp_path / 'run'}")


def test_begun_continued_and_complete(arguments, tmp_path):
    """A run that was stopped after two steps ends like one that never was, and then there is nothing to do."""
    train(*arguments)
    whole = (tmp_path / "run").rename(tmp_path / "whole")
    stored = yaml.safe_load((whole / "config.yaml").read_text())
    assert (stored["resume"], stored["run_dir"]) == (None, str(tmp_path / "run"))
    assert len(stored["data"]["prompts"]) == 2  # as they were taken from the text

    # As a kill leaves it: nothing but the lock and a file that was being written.
    (tmp_path / "run").mkdir()
    (tmp_path / "run/.lock").touch()
    (tmp_path / "run/.config.yaml.4321").touch()
    begun = train(*arguments)
    assert begun.stderr == ""
    assert "continuing" not in begun.stdout
    (tmp_path / "run/checkpoints/last.ckpt").unlink()
    (tmp_path / "run/checkpoints/best.ckpt").unlink()
    continued = train(*arguments)
    assert re.search(r"continuing \S+/run at step \d of 5", continued.stdout)
    assert differences(tmp_path / "run", whole) == []
    complete = train(*arguments)
    assert complete.stderr == ""
    assert "is complete: it has trained all of its 5 steps" in complete.stdout


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ("seed=3", "seed=3 here, and 1 in the run of run_dir="),
        ("model.num_layers=1", "model.num_layers=1 here, and 2 in the run"),
        ("horizon=7steps", "horizon=7steps here, and 5steps in the run of"),
        ("data.prompts=[once]", "data.prompts=['once'] here, and ['', 'beta'] in the run of"),
        ("trainer.micro_batch_size=2", "trainer.micro_batch_size=2 here, and 3 in the run of"),
    ],
)
def test_other_settings(corpus_folder, tmp_path, change, line):
    """A repeated command that says something else is refused, naming the key, both values and the remedy."""
    config = tiny_config(corpus_folder, "horizon=5steps", "data.prompts=['',beta]")
    began = tiny_config(corpus_folder, "horizon=5steps", "data.prompts=null")
    Run.create(str(tmp_path / "run"), "", config.as_decided_from(began))
    asked = ["data.prompts=null", "resume=auto", f"run_dir={tmp_path / 'run'}", "horizon=5steps"]
    assert line in (found := refusal(settle_auto, Asked(tiny_config(corpus_folder, *asked, change))))
    assert "resume=" in found
    assert settle_auto(Asked(tiny_config(corpus_folder, *asked))).config.resume == str(tmp_path / "run")


def test_what_the_run_has_decided(corpus_folder, tmp_path):
    """`auto`, and a model that came with its weights, are no differences; a run_dir is needed."""
    began = tiny_config(corpus_folder, "horizon=2h", "init_from=gpt2")
    stored = tiny_config(corpus_folder, "horizon=2h", "init_from=gpt2", "model.num_layers=7").as_decided_from(began)
    Run.create(str(tmp_path / "run"), "", stored)
    asked = ["resume=auto", "init_from=gpt2", "trainer.micro_batch_size=auto", "horizon=2h"]
    there = [*asked, f"run_dir={tmp_path / 'run'}"]
    assert settle_auto(Asked(tiny_config(corpus_folder, *there))).config.resume == str(tmp_path / "run")
    dropout = tiny_config(corpus_folder, *there, "model.dropout=0.2")
    assert "model.dropout=0.2 here" in refusal(settle_auto, Asked(dropout))
    assert "add run_dir=DIR" in refusal(settle_auto, Asked(tiny_config(corpus_folder, *asked)))


def test_a_key_that_came_later(corpus_folder, tmp_path):
    """The repeated command of a run from before tokens were split goes on, and is refused where it splits them."""
    config = tiny_config(corpus_folder, "horizon=5steps")
    Run.create(str(tmp_path / "run"), "", config.as_decided_from(config))
    file = tmp_path / "run/config.yaml"
    before = yaml.safe_load(file.read_text(encoding="utf-8"))
    del before["data"]["bpe_dropout"]
    file.write_text(yaml.safe_dump(before), encoding="utf-8")
    asked = ["horizon=5steps", "resume=auto", f"run_dir={tmp_path / 'run'}"]
    assert settle_auto(Asked(tiny_config(corpus_folder, *asked))).config.resume == str(tmp_path / "run")
    split = tiny_config(corpus_folder, *asked, "data.bpe_dropout=0.1")
    assert "data.bpe_dropout=0.1 here, and 0.0 in the run of" in refusal(settle_auto, Asked(split))


@pytest.mark.parametrize(
    ("context", "before", "asked", "goes_on"),
    [(128, True, 128, True), (128, True, 256, True), (128, True, 64, False), (128, False, 256, False)],
)
def test_a_default_that_changed(corpus_folder, tmp_path, context, before, asked, goes_on):
    """The repeated command of a run from before mini had a context of 256 goes on; another context is refused."""

    def config(length: int, *changes: str) -> Config:
        step = ["trainer.tokens_per_step=1024", "trainer.micro_batch_size=8", "trainer.short_window=null"]
        return tiny_config(corpus_folder, f"model.context_length={length}", *step, *changes)

    began = config(context)
    Run.create(str(tmp_path / "run"), "", began.as_decided_from(began))
    file = tmp_path / "run/config.yaml"
    stored = yaml.safe_load(file.read_text(encoding="utf-8"))
    if before:
        del stored["trainer"]["short_window"]
    file.write_text(yaml.safe_dump(stored), encoding="utf-8")
    again = Asked(config(asked, "resume=auto", f"run_dir={tmp_path / 'run'}"))
    if goes_on:
        assert settle_auto(again).config.resume == str(tmp_path / "run")
    else:
        assert f"model.context_length={asked} here, and {context} in the run of" in refusal(settle_auto, again)


def test_what_the_run_began_with(corpus_folder, tmp_path):
    """A command may be repeated after its run was given another horizon, or other devices and so smaller pieces."""
    began = tiny_config(corpus_folder, "horizon=5steps", "trainer.micro_batch_size=6")
    changes = ["horizon=9steps", "trainer.micro_batch_size=3", "trainer.devices=2"]
    went_on = tiny_config(corpus_folder, *changes).amending(began, 4)
    assert {line.partition("=")[0] for line in went_on.amended} == {line.partition("=")[0] for line in changes}
    Run.create(str(tmp_path / "run"), "", went_on)
    asked = ["resume=auto", f"run_dir={tmp_path / 'run'}", "trainer.micro_batch_size=6"]
    for horizon in ("horizon=5steps", "horizon=9steps"):
        again = settle_auto(Asked(tiny_config(corpus_folder, *asked, horizon)))
        assert (again.config.resume, again.given) == (str(tmp_path / "run"), {})
    assert "horizon=7steps" in refusal(settle_auto, Asked(tiny_config(corpus_folder, *asked, "horizon=7steps")))


def test_machines_that_are_given(corpus_folder, tmp_path):
    """A run of two machines goes on on one in as many processes as each had."""
    on_two = tiny_config(corpus_folder, "trainer.devices=2", "trainer.num_nodes=2", "trainer.tokens_per_step=192")
    Run.create(str(tmp_path / "run"), "", on_two)
    resumed = tiny_config(corpus_folder, f"resume={tmp_path / 'run'}", "trainer.devices=null")
    assert Asked(resumed).processes == 1  # of which a launcher starts four
    resumed.trainer.num_nodes = 1
    assert Asked(resumed).processes == 2
