"""A finished run that tests copy, and validation losses that overfit."""

import shutil
from pathlib import Path

import pytest

from gpt.sampling.scoring import Score
from harness import Training, begin_run, fit, tiny_config, write_corpus


@pytest.fixture(scope="session")
def trained(tmp_path_factory) -> Training:
    """Return a finished run of 13 steps, with its text in the folder above it. Tests change only copies of it."""
    folder = tmp_path_factory.mktemp("trained")
    write_corpus(folder)
    training = begin_run(tiny_config(folder, "horizon=13steps", f"run_dir={folder / 'run'}"))
    fit(training)
    return training


@pytest.fixture
def run_copy(trained, tmp_path) -> Path:
    """Return a copy of the finished run."""
    return Path(shutil.copytree(trained.path, tmp_path / "run"))


@pytest.fixture
def overfitting(monkeypatch) -> None:
    """Replace validation losses. They fall until the second and then rise, and the same weights give the same loss."""
    steps: dict[bytes, int] = {}

    def score(model, batches, size: int) -> Score:
        weights = model.token_embedding.weight.detach().clone().numpy().tobytes()
        step = steps.setdefault(weights, len(steps) + 1)
        return Score(nats=10.0 + abs(step - 2), tokens=10, bytes=20)

    monkeypatch.setattr("gpt.training.validation.score", score)
