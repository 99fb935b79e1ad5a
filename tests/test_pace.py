"""Speed and waiting are those of training alone."""

import time

import pytest

from compressive.pace import Pace


def test_what_is_waited_in_a_pause_is_no_waiting_for_training() -> None:
    waited, pace = [0.0], Pace()
    pace.tick(0, waited[0])
    time.sleep(0.1)
    waited[0] += 0.02
    with pace.paused(lambda: waited[0]):
        time.sleep(0.3)
        waited[0] += 0.3
    pace.tick(10, waited[0])
    # 0.1 s and a little of training, of which 0.02 s were waited.
    assert 0.05 < pace.wait_share <= 0.2
    assert 50 < pace.steps_per_second <= 100
    time.sleep(0.05)
    pace.tick(11, waited[0])
    assert pace.wait_share == pytest.approx(0.0, abs=1e-9)
