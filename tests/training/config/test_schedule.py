"""From a horizon to steps, and from steps to intervals, rates and micro-batches."""

import dataclasses

import pytest

from gpt.model.transformer import ModelConfig
from gpt.training.config.schedule import MOST_STEPS, Schedule
from gpt.training.config.schema import Config, TrainerConfig
from gpt.training.optim import OptimConfig, lr_factor
from harness import refusal

CONFIG = Config(
    model=ModelConfig(context_length=1024),
    trainer=TrainerConfig(tokens_per_step=7 * 1024, micro_batch_size=1, validate_every=500),
)


@pytest.mark.parametrize(
    ("horizon", "steps", "seconds"),
    [
        ("11steps", 11, 0),
        ("100ktokens", 14, 0),
        ("3epochs", 21, 0),
        ("1tokens", 1, 0),
        ("0.001epochs", 1, 0),
        ("5min", MOST_STEPS, 300),
    ],
)
def test_horizon(horizon, steps, seconds):
    """Steps, tokens and epochs of 50,000 tokens become steps of 7 x 1,024; how many a time has is known at its end."""
    schedule = Schedule.of(dataclasses.replace(CONFIG, horizon=horizon), 50_000)
    assert (schedule.total_steps, schedule.seconds) == (steps, seconds)
    assert (CONFIG.windows_per_step, CONFIG.micro_batch_size, CONFIG.accumulation) == (7, 1, 7)


def test_too_many_steps():
    line = refusal(Schedule.of, dataclasses.replace(CONFIG, horizon="99999Bsteps"), 50_000)
    assert line == "horizon: 99,999,000,000,000 steps are out of range: they must be at most 1,000,000,000,000"


@pytest.mark.parametrize(("steps", "every"), [(4000, 500), (2000, 500), (1999, 499), (122, 30), (7, 1), (3, 1), (1, 1)])
def test_every_run_validates_four_times(steps, every):
    """The configured interval holds where it gives four validations; shorter runs validate more often."""
    schedule = Schedule.of(dataclasses.replace(CONFIG, horizon=f"{steps}steps"), 50_000)
    assert schedule.validate_every == every
    validations = sum(schedule.due(step, schedule.validate_every) for step in range(1, steps + 1))
    assert validations >= min(4, steps)


def test_due():
    """At multiples of the interval, and at the horizon."""
    schedule = Schedule(total_steps=11)
    assert [step for step in range(1, 12) if schedule.due(step, 5)] == [5, 10, 11]


def test_rates_follow_the_clock():
    """A run that has had two fifths of its time after 40 steps has the rates of one of 100 steps."""
    schedule, config = Schedule(seconds=300.0), OptimConfig(warmup_steps=0, decay_from=0.0)
    assert schedule.rate_factor(40, 0.4, config) == lr_factor(40, 100, config) == 0.6
    assert schedule.rate_factor(0, 0.0, config) == 1.0
    assert schedule.rate_factor(7, 1.0, config) == lr_factor(7, 8, config)
    assert dataclasses.replace(schedule, total_steps=80, seconds=0.0).rate_factor(40, 0.4, config) == 0.5


def test_progress():
    """The part of the steps that has passed, or of the time."""
    assert [Schedule(total_steps=80).progress(step, 0.0) for step in (0, 20, 80)] == [0.0, 0.25, 1.0]
    assert Schedule(seconds=300.0).progress(20, 0.4) == 0.4


def test_short_windows():
    """From the second step to 0.6 of the steps, or to the second step after 0.6 of the time."""
    short = dataclasses.replace(CONFIG, trainer=dataclasses.replace(CONFIG.trainer, short_window=128))
    schedule = Schedule.of(dataclasses.replace(short, horizon="10steps"), 50_000)
    assert [step for step in range(10) if schedule.has_short_windows(step)] == [1, 2, 3, 4, 5]
    schedule = Schedule.of(dataclasses.replace(short, horizon="5min"), 50_000)
    for step, share in enumerate((0.2, 0.5, 0.59, 0.61, 0.8, 1.0), start=1):
        before, schedule = schedule, schedule.after(step, share)
        assert schedule.has_short_windows(step) == before.has_short_windows(step)  # which has been cut already
    assert [step for step in range(6) if schedule.has_short_windows(step)] == [1, 2, 3, 4]
    assert schedule.total_steps == 6
    for horizon in ("10steps", "5min"):
        assert Schedule.of(dataclasses.replace(CONFIG, horizon=horizon), 50_000).whole_from == 0


@pytest.mark.parametrize(
    ("size", "accumulation", "smaller"),
    [(8, 3, (4, 6)), (6, 1, (3, 2)), (5, 3, (1, 15)), (7, 1, (1, 7)), (15, 1, (5, 3))],
)
def test_smaller_micro_batch(size, accumulation, smaller):
    """Half, or the next divisor below: the windows of a step stay the same."""
    trainer = TrainerConfig(tokens_per_step=1024 * size * accumulation, micro_batch_size=size)
    chosen = {"trainer.micro_batch_size": "auto"}
    config = dataclasses.replace(CONFIG, trainer=trainer, decided=chosen).with_smaller_micro_batch()
    assert (config.micro_batch_size, config.accumulation) == smaller
