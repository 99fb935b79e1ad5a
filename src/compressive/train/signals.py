"""Hear that somebody asks to stop: Ctrl-C, the end of a job on a cluster, a closed terminal."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def handle_stop_signals(handler: Callable[[int], None]) -> Iterator[None]:
    """Give the number of every such signal to `handler`, in place of what was done with it."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Python hears signals in its main thread only
        return
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup
        numbers.append(signal.SIGHUP)
    before = [signal.signal(number, lambda number, _: handler(number)) for number in numbers]
    try:
        yield
    finally:
        for number, old in zip(numbers, before, strict=True):
            signal.signal(number, old)
