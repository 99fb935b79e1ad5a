"""MLflow."""

import os
import re
import time
from importlib import import_module
from typing import Any

from compressive.rundir.tracker import Status, TrackedRun, Values, plottable
from compressive.tracking.wandb_tracker import PROJECT

_STATUS: dict[str, str] = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
_TAG = "compressive.run_id"  # finds the run again if ours is resumed
_REFUSED = re.compile(r"[^\w.\- :/]")  # in names
_MOST_PARAMS = 100  # that MLflow takes in one request


class MlflowTracker:
    """Log to the server or store of MLFLOW_TRACKING_URI, or to MLflow's default store."""

    _client: Any
    _entities: Any
    _run_id: str

    def start(self, run: TrackedRun) -> str:
        """Start a run, or find the one that has the id of our run."""
        self._client = import_module("mlflow").MlflowClient()
        self._entities = import_module("mlflow.entities")
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT
        found = self._client.get_experiment_by_name(name)
        experiment = found.experiment_id if found else self._client.create_experiment(name)
        old = []
        if run.run_id:
            query = f"tags.`{_TAG}` = '{run.run_id}'"
            old = self._client.search_runs([experiment], query, max_results=1)
        if old:
            self._run_id = old[0].info.run_id
            self._client.update_run(self._run_id, status="RUNNING")
        else:
            self._run_id = self._create(experiment, run)
        return f"experiment {name}, run {self._run_id}, in {self._client.tracking_uri}"

    def _create(self, experiment: str, run: TrackedRun) -> str:
        tags = {_TAG: run.run_id, "group": run.group, "mlflow.note.content": str(run.folder)}
        run_id = self._client.create_run(experiment, run_name=run.name, tags=tags).info.run_id
        params = [self._entities.Param(name, str(value)) for name, value in run.settings.items()]
        for first in range(0, len(params), _MOST_PARAMS):
            self._client.log_batch(run_id, params=params[first : first + _MOST_PARAMS])
        return run_id

    def log(self, step: int, values: Values) -> None:
        """Log all finite numbers; texts become tags."""
        now = int(1000 * time.time())
        # Names of data sets may have characters that MLflow refuses.
        numbers = {_REFUSED.sub("_", n): v for n, v in plottable(values).items()}
        metrics = [self._entities.Metric(name, value, now, step) for name, value in numbers.items()]
        texts = {name: value for name, value in values.items() if isinstance(value, str) and value}
        tags = [self._entities.RunTag(name, value) for name, value in texts.items()]
        self._client.log_batch(self._run_id, metrics=metrics, tags=tags)

    def finish(self, status: Status) -> None:
        """Set the status of the run."""
        self._client.set_terminated(self._run_id, _STATUS[status])
