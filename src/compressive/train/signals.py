"""Handle stop signals: Ctrl-C, the end of a cluster job, a closed terminal."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from compressive.platforms.processes import stop_signals


@contextmanager
def handle_stop_signals(handler: Callable[[int], None]) -> Iterator[None]:
    """Call `handler` with the number of each stop signal; restore old handlers at the end."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Python handles signals in the main thread only
        return
    numbers = stop_signals()
    before = [signal.signal(number, lambda number, _: handler(number)) for number in numbers]
    try:
        yield
    finally:
        for number, old in zip(numbers, before, strict=True):
            signal.signal(number, old)
