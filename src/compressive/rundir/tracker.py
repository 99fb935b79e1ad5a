"""The interface of everything that records the metrics of a run: files and experiment trackers."""

import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

Values = Mapping[str, float | str | None]  # on the host; None: not measured
Status = Literal["finished", "stopped", "failed"]


class TrackedRun(NamedTuple):
    """What a tracker is given about a run."""

    folder: Path
    step: int = 0  # the run starts or resumes here; values of later steps will be logged again
    run_id: str = ""  # of config.json: the same if a run is resumed
    settings: Mapping[str, Any] = MappingProxyType({})  # by dotted name

    @property
    def name(self) -> str:
        """Return the name of the run: that of its folder."""
        return self.folder.absolute().name

    @property
    def group(self) -> str:
        """Return the name of the folder of related runs, such as a sweep."""
        return self.folder.absolute().parent.name


def plottable(values: Values) -> dict[str, float]:
    """Return the values that can be plotted."""
    numbers = {n: v for n, v in values.items() if isinstance(v, int | float)}
    return {name: value for name, value in numbers.items() if math.isfinite(value)}


@runtime_checkable
class Tracker(Protocol):
    """Records the metrics of a run; used by the first process only."""

    def start(self, run: TrackedRun) -> str:
        """Open the records of a run, or resume them; return where they are, or ""."""
        ...

    def log(self, step: int, values: Values) -> None:
        """Record values that are on the host."""
        ...

    def finish(self, status: Status) -> None:
        """Write what is pending, and close."""
        ...
