"""metrics.jsonl: one JSON object per line, after a header line with the format version."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from compressive.rundir.files import METRICS, write_text
from compressive.rundir.records import finite_number
from compressive.rundir.tracker import Status, TrackedRun, Tracker, Values
from compressive.rundir.versions import FORMAT_KEY, FORMAT_VERSIONS, check_format

REQUESTED = "requested"  # the reason if a signal stopped the run
STOPPED = "stopped"  # key of the last line of a run that stopped early; the value is the reason


class MetricsFile:
    """metrics.jsonl of a run folder.

    Lines after the step from which training resumes, truncated lines and the line with the key
    `STOPPED` are dropped at the start.
    """

    def start(self, run: TrackedRun) -> str:
        """Open the file, with the lines up to the step of the run."""
        path = run.folder / METRICS
        old = path.read_text(errors="replace").splitlines() if path.exists() else []
        kept = [line for line in old if f'"{STOPPED}": ' not in line]
        kept = [line for line in kept if _step_of_line(line) <= run.step]
        # Rewrite the file even if all lines are kept: the last one may lack its line break.
        header = json.dumps({FORMAT_KEY: FORMAT_VERSIONS[METRICS]})
        write_text(path, "".join(f"{line}\n" for line in (header, *kept)))
        self._lines = path.open("a")
        return str(path)

    def log(self, step: int, values: Values) -> None:
        """Append a line. JSON has no infinity and no NaN: they become null."""
        line: dict[str, Any] = {"step": step, **values}
        lost = [name for name, v in line.items() if isinstance(v, float) and not math.isfinite(v)]
        line |= dict.fromkeys(lost)
        self._lines.write(json.dumps(line, allow_nan=False) + "\n")
        self._lines.flush()

    def finish(self, status: Status) -> None:
        """Flush and close the file."""
        self._lines.close()


class MetricsLogger:
    """Write metrics.jsonl and, if requested, TensorBoard event files; only rank 0 writes.

    `step` is the step from which training resumes. `trackers` also receive all values. They are
    started and finished by the caller, because a run that restarts opens its files again.
    """

    def __init__(
        self,
        folder: Path,
        *,
        step: int = 0,
        tensorboard: bool = False,
        trackers: Sequence[Tracker] = (),
    ) -> None:
        from compressive.distributed import rank  # imports torch, which readers do not need

        self._files: list[Tracker] = []
        self._trackers, self._events = trackers, None
        if rank() > 0:
            return
        self._files.append(MetricsFile())
        if tensorboard:
            from compressive.rundir.tensorboard import TensorBoardWriter

            self._events = TensorBoardWriter()
            self._files.append(self._events)
        for each in self._files:
            each.start(TrackedRun(folder, step))

    def write(self, step: int, values: Values) -> None:
        """Log values of a step."""
        if self._files:
            for each in (*self._files, *self._trackers):
                each.log(step, values)

    def draw(self, step: int, x: Any, y: Any, r: Any) -> None:
        """Call `TensorBoardWriter.add_views` if TensorBoard is on."""
        if self._events is not None:
            self._events.add_views(step, x, y, r)

    def close(self) -> None:
        """Flush and close the files."""
        for each in self._files:
            each.finish("finished")


def read_metrics(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the valid lines, and the number of damaged ones; raises `UnsupportedFormat`."""
    texts = path.read_bytes().splitlines() if path.is_file() else []
    parsed = [_parse_line(text) for text in texts if text.strip()]
    if parsed and (header := parsed[0]) is not None:
        check_format(path, METRICS, header.get(FORMAT_KEY))
        parsed = parsed[1:]
    lines = [line for line in parsed if line and isinstance(line.get("step"), int)]
    lines = [line for line in lines if finite_number(line["step"]) is not None]
    return lines, len(parsed) - len(lines)


def _parse_line(text: bytes) -> dict[str, Any] | None:
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):  # not JSON, or not text
        return None
    return line if isinstance(line, dict) else None


def _step_of_line(line: str) -> float:
    """Return the step of a line, or infinity for the header and for damaged lines."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError):
        return math.inf
