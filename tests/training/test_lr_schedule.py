"""Learning-rate schedules: values computed by hand, and what holds for every schedule."""

import itertools
import math

import pytest

from gpt.training.lr_schedule import SCHEDULES, lr_multiplier
from gpt.training.optim import OptimConfig


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("linear", {0: 0.25, 1: 0.5, 3: 1, 4: 1, 12: 1, 13: 0.9375, 16: 0.75, 18: 0.625, 23: 0.3125, 24: 0.25}),
        ("cosine", {0: 0.25, 1: 0.5, 3: 1, 4: 1, 12: 1, 16: 0.8125, 18: 0.625, 20: 0.4375, 24: 0.25}),
        ("constant", {0: 0.25, 1: 0.5, 3: 1, 4: 1, 12: 1, 18: 1, 24: 1}),
    ],
)
def test_schedules_equal_values_by_hand(schedule, expected):
    """In 24 steps, the learning rate rises for 4, is at its peak until 12, and falls to a quarter."""
    config = OptimConfig(schedule=schedule, warmup_steps=4, decay_from=0.5, final_lr=0.25)
    assert {step: lr_multiplier(step, 24, config) for step in expected} == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_warmup_takes_at_most_half_the_run(schedule):
    """A warmup of 100 steps in a run of 10 takes 5, and the decay begins after it."""
    config = OptimConfig(schedule=schedule, warmup_steps=100, decay_from=0.0)
    assert [lr_multiplier(step, 10, config) for step in range(6)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])
    expected = {"linear": 0.8, "cosine": 0.5 + 0.5 * math.cos(math.pi / 5), "constant": 1.0}
    assert lr_multiplier(6, 10, config) == expected.get(schedule, lr_multiplier(6, 10, config))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("total_steps", [1, 2, 3, 11, 101])
def test_every_schedule_rises_to_its_peak_and_then_falls(schedule, total_steps):
    """Every step has a learning rate above 0. The final rate is reached one step after the last."""
    for warmup_steps, decay_from, final_lr in itertools.product((0, 1, 7, 1000), (0.0, 0.5, 1.0), (0.0, 0.25)):
        config = OptimConfig(schedule=schedule, warmup_steps=warmup_steps, decay_from=decay_from, final_lr=final_lr)
        multipliers = [lr_multiplier(step, total_steps, config) for step in range(total_steps)]
        assert all(0 < multiplier <= 1 for multiplier in multipliers)
        peak = multipliers.index(1.0)
        assert peak <= total_steps // 2  # so a run of one step trains at the peak
        assert multipliers[:peak] == sorted(multipliers[:peak])
        assert multipliers[peak:] == sorted(multipliers[peak:], reverse=True)
        if total_steps > 10 and decay_from < 1.0 and schedule != "constant":
            assert multipliers[-1] > lr_multiplier(total_steps, total_steps, config) == final_lr


def test_learning_rate_rises_to_the_schedule_of_a_longer_horizon():
    """From a tenth of the peak at step 20 it rises by a quarter a step, and meets the schedule of 40 steps."""
    config = OptimConfig(warmup_steps=4, schedule="linear", decay_from=0.5, final_lr=0.0)
    multipliers = [lr_multiplier(step, 40, config, 20, 0.1) for step in (20, 21, 22, 23, 24, 30, 39, 40)]
    assert multipliers == pytest.approx([0.35, 0.6, 0.85, 17 / 20, 16 / 20, 0.5, 0.05, 0.0], abs=1e-12)
