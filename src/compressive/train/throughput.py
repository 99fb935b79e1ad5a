"""Training throughput and the fraction of time in which the device waits for data."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Throughput:
    """Steps per second and the data-wait fraction between two calls of `update`."""

    def __init__(self) -> None:
        self.steps_per_second = self.data_wait_fraction = 0.0
        self._last: tuple[float, int, float] | None = None
        self._paused = self._waited = 0.0

    def update(self, step: int, waited: float) -> None:
        """Measure since the last call; `waited` is the total time spent waiting for data."""
        now = time.perf_counter()
        if self._last is not None and step > self._last[1]:
            seconds = max(now - self._last[0] - self._paused, 1e-9)
            self.steps_per_second = (step - self._last[1]) / seconds
            self.data_wait_fraction = min(1.0, (waited - self._last[2] - self._waited) / seconds)
        self._last, self._paused, self._waited = (now, step, waited), 0.0, 0.0

    @contextmanager
    def exclude(self, waited: Callable[[], float]) -> Iterator[None]:
        """Exclude this block from throughput and data-wait statistics."""
        begin, before = time.perf_counter(), waited()
        yield
        self._paused += time.perf_counter() - begin
        self._waited += waited() - before
