"""Validations whose loss is not finite."""

import math

import pytest

from gpt.api import read_curves
from gpt.errors import NonFiniteError
from gpt.sampling.scoring import Score
from harness import begin_run, fit, tiny_config


def test_validation_that_is_not_finite(corpus_folder, tmp_path, monkeypatch):
    """A validation loss of nan ends the run, and is not recorded."""
    monkeypatch.setattr("gpt.training.validation.score", lambda *arguments: Score(math.nan, 10, 20))
    training = begin_run(tiny_config(corpus_folder, "horizon=12steps", f"run_dir={tmp_path / 'run'}"))
    with pytest.raises(NonFiniteError, match="step 3: the validation loss is nan"):
        fit(training)
    assert not (training.path / "metrics.json").exists()
    assert not list(training.path.glob("checkpoints/*"))
    assert "val/loss" not in read_curves(training.path)
