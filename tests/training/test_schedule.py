"""The schedule: a horizon gives steps, and steps give intervals, learning rates and sequence lengths."""

import dataclasses

import pytest

from gpt.model.transformer import ModelConfig
from gpt.training.config import Config, TrainerConfig
from gpt.training.lr_schedule import lr_multiplier
from gpt.training.optim import OptimConfig
from gpt.training.schedule import MAX_STEPS, Schedule
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
        ("5min", MAX_STEPS, 300),
    ],
)
def test_horizon_becomes_steps(horizon, steps, seconds):
    """A step has 7 x 1,024 tokens, and an epoch 50,000. The steps of a time are known only at its end."""
    schedule = Schedule.plan(dataclasses.replace(CONFIG, horizon=horizon), 50_000)
    assert (schedule.total_steps, schedule.seconds) == (steps, seconds)
    assert (CONFIG.sequences_per_step, CONFIG.micro_batch_size, CONFIG.accumulation_steps) == (7, 1, 7)


def test_too_many_steps_are_refused():
    line = refusal(Schedule.plan, dataclasses.replace(CONFIG, horizon="99999Bsteps"), 50_000)
    assert line == "horizon: 99,999,000,000,000 steps are out of range: they must be at most 1,000,000,000,000"


@pytest.mark.parametrize(("steps", "every"), [(4000, 500), (2000, 500), (1999, 499), (122, 30), (7, 1), (3, 1), (1, 1)])
def test_every_run_validates_four_times(steps, every):
    """If the configured interval gives fewer validations, a shorter one replaces it."""
    schedule = Schedule.plan(dataclasses.replace(CONFIG, horizon=f"{steps}steps"), 50_000)
    assert schedule.validate_every == every
    validations = sum(schedule.is_due(step, schedule.validate_every) for step in range(1, steps + 1))
    assert validations == schedule.num_validations >= min(4, steps)


def test_last_step_is_always_due():
    """The others are the multiples of the interval."""
    schedule = Schedule(total_steps=11)
    assert [step for step in range(1, 12) if schedule.is_due(step, 5)] == [5, 10, 11]


def test_learning_rate_follows_the_clock():
    """If 40 steps took two fifths of the time, the rate is that of a run of 100 steps."""
    schedule, config = Schedule(seconds=300.0), OptimConfig(warmup_steps=0, decay_from=0.0)
    assert schedule.lr_multiplier(40, 0.4, config) == lr_multiplier(40, 100, config) == 0.6
    assert schedule.lr_multiplier(0, 0.0, config) == 1.0
    assert schedule.lr_multiplier(7, 1.0, config) == lr_multiplier(7, 8, config)
    assert dataclasses.replace(schedule, total_steps=80, seconds=0.0).lr_multiplier(40, 0.4, config) == 0.5


def test_expected_steps_follow_the_clock():
    """A horizon in steps is known. If 20 steps took two fifths of the time, 50 are expected."""
    assert Schedule(total_steps=80).expected_steps(20, 0.0) == 80
    schedule = Schedule(seconds=300.0)
    assert [schedule.expected_steps(*done) for done in ((0, 0.0), (20, 0.4), (20, 1.0))] == [1, 50, 20]


def test_progress_is_a_fraction_of_the_horizon():
    """The horizon is in steps or a time."""
    assert [Schedule(total_steps=80).progress(step, 0.0) for step in (0, 20, 80)] == [0.0, 0.25, 1.0]
    assert Schedule(seconds=300.0).progress(20, 0.4) == 0.4


def test_short_sequences_end_at_three_fifths():
    """They begin in the second step and end after 0.6 of the steps, or in the second step after 0.6 of the time."""
    short = dataclasses.replace(CONFIG, trainer=dataclasses.replace(CONFIG.trainer, short_sequences=128))
    schedule = Schedule.plan(dataclasses.replace(short, horizon="10steps"), 50_000)
    assert [step for step in range(10) if schedule.uses_short_sequences(step)] == [1, 2, 3, 4, 5]
    schedule = Schedule.plan(dataclasses.replace(short, horizon="5min"), 50_000)
    for step, progress in enumerate((0.2, 0.5, 0.59, 0.61, 0.8, 1.0), start=1):
        before, schedule = schedule, schedule.after_step(step, progress)
        assert schedule.uses_short_sequences(step) == before.uses_short_sequences(step)  # these are read already
    assert [step for step in range(6) if schedule.uses_short_sequences(step)] == [1, 2, 3, 4]
    assert schedule.total_steps == 6
    for horizon in ("10steps", "5min"):
        assert Schedule.plan(dataclasses.replace(CONFIG, horizon=horizon), 50_000).full_length_from_step == 0


@pytest.mark.parametrize(
    ("size", "accumulation_steps", "smaller"),
    [(8, 3, (4, 6)), (6, 1, (3, 2)), (5, 3, (1, 15)), (7, 1, (1, 7)), (15, 1, (5, 3))],
)
def test_micro_batch_is_halved(size, accumulation_steps, smaller):
    """If half of it does not divide the sequences of a step, the next smaller divisor replaces it."""
    trainer = TrainerConfig(tokens_per_step=1024 * size * accumulation_steps, micro_batch_size=size)
    config = dataclasses.replace(CONFIG, trainer=trainer).with_smaller_micro_batch()
    assert (config.micro_batch_size, config.accumulation_steps) == smaller
