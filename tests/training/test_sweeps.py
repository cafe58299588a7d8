"""Sweeps: every job trains with any launcher and sweeper, and one that fails neither stops the others nor is passed
over in silence.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from harness import ROOT, Done, differences, needs, refused, tiny_arguments, train


@pytest.fixture
def settings(corpus_folder, tmp_path, monkeypatch) -> list[str]:
    """The arguments of short trainings, in a folder of their own."""
    monkeypatch.chdir(tmp_path)
    return tiny_arguments(corpus_folder, "trainer.device=cpu", "horizon=2steps")


def rates(folder: Path) -> list[float]:
    """The learning rates of the runs below a folder."""
    return sorted(yaml.safe_load(file.read_text())["optim"]["lr"] for file in folder.glob("runs/*/config.yaml"))


def sweep(*arguments: str) -> subprocess.CompletedProcess:
    """Run a sweep in a process of its own, whose children find the project too."""
    command = [sys.executable, str(ROOT / "train.py"), "-m", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=900, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )


def test_sweep(settings, tmp_path, monkeypatch):
    """Each job says what it was given, trains, and returns its bits per byte to the sweeper."""
    returned: list = []
    note = lambda self, config, job_return: returned.append(job_return.return_value)  # noqa: E731
    monkeypatch.setattr("hydra._internal.callbacks.Callbacks.on_job_end", note)
    done = train("-m", *settings, "optim.lr=0.003,0.006")
    assert done.stderr == ""
    assert re.findall(r"^job (\d): model.*data=text .* optim.lr=(.*)$", done.stdout, re.M) == [
        ("0", "0.003"),
        ("1", "0.006"),
    ]
    assert rates(tmp_path) == [0.003, 0.006]
    losses = [
        json.loads((run / "metrics.json").read_text())["val_bits_per_byte"] for run in sorted(tmp_path.glob("runs/2*"))
    ]
    assert returned == [None, None, *losses]  # each job is checked before the first one trains


def best(done: Done | subprocess.CompletedProcess, jobs: int) -> tuple[float, Path, list[str]]:
    """What the end of a sweep says: the best bits per byte, their run, and the arguments of the command for it."""
    lines = rf"^best of {jobs} jobs: (\d+\.\d{{4}}) bits per byte in (\S+)\ntrain it again: (.*)\n\Z"
    said = re.search(lines, done.stdout, re.M)
    assert said, done.stdout
    program, script, *arguments = shlex.split(said[3])
    assert (program, script) == ("python", "train.py")
    return float(said[1]), Path(said[2]), arguments


@pytest.mark.parametrize("in_a_file", [False, True])
def test_a_sweep_ends_with_its_best_job(settings, tmp_path, in_a_file):
    """The command that it prints trains that very run again, whatever the values hold, and recipes of one's own."""
    rates, prompts = "optim.lr=1e-9,0.006", "data.prompts=['a b, c=d','é\"']"
    (tmp_path / "mine/experiment").mkdir(parents=True)
    content = "# @package _global_\ntrainer: {tokens_per_step: 48}\n"
    (tmp_path / "mine/experiment/short.yaml").write_text(content, encoding="utf-8")
    recipe = ["--config-dir", "mine", "experiment=short"] if in_a_file else []
    changes = [*recipe, *settings, "run_dir=first,second"] if in_a_file else [*settings, rates]
    changes = [change for change in changes if not (in_a_file and "tokens_per_step" in change)]
    done = train("-m", *changes, prompts)
    assert done.stderr == ""
    bits, run_dir, arguments = best(done, 2)
    assert prompts in arguments
    figures = {file.parent: json.loads(file.read_text()) for file in tmp_path.rglob("metrics.json")}
    assert bits == round(min(figure["val_bits_per_byte"] for figure in figures.values()), 4)
    assert bits == round(figures[run_dir.absolute()]["val_bits_per_byte"], 4)
    train(*arguments, "run_dir=again")
    assert differences(tmp_path / "again", run_dir) == []


def test_typo_in_the_last_job_of_a_sweep(settings, tmp_path):
    """A configuration that is wrong is named before any job trains."""
    line = refused("-m", *settings, "optim.lr=0.006,-1")
    assert re.match(r"train\.py: job 1 \(.*optim\.lr=-1\): optim\.lr=-1\.0 is out of range", line)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_failing_jobs_of_a_sweep(settings, tmp_path, corpus_folder):
    """Jobs that fail while they run are named at once, and the first again at the end; the others run."""
    places = ",".join(f"{tmp_path}/{name}" for name in ("missing", "lost"))
    done = train("-m", *settings, f"data.path={places},{corpus_folder / 'corpus.txt'}", code=2)
    *named, last = done.stderr.splitlines()
    jobs = [re.match(r"train\.py: job (\d) \(.*\): data\.path=.* names no text file", line)[1] for line in named]
    assert jobs == ["0", "1"]
    assert last.startswith("train.py: 2 of the sweep's jobs failed; the first was job 0 (")
    assert "missing' names no text file" in last
    assert len(list(tmp_path.glob("runs/2*"))) == 1


