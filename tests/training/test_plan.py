"""From a horizon to steps, and from steps to intervals and micro-batches."""

import dataclasses

import pytest

from gpt.model.transformer import ModelConfig
from gpt.training.config import Config, TrainerConfig
from gpt.training.plan import Plan, make_plan

CONFIG = Config(
    model=ModelConfig(context_length=1024),
    trainer=TrainerConfig(tokens_per_step=7 * 1024, micro_batch_size="1", validate_every=500),
)


@pytest.mark.parametrize(
    ("horizon", "steps"),
    [("11steps", 11), ("100ktokens", 14), ("3epochs", 21), ("1tokens", 1), ("0.001epochs", 1), ("5min", 1)],
)
def test_horizon(horizon, steps):
    """Steps, tokens and epochs of 50,000 tokens become steps of 7,168 tokens; a time is measured later."""
    assert make_plan(dataclasses.replace(CONFIG, horizon=horizon), 50_000, True).total_steps == steps


def test_portions():
    """Seven windows a step, one at a time, are seven micro-batches."""
    plan = make_plan(CONFIG, 50_000, False)
    assert (plan.windows_per_step, plan.micro_batch_size, plan.accumulation, plan.automatic) == (7, 1, 7, False)


@pytest.mark.parametrize(("steps", "every"), [(4000, 500), (2000, 500), (1999, 499), (122, 30), (7, 1), (3, 1), (1, 1)])
def test_every_run_validates_four_times(steps, every):
    """The configured interval holds where it gives four validations; shorter runs validate more often."""
    plan = make_plan(dataclasses.replace(CONFIG, horizon=f"{steps}steps"), 50_000, True)
    assert plan.validate_every == every
    validations = sum(plan.due(step, plan.validate_every) for step in range(1, steps + 1))
    assert validations >= min(4, steps)


def test_due():
    """At multiples of the interval, at the horizon, and where that was changed."""
    plan = Plan(11, 6, 3, 2)
    assert [step for step in range(1, 12) if plan.due(step, 5)] == [5, 10, 11]
    changed = dataclasses.replace(plan, extended_at=7)
    assert [step for step in range(1, 12) if changed.due(step, 5)] == [5, 7, 10, 11]


@pytest.mark.parametrize(
    ("size", "accumulation", "smaller"),
    [(8, 3, (4, 6)), (6, 1, (3, 2)), (5, 3, (1, 15)), (7, 1, (1, 7)), (15, 1, (5, 3))],
)
def test_smaller_micro_batch(size, accumulation, smaller):
    """Half, or the next divisor below: the windows of a step stay the same."""
    plan = Plan(1, size * accumulation, size, accumulation).with_smaller_micro_batch()
    assert (plan.micro_batch_size, plan.accumulation) == smaller
