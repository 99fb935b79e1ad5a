"""Trackio."""

import os
from importlib import import_module
from typing import Any

from compressive.rundir.tracker import Status, TrackedRun, Values, plottable
from compressive.tracking.wandb_tracker import PROJECT


class TrackioTracker:
    """Log to Trackio's local database, or to the server that its environment variables name."""

    _run: Any

    def start(self, run: TrackedRun) -> str:
        """Start a run, or resume the one with the same name."""
        project = os.environ.get("TRACKIO_PROJECT") or PROJECT
        # Trackio finds a run by its name alone, so the name must be unique.
        name = f"{run.name}-{run.run_id[:6]}" if run.run_id else run.name
        self._run = import_module("trackio").init(
            project,
            name=name,
            group=run.group,
            config=dict(run.settings),
            resume="allow",
            embed=False,
        )
        return f"run {name}; see it with: trackio show --project {project}"

    def log(self, step: int, values: Values) -> None:
        """Log all finite numbers, and texts."""
        texts = {name: value for name, value in values.items() if isinstance(value, str) and value}
        self._run.log({**plottable(values), **texts}, step=step)

    def finish(self, status: Status) -> None:
        """Log the status and write what is pending."""
        self._run.log({"status": status})
        self._run.finish()
