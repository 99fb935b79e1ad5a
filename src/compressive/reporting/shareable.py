"""Remove absolute paths, which reveal users and machines, so that a report can be shared."""

import re
from dataclasses import replace
from typing import Any

from compressive.rundir.reader import RunFolder
from compressive.rundir.records import ComparisonText

_ABSOLUTE = re.compile(
    r"""(?<![\w.:/~\\)\]|%-])(?:~?/|[A-Za-z]:\\)(?:[^\s/\\'"`,;:]+[/\\])*(?=[\w.])"""
)


def without_paths(value: Any) -> Any:
    """Replace absolute paths in text by their last part; also within lists and dictionaries."""
    if isinstance(value, str):
        return _ABSOLUTE.sub("\N{HORIZONTAL ELLIPSIS}/", value)
    if isinstance(value, dict):
        return {without_paths(key): without_paths(each) for key, each in value.items()}
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return [without_paths(each) for each in value]
    return value


def shareable(run: RunFolder) -> RunFolder:
    """Return a run whose texts have no absolute paths."""
    records = [
        replace(
            record,
            dataset=without_paths(record.dataset),
            task=without_paths(record.task),
            protocol=without_paths(record.protocol),
            command=without_paths(record.command),
        )
        for record in run.records
    ]
    texts = ("name", "settings", "about", "skipped", "evaluated", "missing")
    changed = {name: without_paths(getattr(run, name)) for name in texts}
    predictions = {
        task: each._replace(dataset=without_paths(each.dataset))
        for task, each in run.predictions.items()
    }
    return replace(run, records=records, predictions=predictions, **changed)


def shareable_text(text: ComparisonText | None) -> ComparisonText | None:
    """Return a comparison without absolute paths."""
    return None if text is None else ComparisonText(*map(without_paths, text))
