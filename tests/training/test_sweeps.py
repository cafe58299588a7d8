"""Sweeps: jobs train with any launcher and sweeper. One that fails is reported, and the others continue."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import torch
import yaml

from gpt.api import read_curves
from gpt.training.cli import name_jobs
from harness import (
    ROOT,
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


@pytest.mark.slow
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
def test_sweep_trains_in_other_processes(settings, tmp_path, corpus_folder):
    """Jobs that start together have a run each. Failing jobs are reported, and the others finish."""
    import_or_skip("hydra_plugins.hydra_joblib_launcher")
    parallel = ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]
    paths = f"data.path={corpus_folder / 'corpus.txt'},{tmp_path / 'missing'}"
    done = sweep(*settings, *parallel, "optim.lr=0.003,0.006", paths)
    assert (done.returncode, learning_rates(tmp_path)) == (2, [0.003, 0.006]), done.stderr
    assert re.search(r"^Error executing job with overrides: .*/missing", done.stderr, re.M)  # Hydra names it
    assert "missing' names no text file" in done.stderr.splitlines()[-1]
    figures = [json.loads(file.read_text()) for file in tmp_path.glob("runs/*/metrics.json")]
    assert [figure["steps"] for figure in figures] == [2, 2]


@pytest.mark.slow
def test_optuna_searches_learning_rates(settings, tmp_path):
    """A job that diverges does not end the search."""
    import_or_skip("hydra_plugins.hydra_optuna_sweeper")
    diverging = ["optim.matrix_weight_decay=1e41,0.1", "hydra.sweeper.n_trials=4", "hydra.sweeper.sampler.seed=2"]
    done = sweep("hydra/sweeper=search", *diverging, *settings)
    assert done.returncode == 0, done.stderr  # as `max_failure_rate: 1` has it
    assert re.search(r"^train\.py: job \d \(.*matrix_weight_decay=1e.*\): step \d", done.stderr, re.M)
    results = yaml.safe_load(next(tmp_path.glob("multirun/*/*/optimization_results.yaml")).read_text())
    losses = [json.loads(file.read_text())["val_bits_per_byte"] for file in tmp_path.glob("runs/*/metrics.json")]
    assert 0 < len(losses) < len(learning_rates(tmp_path)) == 4
    assert results["best_value"] == min(losses)
    assert results["best_params"].keys() == {"optim.lr", "optim.matrix_lr", "optim.matrix_weight_decay"}
    assert results["best_params"]["optim.lr"] in learning_rates(tmp_path)


@pytest.mark.slow
def test_processes_of_a_job_that_fail_leave_nothing_behind_for_the_next_job(settings, tmp_path, capfd):
    """A line has the job. Both ranks of the next job train its configuration."""
    taken = tmp_path / "taken"
    free = tmp_path / "free"
    alone = tmp_path / "alone"
    taken.mkdir()
    (taken / "file").touch()
    environment = dict(os.environ)
    exact = ["model.dropout=0", "trainer.precision=fp32", "trainer.log_every=1", "horizon=4steps", "optim.lr=0.02"]
    two = ["trainer.devices=2", "trainer.micro_batch_size=3"]
    done = train("-m", *settings, *exact, *two, f"run_dir={taken},{free}", code=2)
    assert f"train.py: run_dir={taken} is not empty" in capfd.readouterr().err  # a rank has printed it
    assert "train.py: job 0 (" in done.stderr and ": its processes have failed" in done.stderr
    assert dict(os.environ) == environment | {"HYDRA_FULL_ERROR": "1"}
    assert not torch.distributed.is_initialized()
    train(*settings, *exact, f"run_dir={alone}")
    a, b = (torch.tensor([loss for _, loss in read_curves(folder)["train/loss"]]) for folder in (free, alone))
    torch.testing.assert_close(a, b, atol=1e-4, rtol=0.0)
