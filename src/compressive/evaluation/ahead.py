"""Prepare parts of an evaluation in a thread, while this one waits for the GPU or the decoder."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any


class Closed(Exception):
    """Raised in the thread if its work is no longer needed."""


class Ahead:
    """Named parts of work, done one after the other in one thread."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._started: dict[str, Future[Any]] = {}
        self._is_closed = False

    def start(self, name: str, work: Callable[[], Any]) -> None:
        """Start work, once per name."""
        if name not in self._started:
            self._pool = self._pool or ThreadPoolExecutor(1, thread_name_prefix="evaluation")
            self._started[name] = self._pool.submit(work)

    def result(self, name: str) -> Any:
        """Wait for work and return its result or raise its error; None if it was not started."""
        return self._started[name].result() if name in self._started else None

    def go_on(self, *_: object) -> None:
        """Raise `Closed` if the work is no longer needed; call it often in long work."""
        if self._is_closed:
            raise Closed

    def close(self) -> None:
        """End the thread; work that was not started is dropped."""
        self._is_closed = True
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
