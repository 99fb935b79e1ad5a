"""Weights & Biases."""

import os
from importlib import import_module
from pathlib import Path
from typing import Any

from compressive.rundir.tracker import Status, TrackedRun, Values, plottable

PROJECT = "compressive"  # of all trackers, if their environment variables name no other


class WandbTracker:
    """Log to Weights & Biases, or with WANDB_MODE=offline to a folder that `wandb sync` uploads."""

    _run: Any

    def start(self, run: TrackedRun) -> str:
        """Start or resume the run whose id is that of our run."""
        self._run = import_module("wandb").init(
            project=os.environ.get("WANDB_PROJECT") or PROJECT,
            name=run.name,
            group=run.group,
            id=run.run_id or None,
            resume="allow",
            dir=None if os.environ.get("WANDB_DIR") else str(run.folder),
            config=dict(run.settings),
            allow_val_change=True,  # a run may be resumed with other settings of its machine
        )
        # Use our own step: wandb refuses smaller steps, which occur if a run resumes or restarts.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        if self._run.settings.mode == "offline":
            return f"offline; upload it with: wandb sync {Path(self._run.dir).parent}"
        return str(self._run.url)

    def log(self, step: int, values: Values) -> None:
        """Log all finite numbers; texts go to the summary."""
        self._run.log({"step": step, **plottable(values)})
        for name, value in values.items():
            if isinstance(value, str) and value:
                self._run.summary[name] = value

    def finish(self, status: Status) -> None:
        """Upload what is pending; a run that failed is marked as such."""
        self._run.summary["status"] = status
        self._run.finish(exit_code=1 if status == "failed" else 0)
