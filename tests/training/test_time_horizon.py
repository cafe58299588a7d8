"""horizon=auto and the measurement of the time for a step."""

import time

import pytest

from gpt.training.config import load_config
from gpt.training.schedule import Schedule
from gpt.training.start import load_dataset
from gpt.training.timing import seconds_per_step
from harness import begin_run, differences, finalize_config, fit, refusal, resume_run, tiny_config


@pytest.mark.slow
@pytest.mark.parametrize(("limit", "horizon"), [(600, "377steps"), (1e-6, "30steps")])
def test_auto_is_ten_epochs_or_what_fits_into_the_time(corpus_folder, tmp_path, monkeypatch, capsys, limit, horizon):
    """The run equals a run with the same horizon in steps, bit for bit."""
    monkeypatch.setattr("gpt.training.finalize.AUTO_HORIZON_SECONDS", limit)
    training = begin_run(tiny_config(corpus_folder, "horizon=auto", f"run_dir={tmp_path / 'auto'}"))
    assert f"horizon={horizon} suits this text and this machine\n" in capsys.readouterr().out
    assert training.schedule.total_steps == int(horizon.removesuffix("steps"))
    assert load_config(tmp_path / "auto/config.yaml").horizon == training.config.horizon == horizon
    if horizon == "30steps":
        fit(training)
        fit(begin_run(tiny_config(corpus_folder, f"horizon={horizon}", f"run_dir={tmp_path / 'given'}")))
        assert differences(tmp_path / "auto", tmp_path / "given") == []
        line = refusal(resume_run, tmp_path / "auto", "auto")
        assert line.startswith("horizon=auto is for a new run: ") and line.endswith("such as horizon=8000steps")


def test_shortest_auto_horizon_is_not_timed(corpus_folder, tmp_path, monkeypatch):
    """A very short text gets the minimum number of steps, however long they take."""
    monkeypatch.setattr("gpt.training.timing.measure_step", lambda *_: pytest.fail("timed"))
    changes = ("horizon=auto", "trainer.tokens_per_step=4800", f"run_dir={tmp_path / 'run'}")
    assert begin_run(tiny_config(corpus_folder, *changes)).config.horizon == "30steps"


def test_timing_takes_a_few_steps(corpus_folder):
    """Steps of a throwaway model are timed, within the limit."""
    config = finalize_config(tiny_config(corpus_folder))
    dataset = load_dataset(config)
    start = time.monotonic()
    seconds = seconds_per_step(config, Schedule.plan(config, dataset.train_tokens), dataset, max_seconds=0.2)
    assert 0.0 < seconds < time.monotonic() - start
