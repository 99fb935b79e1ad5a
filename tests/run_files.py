"""Contents of files in a run folder that reports, `watch` and sweeps read."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from compressive.rundir.files import CONFIG, METRICS, RESULTS
from compressive.rundir.versions import FORMAT_KEY, FORMAT_VERSIONS


def config_text(settings: Mapping[str, Any]) -> str:
    return json.dumps({FORMAT_KEY: FORMAT_VERSIONS[CONFIG], **settings})


def metrics_text(lines: Iterable[Mapping[str, Any]]) -> str:
    header = {FORMAT_KEY: FORMAT_VERSIONS[METRICS]}
    return "".join(json.dumps(line) + "\n" for line in (header, *lines))


def results_text(records: Iterable[Any], **more: Any) -> str:
    empty = {"run": "r", "about": {}, "skipped": [], "skipped_in": {}}
    version = {FORMAT_KEY: FORMAT_VERSIONS[RESULTS]}
    return json.dumps({**version, **empty, "records": list(records), **more})


def record(task: str, dataset: str, metric: str, value: float, **more: Any) -> dict[str, Any]:
    fixed = {"run": "r", "n": 2400, "images": "i", "of": "o", "seed": 0, "command": "compressive e"}
    return {
        **{"task": task, "dataset": dataset, "metric": metric, "value": value},
        **{"low": None, "high": None, "protocol": {}},
        **fixed,
        **more,
    }
