"""The trackers of a run: check that they are installed, start them and pass values on."""

import importlib.util
from collections.abc import Callable
from pathlib import Path

from compressive.config import Config, flat, tracker_names
from compressive.rundir.tracker import Status, TrackedRun, Values
from compressive.tracking.process import TrackerProcess


def check_trackers(text: str) -> list[str]:
    """Return the names in train.track; raise ValueError if one is unknown or not installed."""
    names = tracker_names(text)
    missing = [name for name in names if not _is_installed(name)]
    if missing:
        words, extras = " and ".join(missing), ",".join(missing)
        are = "are" if len(missing) > 1 else "is"
        hint = f"install with: pip install 'compressive[{extras}]'"
        raise ValueError(f"train.track={text}, but {words} {are} not installed; {hint}")
    return names


def _is_installed(package: str) -> bool:
    # A folder of that name in the current one, as wandb makes it, is a spec without an origin.
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


class TrackerGroup:
    """All trackers of a run; one that fails is turned off with one warning.

    `finish_seconds` is the time that the trackers have at the end of a run.
    """

    def __init__(
        self, text: str, say: Callable[[str], None], *, finish_seconds: float = 30.0
    ) -> None:
        names = check_trackers(text)
        self._trackers: list[TrackerProcess] = [TrackerProcess(n, finish_seconds) for n in names]
        self._say = say

    def start(self, run: TrackedRun) -> str:
        """Start all trackers without waiting for them; they say later where their records are."""
        for each in self._trackers:
            each.start(run)
        return ""

    def log(self, step: int, values: Values) -> None:
        """Pass values on without waiting."""
        for each in self._trackers:
            each.log(step, values)
        self._report()

    def finish(self, status: Status) -> None:
        """Finish all trackers, and wait for them for a limited time."""
        for each in self._trackers:
            each.send_end(status)
        for each in self._trackers:
            each.finish(status)
        self._report()

    def _report(self) -> None:
        """Show what the trackers said since the last call."""
        for each in self._trackers:
            for text in each.take_messages():
                self._say(f"{each.name}: {text}")


def tracked_run(folder: Path, step: int, run_id: str, config: Config) -> TrackedRun:
    """Return what trackers are given about a run."""
    return TrackedRun(folder.absolute(), step, run_id, flat(config))
