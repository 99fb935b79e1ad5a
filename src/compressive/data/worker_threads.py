"""Daemon threads that act on a queue of tasks and end with their owner."""

import atexit
import math
import statistics
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Generic, TypeVar

from compressive.distributed import launched
from compressive.platforms.processes import usable_cores

_Task = TypeVar("_Task")
# Of reading one image, the seconds in which a thread holds the GIL and others cannot run.
_GIL_SECONDS = 50e-6


class WorkerThreads(Generic[_Task]):
    """Threads that call a function with each task; `close` ends them after their current task."""

    # `wake` is called before they are joined: it ends the waiting of a thread inside of a task.

    def __init__(
        self,
        act: Callable[[_Task], object],
        names: list[str],
        wake: Callable[[], object] = lambda: None,
    ) -> None:
        self._act, self._wake = act, wake
        self.closed: bool = False
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=name, daemon=True) for name in names
        ]
        # A thread that returns from C++ while the interpreter exits aborts the process.
        atexit.register(self.close)
        for thread in self._threads:
            thread.start()

    def put(self, task: _Task) -> None:
        """Add a task, to be taken in this order."""
        self._tasks.put(task)

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None and not self.closed:
            self._act(task)
            del task  # it may hold a large buffer while the thread waits

    def close(self) -> None:
        """End the threads and drop tasks that are not taken yet."""
        self.closed = True
        atexit.unregister(self.close)
        for _ in self._threads:
            self._tasks.put(None)
        self._wake()
        for thread in self._threads:
            if thread is not threading.current_thread():  # a worker may collect garbage
                thread.join()


def own_cores() -> int:
    """Return the number of cores for this process; other processes of a run may be next to it."""
    return usable_cores(max(1, launched("LOCAL_WORLD_SIZE", 1)))


def useful_threads(read: Callable[[int], object], indices: list[int], cores: int) -> int:
    """Return how many threads to start, by the time that it takes to read these images."""
    # Small images are read almost entirely under the GIL. 16 threads that compete for it decoded
    # images of 32 pixels at a third of the rate of 2 (docs/results/2026-11-18-performance.md).
    took: list[float] = []
    for index in indices:
        begin = time.perf_counter()
        read(index)
        took.append(time.perf_counter() - begin)
    wanted = math.ceil(statistics.median(took) / _GIL_SECONDS)
    return max(1, min(cores, max(2, wanted)))
