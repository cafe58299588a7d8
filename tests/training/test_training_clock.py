"""The training clock: pauses and suspended time do not count."""

from types import SimpleNamespace

import pytest

from gpt.training.state import TrainState
from gpt.training.training_clock import TrainingClock


@pytest.fixture
def times(monkeypatch) -> SimpleNamespace:
    """Return the wall time and CPU time in seconds that the clock reads."""
    times = SimpleNamespace(wall=100.0, cpu=5.0)
    fake = SimpleNamespace(perf_counter=lambda: times.wall, process_time=lambda: times.cpu)
    monkeypatch.setattr("gpt.training.training_clock.time", fake)
    return times


def test_clock_leaves_pauses_out(times):
    """It adds the time between its start and the end of a step, without pauses, to the seconds of a checkpoint."""
    clock = TrainingClock(TrainState(seconds=100.0), 0.0)
    clock.start()
    times.wall += 0.5
    with clock.paused():
        times.wall += 7.0
    times.wall += 0.25
    clock.end_step(1)
    assert clock.state.seconds == pytest.approx(100.75)


@pytest.mark.parametrize(("wall", "cpu", "counted"), [(10.0, 0.3, 0.3), (3.0, 2.8, 3.0), (10.0, 9.0, 10.0)])
def test_suspension_in_the_first_step(times, wall, cpu, counted):
    """In the first step, time in which the processor was idle does not count."""
    clock = TrainingClock(TrainState(), 0.0)
    clock.start()
    times.wall += wall
    times.cpu += cpu
    clock.end_step(1)
    assert clock.state.seconds == pytest.approx(counted)


@pytest.mark.parametrize(("wall", "counted"), [(5.5, 5.5), (7.0, 0.5)])
def test_suspension_in_a_later_step(times, wall, counted):
    """A gap of more than ten typical steps and a second counts as one typical step."""
    clock = TrainingClock(TrainState(), 0.0)
    clock.start()
    for _ in range(3):
        times.wall += 0.5
        times.cpu += 0.5
        clock.end_step(1)
    times.wall += wall
    clock.end_step(1)
    assert clock.state.seconds == pytest.approx(1.5 + counted)


def test_progress_of_a_time_horizon(times):
    """`progress` is the fraction of eight seconds that has passed, and each quarter is marked once."""
    clock = TrainingClock(TrainState(seconds=1.0), 8.0)
    clock.start()
    steps = []
    for _ in range(8):
        times.wall += 1.0
        times.cpu += 1.0
        clock.end_step(1)
        steps.append((clock.progress, clock.at_quarter_mark))
    assert steps == [(min(1.0, (2 + i) / 8), i % 2 == 0 and i < 7) for i in range(8)]
