"""Sweeps: jobs train with any launcher and sweeper. One that fails is reported, and the others continue."""

import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import torch
import yaml

import gpt.training.loop
from gpt.api import read_curves
from gpt.training.cli import name_jobs
from harness import (
    ROOT,
    differences,
    import_or_skip,
    python_program,
    tiny_arguments,
    train,
    train_refusal,
)


@pytest.fixture
def settings(corpus_folder, tmp_path, monkeypatch) -> list[str]:
    """Arguments of short trainings in a new folder."""
    monkeypatch.chdir(tmp_path)
    return tiny_arguments(corpus_folder, "trainer.device=cpu", "horizon=2steps")


def learning_rates(folder: Path) -> list[float]:
    """Return the learning rates of the runs below a folder."""
    return sorted(yaml.safe_load(file.read_text())["optim"]["lr"] for file in folder.glob("runs/*/config.yaml"))


def sweep(*arguments: str) -> subprocess.CompletedProcess:
    """Run a sweep in another process, whose children find the project too."""
    command = [python_program(), str(ROOT / "train.py"), "-m", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=900, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )


def failed_jobs(stderr: str) -> list[str]:
    """Return the numbers of the jobs that a sweep reports as failed, in order."""
    return re.findall(r"^train\.py: job (\d) \(.*\): ", stderr, re.M)


def test_jobs_train_report_and_return_their_loss(settings, tmp_path, monkeypatch):
    """Each job prints its settings, trains, reports in a line, and returns its bits per byte to the sweeper.

    Its run is named by what varies.
    """
    returned: list = []
    append = lambda self, config, job_return: returned.append(job_return.return_value)  # noqa: E731
    monkeypatch.setattr("hydra._internal.callbacks.Callbacks.on_job_end", append)
    done = train("-m", *settings, "optim.lr=0.003,0.006")
    assert done.stderr == ""
    assert re.findall(r"^job (\d): model.*data=text .* optim.lr=(.*)$", done.stdout, re.M) == [
        ("0", "0.003"),
        ("1", "0.006"),
    ]
    assert learning_rates(tmp_path) == [0.003, 0.006]
    reports = re.findall(r"^(runs/\S+): \d\.\d{4} bits per byte after 2 steps in \d+s$", done.stdout, re.M)
    assert [report.rpartition("_")[2] for report in reports] == ["optim.lr=0.003", "optim.lr=0.006"]
    assert sorted(reports) == sorted(f"runs/{run.name}" for run in tmp_path.glob("runs/2*"))
    assert "see why:" not in done.stdout
    losses = [
        json.loads((run / "metrics.json").read_text())["val_bits_per_byte"] for run in sorted(tmp_path.glob("runs/2*"))
    ]
    assert returned == [None, None, *losses]  # each job is checked before the first one trains


def test_runs_are_named_by_what_varies():
    """Options of Hydra, and settings that all jobs share or that have long values, are left out of the name."""
    words = ["-m", "--config-dir", "recipes", "hydra/launcher=joblib", "seed=1,2", "horizon=2steps", "data.path='a,b'"]
    excluded = '["hydra/launcher", "horizon", "data.path"]'
    assert name_jobs(words) == f"hydra.job.config.override_dirname.exclude_keys={excluded}"


def test_printed_settings_of_a_job_train_the_same_run(settings, tmp_path):
    """Values may contain spaces, commas and quotes."""
    done = train("-m", *settings, "optim.lr=0.003,0.006", "data.prompts=['a b, c=d','é\"']")
    words = shlex.split(re.search(r"^job 1: (.*)$", done.stdout, re.M)[1])
    train(*words, "run_dir=again")
    second = max(tmp_path.glob("runs/2*"))
    assert yaml.safe_load((second / "config.yaml").read_text())["optim"]["lr"] == 0.006
    assert differences(tmp_path / "again", second) == []


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["optim.lr=0.006,-1"], r"job 1 \(.*optim\.lr=-1\): optim\.lr=-1\.0 is out of range"),
        (["plan=json", "seed=1,2"], r"job 0 \(.*\): plan=json describes one new run: leave out -m"),
        (["seed=range(3,3)"], "the sweep has no jobs: one of its ranges or globs is empty"),
    ],
)
def test_mistake_in_any_job_is_refused_before_the_first_one_trains(settings, tmp_path, arguments, line):
    assert re.match(f"train.py: {line}", train_refusal("-m", *settings, *arguments))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_failing_jobs_are_reported_and_the_others_train(settings, tmp_path, corpus_folder):
    """Each failure is printed at once, and the first one again at the end."""
    places = ",".join(f"{tmp_path}/{name}" for name in ("missing", "lost"))
    done = train("-m", *settings, f"data.path={places},{corpus_folder / 'corpus.txt'}", code=2)
    assert failed_jobs(done.stderr) == ["0", "1"]
    assert re.match(r"train\.py: data\.path=.*missing' names no text file", done.stderr.splitlines()[-1])
    assert "Traceback" not in done.stderr
    assert len(list(tmp_path.glob("runs/2*"))) == 1


