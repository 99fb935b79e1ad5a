"""What this process is doing: its step, its operation, and the time it spent on its own work."""

import time
from types import TracebackType


class Activity:
    """The current step and operation of a process; written by training, read by the watchdog."""

    __slots__ = ("calls", "excluded", "operation", "step", "waiting")

    def __init__(self) -> None:
        self.step: int = 0
        self.operation: str = "start"
        self.calls: int = 0  # collectives entered; equal in all processes at the same place
        self.waiting: int = 0  # collectives that it is in, nested ones included
        self.excluded: float = 0.0  # seconds of waiting for others, evaluation and saving


CURRENT = Activity()


class Operation:
    """Name what this process does inside; exclude it from the time of its steps."""

    __slots__ = ("before", "begin", "name")
    calls = 0
    is_excluded = True

    def __init__(self, name: str) -> None:
        self.name: str = name

    def __enter__(self) -> None:
        self.before: str = CURRENT.operation
        self.begin: float = time.monotonic()
        CURRENT.operation = self.name
        CURRENT.calls += self.calls
        CURRENT.waiting += self.calls

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        CURRENT.waiting -= self.calls
        if error is not None:
            return  # keep the name of what failed, for the report
        CURRENT.operation = self.before
        if self.is_excluded:
            CURRENT.excluded += time.monotonic() - self.begin


class Collective(Operation):
    """Name an operation that every process must call, and that waits for the others."""

    __slots__ = ()
    calls = 1


class Backward(Collective):
    """The backward pass: its collectives overlap with computation, so its time is not excluded."""

    __slots__ = ()
    is_excluded = False


def begin_step(step: int) -> None:
    """Note the step that this process is computing."""
    CURRENT.step = step
    CURRENT.operation = "its own computation"
