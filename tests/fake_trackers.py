"""Stand-ins for wandb, mlflow and trackio that record calls in a file, or fail on request."""

import json
from pathlib import Path
from typing import Any

import pytest

_RECORD = """
import json, os, sys, time

def call(called, /, **given):
    with open(os.environ["FAKE_CALLS"], "a") as file:
        file.write(json.dumps({"package": __name__, "call": called, **given}) + "\\n")
    if os.environ.get("FAKE_FAULT") == "raise " + called:
        print("a long explanation on standard output")
        raise ConnectionError("no network\\nsecond line")
    if os.environ.get("FAKE_FAULT") == "exit " + called:
        os._exit(3)
    if os.environ.get("FAKE_FAULT") == "hang " + called:
        time.sleep(600)

call("import")
"""
_WANDB = """
class Run:
    url, dir = "https://example.org/run", "/dir/files"
    class settings:
        mode = "online"
    def __init__(self):
        self.summary = {}
    def define_metric(self, name, step_metric=None): pass
    def log(self, values): call("log", values=values)
    def finish(self, exit_code): call("finish", exit_code=exit_code, summary=self.summary)

def init(**given):
    call("init", **given)
    return Run()
"""
_TRACKIO = """
class Run:
    def log(self, values, step=None): call("log", values=values, step=step)
    def finish(self): call("finish")

def init(project, **given):
    call("init", project=project, **given)
    return Run()
"""
_MLFLOW = """
from types import SimpleNamespace as Named
from mlflow.entities import Metric

class MlflowClient:
    tracking_uri = "sqlite:///fake.db"
    def get_experiment_by_name(self, name): return None
    def create_experiment(self, name): return name
    def search_runs(self, experiments, query, max_results):
        known = [json.loads(line) for line in open(os.environ["FAKE_CALLS"])]
        old = [each["tags"] for each in known if "tags" in each and each["call"] == "init"]
        ids = [t["compressive.run_id"] for t in old if t["compressive.run_id"] in query]
        return [Named(info=Named(run_id="the run"))][:len(ids)]
    def create_run(self, experiment, run_name, tags):
        call("init", experiment=experiment, name=run_name, tags=tags)
        return Named(info=Named(run_id="the run"))
    def update_run(self, run_id, status): call("update", status=status)
    def log_batch(self, run_id, metrics=(), params=(), tags=()):
        call("log", metrics=[list(m) for m in metrics], params=dict(params), tags=dict(tags))
    def set_terminated(self, run_id, status): call("finish", status=status)
"""
_ENTITIES = """
def Metric(name, value, time, step): return name, value, step
def Param(name, value): return name, value
RunTag = Param
"""


class FakeTrackers:
    """Fake packages in a folder at the start of sys.path, and the calls that they received."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._calls, self._monkeypatch = folder / "calls.jsonl", monkeypatch
        packages = {"wandb": _WANDB, "trackio": _TRACKIO, "mlflow": _MLFLOW}
        for name, code in packages.items():
            (folder / name).mkdir()
            (folder / name / "__init__.py").write_text(_RECORD + code)
        (folder / "mlflow" / "entities.py").write_text(_ENTITIES)
        monkeypatch.setenv("FAKE_CALLS", str(self._calls))
        monkeypatch.syspath_prepend(str(folder))

    def fail(self, fault: str) -> None:
        """Let a call raise, hang or exit: "raise log"."""
        self._monkeypatch.setenv("FAKE_FAULT", fault)

    def calls(self, name: str, package: str = "wandb") -> list[dict[str, Any]]:
        text = self._calls.read_text() if self._calls.exists() else ""
        found = [json.loads(line) for line in text.splitlines()]
        return [each for each in found if (each["package"], each["call"]) == (package, name)]