@pytest.mark.slow
def test_bug_in_a_job_shows_its_traceback(settings, tmp_path, monkeypatch):
    """The other jobs train first."""
    run_training, calls = gpt.training.loop.run_training, []

    def fail_once(*arguments):
        calls.append(arguments)
        return run_training(*arguments) if len(calls) > 1 else {}["nothing"]

    monkeypatch.setattr(gpt.training.loop, "run_training", fail_once)
    with pytest.raises(KeyError, match="nothing"):
        train("-m", *settings, "optim.lr=0.003,0.006")
    assert len(list(tmp_path.glob("runs/*/metrics.json"))) == 1


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["joblib", "submitit_local"])
def test_sweep_trains_in_other_processes(settings, tmp_path, corpus_folder, launcher):
    """Jobs that start together have a run each. A failing job is reported, and the others finish."""
    import_or_skip(f"hydra_plugins.hydra_{launcher.split('_')[0]}_launcher")
    parallel = [f"hydra/launcher={launcher}", *(["hydra.launcher.n_jobs=2"] if launcher == "joblib" else [])]
    done = sweep(*settings, *parallel, "optim.lr=0.003,0.006")
    assert (done.returncode, learning_rates(tmp_path)) == (0, [0.003, 0.006]), done.stderr
    paths = f"data.path={corpus_folder / 'corpus.txt'},{tmp_path / 'missing'}"
    done = sweep(*settings, *parallel, paths)
    assert done.returncode == 2
    assert re.search(r"^Error executing job with overrides: .*/missing", done.stderr, re.M)  # Hydra names it
    assert "missing' names no text file" in done.stderr.splitlines()[-1]
    figures = [json.loads(file.read_text()) for file in tmp_path.glob("runs/*/metrics.json")]
    assert [figure["steps"] for figure in figures] == [2, 2, 2]


@pytest.mark.slow
def test_optuna_searches_learning_rates(settings, tmp_path):
    """A job that diverges does not end the search."""
    import_or_skip("hydra_plugins.hydra_optuna_sweeper")
    done = sweep("hydra/sweeper=search", "hydra.sweeper.n_trials=3", *settings)
    assert done.returncode == 0, done.stderr
    results = yaml.safe_load(next(tmp_path.glob("multirun/*/*/optimization_results.yaml")).read_text())
    losses = [json.loads(file.read_text())["val_bits_per_byte"] for file in tmp_path.glob("runs/*/metrics.json")]
    assert len(losses) == 3
    assert results["best_value"] == min(losses)
    assert results["best_params"].keys() == {"optim.lr", "optim.matrix_lr"}
    assert results["best_params"]["optim.lr"] in learning_rates(tmp_path)
    diverging = ["optim.matrix_weight_decay=1e41,0.1", "hydra.sweeper.n_trials=4", "hydra.sweeper.sampler.seed=2"]
    done = sweep("hydra/sweeper=search", *diverging, *settings)
    assert done.returncode == 0  # as `max_failure_rate: 1` has it
    assert re.search(r"^train\.py: job \d \(.*matrix_weight_decay=1e.*\): step \d", done.stderr, re.M)
    assert len(list(tmp_path.glob("runs/*/config.yaml"))) == 3 + 4


TWO = ["trainer.devices=2", "trainer.micro_batch_size=3"]


@pytest.mark.slow
def test_processes_of_a_job_that_fail_do_not_stop_the_sweep(settings, tmp_path):
    """A line has the job, and the next job trains."""
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken/file").touch()
    done = sweep(*settings, *TWO, f"run_dir={tmp_path / 'taken'},{tmp_path / 'free'}")
    assert done.returncode == 2
    assert done.stderr.startswith(f"train.py: run_dir={tmp_path / 'taken'} is not empty")
    assert "train.py: job 0 (" in done.stderr and ": its processes have failed" in done.stderr
    assert (tmp_path / "free/checkpoints/last.ckpt").exists()


@pytest.mark.slow
def test_jobs_train_on_two_processes(settings, tmp_path):
    """Both ranks train the configuration of their job, and the first job leaves nothing behind for the second."""
    environment, exact = dict(os.environ), ["model.dropout=0", "trainer.precision=fp32", "trainer.log_every=1"]
    done = train("-m", *settings, *exact, *TWO, "horizon=4steps", "optim.lr=0.003,0.02")
    assert done.stderr == ""
    assert dict(os.environ) == environment | {"HYDRA_FULL_ERROR": "1"}
    assert not torch.distributed.is_initialized()
    for run, lr in zip(sorted(tmp_path.glob("runs/2*")), (0.003, 0.02), strict=True):
        assert yaml.safe_load((run / "config.yaml").read_text())["optim"]["lr"] == lr
        alone = tmp_path / f"alone-{lr}"
        train(*settings, *exact, "horizon=4steps", f"optim.lr={lr}", f"run_dir={alone}")
        a, b = (torch.tensor([loss for _, loss in read_curves(folder)["train/loss"]]) for folder in (run, alone))
        torch.testing.assert_close(a, b, atol=1e-4, rtol=0.0)