@pytest.mark.slow
def test_bug_in_a_job(settings, tmp_path, monkeypatch):
    """What nobody expected is shown with its traceback, and the sweep goes on."""
    from gpt.training.session import Session

    fit, calls = Session.fit, []

    def fail_once(self, *given) -> None:
        calls.append(self)
        fit(self, *given) if len(calls) > 1 else {}["nothing"]

    monkeypatch.setattr(Session, "fit", fail_once)
    assert "Traceback" in train("-m", *settings, "optim.lr=0.003,0.006", code=2).stderr
    assert len(list(tmp_path.glob("runs/*/metrics.json"))) == 1


def test_sweep_without_jobs(settings, tmp_path):
    """An empty range is a mistake, not a sweep that succeeds."""
    line = refused("-m", *settings, "seed=range(3,3)")
    assert line == "train.py: the sweep has no jobs: one of its ranges or globs is empty"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["joblib", "submitit_local"])
def test_sweep_in_other_processes(settings, tmp_path, corpus_folder, launcher):
    """Jobs that begin together in other processes have a run each; one that fails is named, and the others finish."""
    needs(f"hydra_plugins.hydra_{launcher.split('_')[0]}_launcher")
    parallel = [f"hydra/launcher={launcher}", *(["hydra.launcher.n_jobs=2"] if launcher == "joblib" else [])]
    done = sweep(*settings, *parallel, "optim.lr=0.003,0.006")
    assert (done.returncode, rates(tmp_path)) == (0, [0.003, 0.006]), done.stderr
    assert best(done, 2)[1].is_dir()
    paths = f"data.path={corpus_folder / 'corpus.txt'},{tmp_path / 'missing'}"
    done = sweep(*settings, *parallel, paths)
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 2
    assert last.startswith("train.py: 1 of the sweep's jobs failed; the first was job 1 (")
    assert "missing' names no text file" in last
    figures = [json.loads(file.read_text()) for file in tmp_path.glob("runs/*/metrics.json")]
    assert [figure["steps"] for figure in figures] == [2, 2, 2]


@pytest.mark.slow
@pytest.mark.parametrize(("number", "everywhere"), [(signal.SIGINT, True), (signal.SIGTERM, False)])
def test_stopped_sweep(settings, tmp_path, number, everywhere):
    """Ctrl-C, which all processes get, and SIGTERM to the first: the jobs at work are saved, and no other begins."""
    parallel = ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "seed=1,2,3", "horizon=100000steps"]
    command = [
        sys.executable,
        str(ROOT / "train.py"),
        "-m",
        *settings[:-1],
        *parallel,
        "trainer.checkpoint_every=100000",
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
    while len(list(tmp_path.glob("runs/*/metrics.csv"))) < 2:
        assert process.poll() is None
        time.sleep(0.1)
    os.killpg(process.pid, number) if everywhere else process.send_signal(number)
    assert process.wait(60) == 128 + number
    assert len(list(tmp_path.glob("runs/2*"))) == len(list(tmp_path.glob("runs/*/checkpoints/last.ckpt"))) == 2


@pytest.mark.slow
def test_search(settings, tmp_path):
    """Optuna looks for the rates that the example names, and a job that diverges does not end its search."""
    needs("hydra_plugins.hydra_optuna_sweeper")
    done = sweep("hydra/sweeper=search", "hydra.sweeper.n_trials=3", *settings)
    assert done.returncode == 0, done.stderr
    found = yaml.safe_load(next(tmp_path.glob("multirun/*/*/optimization_results.yaml")).read_text())
    losses = [json.loads(file.read_text())["val_bits_per_byte"] for file in tmp_path.glob("runs/*/metrics.json")]
    assert len(losses) == 3
    assert found["best_value"] == min(losses)
    bits, run_dir, arguments = best(done, 3)
    assert bits == round(found["best_value"], 4)
    assert {f"{key}={value}" for key, value in found["best_params"].items()} <= set(arguments)
    stored = yaml.safe_load((tmp_path / run_dir / "config.yaml").read_text())
    assert stored["optim"]["lr"] == found["best_params"]["optim.lr"]
    assert found["best_params"].keys() == {"optim.lr", "optim.matrix_lr"}
    assert found["best_params"]["optim.lr"] in rates(tmp_path)
    diverging = ["optim.matrix_weight_decay=1e41,0.1", "hydra.sweeper.n_trials=4", "hydra.sweeper.sampler.seed=2"]
    done = sweep("hydra/sweeper=search", *diverging, *settings)
    assert done.returncode == 2
    assert re.search(r"^train\.py: job \d \(.*matrix_weight_decay=1e.*\): step \d", done.stderr, re.M)
    assert len(list(tmp_path.glob("runs/*/config.yaml"))) == 3 + 4
