"""Waiting for a batch counts while the device has nothing to do."""

import time

import pytest
import torch
from test_loaders import Slow, portions

from compressive.data import wait_clock
from compressive.data.loaders import Streaming
from compressive.data.wait_clock import WaitClock


def test_only_time_without_work_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(wait_clock.time, "perf_counter", lambda: now[0])
    clock = WaitClock(lambda: now[0] >= 10.0)  # the device works until 10
    with clock:
        now[0] = 9.0
        clock.look()
    assert clock.seconds == 0  # busy all the time
    with clock:
        now[0] = 11.0
        clock.look()  # notices it here
        now[0] = 12.0
        clock.look()
        now[0] = 14.0
    assert clock.seconds == 3
    with clock:  # idle from the beginning
        now[0] = 16.5
    assert clock.seconds == 5.5


@pytest.mark.parametrize("busy_for", [0.0, 0.06, 60.0])
def test_a_loader_counts_waits_of_its_device(busy_for: float) -> None:
    loader = Streaming(Slow([(4, 4)] * 8), side=4, device="cpu", workers=1, prefetch=1)
    begin = time.perf_counter()
    loader._clock = WaitClock(lambda: time.perf_counter() - begin >= busy_for)
    batches = loader.batches(portions([*range(8)]))
    next(batches)  # eight images of 0.03 s
    rest = time.perf_counter() - begin - busy_for
    batches.close()
    assert loader.waited <= max(0.0, rest)
    assert (loader.waited > 0) == (busy_for < 0.24)
    if not busy_for:
        assert loader.waited >= 0.24


def test_a_cpu_is_always_idle() -> None:
    clock = WaitClock.of_device(torch.device("cpu"))
    with clock:
        time.sleep(0.01)
    assert clock.seconds >= 0.01


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_gpu_is_idle_when_its_stream_has_no_work() -> None:
    clock = WaitClock.of_device(torch.device("cuda"))
    torch.cuda._sleep(1_000_000_000)  # about half a second
    with clock:
        time.sleep(0.05)
        clock.look()
    assert clock.seconds == 0
    torch.cuda.synchronize()
    with clock:
        time.sleep(0.05)
    assert clock.seconds >= 0.05
