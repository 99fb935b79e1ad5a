"""results.json: the numbers of an evaluation, written by `evaluation` and read by `report`."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from compressive.rundir.files import RESULTS
from compressive.rundir.versions import FORMAT_KEY, FORMAT_VERSIONS, UnsupportedFormat, check_format


@dataclass(frozen=True, kw_only=True)
class Record:
    """One number of an evaluation and how it was obtained."""

    run: str
    task: str
    dataset: str
    metric: str
    value: float
    low: float | None  # 95 % confidence interval over images (and draws of labels) of a mean
    high: float | None
    n: int  # number of images
    images: str  # fingerprint of the images; only values of the same images can be paired
    of: str  # fingerprint of how the dataset was opened; "" if there is only one way
    protocol: dict[str, Any]  # procedure and every hyperparameter that was selected
    seed: int
    command: str

    @property
    def key(self) -> str:
        """Return task, dataset and metric; the same in every run."""
        return f"{self.task}/{self.dataset}/{self.metric}"

    @property
    def image_set(self) -> str:
        """Return the fingerprint that must be equal for two values to be comparable."""
        return self.of or self.images


_RECORD_TYPES: dict[str, Any] = {  # checked by `read_results`
    **dict.fromkeys(("run", "task", "dataset", "metric", "images", "of", "command"), str),
    **{"value": int | float, "low": int | float | None, "high": int | float | None},
    **{"n": int, "protocol": dict},
}


@dataclass(eq=False)
class ResultsFile:
    """Content of results.json."""

    run: str
    records: list[Record] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    skipped_in: dict[str, str] = field(default_factory=dict)  # message: its task and dataset
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of each task, if the file has them."""
        found = self.about.get("seconds")
        return dict(found) if isinstance(found, dict) else {}

    def as_json(self) -> str:
        """Return the content of results.json."""
        content = {
            FORMAT_KEY: FORMAT_VERSIONS[RESULTS],
            "run": self.run,
            "about": self.about,
            "records": [asdict(record) for record in self.records],
            "skipped": self.skipped,
            "skipped_in": self.skipped_in,
        }
        return json.dumps(content, indent=1) + "\n"


class ComparisonText(NamedTuple):
    """Two experiments compared by `compressive compare`, as text."""

    first: str
    second: str
    lines: Sequence[tuple[str, ...]]  # metric, first, second, difference with interval, verdict
    note: str
    headline: str = ""  # one sentence about all lines
    # key of a record: difference with its interval, and verdict after the correction
    verdicts: Mapping[str, tuple[str, str]] = {}
    over: str = ""  # seeds or images: what the intervals are taken over


def read_results(path: Path) -> tuple[ResultsFile, int]:
    """Return the content of results.json and the number of damaged records that were skipped."""
    # Raises `UnsupportedFormat` for another format version, and ValueError for a damaged file.
    try:
        content = json.loads(path.read_bytes())
        check_format(path, RESULTS, content.get(FORMAT_KEY))
        found = ResultsFile(
            run=str(content["run"]),
            skipped=_of_type(list, content["skipped"]),
            skipped_in=_of_type(dict, content["skipped_in"]),
            about=_of_type(dict, content["about"]),
        )
        raw = _of_type(list, content["records"])
    except UnsupportedFormat:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{path} is damaged or from another program ({type(error).__name__}: {error})"
        ) from None
    records = [_parse_record(each) for each in raw]
    found.records = [record for record in records if record is not None]
    return found, len(raw) - len(found.records)


def finite_number(value: object) -> float | None:
    """Return a number as float, or None if it is not finite or so large that sums overflow."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) < 1e300 else None


def _parse_record(raw: object) -> Record | None:
    try:
        record = Record(**_of_type(dict, raw))
        for name, kind in _RECORD_TYPES.items():
            _of_type(kind, getattr(record, name))
        for number in (record.value, record.low, record.high):
            float(number or 0)  # raises OverflowError if an integer is too large
    except (TypeError, OverflowError):
        return None
    return record


def _of_type(kind: Any, value: Any) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"expected {kind}, got {value!r:.50}")
    return value
