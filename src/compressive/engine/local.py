"""The interface of an engine, and the engine that runs units in this process."""

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol, TypeVar, runtime_checkable

Unit = TypeVar("Unit")
Result = TypeVar("Result")


class WorkerLost(RuntimeError):
    """A unit was repeated several times, and each time its process or machine ended."""


@runtime_checkable
class Engine(Protocol):
    """Runs a function on independent units.

    A unit may run twice if a process is lost, so that its function must write files by renaming
    complete ones. Function and units are sent to other processes: the function has a name in a
    module, and units hold values such as paths.
    """

    @property
    def is_local(self) -> bool:
        """Return whether units run in this process, one after the other."""
        ...

    @property
    def cores(self) -> int:
        """Return how many cores a unit may use; 0: those of this machine."""
        ...

    def room(self) -> int:
        """Return how many units can run at the same time."""
        ...

    def map(
        self,
        work: Callable[[Unit], Result],
        units: Iterable[Unit],
        *,
        name: str,
        keeps_model: bool = False,
    ) -> Iterator[tuple[int, Result]]:
        """Yield the number and the result of each unit as it ends; take units when there is room.

        `name` is shown by the engine's own tools. `keeps_model` says that the function keeps what
        it loads for the next unit, so that a process shall run many.
        """
        ...


class LocalEngine:
    """Run units in this process, in order."""

    is_local: bool = True
    cores: int = 0

    def room(self) -> int:
        """Return 1."""
        return 1

    def map(
        self,
        work: Callable[[Unit], Result],
        units: Iterable[Unit],
        *,
        name: str = "",
        keeps_model: bool = False,
    ) -> Iterator[tuple[int, Result]]:
        """Yield the number and the result of each unit."""
        del name, keeps_model
        for number, unit in enumerate(units):
            yield number, work(unit)
