"""An undisturbed run, and the same run stopped half-way. RUN and STOP of a module give both lengths."""

import shutil
from pathlib import Path

import pytest

from harness import StopAt, begin_run, fit, tiny_arguments, tiny_config


@pytest.fixture(scope="module")
def settings(corpus_folder, request) -> list[str]:
    """Return the arguments of every run of a module."""
    return tiny_arguments(corpus_folder, *request.module.RUN)


@pytest.fixture(scope="module")
def reference(corpus_folder, request) -> Path:
    """Return an undisturbed run."""
    run_dir = corpus_folder / "reference"
    fit(begin_run(tiny_config(corpus_folder, *request.module.RUN, f"run_dir={run_dir}")))
    return run_dir


@pytest.fixture(scope="module")
def stopped_run(corpus_folder, request) -> Path:
    """Return a run that was stopped half-way. Tests change copies of it."""
    run_dir = corpus_folder / "stopped"
    fit(begin_run(tiny_config(corpus_folder, *request.module.RUN, f"run_dir={run_dir}")), [StopAt(request.module.STOP)])
    return run_dir


@pytest.fixture
def run_copy(stopped_run, tmp_path) -> Path:
    """Return a copy of the stopped run."""
    return Path(shutil.copytree(stopped_run, tmp_path / "run"))
