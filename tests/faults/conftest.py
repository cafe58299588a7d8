"""A run to which nothing happens, and the same run stopped half-way: see RUN and STOP in each module."""

import shutil
from pathlib import Path

import pytest

from harness import StopAt, begin_run, fit, tiny_arguments, tiny_config


@pytest.fixture(scope="module")
def settings(corpus_folder, request) -> list[str]:
    """The arguments of every run of a module."""
    return tiny_arguments(corpus_folder, *request.module.RUN)


@pytest.fixture(scope="module")
def reference(corpus_folder, request) -> Path:
    """A run to which nothing happened."""
    run_dir = corpus_folder / "reference"
    fit(begin_run(tiny_config(corpus_folder, *request.module.RUN, f"run_dir={run_dir}")))
    return run_dir


@pytest.fixture(scope="module")
def stopped(corpus_folder, request) -> Path:
    """A run that was stopped half-way. Tests hurt copies of it."""
    run_dir = corpus_folder / "stopped"
    fit(begin_run(tiny_config(corpus_folder, *request.module.RUN, f"run_dir={run_dir}")), [StopAt(request.module.STOP)])
    return run_dir


@pytest.fixture
def hurt(stopped, tmp_path) -> Path:
    """A copy of the stopped run."""
    return Path(shutil.copytree(stopped, tmp_path / "run"))
