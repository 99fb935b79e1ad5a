"""Add the results of an evaluation to the trackers of the evaluated run."""

from collections.abc import Callable, Iterable
from pathlib import Path

from compressive.rundir.files import CONFIG, METRICS
from compressive.rundir.folder import read_config, read_run_id
from compressive.rundir.metrics_log import read_metrics
from compressive.rundir.records import Record
from compressive.tracking.group import TrackerGroup, tracked_run


def track_records(folder: Path, records: Iterable[Record], say: Callable[[str], None]) -> None:
    """Log records under their keys at the last step of a run; do nothing if it has no trackers.

    A record's key is task/dataset/metric. A tracker that is not installed any more is a note.
    """
    if not (folder / CONFIG).is_file():
        return
    try:
        config = read_config(folder)
        group = TrackerGroup(config.train.track, say)
        lines, _ = read_metrics(folder / METRICS)
    except (OSError, ValueError) as problem:
        say(f"note: results are not sent to trackers: {problem}")
        return
    step = max((line["step"] for line in lines), default=0)
    group.start(tracked_run(folder, step, read_run_id(folder), config))
    group.log(step, {f"evaluation/{record.key}": record.value for record in records})
    group.finish("finished")
