"""Throughput and data wait count training time only."""

import time

import pytest

from compressive.train.throughput import Throughput


def test_excluded_time_counts_neither_as_training_nor_as_data_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A fake clock: 0.1 s of training, 0.02 s of it data wait, and 0.3 s excluded."""
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
