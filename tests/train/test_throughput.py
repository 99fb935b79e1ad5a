"""Speed and waiting are those of training alone."""

import time

import pytest

from compressive.train.throughput import Throughput


def test_what_is_waited_in_a_pause_is_no_waiting_for_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By a clock that is set by hand: 0.1 s of training, 0.02 of it waiting, and 0.3 s beside."""
    now, waited = 5.0, 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    pace = Throughput()
    pace.update(0, waited)
    now, waited = now + 0.1, waited + 0.02
    with pace.exclude(lambda: waited):
        now, waited = now + 0.3, waited + 0.3
    pace.update(10, waited)
    assert pace.steps_per_second == pytest.approx(100)
    assert pace.data_wait_fraction == pytest.approx(0.2)
    now, waited = now + 0.5, waited + 0.05
    pace.update(11, waited)
    assert pace.steps_per_second == pytest.approx(2)
    assert pace.data_wait_fraction == pytest.approx(0.1)
