"""Measure how long the parts of an evaluation take."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class TaskClock:
    """Seconds by the name of a task; the time of a part inside another one counts once."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.seconds: dict[str, float] = {}
        self._now = now
        self._inside = 0.0  # seconds of the parts inside the current one

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Add the time of this block, without that of blocks inside it, to `seconds`."""
        start, outside, self._inside = self._now(), self._inside, 0.0
        try:
            yield
        finally:
            whole = self._now() - start
            self.seconds[name] = self.seconds.get(name, 0.0) + whole - self._inside
            self._inside = outside + whole

    def rounded(self) -> dict[str, float]:
        """Return the seconds for a results file."""
        return {name: round(value, 2) for name, value in self.seconds.items()}
