"""Measure how long a device has nothing to do because the next batch is not ready."""

import time
from collections.abc import Callable

import torch

POLL_SECONDS = 0.005  # between two calls of `look` while a consumer waits


class WaitClock:
    """Context manager that adds up the seconds of waits in which a device has no work.

    The training loop is ahead of a GPU. Waiting for a batch costs no time while the GPU is busy.
    A GPU that waits for a copy counts as busy.
    """

    def __init__(self, is_idle: Callable[[], bool] = lambda: True) -> None:
        self.seconds: float = 0.0
        self._is_idle = is_idle
        self._idle_since: float | None = None

    @classmethod
    def of_device(cls, device: torch.device) -> "WaitClock":
        """Return a clock for the current stream of a GPU; on other devices each wait counts."""
        if device.type != "cuda":
            return cls()
        return cls(lambda: torch.cuda.current_stream(device).query())

    def look(self) -> None:
        """Notice whether the device has become idle; this does not wait for it."""
        if self._idle_since is None and self._is_idle():
            self._idle_since = time.perf_counter()

    def __enter__(self) -> None:
        self._idle_since = None
        self.look()

    def __exit__(self, *_: object) -> None:
        if self._idle_since is not None:
            self.seconds += time.perf_counter() - self._idle_since
